"""TIDE on any causal language model, without routers: n-grams of the text draft, the model verifies.

python examples/any_model.py gpt2 EleutherAI/pythia-160m microsoft/phi-1_5   # from the Hub, or folders
python examples/any_model.py --random gpt2 gpt_neox phi                      # config names: nothing is downloaded

Prints the speed-up over plain `generate`, and whether the tokens are the same. With random weights the speed has no
meaning.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tide_hf import TIDEModelForCausalLM

PROMPT = "Monday: bread, milk, eggs.\nTuesday: bread, milk, apples.\nWednesday: bread, milk,"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def load(name: str, random: bool) -> tuple[Any, torch.Tensor]:
    """The model, and a prompt for it."""
    if random:
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, vocab_size=512, **SIZES, **HEADS, **special)
        )
        return model.eval(), torch.randint(3, 512, (1, 8)).repeat(1, 3)
    prompt = AutoTokenizer.from_pretrained(name)(PROMPT, return_tensors="pt")["input_ids"]
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), prompt


def generate(model: Any, prompt: torch.Tensor, max_new_tokens: int) -> tuple[list[int], float]:
    """The new tokens, and tokens per second: the median of three calls, after one that warms up."""
    seconds = []
    for _ in range(4):
        start = perf_counter()
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
        )
        seconds.append(perf_counter() - start)
    tokens = output[0, prompt.shape[1] :].tolist()
    return tokens, len(tokens) / median(seconds[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="Hub names or folders; with --random, config names")
    parser.add_argument("--random", action="store_true", help="small models with random weights")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in args.models:
        model, prompt = load(name, args.random)
        expected, plain = generate(model, prompt, args.max_new_tokens)
        TIDEModelForCausalLM.attach(model, remembered_tokens=0)  # else later calls draft the first one's answer
        tokens, tide = generate(model, prompt, args.max_new_tokens)
        same = "same tokens" if tokens == expected else "other tokens"
        print(f"{name}: {plain:.1f} tokens/s, with TIDE {tide:.1f} ({tide / plain:.2f} times), {same}")


if __name__ == "__main__":
    main()
