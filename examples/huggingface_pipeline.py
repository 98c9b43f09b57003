"""TIDE inside a transformers pipeline: `python examples/huggingface_pipeline.py`. Nothing else changes."""

import argparse
from collections.abc import Sequence

import torch
from transformers import pipeline

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.hub.load import shipped_routers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder (default: those shipped for the model)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    args = parser.parse_args(argv)

    # If the Hub can be reached: TIDEModelForCausalLM.from_pretrained(model, routers=...) and AutoTokenizer.
    model, tokenizer = load_demo_model(args.model, dtype=torch.float32)
    TIDEModelForCausalLM.attach(model, args.routers or shipped_routers(model))

    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "Name three colours."}]
    for options in ({"tide_mode": "self_speculative"}, {"tide_mode": "early_exit", "exit_threshold": 0.9}):
        answer = generator(chat, max_new_tokens=args.max_new_tokens, do_sample=False, **options)
        print(answer[0]["generated_text"][-1]["content"])
        print(model.last_exit_stats.summary(), end="\n\n")


if __name__ == "__main__":
    main()
