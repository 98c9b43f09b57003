"""Routers for a model of your own, and up to the Hub with them.

python examples/calibrate_and_push.py HuggingFaceTB/SmolLM2-135M-Instruct my-routers --samples 800
python examples/calibrate_and_push.py HuggingFaceTB/SmolLM2-135M-Instruct my-routers --push your-name/your-model-tide

No data set is needed: the model writes its own text. Killed, it goes on where it was when it is started again. Log in
with `hf auth login` before you push.
"""

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf import calibrate


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hub name or folder")
    parser.add_argument("output_dir", help="folder for routers, card and unfinished work")
    parser.add_argument("--samples", type=int, default=600, help="texts to write (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        help="share of tokens that may differ in early_exit (default: %(default)s)",
    )
    parser.add_argument("--max-minutes", type=float, help="time to stay within")
    parser.add_argument("--push", metavar="REPO", help="Hub repository for the routers and their card")
    args = parser.parse_args(argv)

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    settings = {"samples": args.samples, "tolerance": args.tolerance, "max_minutes": args.max_minutes}
    routers = calibrate(model, tokenizer, **settings, output_dir=args.output_dir)
    threshold = routers.config.exit_threshold
    exits = f"early_exit exits at {threshold:g}" if threshold <= 1 else "no threshold was certified for early_exit"
    print(f"Routers and card are in {args.output_dir}; {exits}.")
    if args.push:
        print(routers.push_to_hub(args.push, private=True).commit_url)


if __name__ == "__main__":
    main()
