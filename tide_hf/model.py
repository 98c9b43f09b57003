"""``TIDEModelForCausalLM``: load a base model with TIDE, attach TIDE to a loaded model, detach TIDE again."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields
from typing import Any

import torch

from .base_model.structure import find_structure, input_device
from .base_model.unembed import Unembed
from .base_model.wrappers import base_inside, check_uncompiled, check_wrapper
from .common.busy import warn_if_busy
from .common.choices import (
    AUTO,
    ENGINES,
    MODES,
    REMEMBERED_TOKENS,
    SUCCESSORS,
    check_choice,
    check_compute_dtype,
    check_limit,
)
from .common.errors import ConfigurationError, UnsupportedModelError, UnsupportedOptionError
from .depth.gates import open_gates, remove_gates
from .depth.multi_token_passes import check_widths
from .engines.kinds import new_engines
from .engines.warm_up import build_while_attaching
from .generation import TIDEGenerationMixin, attached_class
from .hub.load import DEFAULT_ROUTERS, find_routers, load_base_model, log_no_routers, read_routers
from .kernels.ops import USE_KERNELS, load_kernels
from .routers.config import FOR_BOTH, check_exit_threshold
from .routers.routers import TIDERouters
from .speculation.answer_memory import AnswerMemory
from .speculation.attachment import Attachment, hybrid_drafter
from .speculation.successors import SuccessorTable
from .weights.compute_dtype import ComputeDtype
from .weights.reading import WeightReading
from .weights.upcast import upcasting

logger = logging.getLogger(__name__)

PACK_WEIGHTS = (True, False, "auto")
Routers = TIDERouters | str | os.PathLike[str] | None


@dataclass(frozen=True)
class AttachOptions:
    """How TIDE is attached: the keyword arguments that `from_pretrained` and `attach` share.

    Attributes:
        mode: `"self_speculative"` (the base model's own output), `"early_exit"` or `"post_hoc"` (approximate).
        exit_threshold: A token exits if its exit score is at least this value; default: the calibrated value.
        ignore_base_mismatch: Use routers that were made for another model of the same shape.
        pack_weights: On a CPU, copy float32 and bfloat16 weights into layouts that are measured to be faster:
            oneDNN's prepacked one, with which a pass over several tokens (or rows) costs little more than over one
            token; and, for float32 weights whose values need fewer bits, those bits. Weights are copied at first
            use. `"auto"`: only if the copies take at most a quarter of the memory that is free when TIDE is
            attached, and in eager calls not for a first short answer. `False` leaves linear layers as they are, so
            the compiled engine's kernels for plain weights do not run either.
        use_kernels: Run fused kernels: `"auto"` (if they are available), `True` (raise if they are not) or `False`.
            See `ops.load_kernels`. Attaching makes the choice: attach again after moving the model. On a CPU,
            kernels that cannot be fetched are built while TIDE is attached, which takes seconds once on each
            machine: with `"auto"` for models of at least 64 MB of weights, if there is a C++ compiler and the build
            can be kept. There, `False` concerns eager calls alone.
        engine: What runs the passes: `"eager"`, the model's own forward; or `"compiled"`, which runs draft steps
            and verify passes of `self_speculative` as compiled steps of fixed shape, captured as CUDA graphs on
            a GPU. Preparing a step at its first use takes seconds. Calls that the steps do not support run eagerly,
            and the log says why. A call may name another engine (`tide_engine=`).
        strict: Raise if `self_speculative` does not support a call or a model: returned attention maps or hidden
            states, caches that cannot be rolled back, recurrent states and so on. By default, such calls decode
            plainly, by transformers' own loop, with the same output. The log gives each reason once as a warning;
            `last_exit_stats.fallback_reason` holds it. A call may override this (`tide_strict=`).
        remembered_tokens: Maximum number of tokens of answers that are remembered, to draft from in later calls; 0
            remembers nothing. Token ids stay in RAM until `tide_release()`, `detach` or another `attach`; they are
            neither saved nor copied with the model. Drafts never change an answer, but an answer that has been
            given before comes sooner.
        successors: Maximum number of tokens for each of which the eight likeliest next ones are kept, as this model's
            passes in `self_speculative` gave them, to draft from; 0 keeps none. As with `remembered_tokens`, they stay
            in RAM, and drafts never change an answer.
        compute_dtype: Dtype of activations, K/V and sums, `torch.float32` or the model's own, as a dtype or by name.
            With float32, a model in half precision, or quantised over such, keeps its weights as they are, and gives
            the answers of the same model loaded in float32. `"auto"`: float32 on CPUs where kernels are at hand and
            it is measured no slower than 0.95 of the model's dtype, else the model's dtype; `last_exit_stats` says
            which. Refused by name on GPUs, for models that read images, recurrent ones, those with adapters, those that
            processes share, and those whose code rounds by itself. A call may name another one.
    """

    mode: str = "self_speculative"
    exit_threshold: float | None = None
    ignore_base_mismatch: bool = False
    pack_weights: bool | str = "auto"
    use_kernels: bool | str = "auto"
    engine: str = "eager"
    strict: bool = False
    remembered_tokens: int = REMEMBERED_TOKENS
    successors: int = SUCCESSORS
    compute_dtype: str | torch.dtype = AUTO

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("pack_weights", self.pack_weights, PACK_WEIGHTS)
        check_choice("use_kernels", self.use_kernels, USE_KERNELS)
        check_choice("engine", self.engine, ENGINES)
        check_compute_dtype(self.compute_dtype)
        check_limit(remembered_tokens=self.remembered_tokens, successors=self.successors)
        if self.exit_threshold is not None:
            check_exit_threshold(self.exit_threshold)


class _InstanceCheck(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return _is_attached(base_inside(instance))


class TIDEModelForCausalLM(metaclass=_InstanceCheck):
    """Any causal language model of transformers, decoding with token-informed depth (arXiv 2603.21365).

    A model with TIDE attached is still the same object and an instance of its own class, but its `generate` decodes
    with TIDE. `isinstance(model, TIDEModelForCausalLM)` is true while TIDE is attached.
    """

    def __init__(self) -> None:
        raise ConfigurationError(
            "TIDEModelForCausalLM is not built directly",
            got="TIDEModelForCausalLM(...)",
            expected="TIDEModelForCausalLM.from_pretrained(base, routers=...) or .attach(model, routers)",
            do="Call one of these.",
        )

    @classmethod
    def from_pretrained(
        cls,
        base: str | os.PathLike[str],
        routers: Routers = None,
        *,
        routers_revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a base model and attach TIDE to it.

        Args:
            base: Hub name or folder of the base model, or of routers, whose config names the base model.
            routers: Routers made for the base model: a folder, a Hub repository, [`TIDERouters`], or `"default"`, the
                routers shipped with this library for the model. Without routers (`None`, or `"none"`), drafts come only
                from n-grams of the context, and only `self_speculative` can run.
            routers_revision: Revision of the routers' Hub repository.
            **kwargs: The fields of [`AttachOptions`]: `mode`, `engine`, `exit_threshold` and so on. All others are for
                `AutoModelForCausalLM.from_pretrained`: `dtype`, `device_map`, `revision`, `quantization_config` and the
                rest. `token`, `cache_dir`, `force_download`, `local_files_only` and `proxies` are used for the routers
                as well.

        Returns:
            The base model, attached.

        Raises:
            UnsupportedModelError: The model is not supported, in general or in this mode.
            BaseModelMismatchError: The routers belong to another model.
            RoutersFileError, RoutersNotFoundError: The routers cannot be read, or none are shipped for the model.
            ModelNotFoundError: There is no such base model, or the Hub cannot be reached.
            ConfigurationError: A setting is invalid.
            KernelError: `use_kernels=True`, and the kernels cannot be loaded.
        """
        own = {field.name: kwargs.pop(field.name) for field in fields(AttachOptions) if field.name in kwargs}
        AttachOptions(**own)  # checked before anything is loaded
        hub_kwargs = {name: kwargs[name] for name in FOR_BOTH if name in kwargs}
        loaded: Any = routers
        if routers != DEFAULT_ROUTERS:  # `attach` finds default routers by the model's head
            loaded = read_routers(routers, revision=routers_revision, **hub_kwargs)
        model = load_base_model(base, **kwargs)
        if routers is None and _is_attached(model):  # `base` is a repository of routers
            loaded = model._tide.routers
        return cls.attach(model, loaded, **own)

    @classmethod
    def attach(cls, model: Any, routers: Routers = None, **options: Any) -> Any:
        """Attach TIDE to a loaded model. Dispatch a model over devices (accelerate) before attaching.

        Args:
            model: The base model, or a `PeftModel` or `torch.compile(model)` around it. TIDE is attached to the base
                model, in place; attaching again replaces the routers and settings.
            routers: As in `from_pretrained`.
            **options: The fields of [`AttachOptions`].

        Returns:
            `model` itself.

        Raises:
            As `from_pretrained`. A model that is refused is left as it was.
        """
        chosen = AttachOptions(**options)
        check_wrapper(model)
        given, model = model, base_inside(model)
        loaded = find_routers(routers, model)
        if loaded is None:
            log_no_routers(model)
        structure = find_structure(model)
        check_uncompiled(model, structure)
        if loaded is not None:
            loaded.check_base_model(model, ignore_base_mismatch=chosen.ignore_base_mismatch)
        device = input_device(model)
        weights = WeightReading(structure, loaded, chosen.pack_weights, chosen.use_kernels)
        attachment = Attachment(
            base_class=model._tide.base_class if _is_attached(model) else type(model),
            structure=structure,
            unembed=Unembed(
                model, structure, load_kernels(use_kernels=chosen.use_kernels, device=device, dtype=model.dtype)
            ),
            routers=loaded,
            weights=weights,
            compute=ComputeDtype(structure, weights, check_compute_dtype(chosen.compute_dtype)),
            mode=chosen.mode,
            exit_threshold=chosen.exit_threshold,
            make_drafter=hybrid_drafter,
            engines=new_engines(),
            engine=chosen.engine,
            strict=chosen.strict,
            answers=AnswerMemory(chosen.remembered_tokens),
            successors=SuccessorTable(chosen.successors),
        )
        try:
            attachment.check_mode(chosen.mode)
        except UnsupportedModelError as error:
            if chosen.mode != "self_speculative" or chosen.strict:
                raise
            attachment.note_fallback(error)
        passes = check_widths(model, structure, needs_logits=loaded is not None)
        attachment.needs_same_length, attachment.takes_trees = passes
        if loaded is not None:
            loaded.place(device, model.dtype)
        cls.detach(model)
        attachment.weights.open(model)
        open_gates(structure)
        model.__class__ = attached_class(attachment.base_class)
        model._tide = attachment
        model.last_exit_stats = None
        build_while_attaching(attachment.weights, attachment.compute.may_upcast(model))
        try:
            dtype = attachment.compute.of_call(model, None, chosen.engine)
        except UnsupportedOptionError:
            cls.detach(model)
            raise
        logger.info("%s computes in %s", type(model).__name__, str(dtype).removeprefix("torch."))
        with upcasting(dtype is not model.dtype):
            attachment.weights.measure()
        if device.type == "cpu":
            warn_if_busy(measure=True)
        return given

    @classmethod
    def detach(cls, model: Any) -> Any:
        """Detach TIDE: restore the model's own class and `forward`.

        Args:
            model: An attached model, or a wrapper around it. A model that is not attached is returned unchanged.

        Returns:
            `model` itself, as it was before `attach`.
        """
        base = base_inside(model)
        if _is_attached(base):
            attachment = base._tide
            remove_gates(attachment.structure)
            attachment.weights.remove()
            base.__class__ = attachment.base_class
            del base._tide, base.last_exit_stats
        return model


def _is_attached(model: Any) -> bool:
    return isinstance(model, TIDEGenerationMixin)
