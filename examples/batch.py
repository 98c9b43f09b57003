"""A batch of prompts with TIDE: each row accepts its own number of drafts; the tokens are those of plain `generate`.

python examples/batch.py "Name three colours." "Why does bread rise?" "Count from one to ten."
"""

import argparse
from collections.abc import Sequence

import torch

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.hub.load import shipped_routers

PROMPTS = ["Name three colours.", "Why does bread rise?", "Count from one to ten."]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="default: three built-in prompts")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder")
    parser.add_argument("--routers", help="Hub name or folder (default: those shipped for the model)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of an answer (default: %(default)s)")
    args = parser.parse_args(argv)

    model, tokenizer = load_demo_model(args.model, dtype=torch.float32)
    chats = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    # Left padding, so that all answers start in the same column. Chat templates add special tokens themselves.
    inputs = tokenizer(
        texts,
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_token_type_ids=False,
        return_tensors="pt",
    )
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    expected = model.generate(**inputs, **options)

    TIDEModelForCausalLM.attach(model, args.routers or shipped_routers(model))
    output = model.generate(**inputs, **options)
    for prompt, tokens in zip(args.prompts, output[:, inputs["input_ids"].shape[1] :], strict=True):
        print(f"> {prompt}\n{tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    print(model.last_exit_stats.summary())
    print("Same tokens as plain generate:", "yes" if torch.equal(output, expected) else "no")


if __name__ == "__main__":
    main()
