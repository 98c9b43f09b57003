"""``TIDEModelForCausalLM``: load a base model with TIDE, attach TIDE to a loaded model, detach TIDE again."""

from __future__ import annotations

import os
from typing import Any

from .base_model.structure import find_structure, input_device
from .base_model.unembed import Unembed
from .base_model.wrappers import base_inside, check_uncompiled, check_wrapper
from .common.busy import warn_if_busy
from .common.choices import ENGINES, MODES, REMEMBERED_TOKENS, check_choice, check_limit
from .common.errors import ConfigurationError, UnsupportedModelError
from .depth.gates import open_gates, remove_gates
from .depth.linear_gate import linears_in, linears_to_gate, open_linear_gates
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

PACK_WEIGHTS = (True, False, "auto")
Routers = TIDERouters | str | os.PathLike[str] | None


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
        mode: str = "self_speculative",
        exit_threshold: float | None = None,
        routers_revision: str | None = None,
        ignore_base_mismatch: bool = False,
        pack_weights: bool | str = "auto",
        use_kernels: bool | str = "auto",
        engine: str = "eager",
        strict: bool = False,
        remembered_tokens: int = REMEMBERED_TOKENS,
        **auto_model_kwargs: Any,
    ) -> Any:
        """Load a base model and attach TIDE to it.

        Args:
            base: Hub name or folder of the base model, or of routers, whose config names the base model.
            routers: Routers made for the base model: a folder, a Hub repository, [`TIDERouters`], or `"default"`, the
                routers shipped with this library for the model. Without routers (`None`, or `"none"`), drafts come only
                from n-grams of the context, and only `self_speculative` can run.
            mode: `"self_speculative"` (the base model's own output), `"early_exit"` or `"post_hoc"` (approximate).
            exit_threshold: A token exits if its exit score is at least this value; default: the calibrated value.
            routers_revision: Revision of the routers' Hub repository.
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
            **auto_model_kwargs: For `AutoModelForCausalLM.from_pretrained`: `dtype`, `device_map`, `revision`,
                `quantization_config` and the rest. `token`, `cache_dir`, `force_download`, `local_files_only` and
                `proxies` are used for the routers as well.

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
        check_choice("mode", mode, MODES)
        check_choice("pack_weights", pack_weights, PACK_WEIGHTS)
        check_choice("use_kernels", use_kernels, USE_KERNELS)
        check_choice("engine", engine, ENGINES)
        check_limit(remembered_tokens=remembered_tokens)
        if exit_threshold is not None:
            check_exit_threshold(exit_threshold)
        hub_kwargs = {name: auto_model_kwargs[name] for name in FOR_BOTH if name in auto_model_kwargs}
        loaded: Any = routers
        if routers != DEFAULT_ROUTERS:  # `attach` finds default routers by the model's head
            loaded = read_routers(routers, revision=routers_revision, **hub_kwargs)
        model = load_base_model(base, **auto_model_kwargs)
        if routers is None and _is_attached(model):  # `base` is a repository of routers
            loaded = model._tide.routers
        return cls.attach(
            model,
            loaded,
            mode=mode,
            exit_threshold=exit_threshold,
            ignore_base_mismatch=ignore_base_mismatch,
            pack_weights=pack_weights,
            use_kernels=use_kernels,
            engine=engine,
            strict=strict,
            remembered_tokens=remembered_tokens,
        )

    @classmethod
    def attach(
        cls,
        model: Any,
        routers: Routers = None,
        *,
        mode: str = "self_speculative",
        exit_threshold: float | None = None,
        ignore_base_mismatch: bool = False,
        pack_weights: bool | str = "auto",
        use_kernels: bool | str = "auto",
        engine: str = "eager",
        strict: bool = False,
        remembered_tokens: int = REMEMBERED_TOKENS,
    ) -> Any:
        """Attach TIDE to a loaded model. Dispatch a model over devices (accelerate) before attaching.

        Args:
            model: The base model, or a `PeftModel` or `torch.compile(model)` around it. TIDE is attached to the base
                model, in place; attaching again replaces the routers and settings.
            routers: As in `from_pretrained`.
            mode: As in `from_pretrained`.
            exit_threshold: As in `from_pretrained`.
            ignore_base_mismatch: As in `from_pretrained`.
            pack_weights: As in `from_pretrained`.
            use_kernels: As in `from_pretrained`.
            engine: As in `from_pretrained`.
            strict: As in `from_pretrained`.
            remembered_tokens: As in `from_pretrained`.

        Returns:
            `model` itself.

        Raises:
            As `from_pretrained`. A model that is refused is left as it was.
        """
        check_choice("mode", mode, MODES)
        check_choice("pack_weights", pack_weights, PACK_WEIGHTS)
        check_choice("engine", engine, ENGINES)
        check_limit(remembered_tokens=remembered_tokens)
        check_wrapper(model)
        given, model = model, base_inside(model)
        loaded = find_routers(routers, model)
        if loaded is None:
            log_no_routers(model)
        structure = find_structure(model)
        check_uncompiled(model, structure)
        if exit_threshold is not None:
            check_exit_threshold(exit_threshold)
        if loaded is not None:
            loaded.check_base_model(model, ignore_base_mismatch=ignore_base_mismatch)
        device = input_device(model)
        attachment = Attachment(
            base_class=model._tide.base_class if _is_attached(model) else type(model),
            structure=structure,
            unembed=Unembed(model, structure, load_kernels(use_kernels=use_kernels, device=device, dtype=model.dtype)),
            routers=loaded,
            mode=mode,
            exit_threshold=exit_threshold,
            make_drafter=hybrid_drafter,
            engines=new_engines(),
            engine=engine,
            use_kernels=use_kernels,
            copies_at_once=pack_weights is True,
            strict=strict,
            answers=AnswerMemory(remembered_tokens),
        )
        try:
            attachment.check_mode(mode)
        except UnsupportedModelError as error:
            if mode != "self_speculative" or strict:
                raise
            attachment.note_fallback(error)
        attachment.stays_level = check_widths(model, structure, needs_logits=loaded is not None)
        if loaded is not None:
            loaded.place(device, model.dtype)
        linears, may_copy = linears_to_gate(structure, pack_weights)
        cls.detach(model)
        open_linear_gates(linears, may_copy)
        head = attachment.draft_head
        if linears and head is not None:
            open_linear_gates(linears_in(*head.modules()), may_copy, anywhere=True)
        open_gates(structure)
        model.__class__ = attached_class(attachment.base_class)
        model._tide = attachment
        model.last_exit_stats = None
        build_while_attaching(attachment)
        attachment.measure_layouts()
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
            for gate in attachment.gates():
                gate.remove()
            base.__class__ = attachment.base_class
            del base._tide, base.last_exit_stats
        return model


def _is_attached(model: Any) -> bool:
    return isinstance(model, TIDEGenerationMixin)
