"""One call of `generate`, and what the speculative loop requires of a call.

Each check raises a typed error. `generation` catches the error and decodes plainly, by transformers' own loop at full
depth, unless TIDE was attached with `strict=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..base_model.inputs import check_no_cross_attention
from ..base_model.structure import CACHE, check_rope, rope_limits
from ..common.errors import ConfigurationError, UnsupportedModelError, UnsupportedOptionError
from ..depth.kv_cache import find_cache
from ..depth.multi_token_passes import check_multi_token_passes, multi_token_limit
from .rows import max_length_of

# Methods of transformers' decoding loop, which the speculative loop replaces, and model types whose own version of a
# method the speculative loop need not follow: tests compare its tokens with those of plain decoding.
LOOP_METHODS: dict[str, frozenset[str]] = {
    "_sample": frozenset(),
    "_has_unfinished_sequences": frozenset(),
    "_update_model_kwargs_for_generation": frozenset({"mllama", "paligemma"}),
}


@dataclass
class Call:
    """What `generate` passes to `_sample`: (rows, length) `input_ids`, model inputs in `model_kwargs`, and options."""

    input_ids: Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """All but `input_ids`, as keyword arguments of `_sample`."""
        names = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
        return {**{name: getattr(self, name) for name in names}, **self.model_kwargs}

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The token ids of each row's prompt, padding included."""
        return self.input_ids.tolist()

    @property
    def cache_is_returned(self) -> bool:
        """Whether the caller gets the cache back."""
        is_own = getattr(self.model_kwargs.get(CACHE), "_is_user_defined", False)
        return bool(self.generation_config.return_dict_in_generate or is_own)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and answer; a caller's MaxLengthCriteria overrides the config."""
        return max_length_of(self.stopping_criteria) or self.generation_config.max_length

    @property
    def pad_token_id(self) -> int:
        """The token that follows the end of a row."""
        pad = self.generation_config._pad_token_tensor
        return int(pad) if pad is not None else 0

    @property
    def temperature(self) -> float:
        """Of sampling; 0 for greedy decoding."""
        config = self.generation_config
        return float(config.temperature or 1.0) if config.do_sample else 0.0

    @property
    def ends_by_length(self) -> bool:
        """Whether only their length ends rows, so that all of them end at once."""
        return all(type(criterion) is MaxLengthCriteria for criterion in self.stopping_criteria)

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt, as ids or as embeddings."""
        embeds = self.model_kwargs.get("inputs_embeds")
        return (self.input_ids if embeds is None else embeds).shape[1]

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of the answer."""
        return self.max_length - self.input_ids.shape[1]


def check_call(model: Any, call: Call, mode: str = "self_speculative") -> None:
    """Refuse a call whose output the speculative loop cannot produce, or whose cache it cannot use."""
    mode, rows = f"tide_mode={mode!r}", call.input_ids.shape[0]
    if not rows or not call.prompt_length:
        raise ConfigurationError(
            "there is no prompt to continue",
            got=f"a batch of {rows} rows of {call.prompt_length} tokens",
            expected="at least one row, and one token in each, such as the bos token",
            do="Pass input_ids of at least one token.",
        )
    _check_loop(model._tide.base_class, model.config.model_type, mode)
    check_no_cross_attention(mode, call.model_kwargs)
    refused = {
        f"a streamer with a batch of {rows}": call.streamer is not None and rows != 1,
        "synced_gpus=True": call.synced_gpus,
        "output_attentions=True": call.generation_config.output_attentions,
        "output_hidden_states=True": call.generation_config.output_hidden_states,
    }
    for got, is_refused in refused.items():
        if is_refused:
            raise UnsupportedOptionError(
                f"{mode} cannot give what this call asks for",
                got=got,
                expected="one process, no output_attentions or output_hidden_states, streamers for one sequence",
                do="Leave it out, or choose self_speculative without strict=True: such calls decode plainly. A "
                "tide_hf.speculation.rows.RowCriterion sees the tokens of every row of a batch.",
            )
    _check_length(model, call)
    user = mode + (" in a batch" if rows > 1 else "")
    find_cache(call.model_kwargs, user, takes_static=rows == 1, moves_rows=rows > 1)


def _check_loop(base_class: Any, model_type: str, mode: str) -> None:
    """Refuse a model class that decodes by its own loop, or keeps state of its own from token to token."""
    for name, known in LOOP_METHODS.items():
        if getattr(base_class, name, None) is not getattr(GenerationMixin, name) and model_type not in known:
            raise UnsupportedModelError(
                f"{mode} would pass over code that the model runs at each token",
                got=f"{base_class.__name__} with its own {name}",
                expected=f"a model that decodes by GenerationMixin.{name}",
                do="Choose self_speculative without strict=True: such models decode plainly.",
            )


def _check_length(model: Any, call: Call) -> None:
    """Refuse answers so long that multi-token passes attend to other keys than single-token passes, or RoPE changes.

    RoPE depends on positions, not on the length of `input_ids`, which may be padded, or only a part of the prompt.
    """
    config = model.config.get_text_config()
    limits = rope_limits(config)
    if not limits and multi_token_limit(model) is None:
        return
    length, positions = _num_slots(call), call.model_kwargs.get("position_ids")
    check_multi_token_passes(model, length + call.max_new_tokens)
    if limits:
        length = length if positions is None else int(positions.max()) + 1
        check_rope(config, length, length + call.max_new_tokens)


def _num_slots(call: Call) -> int:
    """Number of tokens of prompt and cache, padding included; a prompt may repeat the tokens of the cache, or not."""
    mask, cache = (call.model_kwargs.get(name) for name in ("attention_mask", CACHE))
    # `generate` drops a mask of ones, and stores its length.
    masked = mask.shape[1] if mask is not None else getattr(call.generation_config, "_mask_length", None)
    if masked is not None:
        return int(masked)
    return call.prompt_length + (int(cache.get_seq_length()) if isinstance(cache, Cache) else 0)
