"""Whether the certified disagreement holds in `early_exit`: `python -m examples.benchmarks.disagreement`.

For every tolerance that the routers' calibration could certify a threshold for, prompts that it did not see are
answered in `early_exit` at that threshold. The full model then reads each answer once, and a token disagrees where the
full model would have chosen another one after the same tokens. Two sets of prompts: new draws of the kind that the
calibration answered (prompts that the model writes among them), for which the promise is made, and the decode
benchmark's own, which are of another kind. Writes JSON, prints a Markdown table.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import input_device
from tide_hf.calibration.text import OWN_SHARE, draw_prompts, find_user_turn, plan_writing, write_documents
from tide_hf.calibration.threshold import clopper_pearson, mean_interval
from tide_hf.common.token_ids import left_padded, prompt_tokens
from tide_hf.evaluation.benchmark import weight_sharing_copy
from tide_hf.hub.load import DEFAULT_ROUTERS, find_routers
from tide_hf.hub.provenance import provenance

from .common import load_for, markdown, read_prompts, study_parser, write_record

CONFIDENCE = 0.95


def unseen_prompts(num_documents: int, seed: int, count: int) -> list[str]:
    """Draw prompts from the package's templates that a calibration with so many documents and `seed` did not draw."""
    known = set(draw_prompts(2 * num_documents, seed))  # a few of its prompts may have come to no document
    others = [prompt for prompt in draw_prompts(10**5, seed + 1) if prompt not in known]
    random.Random(seed).shuffle(others)
    return others[:count]


def own_prompts(model: Any, tokenizer: Any, seed: int, count: int) -> list[list[int]]:
    """Let the model write prompts as it does for a calibration with `seed`, but others; none where it cannot."""
    turn = find_user_turn(tokenizer)
    if turn is None or count == 0:
        return []
    (batch,) = plan_writing([], count, seed + 1, turn, count)
    return [one.tokens[: one.first + 1] for one in write_documents(model, tokenizer, batch, max_length=1)]


@torch.no_grad()
def disagreements(
    plain: Any, attached: Any, inputs: dict[str, Tensor], exit_threshold: float, max_new_tokens: int
) -> tuple[list[tuple[int, int]], int]:
    """Answer a batch in `early_exit`, and have the full model judge every token.

    Returns:
        For each row the numbers of tokens that disagree and of all; and the layers that all tokens were read from,
        added up.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    sequences = attached.generate(**inputs, **options, tide_mode="early_exit", exit_threshold=exit_threshold)
    per_token = attached.last_exit_stats.per_token
    start = inputs["input_ids"].shape[1]
    new = sequences.shape[1] - start
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(sequences), new, dtype=torch.int64)], dim=1)[:, :-1]
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    logits = plain(input_ids=sequences[:, :-1], attention_mask=mask, position_ids=positions, logits_to_keep=new).logits
    differs = logits.argmax(dim=-1) != sequences[:, start:]
    counts = [(int(row[: len(layers)].sum()), len(layers)) for row, layers in zip(differs, per_token, strict=True)]
    return counts, sum(map(sum, per_token))


def study(plain: Any, attached: Any, prompts: list[list[int]], row: dict[str, Any], options: Any) -> dict[str, Any]:
    """One tolerance on one set of prompts."""
    counts: list[tuple[int, int]] = []
    depth = 0
    for start in range(0, len(prompts), options.batch_size):
        inputs = left_padded(prompts[start : start + options.batch_size], device=input_device(plain))
        found, layers = disagreements(plain, attached, inputs, row["exit_threshold"], options.max_new_tokens)
        counts += found
        depth += layers
    differ, total = (sum(column) for column in zip(*counts, strict=True))
    losses = torch.tensor([wrong / tokens for wrong, tokens in counts], dtype=torch.float64)
    return {
        "prompts": len(counts),
        "tokens": total,
        "differ": differ,
        "binomial_interval": clopper_pearson(differ, total, CONFIDENCE),
        "mean_of_prompts": float(losses.mean()),
        "interval_of_prompts": mean_interval(losses, CONFIDENCE),
        "depth_fraction": depth / total / attached._tide.structure.num_layers,
    }


def table(record: dict[str, Any]) -> str:
    """Render a record as Markdown."""
    heads = ["prompts", "tolerance", "threshold", "tokens that differ", "binomial interval", "mean of prompts", "depth"]
    rows = []
    for row in record["tolerances"]:
        for name, found in row["measured"].items():
            low, high = found["binomial_interval"]
            cells = [
                name,
                f"{row['tolerance']:.1%}",
                f"{row['exit_threshold']:g}",
                f"{found['differ']}/{found['tokens']}",
            ]
            cells += [f"{low:.2%} to {high:.2%}", f"{found['mean_of_prompts']:.2%}", f"{found['depth_fraction']:.1%}"]
            rows.append(cells)
    return markdown(heads, rows)


def run(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every certified tolerance."""
    routers: Any = find_routers(options.routers or DEFAULT_ROUTERS, model)
    calibration = routers.config.calibration
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers)
    seed = calibration["seed"]
    new = own_prompts(model, tokenizer, seed, round(OWN_SHARE * options.prompts))
    others = unseen_prompts(calibration["num_documents"], seed, options.prompts - len(new))
    benchmark = [text for texts in read_prompts().values() for text in texts][: options.prompts]
    sets = {
        "new draws": new + [prompt_tokens(tokenizer, text) for text in others],
        "decode benchmark": [prompt_tokens(tokenizer, text) for text in benchmark],
    }
    record = provenance(model) | {"max_new_tokens": options.max_new_tokens, "confidence": CONFIDENCE}
    rows = [row for row in calibration.get("tolerances", []) if row["exit_threshold"] is not None]
    record["tolerances"] = []
    for row in track(rows, description="Measuring", console=Console(stderr=True)):
        measured = {name: study(model, attached, prompts, row, options) for name, prompts in sets.items()}
        record["tolerances"].append({**row, "measured": measured})
    return record


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write and print."""
    parser = study_parser(__doc__, "disagreement.json", routers=True)
    parser.add_argument("--prompts", type=int, default=128, help="of each set, at most")
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args(argv)
    record = run(*load_for(options), options)
    write_record(record, options.output)
    print(table(record))


if __name__ == "__main__":
    main()
