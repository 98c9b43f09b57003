"""``TIDELogitsProcessor``: the `post_hoc` mode for plain ``generate``, without attaching TIDE."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from .base_model.hooks import hook_layers
from .base_model.structure import find_structure, input_device
from .base_model.unembed import Unembed
from .base_model.wrappers import base_inside, check_wrapper
from .common.errors import ConfigurationError, UnsupportedModelError, UnsupportedOptionError
from .depth.gates import on_device
from .hub.load import find_routers
from .kernels.reference import exit_mask
from .model import TIDEModelForCausalLM
from .routers.config import check_exit_threshold
from .routers.routers import TIDERouters


class TIDELogitsProcessor(LogitsProcessor):
    """Replaces a token's scores by those at the first exit layer where the token exits (arXiv 2603.21365, Algorithm 1).

    All layers run: this saves no time, but shows which tokens early exit would give. Prefill scores are unchanged.
    This processor must come before processors that adjust scores, as in `generate(logits_processor=[tide])`. It leaves
    hooks on the exit layers until `close()`, or until the end of a `with` block.

    Args:
        model: The base model, not attached, or a `PeftModel` around it.
        routers: Routers of the model: a folder, a Hub repository, [`TIDERouters`], or `"default"`, the routers shipped
            with this library.
        exit_threshold: A token exits if a router's score is at least this value; default: the calibrated value.

    Raises:
        BaseModelMismatchError: The routers belong to another model.
        ConfigurationError: The threshold is invalid, or there are no routers.
        RoutersFileError, RoutersNotFoundError: The routers cannot be read.
        UnsupportedModelError: The model is not supported, or is attached.
        UnsupportedOptionError: The routers have no exit layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        routers: TIDERouters | str | os.PathLike[str],
        exit_threshold: float | None = None,
    ) -> None:
        check_wrapper(model)
        model = base_inside(model)
        if isinstance(model, TIDEModelForCausalLM):
            raise UnsupportedModelError(
                "TIDELogitsProcessor is for models without TIDE",
                got="a model that TIDE is attached to, whose passes are not those of plain decoding",
                expected="a model that is not attached",
                do="Call generate(tide_mode='post_hoc'), or TIDEModelForCausalLM.detach(model) first.",
            )
        found: Any = find_routers(routers, model)
        if found is None:
            raise ConfigurationError(
                "TIDELogitsProcessor needs routers",
                got=repr(routers),
                expected="routers made for this model",
                do="Pass their folder or Hub repository; tide_hf.calibrate(model, tokenizer) makes them.",
            )
        found.check_base_model(model)
        found.check_exit_layers("TIDELogitsProcessor")
        structure = find_structure(model)
        self.unembed = Unembed(model, structure)
        self.routers: TIDERouters = found.place(input_device(model), model.dtype)
        self.exit_threshold = check_exit_threshold(
            found.config.exit_threshold if exit_threshold is None else exit_threshold
        )
        self._states: dict[int, Tensor] = {}
        self._hooks = hook_layers(structure, found.exit_layers, self._store)

    def _store(self, exit_layer: int, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        if state.shape[1] == 1:
            self._states[exit_layer] = state[:, -1]
        else:
            self._states.pop(exit_layer, None)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Replace the scores, (rows, vocab_size), of tokens that exit."""
        not_exited = torch.ones(scores.shape[0], dtype=torch.bool, device=scores.device)
        for exit_layer, state in sorted(self._states.items()):
            if state.shape[0] != scores.shape[0]:
                raise UnsupportedOptionError(
                    "TIDELogitsProcessor cannot match scores to hidden states",
                    got=f"{scores.shape[0]} rows of scores for {state.shape[0]} rows of states",
                    expected="one row of scores per row of the forward pass",
                    do="Use it with greedy search, sampling or beam search of the model it was made for.",
                )
            exit_point = on_device(self.routers[exit_layer], state)
            exit_scores = self.unembed.route(exit_point.router, state).to(scores.device)
            exiting = exit_mask(exit_scores, self.exit_threshold, not_exited)
            if exiting.any():
                logits = self.unembed(exit_point.head(state)).to(scores)
                scores = torch.where(exiting[:, None], logits, scores)
                not_exited &= ~exiting
        return scores

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._hooks.close()
        self._states.clear()

    def __enter__(self) -> TIDELogitsProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
