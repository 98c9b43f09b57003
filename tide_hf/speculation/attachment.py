"""What TIDE adds to a model, and the drafter of `self_speculative`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..base_model.structure import DecoderStructure, check_layers
from ..base_model.unembed import DraftUnembed, Unembed, has_readable_rows
from ..base_model.wrappers import check_adapters, check_uncompiled
from ..common.choices import EAGER
from ..common.errors import TIDEError, UnsupportedModelError, UnsupportedOptionError
from ..routers.config import TIDEConfig
from ..routers.draft_head import DraftHead
from ..routers.exit_points import ExitPoint
from ..routers.routers import TIDERouters
from ..weights.compute_dtype import ComputeDtype
from ..weights.reading import WeightReading
from ..weights.upcast import upcasts
from .acceptance import ExactAcceptance
from .answer_memory import AnswerMemory
from .call import Call
from .drafters import HybridDrafter
from .policy import ACCELERATOR_SLOPE, PRIOR_SLOPE, CostTable, Key
from .protocols import DraftEngine, DrafterFactory, EngineKind, RuleFactory
from .rows import Row
from .sources import EarlierAnswers, Ngrams, Successors, TreeSource
from .successors import SuccessorTable

UNKNOWN_AGREEMENT = 0.5  # of a draft head without a calibration record, until calls have shown it

logger = logging.getLogger(__name__)


@dataclass
class Attachment:
    """What TIDE adds to a model: parts, measurements and defaults for calls, but no state of a single call."""

    base_class: type  # the model's own class
    structure: DecoderStructure
    unembed: Unembed
    routers: TIDERouters | None  # `None` where drafts come from n-grams alone
    weights: WeightReading
    mode: str
    exit_threshold: float | None  # the user's; `None`: the calibrated one
    make_drafter: DrafterFactory
    compute: ComputeDtype
    make_rule: RuleFactory = ExactAcceptance
    engines: dict[str, EngineKind] = field(default_factory=dict)  # by name
    engine: str = EAGER
    needs_same_length: bool = False  # whether all rows must have one length, since the model counts cache slots
    takes_trees: bool = False  # whether the model's passes can verify trees of drafts, see `check_widths`
    strict: bool = False  # whether calls that `self_speculative` does not support raise, instead of decoding plainly
    # Costs measured on this machine, by the arguments of `costs_of`, and whether the machine upcasts.
    costs: dict[tuple[str, bool, tuple[int, ...], bool, int], CostTable] = field(default_factory=dict)
    # The acceptance rate of each source and rank in earlier calls, by temperature (0: greedy).
    acceptances: dict[float, dict[Key, float]] = field(default_factory=dict)
    answers: AnswerMemory = field(default_factory=AnswerMemory)  # of earlier calls in `self_speculative`
    successors: SuccessorTable = field(default_factory=SuccessorTable)
    _draft_unembed: DraftUnembed | None = field(default=None, repr=False)
    _fallbacks: set[str] = field(default_factory=set, repr=False)  # problems that have been logged as warnings

    @property
    def config(self) -> TIDEConfig:
        """The routers' config, or the default config."""
        return self.routers.config if self.routers is not None else TIDEConfig()

    @property
    def runs_on_steps(self) -> bool:
        """Whether calls in the attached mode run on the engine, and not layer by layer without it."""
        return self.mode != "post_hoc"

    @property
    def default_threshold(self) -> float:
        """The exit threshold of calls that set none."""
        return float(self.config.exit_threshold) if self.exit_threshold is None else self.exit_threshold

    def costs_of(self, num_rows: int, engine: str, reads_once: bool, widths: tuple[int, ...] = ()) -> CostTable:
        """Measured costs of a batch of `num_rows`, at first copied from the next larger batch with known costs.

        `reads_once`: whether passes over several tokens take the time to read weights and K/V once, as on accelerators.
        """
        kind = (engine, reads_once, widths, upcasts())
        key = (*kind, num_rows)
        if key not in self.costs:
            larger = [known for known in list(self.costs) if known[:-1] == kind and known[-1] > num_rows]
            unmeasured = self.unmeasured_costs(num_rows, reads_once, widths)
            self.costs[key] = self.costs[min(larger)].resized(unmeasured.slope) if larger else unmeasured
        return self.costs[key]

    def unmeasured_costs(self, num_rows: int, reads_once: bool, widths: tuple[int, ...]) -> CostTable:
        """Costs before any pass, proportional to the weights that it reads."""
        vocab_size, head = self.structure.vocab_size, self.draft_head
        chosen_from = self.config.draft_vocab_size if head is None else head.config.draft_vocab_size
        vocab_share = (chosen_from or vocab_size) / vocab_size
        slope = PRIOR_SLOPE
        weights = (weight for layer in self.structure.layers for weight in layer.parameters())
        if reads_once and all(map(_is_plain, weights)):
            slope = min(slope, ACCELERATOR_SLOPE * num_rows)
        return CostTable(self.structure.num_layers, self.structure.head_share, vocab_share, widths, slope)

    def in_vocabulary(self, prompt: Iterable[int]) -> list[int]:
        """The prompt as drafters see it: the token id of an image placeholder may lie outside the vocabulary."""
        return [token if token < self.structure.vocab_size else 0 for token in prompt]

    def remember(self, prompts: list[list[int]], rows: list[Row]) -> None:
        """Remember the answers of a call, to draft from in later calls."""
        for prompt, row in zip(prompts, rows, strict=True):
            self.answers.add(self.in_vocabulary(prompt), row.tokens[: row.stopped_at])

    def exit_point(self, exit_layer: int) -> ExitPoint:
        """Router and head at `exit_layer`."""
        return self.require_routers("an exit head")[exit_layer]

    @property
    def draft_head(self) -> DraftHead | None:
        """The draft head, if there is one."""
        return self.routers.draft_head if self.routers is not None else None

    def draft_unembed(self) -> DraftUnembed:
        """The unembedding for drafts; its copy of the draft vocabulary's rows is renewed when the head changes."""
        vocab = self.routers.draft_vocab if self.routers is not None else None
        if not has_readable_rows(self.structure.head):
            return DraftUnembed(self.unembed)
        found = self._draft_unembed  # which another thread may release at any time
        if found is None or not found.is_current():
            self._draft_unembed = found = DraftUnembed(self.unembed, vocab)
            if vocab is not None:
                self.weights.open_for(found.head)
        return found

    def release(self) -> None:
        """Free the memory that is retained between calls."""
        self._draft_unembed = None
        self.answers.clear()
        self.successors.clear()
        self.weights.release()
        for engine in self.engines.values():
            engine.release()

    def require_routers(self, needed_by: str) -> TIDERouters:
        """Return the routers; if there are none, raise an error that says that `needed_by` needs them."""
        if self.routers is None:
            raise UnsupportedOptionError(
                f"{needed_by} needs routers",
                got="routers=None",
                expected="routers made for this model",
                do="Pass routers=... to from_pretrained or attach; tide_hf.calibrate(model, tokenizer) makes them.",
            )
        return self.routers

    def check_model(self, model: Any, mode: str) -> None:
        """Raise if the model in its present state cannot run in `mode`."""
        self.check_mode(mode)
        check_layers(model, self.structure)
        self._check_head(model)
        check_adapters(model, self.structure)
        check_uncompiled(model, self.structure)

    def note_fallback(self, error: TIDEError) -> str:
        """Log why a call decodes plainly, as a warning the first time for each kind of reason; return the reason."""
        reason = error.problem
        kind = reason.partition(": got ")[0]
        level = logging.INFO if kind in self._fallbacks else logging.WARNING
        logger.log(level, "TIDE leaves this call to plain decoding, with the same output but no faster: %s", reason)
        self._fallbacks.add(kind)
        return reason

    def note_chains(self, reason: str) -> None:
        """Log why drafts of a call are chains, once for each reason."""
        if reason not in self._fallbacks:
            logger.info("drafts of %s are chains, and not trees: %s", self.base_class.__name__, reason)
            self._fallbacks.add(reason)

    def _check_head(self, model: Any) -> None:
        """Raise if the vocabulary is smaller than when TIDE was attached: exit heads would draft removed tokens."""
        head, known = model.get_output_embeddings(), self.structure.vocab_size
        if head is self.structure.head or self.routers is None:
            return
        size = getattr(head, "out_features", known)
        if size < known:
            raise UnsupportedModelError(
                "the model's head has fewer tokens than when TIDE was attached",
                got=f"{size} tokens",
                expected=f"{known} tokens",
                do="Detach TIDE, and attach it with routers that were calibrated for the smaller vocabulary.",
            )

    def check_mode(self, mode: str) -> None:
        """Raise if this model cannot run in `mode`."""
        if mode != "post_hoc" and self.structure.is_recurrent:
            raise UnsupportedModelError(
                f"{self.base_class.__name__} keeps a recurrent state, which tide_mode={mode!r} cannot handle: it "
                "can be neither rolled back nor filled in for a skipped layer",
                got=f"tide_mode={mode!r}",
                expected="tide_mode='post_hoc' for this model",
                do="Attach with mode='post_hoc', or use the model without TIDE.",
            )


