"""A page that shows where each token of an answer came from, and the speed-up: `python examples/app.py`.

Needs `pip install "tide-hf[demo]"`. Open http://127.0.0.1:7860; the page is only served to this machine and loads
nothing from elsewhere. The answer streams, each token in the colour of what drafted it, with rejected drafts struck
through; then its speed and tokens are compared with those of plain `generate`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import gradio as gr

from tide_hf.cli.benchmark import notes
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.cli.model_arguments import ALL, Loaded, load, modes_to_run
from tide_hf.cli.parser import add_model_arguments, positive
from tide_hf.cli.prompts import PROMPTS, check_room
from tide_hf.common.draft_streamer import DraftStreamer
from tide_hf.common.errors import TIDEError
from tide_hf.common.token_ids import encode_prompt
from tide_hf.evaluation.benchmark import (
    Result,
    Run,
    compare,
    runs_note,
    tide_method,
    tide_methods,
    timed_run,
    usable_threshold,
)

WAITING = "Measuring against plain `generate` …"


class Page:
    """The page of a loaded model; each method of decoding gets `repeats` timed runs."""

    def __init__(self, loaded: Loaded, repeats: int = 1) -> None:
        self.tokenizer = loaded.tokenizer
        self.modes = modes_to_run(ALL, loaded.routers)
        self.threshold = usable_threshold(loaded.routers, None)
        self.repeats = repeats
        self.plain, tide = tide_methods(loaded.model, loaded.routers, self.modes[:1])
        self.attached = tide.model

    def answer(self, prompt: str, mode: str, threshold: float, max_new_tokens: float) -> Iterator[tuple[str, str]]:
        """Yield the growing answer, then figures: HTML and Markdown."""
        if not prompt.strip():
            raise gr.Error("Write a prompt first.")
        method = tide_method(self.attached, mode, threshold)
        inputs, longest = encode_prompt(self.tokenizer, prompt), int(max_new_tokens)
        try:
            check_room(self.plain.model, inputs["input_ids"].shape[1], longest)
            for html in streamed(partial(timed_run, method, inputs, longest), self.tokenizer):
                yield html, ""
            yield gr.skip(), WAITING
            results = compare([self.plain, method], [inputs], max_new_tokens=longest, repeats=self.repeats)
        except TIDEError as error:
            raise gr.Error(str(error)) from error
        explained = "\n".join(f"- {note}" for note in notes(results, longest, self.repeats))
        yield gr.skip(), f"{table(results)}\n\n{explained}"

    def blocks(self) -> gr.Blocks:
        """The layout of the page."""
        with gr.Blocks(title="TIDE: drafts, verified by the model itself", analytics_enabled=False) as page:
            gr.Markdown(
                f"# Drafts, verified by the model itself\n{self.plain.model.name_or_path}, each token in the colour of "
                "its source; drafts that the model rejects are struck through"
            )
            with gr.Row():
                prompt = gr.Textbox(PROMPTS[2], label="Prompt", lines=4, scale=2, elem_id="prompt")
                with gr.Column():
                    mode = gr.Dropdown(self.modes, value=self.modes[0], label="Mode", elem_id="mode")
                    threshold = gr.Slider(
                        0.0, 1.0, self.threshold, step=0.01, label="Exit threshold", visible=False, elem_id="threshold"
                    )
                    most = gr.Slider(8, 256, 64, step=8, label="Most new tokens", elem_id="tokens")
            button = gr.Button("Answer", variant="primary", elem_id="answer")
            answer = gr.HTML(elem_id="text")
            figures = gr.Markdown(elem_id="figures")
            mode.change(lambda mode: gr.update(visible=mode != "self_speculative"), mode, threshold)
            button.click(self.answer, [prompt, mode, threshold, most], [answer, figures])  # one at a time
        return page


def streamed(answer: Callable[[DraftStreamer], Run], tokenizer: Any) -> Iterator[str]:
    """Run `answer` in a thread and yield its text so far as HTML: after each round, or each token if there are none.

    The last page has the statistics as well.
    """
    pages: SimpleQueue[str | None] = SimpleQueue()

    def show(streamer: DraftStreamer) -> None:
        if len(streamer.sources) in (0, len(streamer.texts)):  # else the round's sources are about to come
            pages.put(streamer.to_html())

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(answer, streamer=DraftStreamer(tokenizer, show))
        run.add_done_callback(lambda _: pages.put(None))  # also if it fails
        yield from iter(pages.get, None)
        found = run.result()
    yield found.stats.to_html(found.new_tokens, tokenizer)


def table(results: Sequence[Result]) -> str:
    """The figures, as Markdown; plain `generate` first."""
    plain, tide = results
    speedup = f"{tide.speedup:.2f}"
    accepted = "" if tide.acceptance_rate is None else f"{tide.acceptance_rate:.0%}"
    tokens = "equal to generate's" if tide.num_equal else f"the first {tide.same_start:.0%} are generate's"
    lines = [
        "| decoding | tokens/s | speed-up | drafts accepted | tokens |",
        "| --- | --- | --- | --- | --- |",
        f"| generate | {plain.tokens_per_s:.1f} | 1.00 | | |",
        f"| {tide.method.name} | {tide.tokens_per_s:.1f} | {speedup} | {accepted} | {tokens} |",
        f"\n{runs_note(results)}",
    ]
    return "\n".join(lines)


def launch(page: gr.Blocks, port: int | None = None, **options: Any) -> tuple[Any, str, str]:
    """Serve the page to this machine only."""
    return page.launch(
        server_name="127.0.0.1", server_port=port, share=False, footer_links=[], run_history=False, **options
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, model=DEFAULT_MODEL, dtype="float32")
    parser.add_argument("--repeats", type=positive, default=1, help="timed runs (default: %(default)s)")
    parser.add_argument("--port", type=positive, default=7860)
    args = parser.parse_args(argv)
    launch(Page(load(args, load_demo_model), args.repeats).blocks(), args.port)


if __name__ == "__main__":
    main()
