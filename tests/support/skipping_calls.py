"""Tiny models attached in `early_exit`."""

import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters

OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def attached(family: str, exit_layers: list[int], strategy: str = "propagate", **options):
    model = tiny_model(family)
    routers = TIDERouters.for_model(model, exit_layers=exit_layers, exit_strategy="linear", kv_cache_strategy=strategy)
    torch.manual_seed(1)
    for exit_layer in exit_layers:
        torch.nn.init.normal_(routers[exit_layer].head.translator.weight, std=0.1)
        torch.nn.init.normal_(routers[exit_layer].router.up.weight)
    return TIDEModelForCausalLM.attach(model, routers, mode="early_exit", **options)
