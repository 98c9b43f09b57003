"""Tiny models attached in each mode."""

import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters

OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def attached(family: str = "llama", **options):
    model = tiny_model(family)
    return TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 3]), **options)


def random_routers(model, exit_layers=(1, 3), seed=1, **config):
    """Routers with linear heads, whose scores differ from token to token."""
    routers = TIDERouters.for_model(model, exit_layers=[*exit_layers], exit_strategy="linear", **config)
    torch.manual_seed(seed)
    for exit_layer in exit_layers:
        torch.nn.init.normal_(routers[exit_layer].head.translator.weight, std=0.1)
        torch.nn.init.normal_(routers[exit_layer].router.up.weight)
    return routers


def attached_early(family: str, exit_layers: list[int], **options):
    """A model in `early_exit` with random routers."""
    model = tiny_model(family)
    return TIDEModelForCausalLM.attach(model, random_routers(model, exit_layers), mode="early_exit", **options)
