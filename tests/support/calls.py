"""Calls with greedy decoding, and logits processors that look at one row at a time."""

import torch
from families import VOCAB

PROMPT, NEW = 12, 28


OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


PROCESSED = (  # options with a processor that looks at each row by itself
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9, "eos_token_id": [5, 9, 11, 40, 41, 42, 43]},
    {"bad_words_ids": [[7], [9, 10]]},
)


def prompt(seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
