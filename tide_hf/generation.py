"""``TIDEGenerationMixin``: how the ``generate`` of an attached model decodes in each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn

from .base_model.structure import CACHE
from .base_model.wrappers import leave_uncompiled
from .common.busy import busy_note
from .common.choices import EAGER, ENGINES, MODES, check_choice, check_compute_dtype
from .common.errors import UnsupportedModelError, UnsupportedOptionError
from .common.stats import ExitStats
from .depth.early_exit import RecomputeRun
from .depth.gates import active, active_run
from .depth.kv_cache import kv_in_float32
from .engines.warm_up import checked_rows, prepare_eager, warm_up
from .modes.early_exit import EXIT_OPTIONS, exit_early
from .modes.self_speculative import decode_plainly, speculate
from .routers.config import check_exit_threshold
from .speculation.attachment import Attachment
from .speculation.call import Call, check_call
from .speculation.protocols import DrafterFactory
from .weights.upcast import upcasting

CALL_OPTIONS = ("tide_mode", "tide_engine", "tide_strict", "compute_dtype", *EXIT_OPTIONS)


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
        options = {name: kwargs.pop(name) for name in CALL_OPTIONS if name in kwargs}
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]
        for name, value in options.items():
            if value is not None:
                setattr(config, name, check_compute_dtype(value) if name == "compute_dtype" else value)
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
        own_sample = super()._sample  # type: ignore[misc]

        def sample() -> Any:
            return own_sample(input_ids, **call.options)

        if generation_config.is_assistant:  # this model drafts for another model: full depth, no statistics
            return sample()
        attachment = self._tide
        name = getattr(generation_config, "compute_dtype", None)
        name = None if name is None else check_compute_dtype(name)
        engine = check_choice(
            "tide_engine", getattr(generation_config, "tide_engine", None) or attachment.engine, ENGINES
        )
        dtype = attachment.compute.of_call(self, name, engine)
        upcast = dtype is not self.dtype
        kv = (call.model_kwargs.get(CACHE), self.dtype, call.cache_is_returned)
        with upcasting(upcast), kv_in_float32(*kv) if upcast else nullcontext():
            result, stats = self._decoded(call, engine, sample, make_drafter)
        stats.dtype, stats.compute_dtype = (str(one).removeprefix("torch.") for one in (self.dtype, dtype))
        self.last_exit_stats = stats
        return result

    def _decoded(
        self, call: Call, engine: str, sample: Callable[[], Any], make_drafter: DrafterFactory | None
    ) -> tuple[Any, ExitStats]:
        """Decode a call; return its result, and its counts."""
        attachment, generation_config, rows = self._tide, call.generation_config, call.input_ids
        mode = check_choice("tide_mode", getattr(generation_config, "tide_mode", None) or attachment.mode, MODES)
        if getattr(generation_config, "exit_threshold", None) is not None:
            check_exit_threshold(generation_config.exit_threshold)
        try:
            attachment.check_model(self, mode)
            if mode == "self_speculative":
                check_call(self, call)
        except (UnsupportedModelError, UnsupportedOptionError) as error:
            strict = getattr(generation_config, "tide_strict", None)
            if mode != "self_speculative" or (attachment.strict if strict is None else strict):
                raise
            return decode_plainly(self, call, error, sample)
        generation_config.max_length = call.max_length
        for name in ("tokenizer", "assistant_tokenizer"):  # already passed to the stopping criteria
            call.model_kwargs.pop(name, None)
        leave_uncompiled(generation_config)
        warm_up_seconds = attachment.engines[engine].warm_up_seconds
        if mode == "self_speculative":
            result, stats = speculate(self, call, engine, make_drafter)
        else:
            result, stats = exit_early(self, call, mode, engine, sample, super().__call__)  # type: ignore[misc]
        attachment.weights.add_decoded(stats.total_tokens / len(rows))
        stats.busy_note = busy_note() if rows.device.type == "cpu" else None
        stats.warm_up_s = attachment.engines[engine].warm_up_seconds - warm_up_seconds
        return result, stats

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
            return prepare_eager(self, attachment)
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
