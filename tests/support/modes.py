"""A tiny model attached in each mode."""

from families import tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters

MODES = ("self_speculative", "early_exit", "post_hoc")
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def attached(family: str = "llama", **options):
    model = tiny_model(family)
    return TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 3]), **options)
