"""The page of `examples/app.py`, on a tiny model, in a browser. Without gradio, playwright and chromium: skipped."""

import re
import shutil
import threading
from urllib.parse import urlsplit

import pytest
import torch
from drafters import use_drafter

gradio = pytest.importorskip("gradio")

from examples import app  # noqa: E402
from tide_hf import DraftStreamer, ExitStats, TIDERouters  # noqa: E402
from tide_hf.cli.model_arguments import Loaded  # noqa: E402
from tide_hf.common.token_ids import encode_prompt  # noqa: E402
from tide_hf.evaluation.benchmark import Run  # noqa: E402

CHROMIUM = shutil.which("chromium")
QUIET = ("--no-first-run", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, one_thread):
    """Gradio sets a variable that other libraries read; it is taken away again."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "True")


@pytest.fixture
def page(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    return app.Page(Loaded(model, tiny_tokenizer, TIDERouters.for_model(model, exit_layers=[2]), None))


@pytest.fixture
def browser(tmp_path):
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    if CHROMIUM is None:
        pytest.skip("no chromium")
    options = {"executable_path": CHROMIUM, "args": ["--no-sandbox", *QUIET, "--disable-component-update"]}
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(tmp_path / "profile", headless=True, **options)
        yield context
        context.close()


def test_the_answer_streams_in_colours_and_is_then_measured(page):
    *streamed, (html, _), (kept, waiting), (last, figures) = page.answer("abcabcabc", "self_speculative", 0.5, 24)
    assert len(streamed) > 1
    assert "full pass: 1<" in streamed[0][0]
    assert all(figures == "" for _, figures in streamed)
    assert "self_speculative: 24 tokens" in html
    assert (kept, waiting, last) == (gradio.skip(), app.WAITING, gradio.skip())  # the answer stays
    plain, tide = figures.splitlines()[2:4]
    assert plain.startswith("| generate |")
    assert tide.startswith("| self_speculative |")
    assert tide.endswith("| equal to generate's |")
    *_, (html, _), _, (_, figures) = page.answer("abcabcabc", "early_exit", 0.0, 24)
    assert "exit layer 2" in html
    assert "early_exit: approximate, exit_threshold 0" in figures
    assert "are generate's |" in figures


def test_rejected_drafts_are_struck_through_until_the_next_token(tiny_tokenizer):
    def answer(streamer):
        streamer.put(torch.zeros(1, 3))
        for tokens, sources, rejected in (("a", ["full pass"], "x"), ("bc", ["2-gram", "full pass"], "y")):
            for token in tiny_tokenizer(tokens)["input_ids"]:
                streamer.put(torch.tensor([token]))
            streamer.end_round(sources, tiny_tokenizer(rejected)["input_ids"])
        streamer.end()
        stats = ExitStats("self_speculative", 4, per_token=[[4, 0, 4]], sources=[["full pass", "2-gram", "full pass"]])
        return Run(1.0, tiny_tokenizer("abc")["input_ids"], stats)

    pages = list(app.streamed(answer, tiny_tokenizer))
    struck = [re.findall("<s .*?>(.*?)</s>", page) for page in pages]
    assert struck == [[], ["x"], ["y"], [], []]  # the first token, each round, the end, with statistics
    assert ["n-gram: 1" in page for page in pages] == [False, False, True, True, True]


@pytest.mark.parametrize(("prompt", "most", "problem"), [(" ", 8, "Write a prompt"), ("abc", 10**6, "too long")])
def test_an_error_is_explained_and_a_failure_ends_the_stream(page, tiny_tokenizer, prompt, most, problem):
    with pytest.raises(gradio.Error, match=problem):
        list(page.answer(prompt, "self_speculative", 0.5, most))
    with pytest.raises(ZeroDivisionError):
        list(app.streamed(lambda streamer: 1 / 0, tiny_tokenizer))


def test_the_page_in_a_browser(browser, page, request, monkeypatch):
    blocks = page.blocks()
    request.addfinalizer(lambda: blocks.close(verbose=False))
    _, address, _ = app.launch(blocks, prevent_thread_lock=True, quiet=True)
    goes_on = hold_at_a_rejected_draft(page, monkeypatch)
    request.addfinalizer(goes_on.set)
    nasty = "<b>${1 + 1}</b> {{2 + 2}} &amp; <script>document.title='hit'</script>"
    monkeypatch.setattr(page.tokenizer, "decode", lambda tokens, **options: nasty * len(tokens))
    asked = []
    tab = browser.new_page()
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(address)
    tab.locator("#prompt textarea").fill("abcabcabc")
    tab.locator("#answer").click()
    chips = tab.locator("#text div[dir=auto] span")
    tab.locator("#text s").wait_for()
    assert tab.locator("#text s").all_text_contents() == [nasty]
    drafted = [title == "script" for title in chips.evaluate_all("chips => chips.map(chip => chip.title)")]
    assert drafted == [False, True, True, False]  # prefill's token, a round of two accepted drafts and one rejected
    drafted_colour, other = (chips.nth(at).evaluate("chip => getComputedStyle(chip).backgroundColor") for at in (1, 3))
    assert drafted_colour != other
    goes_on.set()
    tab.get_by_text("equal to generate's").first.wait_for()
    assert chips.all_text_contents() == [nasty] * 64
    assert tab.locator("#text b, #text script, #text s").count() == 0
    assert {urlsplit(url).hostname for url in asked if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
    tab.locator("#threshold").wait_for(state="detached")
    tab.locator("#mode input").click()
    tab.get_by_role("option", name="early_exit").click()
    tab.locator("#threshold").wait_for()


def hold_at_a_rejected_draft(page, monkeypatch):
    """Let the page's model draft by script, and wait after the first rejected draft for the event that is returned."""
    inputs = encode_prompt(page.tokenizer, "abcabcabc")
    plain = page.plain.model.generate(**inputs, do_sample=False, max_new_tokens=64)
    use_drafter(page.attached, "wrong at the last position", plain[:, inputs["input_ids"].shape[1] :].tolist())
    goes_on, end_round = threading.Event(), DraftStreamer.end_round

    def hold(streamer, sources, rejected):
        end_round(streamer, sources, rejected)
        if rejected:
            goes_on.wait(60)

    monkeypatch.setattr(DraftStreamer, "end_round", hold)
    return goes_on
