"""``TIDELM``: lm-eval's Hugging Face model with TIDE attached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from ...hub.load import DEFAULT_ROUTERS, read_routers
from ...model import TIDEModelForCausalLM
from ..teacher_forcing import exit_logits


class RowStops(StoppingCriteria):
    """Ends each row at its first stop string; lm-eval's own criterion can only end the whole batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], start: int) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.start = start  # number of prompt tokens, padding included
        lengths = [len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops]
        self.lookback = max(lengths, default=0) + 2  # a model may split a stop string into more tokens than encode does

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(rows, length) tokens -> (rows,) whether each row has just reached a stop string."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.lookback :])
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=input_ids.device)


@register_model("tide_hf")
class TIDELM(HFLM):
    """A causal language model with TIDE attached, for lm-eval.

    Generation tasks call `generate` in `tide_mode`. Likelihoods are the base model's own in `self_speculative`. In
    `early_exit` and `post_hoc` the logits at each position are those of the earliest exit layer whose router's score
    reaches the threshold, as if every token, also of the context, had its own decode step (see
    `evaluation.teacher_forcing`). The results' config reports the mean depth of the tokens under `tide`.

    Args:
        pretrained: As in lm-eval's `hf`: Hub name or folder of the base model, or a model.
        routers: The base model's routers, as in `TIDEModelForCausalLM.attach`.
        tide_mode: `"self_speculative"`, `"early_exit"` or `"post_hoc"`.
        exit_threshold: Exit where a router's score is at least this; default: the calibrated value.
        routers_revision: Revision of the routers' Hub repository.
        **kwargs: As in lm-eval's `hf`.

    Raises:
        The errors of `TIDEModelForCausalLM.attach`.
    """

    def __init__(
        self,
        pretrained: Any,
        routers: Any = None,
        tide_mode: str = "self_speculative",
        exit_threshold: float | None = None,
        routers_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained, **kwargs)
        if isinstance(routers, str) and routers != DEFAULT_ROUTERS:
            routers = read_routers(routers, revision=routers_revision)
        TIDEModelForCausalLM.attach(self.model, routers, mode=tide_mode, exit_threshold=exit_threshold)
        if tide_mode != "self_speculative":
            self.model._tide.require_routers(f"tide_mode={tide_mode!r}")
        self._depths_of_call: Iterator[Tensor] | None = None
        self._layers_executed: dict[str, list[int]] = {"likelihood": [], "generation": []}  # per token

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """(rows, length) tokens, padded on the right -> (rows, length, vocab_size) logits."""
        attachment = self.model._tide
        if attachment.mode == "self_speculative":
            return super()._model_call(inps, attn_mask, labels)
        with self._autocast():
            read = exit_logits(self.model, attachment.routers, inps, exit_threshold=attachment.default_threshold)
        self._depths_of_call = iter(read.exit_layers)
        return read.logits

    def _select_cont_toks(self, logits: Tensor, contlen: int | None = None, inplen: int | None = None) -> Tensor:
        """Select the logits of a row's continuation, and count its depths; lm-eval calls this row by row, in order."""
        if self._depths_of_call is not None and contlen and inplen:
            self._layers_executed["likelihood"] += next(self._depths_of_call)[inplen - contlen : inplen].tolist()
        return super()._select_cont_toks(logits, contlen=contlen, inplen=inplen)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        """Generate as lm-eval's `hf` does, but with `RowStops`, and count the layers executed."""
        if not kwargs.get("do_sample"):
            kwargs.pop("temperature", None)
        with self._autocast():
            sequences = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=[RowStops(self.tokenizer, stop, context.shape[1])],
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **kwargs,
            )
        stats = self.model.last_exit_stats  # None after beam search
        for layers in stats.per_token if stats is not None else ():
            self._layers_executed["generation"] += layers
        return sequences

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)

    def get_model_info(self) -> dict[str, Any]:
        """Facts that lm-eval stores with its results, among them the mode and the mean depth of all tokens so far."""
        attachment = self.model._tide
        depth = {
            f"{kind}_depth_fraction": sum(layers) / len(layers) / attachment.structure.num_layers
            for kind, layers in self._layers_executed.items()
            if layers
        }
        tide = {"mode": attachment.mode, "exit_threshold": attachment.default_threshold}
        return super().get_model_info() | {"tide": tide | depth}
