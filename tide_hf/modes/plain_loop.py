"""What transformers' own decoding loop has decoded, as the statistics of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.stats import ExitStats
from ..common.token_ids import truncate_at_eos
from ..common.token_sources import sources_of_depths
from ..speculation.call import Call


def new_tokens(result: Any, call: Call) -> Tensor:
    """The new tokens, (rows, passes), in `result`, which `_sample` returned."""
    sequences = result if isinstance(result, Tensor) else result.sequences
    return sequences[:, call.input_ids.shape[1] :]


def add_tokens(stats: ExitStats, per_pass: list[list[int]], result: Any, call: Call) -> None:
    """Add depth and source of each new token, from the depths of each pass (passes, rows); padding is left out."""
    eos = getattr(call.generation_config, "_eos_token_tensor", None)
    eos_tokens = set(eos.tolist()) if eos is not None else set()
    lengths = [len(truncate_at_eos(tokens, eos_tokens)) for tokens in new_tokens(result, call).tolist()]
    stats.per_token = [[layers[row] for layers in per_pass[:length]] for row, length in enumerate(lengths)]
    stats.sources = sources_of_depths(stats.per_token, stats.num_layers)
