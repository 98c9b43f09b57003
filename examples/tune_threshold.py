"""The effect of `exit_threshold` in `early_exit`: a lower one runs fewer layers and agrees less with the full model.

python examples/tune_threshold.py --thresholds 0.97 0.9 0.8

`tide-hf evaluate` measures this with intervals, on your own data.
"""

import argparse
from collections.abc import Sequence

import torch

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.cli.prompts import PROMPTS
from tide_hf.common.token_ids import encode_prompt
from tide_hf.evaluation.benchmark import same_start
from tide_hf.hub.load import shipped_routers

THRESHOLDS = [0.97, 0.94, 0.88, 0.83, 0.7]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder (default: those shipped for the model)")
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS, help="default: %(default)s")
    parser.add_argument("--prompt", action="append", help="may be repeated (default: three built-in prompts)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    args = parser.parse_args(argv)

    model, tokenizer = load_demo_model(args.model, dtype=torch.float32)
    inputs = [encode_prompt(tokenizer, prompt) for prompt in args.prompt or PROMPTS]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    expected = [model.generate(**prompt, **options)[0].tolist() for prompt in inputs]
    starts = [prompt["input_ids"].shape[1] for prompt in inputs]

    TIDEModelForCausalLM.attach(model, args.routers or shipped_routers(model), mode="early_exit")
    print("threshold   layers executed   tokens that exit   answer's start that is the full model's")
    for threshold in args.thresholds:
        depths, exits, same = [], [], []
        for prompt, start, full in zip(inputs, starts, expected, strict=True):
            output = model.generate(**prompt, **options, exit_threshold=threshold)[0].tolist()
            depths.append(model.last_exit_stats.depth_fraction)
            exits.append(model.last_exit_stats.exit_rate)
            same.append(same_start(full[start:], output[start:]))
        means = [sum(column) / len(column) for column in (depths, exits, same)]
        print(f"{threshold:9g}   {means[0]:15.0%}   {means[1]:16.0%}   {means[2]:.0%}")


if __name__ == "__main__":
    main()
