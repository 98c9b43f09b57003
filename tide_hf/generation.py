"""``TIDEGenerationMixin``: how the ``generate`` of an attached model decodes in each mode."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .base_model.inputs import check_no_cross_attention
from .base_model.structure import CACHE, counts_slots, rope_limits
from .base_model.wrappers import has_adapters_by_row, leave_uncompiled
from .common.busy import busy_note
from .common.choices import EAGER, ENGINES, EXIT_CRITERIA, MODES, check_choice
from .common.errors import TIDEError, UnsupportedModelError, UnsupportedOptionError
from .common.stats import ExitStats
from .common.token_ids import truncate_at_eos
from .common.token_sources import sources_of_depths
from .depth.early_exit import ExitOptions, ExitRun, PostHocRun, PropagateRun, RecomputeRun
from .depth.gates import active, active_run
from .depth.kv_cache import fill_for, find_cache
from .engines.exit_passes import StepsHeldError
from .engines.warm_up import checked_rows, prepare_eager, warm_up
from .routers.config import check_exit_threshold, check_min_layers
from .speculation.acceptance import AcceptanceRule
from .speculation.attachment import Attachment, DrafterFactory
from .speculation.call import Call, check_call
from .speculation.engine import Engine
from .speculation.exits import ExitDrafter, ExitRule, NoDrafter
from .speculation.loop import SpeculativeDecoder
from .speculation.ranks import ranks_of

OPTIONS_OF_EXITS = ("exit_threshold", "exit_criterion", "min_layers", "exits_in_prompt")
OPTIONS = ("tide_mode", "tide_engine", "tide_strict", *OPTIONS_OF_EXITS)


class TIDEGenerationMixin:
    """Base class placed in front of a model's own class while TIDE is attached.

    Attributes:
        last_exit_stats: Counts of the last call; `None` before the first call, and after beam search (without TIDE).
    """

    config: Any
    generation_config: Any
    dtype: Any
    _tide: Attachment
    last_exit_stats: ExitStats | None

    def _prepare_generation_config(self, generation_config: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Move TIDE's options from the keyword arguments of `generate` to the generation config of this call."""
        self.last_exit_stats = None
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]
        for name, value in options.items():
            if value is not None:
                setattr(config, name, value)
        if "use_cache" not in kwargs and self.generation_config.use_cache is False:
            config.use_cache = True  # training often leaves `use_cache=False` in the model's own config
        return config, model_kwargs

    def _sample(  # the method of transformers that greedy search and sampling both run
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        make_drafter: DrafterFactory | None = None,
        **model_kwargs: Any,
    ) -> Any:
        call = Call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )
        if generation_config.is_assistant:  # this model drafts for another model: full depth, no statistics
            return super()._sample(input_ids, **call.options)  # type: ignore[misc]
        attachment = self._tide
        mode = check_choice("tide_mode", getattr(generation_config, "tide_mode", None) or attachment.mode, MODES)
        engine = check_choice(
            "tide_engine", getattr(generation_config, "tide_engine", None) or attachment.engine, ENGINES
        )
        if getattr(generation_config, "exit_threshold", None) is not None:
            check_exit_threshold(generation_config.exit_threshold)
        try:
            attachment.check_model(self, mode)
            exits_with_head = mode == "early_exit" and attachment.exits_with_head
            if mode == "self_speculative" or exits_with_head:
                check_call(self, call, mode)
        except (UnsupportedModelError, UnsupportedOptionError) as error:
            strict = getattr(generation_config, "tide_strict", None)
            if mode != "self_speculative" or (attachment.strict if strict is None else strict):
                raise
            return self._tide_fall_back(error, call)
        generation_config.max_length = call.max_length
        for name in ("tokenizer", "assistant_tokenizer"):  # already passed to the stopping criteria
            model_kwargs.pop(name, None)
        leave_uncompiled(generation_config)
        warm_up_seconds = attachment.engines[engine].warm_up_seconds
        if mode == "self_speculative":
            result, stats = self._tide_speculate(call, engine, make_drafter or attachment.make_drafter)
        elif exits_with_head:
            result, stats = self._tide_exit_with_head(call, engine)
        else:
            result, stats = self._tide_exit(call, mode, engine)
        attachment.num_decoded += stats.total_tokens / len(input_ids)
        stats.busy_note = busy_note() if input_ids.device.type == "cpu" else None
        stats.warm_up_s = attachment.engines[engine].warm_up_seconds - warm_up_seconds
        stats.dtype = str(self.dtype).removeprefix("torch.")
        self.last_exit_stats = stats
        return result

    def _tide_speculate(self, call: Call, engine_name: str, make_drafter: DrafterFactory) -> tuple[Any, ExitStats]:
        """Decode in `self_speculative`."""
        attachment = self._tide
        rule = AcceptanceRule(*_rule_arguments(self, call))
        engine = attachment.engines[engine_name].engine(self, attachment, call)
        decoder = _decoder_of(self, call, "self_speculative", engine, rule)
        with attachment.running(engine_name, call.max_new_tokens):
            prompts = call.input_ids.tolist()
            result = decoder.decode(lambda own: make_drafter(attachment, prompts, own))
        if make_drafter is attachment.make_drafter:  # else it is a warm-up, whose tokens nobody asked for
            attachment.remember(prompts, decoder.rows)
        return result, decoder.stats

    def _tide_exit_with_head(self, call: Call, engine_name: str) -> tuple[Any, ExitStats]:
        """Decode in `early_exit` with a draft head, by the self-speculative loop with an [`ExitRule`]."""
        attachment = self._tide
        head: Any = attachment.draft_head
        threshold = _head_threshold(attachment, call)
        rule = ExitRule(*_rule_arguments(self, call), score=head.score, exit_threshold=threshold)
        engine = attachment.engines[engine_name].engine(self, attachment, call)
        decoder = _decoder_of(self, call, "early_exit", engine, rule)
        with attachment.running(engine_name, call.max_new_tokens):
            result = decoder.decode(lambda own: ExitDrafter(own, rule))
        return result, decoder.stats

    def _tide_exit(self, call: Call, mode: str, engine_name: str) -> tuple[Any, ExitStats]:
        """Decode in `early_exit` or `post_hoc` with exit layers: on steps where they run, else layer by layer."""
        attachment = self._tide
        if mode == "early_exit":
            check_no_cross_attention(f"tide_mode={mode!r}", call.model_kwargs)
        options = _exit_options(attachment, mode, call)
        run = _exit_run(
            attachment, mode, call, options, self.config.get_text_config()
        )  # refuses what no engine can run
        if engine_name != EAGER:
            reason = decoder = self._tide_decoder_of_exits(call, mode, engine_name, options)
            try:
                if isinstance(decoder, SpeculativeDecoder):
                    with attachment.running(engine_name, call.max_new_tokens):
                        result = decoder.decode(lambda _: NoDrafter())
                    decoder.stats.rounds = 0  # nothing was drafted
                    return result, decoder.stats
            except StepsHeldError:
                reason = "another call holds the steps"
            attachment.engines[engine_name].log_eager(str(reason))
        return self._tide_exit_eagerly(call, mode, run)

    def _tide_decoder_of_exits(
        self, call: Call, mode: str, engine_name: str, options: ExitOptions
    ) -> SpeculativeDecoder | str:
        """The decoder of one call whose tokens exit at exit layers, on steps; or the reason why there is none."""
        attachment, cache = self._tide, call.model_kwargs.get(CACHE)
        num_fed = call.prompt_length - (int(cache.get_seq_length()) if isinstance(cache, Cache) else 0)
        reasons = {
            "post_hoc runs all layers": mode == "post_hoc",
            "tokens may exit in the prompt": options.exits_in_prompt or num_fed <= 1,
        }
        try:
            check_call(self, call, mode)
        except (UnsupportedModelError, UnsupportedOptionError) as error:
            reasons[error.problem] = True
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            return reason
        engine = attachment.engines[engine_name].exit_engine(self, attachment, call, options)
        if isinstance(engine, str):
            return engine
        decoder = _decoder_of(self, call, mode, engine, AcceptanceRule(*_rule_arguments(self, call)))
        if len(decoder.rows) == 1 or decoder.rule.stopping.by_length:
            return decoder
        if options.strategy == "zero_pad":
            return "with zero_pad, rows that have ended decide what the others store"
        return decoder if decoder.drops_stopped else "rows that have ended stay in the batch, and add no tokens"

    def _tide_exit_eagerly(self, call: Call, mode: str, run: ExitRun) -> tuple[Any, ExitStats]:
        """Decode by transformers' own loop while an `ExitRun` is active."""
        with self._tide.running(EAGER, call.max_new_tokens), active(run):
            result = self._tide_run_exits(run, call)
        per_token = _depths(run.per_pass, result, call)
        stats = ExitStats(mode, run.num_layers, run.layers_executed, per_token)
        stats.sources = sources_of_depths(per_token, run.num_layers)
        stats.mlp_tokens_skipped = run.mlp_tokens_skipped
        return result, stats

    def _tide_run_exits(self, run: ExitRun, call: Call) -> Any:
        cache, options = call.model_kwargs.get(CACHE), call.options
        if not (isinstance(run, RecomputeRun) and call.cache_is_returned):
            return super()._sample(call.input_ids, **options)  # type: ignore[misc]
        try:
            result = super()._sample(call.input_ids, **options)  # type: ignore[misc]
        except BaseException:  # such as Ctrl-C, or an error of a streamer: the caller may reuse the cache
            run.give_up(cache)
            raise
        run.flush(super().__call__)  # type: ignore[misc]
        return result

    def _tide_fall_back(self, error: TIDEError, call: Call) -> Any:
        """Decode at full depth by the model's own loop, since `self_speculative` does not support the model or call."""
        reason = self._tide.note_fallback(error)
        result = super()._sample(call.input_ids, **call.options)  # type: ignore[misc]
        depth, rows = self._tide.structure.num_layers, call.input_ids.shape[0]
        stats = ExitStats("self_speculative", depth, fallback_reason=reason)
        if isinstance(result, Tensor | GenerateDecoderOnlyOutput):
            passes = _new_tokens(result, call).shape[1]
            stats.layers_executed = depth * rows * passes
            stats.per_token = _depths([[depth] * rows] * passes, result, call)
            stats.sources = sources_of_depths(stats.per_token, depth)
        stats.dtype = str(self.dtype).removeprefix("torch.")
        self.last_exit_stats = stats
        return result

    def tide_release(self) -> None:
        """Free the memory that TIDE retains between calls; later calls allocate it again.

        What a call in another thread uses meanwhile is freed when that call ends.
        """
        self._tide.release()

    def tide_warm_up(
        self, rows: int | Iterable[int] = 1, *, max_length: int = 1024, engine: str | None = None
    ) -> float:
        """Compile what an engine runs, and on a GPU capture its steps, so that later calls need not wait.

        `"eager"` has no steps to compile. On a CPU, kernels are built that were neither fetched nor built while TIDE
        was attached, and weights are converted to what these read the fastest, which later calls then need not do.
        Calls that exceed `max_length`, or draft with other exit heads, compile further steps.

        Args:
            rows: The batch size of later calls, or several sizes. Steps for one size also serve smaller batches of more
                than half that size, so `(1, 2, 4, 8)` serves all batches of up to 8.
            max_length: Maximum number of tokens of prompt and answer together.
            engine: Name of the engine; default: the engine that TIDE was attached with.

        Returns:
            Seconds that the warm-up took; 0 if there was nothing to do.

        Raises:
            ConfigurationError: An argument is not a positive integer, or there is no such engine.
            UnsupportedModelError: The model cannot decode in `self_speculative`.
        """
        attachment = self._tide
        chosen = check_choice("engine", engine or attachment.engine, ENGINES)
        numbers = checked_rows(rows, max_length)
        if chosen == EAGER:
            return prepare_eager(attachment)
        return warm_up(self, attachment, chosen, numbers, max_length)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. A `RecomputeRun` wraps the call, since layers that earlier tokens skipped may have to run."""
        run = active_run()
        if run is not None and not run.owns(kwargs):
            with active(None):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if run is not None:
            run.starts(kwargs)
        if isinstance(run, RecomputeRun) and not run.resume_at:
            return run.call(super().__call__, kwargs)  # type: ignore[misc]
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """Apply `.to()`, `.half()` and the like to the routers too, which are not a submodule of the base model."""
        model = super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        if self._tide.routers is not None:
            self._tide.routers._apply(fn)
        return model

    def __reduce__(self) -> tuple:
        """Pickle and copy through the base class, since the attached class cannot be imported by name."""
        return _new_attached, (self._tide.base_class,), self.__dict__


def attached_class(base_class: Any) -> type:
    """Make the class of an attached model: a subclass of the mixin and `base_class`, with the name of `base_class`."""

    @wraps(base_class.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = base_class  # a new model, made by `type(model)(config)`, has nothing attached
        base_class.__init__(self, *args, **kwargs)

    names = {"__module__": base_class.__module__, "__qualname__": base_class.__qualname__, "__init__": init}
    return type(base_class.__name__, (TIDEGenerationMixin, base_class), names)


def _new_attached(base_class: type) -> Any:
    return object.__new__(attached_class(base_class))


def _rule_arguments(model: Any, call: Call) -> tuple[Any, ...]:
    """The arguments of one call's `AcceptanceRule`."""
    config, length = model.config.get_text_config(), call.generation_config.max_length
    stay_level = model._tide.stays_level or counts_slots(config, length)
    return call, ranks_of(model), call.cache_is_returned, stay_level


