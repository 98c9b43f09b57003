"""Passes of one row by the parts of a model, without its own forward around the layers.

Where layers run in one call of a kernel, what that forward does around them takes a millisecond, a tenth of a small
model's pass. A model of Llama's kind does no more there than embed the tokens and read the last layer's output by the
final norm and head. That a model is of this kind shows in one pass by its own forward: its parts must give every value
again, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base_model.structure import CACHE
from ..base_model.unembed import Unembed
from ..depth.gates import LayerRun
from ..depth.masks import current_tree
from ..weights.fused_layers import is_untouched
from ..weights.fused_passes import FusedPasses


class DirectPasses:
    """Runs passes of one call; see [`direct_passes`].

    Args:
        embed: The input embedding.
        rotary: The rotary embedding.
        unembed: The final norm and head.
        run: The active run of the call.
        passes: What runs its layers, all of them by kernels.
    """

    def __init__(self, embed: Any, rotary: Any, unembed: Unembed, run: LayerRun, passes: FusedPasses) -> None:
        self._embed, self._rotary, self._unembed = embed, rotary, unembed
        self._run, self._passes, self._layers = run, passes, unembed.structure.layers

    def give(self, ids: Tensor, positions: Tensor, logits: Tensor) -> bool:
        """Whether the parts give all values of the last pass, by the model's own forward, whose logits are these."""
        given = self._passes.last_pass
        if given is None:
            return False
        first, last, angles = given
        state = self._embed(ids)
        found = (state, *self._rotary(state, positions), self._unembed(last))
        return all(map(torch.equal, found, (first, *angles, logits)))

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (1, width, V) of a pass over `ids` (1, width) at `positions`, of which nothing is masked."""
        state, cache = self._embed(ids), self._run.cache
        angles, mask = self._rotary(state, positions), _tree_mask(cache.get_seq_length())
        kwargs = {"attention_mask": mask, "position_embeddings": angles, CACHE: cache}
        self._run.starts({"input_ids": ids, "inputs_embeds": state, "attention_mask": None})
        begin = 0
        while begin < len(self._layers):
            state = self._layers[begin].forward(state, **kwargs)
            end = self._passes.end
            if end - begin > 1:  # the run observes the last of the layers that have run with this one
                self._run.count_joined(ids.shape[0], end - begin - 2)
                state = self._layers[end - 1].forward(state, **kwargs)
            begin = end
        return self._unembed(state)


def direct_passes(model: Any, unembed: Unembed, run: LayerRun) -> DirectPasses | None:
    """What runs passes of a call by the parts of the model; `None` for models that may do more, or where users look in.

    Without padding and other inputs than tokens, and where [`DirectPasses.give`] holds, it gives what the model gives.
    """
    passes, decoder = run.execute_layer, model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    if not isinstance(passes, FusedPasses) or not passes.run_all or rotary is None:
        return None
    if decoder not in model.children() or not (is_untouched(model) and is_untouched(decoder)):
        return None
    return DirectPasses(model.get_input_embeddings(), rotary, unembed, run, passes)


def _tree_mask(length: int) -> Tensor | None:
    """(1, 1, width, slots) mask of the pass's tree behind `length` tokens; `None` for a chain."""
    tree = current_tree()
    if tree is None:
        return None
    before = tree.attended.new_ones(1, tree.attended.shape[1], length)
    return torch.cat([before, tree.attended], dim=2)[:, None]