def _is_plain(weight: nn.Parameter) -> bool:
    """Whether a weight is read once for all tokens, unlike those of experts (3 dimensions), as it is, not quantised."""
    return type(weight) is nn.Parameter and weight.dim() < 3 and weight.itemsize > 1


def hybrid_drafter(attachment: Attachment, call: Call, engine: DraftEngine) -> HybridDrafter:
    """The drafter of `self_speculative`: what needs no model, and the heads whose agreement calibration measured."""
    prompts = [attachment.in_vocabulary(prompt) for prompt in call.prompts]
    sources: list[TreeSource] = [Ngrams(prompts)]
    if attachment.answers.max_tokens:
        sources.append(EarlierAnswers(prompts, attachment.answers))
    if attachment.successors.max_tokens:
        sources.append(Successors(prompts, attachment.successors))
    learned = attachment.acceptances.setdefault(call.temperature, {})
    priors, successors = head_priors(attachment, engine), attachment.successors
    return HybridDrafter(sources, engine.costs_of, priors, engine, learned, successors)


def head_priors(attachment: Attachment, engine: DraftEngine) -> dict[int, float]:
    """The exit layers whose heads draft, and how often each head agreed with the base model in calibration.

    Where the draft head drafts, exit layers do not: a token of theirs costs most of a full pass, and its step takes
    seconds to compile.
    """
    config = attachment.config
    record = config.calibration or {}
    if engine.head_layer is not None:
        return {engine.head_layer: float(record.get("draft_head", {}).get("agreement", UNKNOWN_AGREEMENT))}
    measured = {int(layer): float(row["agreement"]) for layer, row in record.get("exit_layers", {}).items()}
    return {layer: agreement for layer, agreement in measured.items() if layer in (config.exit_layers or [])}