def _decoder_of(model: Any, call: Call, mode: str, engine: Engine, rule: AcceptanceRule) -> SpeculativeDecoder:
    """Compose the decoder of one call."""
    structure, config = model._tide.structure, model.config.get_text_config()
    # Stopped rows stay in the batch if the call does not pad them, if their padding is returned, if all rows must
    # advance together, if rotary embeddings depend on the longest row, or if each row has its own adapter.
    drops_stopped = not (
        not rule.stopping.pads
        or rule.padding_is_returned
        or rule.together
        or "longrope" in rope_limits(config)
        or has_adapters_by_row(model, structure)
    )
    stats = ExitStats(mode, structure.num_layers, engine=engine.name)
    return SpeculativeDecoder(engine, rule, stats, drops_stopped)


def _head_threshold(attachment: Attachment, call: Call) -> float:
    """The exit threshold of one `early_exit` call with a draft head; options that only exit layers have are refused."""
    threshold, *others = (getattr(call.generation_config, name, None) for name in OPTIONS_OF_EXITS)
    passed = {name: value for name, value in zip(OPTIONS_OF_EXITS[1:], others, strict=True) if value}
    if passed.get("exit_criterion") == "router":
        del passed["exit_criterion"]
    if passed:
        name, value = next(iter(passed.items()))
        raise UnsupportedOptionError(
            "tokens exit with the draft head here, before any layer runs",
            got=f"{name}={value!r}",
            expected="exit_threshold alone",
            do=f"Leave {name} out, or set routers.config.kv_cache_strategy = 'propagate': exit layers are then used.",
        )
    return attachment.threshold_of("early_exit") if threshold is None else threshold


