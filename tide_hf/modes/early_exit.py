"""Modes `early_exit` and `post_hoc`: tokens exit at exit layers, on compiled steps or layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.cache_utils import Cache

from ..base_model.inputs import check_no_cross_attention
from ..base_model.structure import CACHE
from ..common.choices import EAGER, EXIT_CRITERIA, check_choice
from ..common.errors import UnsupportedModelError, UnsupportedOptionError
from ..common.stats import ExitStats
from ..depth.early_exit import ExitOptions, PostHocRun, RecomputeRun
from ..depth.gates import active
from ..depth.kv_cache import find_cache
from ..routers.config import check_field
from ..speculation.attachment import Attachment
from ..speculation.call import Call, check_call
from ..speculation.drafters import NoDrafter
from .plain_loop import add_tokens
from .self_speculative import decoder_of

EXIT_OPTIONS = ("exit_threshold", "exit_criterion", "min_layers")


def exit_early(
    model: Any, call: Call, mode: str, engine_name: str, sample: Callable[[], Any], forward: Callable[..., Any]
) -> tuple[Any, ExitStats]:
    """Decode a call in `early_exit` or `post_hoc`.

    Args:
        model: The attached model.
        call: The call.
        mode: The mode.
        engine_name: The engine that the call asks for.
        sample: Runs transformers' own decoding loop on the call.
        forward: The model's own forward.
    """
    attachment = model._tide
    if mode == "early_exit":
        check_no_cross_attention(f"tide_mode={mode!r}", call.model_kwargs)
    options = exit_options(attachment, mode, call)
    run = _run_of(attachment, mode, call, options)  # refuses what no engine can run
    if engine_name != EAGER:
        found = _exit_on_steps(model, call, mode, engine_name, options)
        if not isinstance(found, str):
            return found
        attachment.engines[engine_name].log_eager(found)
    with attachment.weights.in_call(EAGER, call.max_new_tokens), active(run):
        result = _sample_and_flush(run, call, sample, forward)
    stats = ExitStats(mode, run.num_layers, run.layers_executed)
    add_tokens(stats, run.per_pass, result, call)
    return result, stats


def _exit_on_steps(
    model: Any, call: Call, mode: str, engine_name: str, options: ExitOptions
) -> tuple[Any, ExitStats] | str:
    """Decode a call on steps; or return the reason why it has to run layer by layer."""
    reason = _obstacle(model, call, mode)
    if reason is not None:
        return reason
    attachment, decoder = model._tide, decoder_of(model, call, mode)
    if len(decoder.rows) > 1 and not call.ends_by_length and not decoder.drops_ended:
        return "rows that have ended stay in the batch, and add no tokens"
    kind = attachment.engines[engine_name]
    with kind.showing_warm_up(), attachment.weights.in_call(engine_name, call.max_new_tokens):
        found = kind.prefill_exits(model, attachment, call, options)
        if isinstance(found, str):
            return found
        result = decoder.decode(lambda: found, lambda engine: NoDrafter(attachment, call, engine))
    decoder.stats.rounds = 0  # nothing was drafted
    return result, decoder.stats


def _obstacle(model: Any, call: Call, mode: str) -> str | None:
    """The reason why no engine can run a call on steps, however its rows end; `None` if there is none."""
    cache = call.model_kwargs.get(CACHE)
    num_given = call.prompt_length - (int(cache.get_seq_length()) if isinstance(cache, Cache) else 0)
    reasons = {
        "post_hoc runs all layers": mode == "post_hoc",
        "tokens may exit in the prompt": num_given <= 1,
    }
    try:
        check_call(model, call, mode)
    except (UnsupportedModelError, UnsupportedOptionError) as error:
        reasons[error.problem] = True
    return next((reason for reason, holds in reasons.items() if holds), None)


def _sample_and_flush(run: PostHocRun, call: Call, sample: Callable[[], Any], forward: Callable[..., Any]) -> Any:
    """Run transformers' loop; leave the cache with the K/V of all layers, if the call returns it."""
    if not (isinstance(run, RecomputeRun) and call.cache_is_returned):
        return sample()
    try:
        result = sample()
    except BaseException:  # such as Ctrl-C, or an error of a streamer: the caller may reuse the cache
        run.recover(call.model_kwargs[CACHE])
        raise
    run.flush(forward)
    return result


def exit_options(attachment: Attachment, mode: str, call: Call) -> ExitOptions:
    """How the tokens of one `early_exit` or `post_hoc` call exit."""
    routers = attachment.require_routers(f"tide_mode={mode!r}")
    threshold, criterion, min_layers = (getattr(call.generation_config, name, None) for name in EXIT_OPTIONS)
    options = ExitOptions(
        routers,
        attachment.default_threshold if threshold is None else threshold,
        check_choice("exit_criterion", criterion or "router", EXIT_CRITERIA),
        0 if min_layers is None else check_field("min_layers", min_layers),
    )
    routers.check_exit_layers(f"tide_mode={mode!r}")
    return options


def _run_of(attachment: Attachment, mode: str, call: Call, options: ExitOptions) -> PostHocRun:
    """Make the run of one `early_exit` or `post_hoc` call, with the options of this call."""
    kwargs = call.model_kwargs
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    common = (attachment.structure, cache, attachment.unembed, options)
    if mode == "post_hoc" and kwargs.get("use_cache", True):
        return PostHocRun(*common)
    find_cache(kwargs, f"tide_mode={mode!r}", takes_static=False)
    return RecomputeRun(*common)
