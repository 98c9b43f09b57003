"""The page of `examples/app.py`, on a tiny model, in a browser. Without gradio, playwright and chromium: skipped."""

import shutil
from urllib.parse import urlsplit

import pytest

gradio = pytest.importorskip("gradio")

from examples import app  # noqa: E402
from tide_hf import TIDERouters  # noqa: E402
from tide_hf.cli.model_arguments import Loaded  # noqa: E402

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


def test_the_answer_streams_and_ends_coloured_and_measured(page):
    *streamed, (waiting_text, waiting), (html, figures) = page.answer("abcabcabc", "self_speculative", 0.5, 24)
    assert len(streamed) > 1
    assert all(figures == "" for _, figures in streamed)
    assert (waiting_text, waiting) == (gradio.skip(), app.WAITING)
    assert "self_speculative: 24 tokens" in html
    plain, tide = figures.splitlines()[2:4]
    assert plain.startswith("| generate |")
    assert tide.startswith("| self_speculative |")
    assert tide.endswith("| equal to generate's |")
    *_, (html, figures) = page.answer("abcabcabc", "early_exit", 0.0, 24)
    assert "exit layer 2" in html
    assert "early_exit: approximate, exit_threshold 0" in figures
    assert "are generate's |" in figures


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
    nasty = "<b>${1 + 1}</b> {{2 + 2}} &amp; <script>document.title='hit'</script>"
    monkeypatch.setattr(page.tokenizer, "decode", lambda tokens, **options: nasty * len(tokens))
    asked = []
    tab = browser.new_page()
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(address)
    tab.locator("#prompt textarea").fill("abcabcabc")
    tab.locator("#answer").click()
    tab.get_by_text("equal to generate's").first.wait_for()
    chips = tab.locator("#text div[dir=auto] span").all_text_contents()
    assert chips == [nasty] * 64
    assert tab.locator("#text b, #text script").count() == 0
    assert {urlsplit(url).hostname for url in asked if not url.startswith(("data:", "blob:"))} == {"127.0.0.1"}
    tab.locator("#threshold").wait_for(state="detached")
    tab.locator("#mode input").click()
    tab.get_by_role("option", name="early_exit").click()
    tab.locator("#threshold").wait_for()