def _exit_options(attachment: Attachment, mode: str, call: Call) -> ExitOptions:
    """How the tokens of one `early_exit` or `post_hoc` call exit at exit layers."""
    routers = attachment.require_routers(f"tide_mode={mode!r}")
    config, strategy = call.generation_config, routers.config.kv_cache_strategy
    threshold, criterion, min_layers, in_prompt = (getattr(config, name, None) for name in OPTIONS_OF_EXITS)
    options = ExitOptions(
        routers,
        strategy,
        attachment.threshold_of(mode) if threshold is None else threshold,
        check_choice("exit_criterion", criterion or "router", EXIT_CRITERIA),
        0 if min_layers is None else check_min_layers(min_layers),
        bool(in_prompt),
    )
    routers.check_exit_layers(f"tide_mode={mode!r}")
    if in_prompt and (mode == "post_hoc" or strategy != "propagate"):
        raise UnsupportedOptionError(
            "prompt tokens cannot exit early here",
            got=f"exits_in_prompt=True with tide_mode={mode!r} and kv_cache_strategy={strategy!r}",
            expected="tide_mode='early_exit' and routers with kv_cache_strategy='propagate', since the layers that "
            "a prompt token skips change the K/V of the deeper ones",
            do="Set routers.config.kv_cache_strategy = 'propagate', or leave exits_in_prompt out.",
        )
    return options


