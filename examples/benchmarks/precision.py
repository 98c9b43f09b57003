"""Where a low-precision answer leaves the base model's, and by how little: `python -m examples.benchmarks.precision`.

In float32 `self_speculative` gives the base model's tokens. In bfloat16 and float16, and where weights or states are
quantised (`--quantize`), a pass over several tokens rounds otherwise than passes over one, so a near-tie between the
two best tokens can fall either way. For every prompt and
draft width this finds the first token that differs from plain decoding, the gap between the base model's two best
logits there, and how much rounding alone moves such gaps on the same text. Writes JSON, prints a Markdown table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.choices import ENGINES
from tide_hf.common.token_ids import encode_prompt
from tide_hf.evaluation.benchmark import weight_sharing_copy
from tide_hf.hub.provenance import provenance
from tide_hf.speculation.drafts import Accepted, Draft
from tide_hf.speculation.prefill import num_shared

from .common import load_for, markdown, read_prompts, study_parser, write_record

WIDTHS = (1, 3, 7, 15)


def torchao(name: str, **options: Any) -> Any:
    return TorchAoConfig(getattr(import_module("torchao.quantization"), name)(**options))


# Each needs the package that it is named after.
QUANTIZATIONS: dict[str, Callable[[], Any]] = {
    "torchao-int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao-int4": lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao-int8-states": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto-int8": lambda: QuantoConfig(weights="int8"),
    "quanto-int4": lambda: QuantoConfig(weights="int4"),
    "bitsandbytes-nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


class KnownAnswer:
    """A drafter that knows what plain decoding answers, so that every pass has the width under study."""

    def __init__(self, answer: list[int], width: int) -> None:
        self.answer, self.width, self.done = answer, width, 0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft the next `width` tokens of the answer."""
        return [Draft().add(self.answer[self.done : self.done + min(self.width, limits[0])], "known")]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Move on."""
        self.done += len(accepted.tokens)


def gaps(logits: Tensor) -> Tensor:
    """(..., vocabulary) logits -> (...) differences of the two largest, float32."""
    top = logits.float().topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


@torch.no_grad()
def study(plain: Any, attached: Any, inputs: dict[str, Tensor], max_new_tokens: int) -> dict[str, Any]:
    """One prompt: plain decoding, then ours at each width."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    output = plain.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    start = inputs["input_ids"].shape[1]
    answer = output.sequences[0, start:].tolist()
    stepwise = torch.stack(output.logits, dim=1)[0]
    at_once = plain(input_ids=output.sequences[:, :-1]).logits[0, start - 1 :]
    tokens = output.sequences[0, start:, None]
    rivals = stepwise.float().scatter(1, tokens, float("-inf")).argmax(dim=-1, keepdim=True)
    lead = [(logits.gather(1, tokens) - logits.gather(1, rivals)).float()[:, 0] for logits in (stepwise, at_once)]
    record: dict[str, Any] = {
        "num_new_tokens": len(answer),
        "rounding_moves_gaps_by_at_most": float((lead[0] - lead[1]).abs().max()),
        "median_gap": float(gaps(stepwise).median()),
        "divergences": {},
    }
    make = attached._tide.make_drafter
    for width in (None, *WIDTHS):
        if width is not None:
            attached._tide.make_drafter = lambda *_, width=width: KnownAnswer(answer, width)
        new = attached.generate(**inputs, **options)[0, start:].tolist()
        attached._tide.make_drafter = make
        differs = num_shared(answer, new)
        record["divergences"]["policy" if width is None else str(width)] = (
            None
            if differs == min(len(answer), len(new))
            else {"position": differs, "gap": float(gaps(stepwise)[differs])}
        )
    return record


def quantized(model: Any, name: str) -> Any:
    """The same model with quantised linear layers."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = {"dtype": model.dtype, "device_map": "cpu", "quantization_config": QUANTIZATIONS[name]()}
        copy = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    copy.config._name_or_path, copy.weights_origin = model.config._name_or_path, getattr(model, "weights_origin", None)
    return copy


def table(record: dict[str, Any]) -> str:
    """Render a record as Markdown."""
    rows = []
    prompts = record["prompts"]
    for width in prompts[0]["divergences"]:
        found = [prompt["divergences"][width] for prompt in prompts]
        differing = [one["gap"] for one in found if one is not None]
        equal = f"{len(found) - len(differing)}/{len(found)}"
        rows.append([width, equal, ", ".join(f"{gap:.3g}" for gap in sorted(differing)) or "-"])
    moved = max(prompt["rounding_moves_gaps_by_at_most"] for prompt in prompts)
    typical = sorted(prompt["median_gap"] for prompt in prompts)[len(prompts) // 2]
    found = markdown(["draft width", "answers equal", "gaps of the others"], rows)
    return f"{found}\n\nRounding alone moves a gap by up to {moved:.3g}; the median gap is {typical:.3g}."


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write and print."""
    parser = study_parser(__doc__, "precision.json", dtype="bfloat16")
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--engine", choices=ENGINES, default="eager")
    options = parser.parse_args(argv)
    model, tokenizer = load_for(options)
    if options.quantize is not None:
        model = quantized(model, options.quantize)
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), engine=options.engine)
    prompts = [prompt for category in read_prompts().values() for prompt in category[: options.prompts]]
    settings = {name: getattr(options, name) for name in ("engine", "max_new_tokens", "quantize")}
    record = provenance(model) | settings
    record["prompts"] = [
        study(model, attached, encode_prompt(tokenizer, prompt), options.max_new_tokens)
        for prompt in track(prompts, description="Comparing", console=Console(stderr=True))
    ]
    write_record(record, options.output)
    print(table(record))


if __name__ == "__main__":
    main()
