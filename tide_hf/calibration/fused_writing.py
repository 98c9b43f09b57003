"""Text written in passes whose decoder layers all run in one call of a kernel (see `weights.fused_passes`).

On a CPU such a pass over a batch takes half the time of the model's own. Rows that end leave the batch at once, since
others move into their slots of the K/V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..base_model.structure import CACHE, DecoderStructure
from ..common.choices import EAGER
from ..common.token_ids import left_padded, truncate_at_eos
from ..depth.gates import LayerRun, active, open_gates, remove_gates
from ..engines.gqa_attention import gqa_attention
from ..engines.warm_up import build_while_attaching
from ..weights.linear_gate import faster_passes
from ..weights.reading import WeightReading

LEAVING_SHARE = 1 / 16  # of a batch that has ended, from which on it leaves


class FusedWriter:
    """Continues prompts with a model whose weights have open gates.

    Args:
        model: A model that reads nothing but text, and keeps all K/V.
        weights: How its weights are read.
    """

    def __init__(self, model: Any, weights: WeightReading) -> None:
        self.model, self.weights = model, weights

    @torch.no_grad()
    def continue_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        choose: Callable[[Tensor], Tensor],
        *,
        ends: set[int],
        pad: int,
        deadline: float,
    ) -> list[list[int]]:
        """As `text.continue_prompts`; `choose` gives the next tokens (rows,) of logits (rows, V)."""
        passes: Any = self.weights.execute_layer(spare_slots=max_new_tokens)
        cache = plain_cache(self.model)
        ids, mask = left_padded(prompts, pad=pad).values()
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        answers: list[list[int]] = [[] for _ in prompts]
        rows, ended = list(range(len(prompts))), set[int]()
        with active(LayerRun(self.weights.structure, cache, execute_layer=passes)), gqa_attention(self.model):
            for _ in range(max_new_tokens):
                inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE: cache}
                tokens = choose(self.model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True).logits[:, -1])
                for row, token in zip(rows, tokens.tolist(), strict=True):
                    answers[row].append(token)
                    if token in ends:
                        ended.add(row)
                kept = [idx for idx, row in enumerate(rows) if row not in ended]
                if not kept or perf_counter() > deadline:
                    break
                ids, positions = tokens[:, None], positions[:, -1:] + 1
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
                if len(rows) - len(kept) >= LEAVING_SHARE * len(rows):
                    order = _moving_few(kept)
                    passes.keep_rows(cache, order)
                    ids, positions, mask = ids[order], positions[order], mask[order]
                    rows = [rows[idx] for idx in order]
        return [truncate_at_eos(answer, ends, keep_eos=False) for answer in answers]


def _moving_few(kept: list[int]) -> list[int]:
    """The rows to keep, ascending, in an order in which as few as possible change their place."""
    stays, late = set(kept), [row for row in kept if row >= len(kept)]
    return [row if row in stays else late.pop() for row in range(len(kept))]


@contextmanager
def writing_passes(
    model: PreTrainedModel, structure: DecoderStructure, rows: int, max_new_tokens: int
) -> Iterator[FusedWriter | None]:
    """The context in which batches of up to `rows` rows are written, about `max_new_tokens` tokens a row in all.

    Yields what writes them; `None` where no kernel runs the model's layers, or is faster for so many rows, or can be
    built, as it is where that pays. The model's own passes are then as fast as they can be.
    """
    with _fused_writer(model, structure, rows, max_new_tokens) as writer:
        if writer is not None:
            yield writer
            return
    with faster_passes(structure):
        yield None


@contextmanager
def _fused_writer(
    model: PreTrainedModel, structure: DecoderStructure, rows: int, max_new_tokens: int
) -> Iterator[FusedWriter | None]:
    """Gates are on the layers meanwhile. Those of a model with TIDE attached, which it has already, are used."""
    attachment = getattr(model, "_tide", None)
    weights = WeightReading(structure, None) if attachment is None else attachment.weights
    try:
        if attachment is None:
            weights.open(model)
            open_gates(structure)
            build_while_attaching(weights, may_upcast=False)
        with weights.in_call(EAGER, max_new_tokens):
            passes = weights.execute_layer() if _is_text_alone(model) else None
            suits = passes is not None and passes.runs_each and passes.most_tokens >= rows
            yield FusedWriter(model, weights) if suits else None
    finally:
        if attachment is None:
            remove_gates(structure)
            weights.remove()


def _is_text_alone(model: PreTrainedModel) -> bool:
    """Whether a model's own config is that of its text model, and it keeps the K/V of all tokens."""
    return model.config.get_text_config() is model.config and plain_cache(model) is not None


def plain_cache(model: PreTrainedModel) -> DynamicCache | None:
    """An empty cache; `None` for models whose layers keep something other than all K/V."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    is_plain = cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers)
    return cache if is_plain else None