def _exit_run(attachment: Attachment, mode: str, call: Call, options: ExitOptions, text_config: Any) -> ExitRun:
    """Make the run of one `early_exit` or `post_hoc` call, with the options of this call."""
    kwargs, strategy = call.model_kwargs, options.strategy
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    common = (attachment.structure, cache, attachment.unembed, options)
    if mode == "post_hoc" and kwargs.get("use_cache", True):
        return PostHocRun(*common)
    user = f"tide_mode={mode!r} with kv_cache_strategy={strategy!r}"
    find_cache(kwargs, user, static="none" if strategy == "recompute" else "any")
    if strategy == "recompute":
        return RecomputeRun(*common)
    return PropagateRun(*common, fill=fill_for(strategy, text_config))


def _new_tokens(result: Any, call: Call) -> Tensor:
    """The new tokens, (rows, passes), in `result`, which `_sample` returned."""
    sequences = result if isinstance(result, Tensor) else result.sequences
    return sequences[:, call.input_ids.shape[1] :]


def _depths(per_pass: list[list[int]], result: Any, call: Call) -> list[list[int]]:
    """For each row, the exit layer of each new token, from `per_pass` (passes, rows); padding is left out."""
    eos = getattr(call.generation_config, "_eos_token_tensor", None)
    eos_tokens = set(eos.tolist()) if eos is not None else set()
    per_token = []
    for row, tokens in enumerate(_new_tokens(result, call).tolist()):
        length = len(truncate_at_eos(tokens, eos_tokens))
        per_token.append([layers[row] for layers in per_pass[:length]])
    return per_token
