"""Helpers for repositories on a Hub: the base model's answer without TIDE, and edits of a config file."""

import json

from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "Bread rises because"
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def plain_answer(**options):
    model, tokenizer = AutoModelForCausalLM.from_pretrained("org/base"), AutoTokenizer.from_pretrained("org/base")
    return model.generate(**tokenizer(PROMPT, return_tensors="pt"), **OPTIONS, **options)


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
