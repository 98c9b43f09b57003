"""The stages of a calibration, resumable at the last finished unit, within a time budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.structure import DecoderStructure
from ..base_model.unembed import DraftUnembed, Unembed
from ..common.display.progress import Steps
from ..routers.routers import TIDERouters
from .block_head import BlockStage
from .documents import Document, pack_documents, split_documents, unpack_documents
from .heads import can_distil, collect_moments, distil_head, draft_agreement, fit_head, frequent_tokens
from .processes import Processes
from .routers import decide, fit_router
from .states import StateReader, StateStore
from .text import Text, write_documents
from .threshold import Decisions
from .work_folder import WorkFolder

WRITING_SHARE = 0.4  # share of the time budget for generating text
SAFETY = 2.0  # factor on the estimated time of the stages after distillation
FIT_CAPACITY = 24_000  # positions to train routers on, which bounds memory
DISTIL_CAPACITY = 48_000
TUNE_CAPACITY = 8_000
FEWEST_DOCUMENTS = 10  # generated even if the time budget is spent
DOCUMENTS = "documents/list"
BLOCK = "block/head"
BLOCK_SHARE = 0.7  # share of the remaining time for training the block head


@dataclass(frozen=True)
class Budget:
    """Time budget of a calibration.

    Attributes:
        started: `perf_counter()` at its start.
        seconds: Length; infinite without a limit.
    """

    started: float
    seconds: float = math.inf

    @classmethod
    def of_minutes(cls, minutes: float | None) -> Budget:
        """A budget that starts now."""
        return cls(perf_counter(), math.inf if minutes is None else 60.0 * minutes)

    @property
    def writing_deadline(self) -> float:
        """When to stop generating text."""
        return self.started + WRITING_SHARE * self.seconds

    def share_of_rest(self, share: float) -> float:
        """Deadline after a share of the remaining time."""
        now = perf_counter()
        return now + max(0.0, share * (self.started + self.seconds - now))

    def distillation_deadline(self, seconds_afterwards: float, num_heads: int) -> float:
        """Deadline of the next of `num_heads` distillations, which share the spare time equally.

        Args:
            seconds_afterwards: Estimated time of everything else still to do.
            num_heads: Heads left to distil.
        """
        now = perf_counter()
        if math.isinf(self.seconds):
            return math.inf
        spare = self.started + self.seconds - now - SAFETY * seconds_afterwards
        return now + max(0.0, spare) / num_heads


@dataclass(frozen=True)
class Settings:
    """Settings that results of units depend on; see `calibrate`."""

    samples: int
    max_length: int
    labels: str
    exit_strategy: str
    exit_layers: list[int]
    translator_rank: int | None
    batch_size: int
    seed: int
    draft_vocab_size: int | None
    start_from: str | None  # fingerprint of the block head to continue from


class Pipeline:
    """One calibration, stage by stage; every process runs every stage on its share of the units.

    Args:
        model: The base model, at full depth and in evaluation mode.
        tokenizer: Its tokenizer.
        structure: The model's structure.
        routers: Fresh routers, trained in place.
        settings: Settings that results depend on.
        work: Folder of the units' results.
        processes: The processes that share the work.
        steps: Progress bars.
        budget: Time budget.

    Attributes:
        resumed_units: Units of this process that an earlier run had finished.
        cut_short: Stages that the time budget cut short, for the record.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        structure: DecoderStructure,
        routers: TIDERouters,
        settings: Settings,
        work: WorkFolder,
        processes: Processes,
        steps: Steps,
        budget: Budget,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.structure = structure
        self.unembed = Unembed(model, structure)
        self.routers = routers
        self.settings = settings
        self.work = work
        self.processes = processes
        self.steps = steps
        self.budget = budget
        self.resumed_units = 0
        self.cut_short: list[str] = []
        block_layer = routers.config.block_layer
        self.state_layers = sorted({*routers.exit_layers, *([] if block_layer is None else [block_layer])})

    def write_text(self, text: Text) -> list[Document]:
        """Stage (a): the documents; the model generates them if the user gave none."""
        if text.documents:
            return text.documents
        names = [f"documents/{number:05d}" for number in range(len(text.prompts))]
        at_least = -(-FEWEST_DOCUMENTS // max(1, self.settings.batch_size))

        def write(number: int) -> None:
            if number >= at_least and perf_counter() >= self.budget.writing_deadline:
                return
            batch = text.prompts[number]
            documents = write_documents(self.model, self.tokenizer, batch, self.settings.max_length)
            self.work.write(names[number], pack_documents(documents))

        if self.work.has(DOCUMENTS):
            self.resumed_units += len(self.processes.share(self.work.facts(DOCUMENTS)["names"]))
        else:
            self._run_units("Writing text", names, write)
            if self.processes.is_main:  # fixes the documents for runs that resume with another time budget
                self.work.write(DOCUMENTS, {}, {"names": [name for name in names if self.work.has(name)]})
            self.processes.wait()
        written = self.work.facts(DOCUMENTS)["names"]
        if len(written) < len(names):
            self.cut_short.append(f"{len(names) - len(written)} of {len(names)} batches of text")
        return [document for name in written for document in unpack_documents(self.work.read(name))]

    def read_states(self, documents: Sequence[Document]) -> StateStore:
        """Stage (b): the base model's hidden states on the documents, one shard for each batch of them."""
        splits = split_documents(documents, self.settings.seed)
        store = StateStore(self.work, splits, self.settings.batch_size, self.state_layers, self.model.dtype)
        self.work.check_space(store.missing_bytes(self.structure.hidden_size))
        self.processes.wait()  # no process may write before all have checked the space
        reader = StateReader(self.model, self.structure, self.unembed, self.state_layers)
        shards = store.shards()
        self._run_units(
            "Reading hidden states", [shard.name for shard in shards], lambda i: store.write(shards[i], reader)
        )
        return store

    def fit_heads(self, store: StateStore) -> dict[str, dict[str, Any]]:
        """Stage (c): the exit heads, in closed form and then distilled; returns facts about each fit."""
        layers = self.routers.exit_layers
        names = [f"heads/{layer:04d}" for layer in layers]
        tokens = frequent_tokens(store.count_tokens("fit", self.structure.vocab_size)[1])
        mine = self.processes.share(range(len(layers)))

        def fit(i: int) -> None:
            heads_left = sum(other >= i for other in mine)
            facts = self._fit_head(store, layers[i], tokens, heads_left)
            self.work.write(names[i], self.routers[layers[i]].head.state_dict(), facts)

        self._run_units("Fitting exit heads", names, fit)
        made = {}
        for layer, name in zip(layers, names, strict=True):
            self.routers[layer].head.load_state_dict(self.work.read(name))
            made[str(layer)] = self.work.facts(name)
            if made[str(layer)].get("stopped"):
                self.cut_short.append(f"distillation at layer {layer}")
        return made

    def train_routers(self, store: StateStore) -> dict[str, dict[str, float]]:
        """Stage (d): the routers; returns their figures on the tune split."""
        layers = self.routers.exit_layers
        names = [f"routers/{layer:04d}" for layer in layers]

        def train(i: int) -> None:
            layer, seed = layers[i], self.settings.seed
            fit = store.sample("fit", [layer], FIT_CAPACITY, seed).to(self.routers.device, self.model.dtype)
            tune = store.sample("tune", [layer], TUNE_CAPACITY, seed).to(self.routers.device, self.model.dtype)
            exit_point = self.routers[layer]
            figures = fit_router(exit_point, layer, (fit, tune), self.unembed, self.settings.labels, seed + layer)
            self.work.write(names[i], exit_point.router.state_dict(), figures)

        self._run_units("Training routers", names, train)
        for layer, name in zip(layers, names, strict=True):
            self.routers[layer].router.load_state_dict(self.work.read(name))
        return {str(layer): self.work.facts(name) for layer, name in zip(layers, names, strict=True)}

    def train_block(self, store: StateStore, tokens: torch.Tensor) -> dict[str, Any] | None:
        """Stage (e): the block head, if there is one, with draft vocabulary `tokens`; returns its figures."""
        point, block_layer = self.routers.block, self.routers.config.block_layer
        if point is None:
            return None

        def train(_: int) -> None:
            settings = self.settings
            parts = (self.model, self.structure, self.unembed, store, point, block_layer, tokens, settings.seed)
            stage = BlockStage(*parts, is_fresh=settings.start_from is None)
            facts = stage.make(self.budget.share_of_rest(BLOCK_SHARE))
            self.work.write(BLOCK, point.state_dict(), facts | stage.figures())

        self._run_units("Training the block head", [BLOCK], train)
        point.load_state_dict(self.work.read(BLOCK))
        facts = self.work.facts(BLOCK)
        if facts["stopped"]:
            self.cut_short.append("training of the block head")
        return facts

    def decide(self, store: StateStore, split: str) -> Decisions:
        """Stage (f): decisions of every router and head on a split that neither was fitted to."""
        shards = store.shards(split)
        names = [f"decisions/{split}-{shard.number:05d}" for shard in shards]

        def note(i: int) -> None:
            batch = store.read(shards[i]).to(self.routers.device, self.model.dtype)
            self.work.write(names[i], decide(batch, self.routers, self.unembed))

        self._run_units(f"Deciding on the {split} split", names, note)
        parts = [self.work.read(name) for name in names]
        columns = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return Decisions(self.routers.exit_layers, self.structure.num_layers, **columns)

    def _run_units(self, description: str, names: Sequence[str], make: Callable[[int], None]) -> None:
        """Run this process's share of the unfinished units, then wait for the others."""
        mine = self.processes.share(range(len(names)))
        with self.processes.threads_for(len(names)):
            for i in self.steps.track(description, mine, len(mine)):
                if self.work.has(names[i]):
                    self.resumed_units += 1
                else:
                    make(i)
        self.processes.wait()

    def _fit_head(self, store: StateStore, layer: int, tokens: torch.Tensor, heads_left: int) -> dict[str, Any]:
        """Fit one head; return facts about the fit."""
        head = self.routers[layer].head
        if head.translator is None:
            return {"method": "identity"}
        started = perf_counter()
        device, dtype = self.routers.device, self.model.dtype
        tune = store.sample("tune", [layer], TUNE_CAPACITY, self.settings.seed)
        states = tune.hidden_states[layer].to(device, dtype)
        drafts = DraftUnembed(self.unembed, tokens) if can_distil(self.structure) else DraftUnembed(self.unembed)
        moments = collect_moments(store.batches("fit", [layer]), layer, device)
        penalty = fit_head(head, moments, states, tune.top_tokens, drafts)
        looked = perf_counter()
        everything = DraftUnembed(self.unembed)
        closed_form = draft_agreement(head, states, tune.top_tokens, everything)
        now = perf_counter()
        facts = {"method": "ridge", "penalty": penalty, "ridge_agreement": closed_form}
        if not can_distil(self.structure):
            return facts
        afterwards = self._seconds_after_heads(store, (now - looked) / len(tune)) + (now - started) * (heads_left - 1)
        deadline = self.budget.distillation_deadline(afterwards, heads_left)
        fit = store.sample("fit", [layer], DISTIL_CAPACITY, self.settings.seed)
        kept = {name: value.clone() for name, value in head.state_dict().items()}
        outcome = distil_head(head, layer, fit, tune, self.unembed, tokens, self.settings.seed + layer, deadline)
        distilled = draft_agreement(head, states, tune.top_tokens, everything)
        facts |= {"distilled_agreement": distilled, **asdict(outcome)}
        if distilled <= closed_form:
            head.load_state_dict(kept)
            return facts
        return facts | {"method": "distilled"}

    def _seconds_after_heads(self, store: StateStore, seconds_per_position: float) -> float:
        """Estimated time of training routers and of decisions, from the time of one position's logits."""
        routers = min(FIT_CAPACITY, store.num_counted("fit")) + min(TUNE_CAPACITY, store.num_counted("tune"))
        decisions = store.num_counted("certify") + store.num_counted("tune")
        positions = (routers + decisions) * len(self.routers.exit_layers)
        return seconds_per_position * positions / self.processes.count
