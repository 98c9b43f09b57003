"""Tiny models attached in each mode, and a reference that gets the same results in passes over all layers."""

from contextlib import contextmanager

import torch
from families import LAYERS, tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed

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


def attached_early(family: str, exit_layers: list[int], strategy: str = "propagate", **options):
    """A model in `early_exit` with random routers."""
    model = tiny_model(family)
    routers = random_routers(model, exit_layers, kv_cache_strategy=strategy)
    return TIDEModelForCausalLM.attach(model, routers, mode="early_exit", **options)


@contextmanager
def frozen_after_exits(model, routers, exits=None, threshold=None):
    """Let all layers of the base model run on all tokens, but return a token's state unchanged after its exit.

    Tokens exit at the layers `exits`, or else where their score reaches `threshold`. Yields a list of the exit layers.
    """
    structure, found = find_structure(model), [exits]
    unembed = Unembed(model, structure)

    def freeze(layer_idx, before, state):
        if layer_idx == 0 and threshold is not None:
            found[0] = torch.full(state.shape[:2], LAYERS)
        state = torch.where((found[0] <= layer_idx)[..., None], before, state)
        if threshold is not None and layer_idx + 1 in routers.exit_layers:
            scores = routers[layer_idx + 1].router(unembed.normalize(state))
            found[0][(scores >= threshold) & (found[0] == LAYERS)] = layer_idx + 1
        for exit_layer in routers.exit_layers if layer_idx + 1 == LAYERS else ():
            state = torch.where((found[0] == exit_layer)[..., None], routers[exit_layer].head(state), state)
        return state

    def hook_of(layer_idx):
        def hook(_module, args, kwargs, output):
            before = args[0] if args else kwargs["hidden_states"]
            is_tuple = isinstance(output, tuple)
            state = freeze(layer_idx, before, output[0] if is_tuple else output)
            return (state, *output[1:]) if is_tuple else state

        return hook

    handles = [layer.register_forward_hook(hook_of(i), with_kwargs=True) for i, layer in enumerate(structure.layers)]
    with torch.no_grad():
        yield found
    for handle in handles:
        handle.remove()
