"""Calls that stopping rules end."""

import torch
from families import VOCAB
from on_steps import attach_compiled

from tide_hf import TIDEModelForCausalLM

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


PROMPT = 12


ATTACH = {"eager": TIDEModelForCausalLM.attach, "compiled": attach_compiled}


def prompts(rows):
    return torch.randint(3, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
