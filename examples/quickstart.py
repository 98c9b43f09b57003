"""An answer with TIDE, and how deep its tokens ran: `python examples/quickstart.py "Why does bread rise?"`."""

import argparse
from collections.abc import Sequence

import torch

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.hub.load import shipped_routers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Write a Python function that adds two numbers, and call it.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder (default: those shipped for the model)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    args = parser.parse_args(argv)

    # Or AutoModelForCausalLM and AutoTokenizer; this also finds the default model if the Hub cannot be reached.
    model, tokenizer = load_demo_model(args.model, dtype=torch.float32)
    TIDEModelForCausalLM.attach(model, args.routers or shipped_routers(model))

    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print()
    print(model.last_exit_stats.summary())


if __name__ == "__main__":
    main()
