"""The self-speculative loop: cheap drafts, one full-depth pass to verify them, roll back what was wrong.

Every token that leaves this loop was chosen from the base model's own full-depth logits, after the same processors,
with the same random draws; drafts only decide how many positions one pass covers. Since a draft names one token,
"draw from p and compare" is speculative sampling with q = 1 (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .drafting import Draft, Drafter
from .policy import CostTable
from .skipping import FixedDepthRun, LayerRun, active
from .stats import ExitStats

if TYPE_CHECKING:
    from .generation import Attachment


class SelfSpeculativeDecoder:
    """Decodes one sequence.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        input_ids: (1, prompt length).
        logits_processor: Applied to every position's scores, once, in order.
        stopping_criteria: Asked after every token.
        generation_config: Of this call.
        streamer: Gets the tokens one by one, as plain decoding gives them.
        model_kwargs: What `generate` prepared, the cache among it.
    """

    def __init__(
        self,
        model: Any,
        attachment: Attachment,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.input_ids = input_ids
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.config = generation_config
        self.streamer = streamer
        self.model_kwargs = model_kwargs
        self.cache = model_kwargs["past_key_values"]
        self.costs: CostTable = attachment.costs
        self.run = LayerRun(attachment.structure)
        self.shallow = _Shallow(self, attachment)
        self.finished = False
        keep = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if keep and generation_config.output_scores else None
        self.raw_logits: tuple[Tensor, ...] | None = () if keep and generation_config.output_logits else None
        self.stats = ExitStats("self_speculative", attachment.structure.num_layers, per_token=[[]])

    def decode(self, drafter: Drafter) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until a criterion stops it."""
        with active(self.run):
            outputs = self.model._prefill(self.input_ids, self.config, self.model_kwargs)
            self.cache.activate_past_recording()
            new_tokens = self._accept(outputs.logits[:, -1:], Draft())
            self._advance(outputs, len(new_tokens))
            drafter.observe(Draft(), new_tokens, 0)
            while not self.finished:
                self._round(drafter)
        for layer in self.cache.layers:  # a returned cache must not hoard what leaves its window in a next prefill
            if hasattr(layer, "record_past"):
                layer.record_past = False
        if self.streamer is not None:
            self.streamer.end()
        self.stats.layers_executed = self.run.layers_executed + self.shallow.layers_executed
        if not self.config.return_dict_in_generate:
            return self.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids, scores=self.scores, logits=self.raw_logits, past_key_values=self.cache
        )

    def _round(self, drafter: Drafter) -> None:
        limit = self.config.max_length - self.input_ids.shape[1] - 1
        draft = drafter.draft(limit)
        draft.tokens = draft.tokens[: max(limit, 0)]
        start = perf_counter()
        outputs = self.forward(draft.tokens)
        new_tokens = self._accept(outputs.logits[:, -len(draft.tokens) - 1 :], draft)
        # Also with nothing to remove: it lets sliding-window layers drop what has left the window.
        self.cache.crop(len(new_tokens) - len(draft.tokens) - 1)
        self._advance(outputs, len(new_tokens))
        self.costs.record(("verify", len(draft.tokens) + 1), (perf_counter() - start) * 1000)
        n_matches = sum(drafted == new for drafted, new in zip(draft.tokens, new_tokens, strict=False))
        drafter.observe(draft, new_tokens, n_matches)
        self.stats.rounds += 1
        self.stats.drafted += len(draft.tokens)
        self.stats.accepted += n_matches

    def forward(self, tokens: list[int], logits_to_keep: int | None = None) -> Any:
        """One pass over the last token and `tokens`, whose cached length is that of the sequence without them."""
        ids, kwargs = self.input_ids, self.model_kwargs
        if tokens:
            ids = torch.cat([ids, ids.new_tensor([tokens])], dim=-1)
            kwargs = self.model._update_model_kwargs_for_generation({}, dict(kwargs), num_new_tokens=len(tokens))
        width = len(tokens) + 1 if logits_to_keep is None else logits_to_keep
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=width, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return self.model(**inputs, return_dict=True)

    def _advance(self, outputs: Any, num_new_tokens: int) -> None:
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=num_new_tokens
        )

    def _accept(self, logits: Tensor, draft: Draft) -> list[int]:
        """Choose tokens position by position until one differs from the draft or a criterion stops.

        Args:
            logits: (1, drafts + 1, vocabulary) of the full-depth pass.
            draft: The draft that it verified.

        Returns:
            The new tokens: the accepted drafts and one more.
        """
        greedy = self._choose_all(logits)
        new_tokens: list[int] = []
        for position in range(logits.shape[1]):
            token = greedy[position] if greedy is not None else self._choose(logits[:, position])
            new_tokens.append(token)
            self.input_ids = torch.cat([self.input_ids, self.input_ids.new_tensor([[token]])], dim=-1)
            if self.streamer is not None:
                self.streamer.put(self.input_ids[:, -1].cpu())
            matched = position < len(draft.tokens) and token == draft.tokens[position]
            self.stats.per_token[0].append(draft.exit_layer if matched else self.stats.num_layers)
            self.finished = bool(self.stopping_criteria(self.input_ids, self.scores).all())
            if self.finished or not matched:
                break
        return new_tokens

    def _choose_all(self, logits: Tensor) -> list[int] | None:
        """All greedy choices with one transfer to the host, where no processor has to see each prefix."""
        plain = not self.config.do_sample and len(self.logits_processor) == 0
        if not plain or self.scores is not None or self.raw_logits is not None:
            return None
        return logits[0].argmax(dim=-1).tolist()

    def _choose(self, logits: Tensor) -> int:
        logits = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self.logits_processor(self.input_ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        if self.config.do_sample:
            return int(torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1))
        return int(scores.argmax(dim=-1))


class _Shallow:
    """The exit heads' view of a decoder: steps through the shallow layers, in the same cache."""

    def __init__(self, decoder: SelfSpeculativeDecoder, attachment: Attachment) -> None:
        self.decoder = decoder
        self.attachment = attachment
        self.layers_executed = 0
        self.depths: list[int] = []

    def step(self, exit_layer: int, tokens: list[int]) -> tuple[int, float]:
        """Decode the token after the sequence and `tokens` at `exit_layer`."""
        attachment, start = self.attachment, perf_counter()
        exit_point = attachment.exit_point(exit_layer)
        run = FixedDepthRun(attachment.structure, exit_layer, exit_point, attachment.unembed)
        with active(run):
            outputs = self.decoder.forward(tokens, logits_to_keep=1)
        token, score = int(outputs.logits[0, -1].argmax()), float(run.exit_scores)  # type: ignore[arg-type]
        self.layers_executed += run.layers_executed
        self.depths.append(exit_layer)
        self.decoder.costs.record(("draft", exit_layer), (perf_counter() - start) * 1000)
        return token, score

    def rollback(self) -> None:
        """Take the draft tokens' K/V out of the shallow layers."""
        # Each layer is cropped once: a sliding-window layer forgets what lies before the window when it is cropped.
        for layer_idx in range(max(self.depths, default=0)):
            num_steps = sum(exit_layer > layer_idx for exit_layer in self.depths)
            self.decoder.cache.layers[layer_idx].crop(-num_steps)
        self.depths.clear()
