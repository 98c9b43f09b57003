"""The stages of a calibration, resumable at the last finished unit, within a time budget."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.structure import DecoderStructure
from ..base_model.unembed import DraftUnembed, Unembed
from ..common.progress import Steps
from ..common.timing import least_seconds
from ..routers.routers import TIDERouters
from .arguments import Settings
from .documents import Document, num_positions, split_documents
from .draft_head_training import DraftHeadStage, DraftHeadTrainer
from .fused_writing import FusedWriter, writing_passes
from .heads import can_distil, collect_moments, distil_head, draft_agreement, fit_head, frequent_tokens
from .router_training import decide, fit_router
from .states import StateReader, StateStore, top_tokens
from .text import Text, write_documents
from .threshold import Decisions
from .work_folder import Processes, WorkFolder

WRITING_SHARE = 0.35  # share of the time budget for generating text
SAFETY = 2.0  # safety factor on the estimated time of the stages after distillation
FIT_CAPACITY = 24_000  # maximum number of positions to train a router on, to bound memory
DISTIL_CAPACITY = 48_000
TUNE_CAPACITY = 8_000
FEWEST_DOCUMENTS = 10  # generated and used even if the time budget is spent
TIMED_DOCUMENTS = 4  # to estimate the time of the stages after text
DOCUMENTS, KEPT = "documents/list", "documents/kept"
DRAFT_HEAD = "draft/head"
HEAD_SHARE = 0.75  # share of the remaining time for training the head that drafts
DISK_SHARE = 0.5  # of the free disk space
LEAST_HEAD_SHARE = 0.3  # that documents are left out for: a head hardly trained on more of them drafts worse


@dataclass
class Pipeline:
    """One calibration, stage by stage; every process runs every stage on its share of the units."""

    model: PreTrainedModel  # at full depth and in evaluation mode
    tokenizer: PreTrainedTokenizerBase
    unembed: Unembed
    routers: TIDERouters  # trained in place
    settings: Settings
    work: WorkFolder
    processes: Processes
    steps: Steps
    end: float  # end of the time budget, in `perf_counter` seconds; infinite without a budget
    resumed_units: int = 0  # units of this process that an earlier run finished
    cut_short: list[str] = field(default_factory=list)  # stages that the time budget cut short, for the record
    seconds_per_position: float = 0.0  # that logits take, as measured for the time budget

    @property
    def structure(self) -> DecoderStructure:
        """The model's structure."""
        return self.unembed.structure

    def write_text(self, text: Text) -> list[Document]:
        """Stage (a): return the user's documents, or documents that the model generates if the user gave none."""
        if text.documents:
            return text.documents
        num_batches = len(text.prompts) if self.end < math.inf else text.num_usual
        names = [f"documents/{number:05d}" for number in range(len(text.prompts))]
        at_least = -(-FEWEST_DOCUMENTS // self.settings.batch_size)
        deadline, longest = self._share_of_rest(WRITING_SHARE), 0.0
        max_length = self.settings.max_length

        def write(number: int, writer: FusedWriter | None) -> None:
            nonlocal longest
            begin = perf_counter()
            if number >= at_least and begin + longest > deadline:
                return
            batch = text.prompts[number]
            documents = write_documents(self.model, self.tokenizer, batch, max_length, deadline, writer)
            self.work.write(names[number], {}, {"documents": [(one.tokens, one.first) for one in documents]})
            seconds = perf_counter() - begin
            if not longest:
                self._say_estimate(seconds, num_batches)
            longest = max(longest, seconds)

        if self.work.has(DOCUMENTS):
            self.resumed_units += len(self.processes.share(self.work.facts(DOCUMENTS)["names"]))
        else:
            size = self.settings.batch_size, num_batches * max_length
            with writing_passes(self.model, self.structure, *size) as writer:
                self._run_units("Writing text", names[:num_batches], partial(write, writer=writer))
            if self.processes.is_main:  # so that a run resumed with another time budget has the same documents
                self.work.write(DOCUMENTS, {}, {"names": [name for name in names if self.work.has(name)]})
            self.processes.wait()
        written = self.work.facts(DOCUMENTS)["names"]
        if len(written) < text.num_usual:
            self.cut_short.append(f"{text.num_usual - len(written)} of {text.num_usual} batches of text")
        return [Document(*document) for name in written for document in self.work.facts(name)["documents"]]

    def _say_estimate(self, seconds: float, num_batches: int) -> None:
        """Say how long the calibration takes, given the seconds that a batch of text has taken."""
        whole = seconds * num_batches / self.processes.count / WRITING_SHARE
        ends = seconds + max(0.0, self.end - perf_counter())
        of_text = f"a batch of text takes {seconds:.0f} s, and text {WRITING_SHARE:.0%} of the time"
        if whole <= ends or self.settings.samples is None:
            self.steps.say(f"This will take about {min(whole, ends) / 60:.0f} minutes: {of_text}.")
        else:
            limit = f"{whole / 60:.0f} minutes without a limit; less text is written within max_minutes"
            self.steps.say(f"This will take about {ends / 60:.0f} minutes, or {limit}: {of_text}.")

    def documents_in_time(self, documents: Sequence[Document]) -> Sequence[Document]:
        """Leave out the documents that the stages after (a) have no time for, by rates measured on a few of them."""
        if self.processes.is_main and not self.work.has(KEPT):  # a resumed run has the same documents
            is_bounded = self.end < math.inf and len(documents) > FEWEST_DOCUMENTS
            kept = self._most_documents(documents) if is_bounded else len(documents)
            self.work.write(KEPT, {}, {"kept": kept, "seconds_per_position": self.seconds_per_position})
        self.processes.wait()
        facts = self.work.facts(KEPT)
        self.seconds_per_position = facts["seconds_per_position"]
        if facts["kept"] == len(documents):
            return documents
        self.cut_short.append(f"{len(documents) - facts['kept']} of {len(documents)} documents")
        return random.Random(self.settings.seed).sample(list(documents), facts["kept"])

    def _most_documents(self, documents: Sequence[Document]) -> int:
        """How many documents can be read, decided on and so on, with time left to train the draft head."""
        few = documents[:TIMED_DOCUMENTS]
        reader = StateReader(self.model, self.structure, self.unembed, self._layers_to_read())
        states = reader.read(few, [0]).only_counted().final_states  # the first pass takes longer
        self.seconds_per_position = least_seconds(lambda: top_tokens(self.unembed, states), 1) / len(states)
        begin = perf_counter()
        num_tokens = len(reader.read(few, range(len(few))))
        seconds_per_token = (perf_counter() - begin) / num_tokens
        share = 1.0 if self.routers.draft_head is None else 1.0 - LEAST_HEAD_SHARE
        available = share * (self.end - perf_counter()) * self.processes.count
        kept = len(documents)
        while kept > FEWEST_DOCUMENTS:
            splits = split_documents(documents[:kept], self.settings.seed)
            counts = {name: num_positions(part) for name, part in splits.items()}
            reading = seconds_per_token * sum(len(document.tokens) for document in documents[:kept])
            seconds = reading + self.seconds_per_position * self._positions_after_reading(counts)
            if seconds <= available and (self.settings.samples is not None or self._fits_on_disk(splits)):
                break
            kept = max(FEWEST_DOCUMENTS, kept * 7 // 8)
        return kept

    def _store(self, splits: dict[str, list[Document]]) -> StateStore:
        return StateStore(self.work, splits, self.settings.batch_size, self._layers_to_read(), self.model.dtype)

    def _fits_on_disk(self, splits: dict[str, list[Document]]) -> bool:
        """Whether states take no more than `DISK_SHARE` of the disk, where no user has said how many documents."""
        needed = self._store(splits).missing_bytes(self.structure.hidden_size)
        return needed <= DISK_SHARE * self.work.free_bytes

    def read_states(self, documents: Sequence[Document]) -> StateStore:
        """Stage (b): store the base model's hidden states on the documents, one shard per batch of documents."""
        store = self._store(split_documents(documents, self.settings.seed))
        self.work.check_space(store.missing_bytes(self.structure.hidden_size))
        self.processes.wait()  # no process may write before all have checked the space
        reader = StateReader(self.model, self.structure, self.unembed, self._layers_to_read())
        shards = store.shards()
        names = [shard.name for shard in shards]
        self._run_units("Reading hidden states", names, lambda i: store.write(shards[i], reader))
        return store

    def _layers_to_read(self) -> list[int]:
        """The layers after which hidden states are stored, besides the last one."""
        head = self.routers.draft_head
        taps = head.config.tap_layers if head is not None else ()
        return sorted({*self.routers.exit_layers, *taps} - {self.structure.num_layers})

    def fit_heads(self, store: StateStore) -> dict[str, dict[str, Any]]:
        """Stage (d): fit the exit heads in closed form, then distil them; return facts about each fit."""
        tokens = frequent_tokens(store.count_tokens("fit", self.structure.vocab_size)[1])
        mine = self.processes.share(self.routers.exit_layers)

        def fit(layer: int) -> dict[str, Any]:
            return self._fit_head(store, layer, tokens, heads_left=sum(other >= layer for other in mine))

        facts = self._fit_each_layer("Fitting exit heads", "head", fit)
        self.cut_short += [f"distillation at layer {layer}" for layer in facts if facts[layer].get("stopped")]
        return facts

    def train_routers(self, store: StateStore) -> dict[str, dict[str, Any]]:
        """Stage (e): train the routers; return their figures on the tune split."""
        seed = self.settings.seed

        def train(layer: int) -> dict[str, Any]:
            fit, tune = (
                store.sample(split, [layer], capacity, seed).to(self.routers.device, self.model.dtype)
                for split, capacity in (("fit", FIT_CAPACITY), ("tune", TUNE_CAPACITY))
            )
            labels = self.settings.labels
            return fit_router(self.routers[layer], layer, (fit, tune), self.unembed, labels, seed + layer)

        return self._fit_each_layer("Training routers", "router", train)

    def train_draft_head(self, store: StateStore, tokens: torch.Tensor) -> dict[str, Any] | None:
        """Stage (c): train the draft head, if there is one; return its figures.

        `tokens` is the draft vocabulary of a new head; one that is trained further keeps its own.
        """
        head = self.routers.draft_head
        if head is None:
            return None

        def train(_: int) -> None:
            is_fresh = self.settings.start_from is None
            trainer = DraftHeadTrainer(self.model, self.unembed, head, tokens if is_fresh else head.tokens)
            stage = DraftHeadStage(trainer, store, self.settings.seed)
            counts = {split: store.num_counted(split) for split in store.splits}
            later = self.seconds_per_position * self._positions_after_reading(counts) / self.processes.count
            deadline = min(self._share_of_rest(HEAD_SHARE), self._share_of_rest(1.0, later))
            facts = stage.make(deadline, is_fresh=is_fresh)
            self.work.write(DRAFT_HEAD, head.state_dict(), facts | stage.figures())

        self._run_units("Training the draft head", [DRAFT_HEAD], train)
        head.load_state_dict(self.work.read(DRAFT_HEAD))
        facts = self.work.facts(DRAFT_HEAD)
        if facts["stopped"]:
            self.cut_short.append("training of the draft head")
        return facts

    def decide(self, store: StateStore, split: str) -> Decisions:
        """Stage (f): compute exit scores and head agreement at every exit layer, on the tune or certify split."""
        shards = store.shards(split)
        names = [f"decisions/{split}-{shard.number:05d}" for shard in shards]

        def decide_shard(i: int) -> None:
            batch = store.read(shards[i]).to(self.routers.device, self.model.dtype)
            self.work.write(names[i], decide(batch, self.routers, self.unembed))

        self._run_units(f"Deciding on the {split} split", names, decide_shard)
        parts = [self.work.read(name) for name in names]
        columns = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return Decisions(self.routers.exit_layers, self.structure.num_layers, **columns)

    def _fit_each_layer(
        self, description: str, kind: str, fit: Callable[[int], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Fit the `"head"` or `"router"` of each exit layer, one unit each; return the results of `fit` by layer."""
        parts = {layer: getattr(self.routers[layer], kind) for layer in self.routers.exit_layers}
        layers, names = list(parts), [f"{kind}s/{layer:04d}" for layer in parts]

        def fit_and_write(i: int) -> None:
            facts = fit(layers[i])
            self.work.write(names[i], parts[layers[i]].state_dict(), facts)

        self._run_units(description, names, fit_and_write)
        for layer, name in zip(layers, names, strict=True):
            parts[layer].load_state_dict(self.work.read(name))
        return {str(layer): self.work.facts(name) for layer, name in zip(layers, names, strict=True)}

    def _run_units(self, description: str, names: Sequence[str], make: Callable[[int], None]) -> None:
        """Run this process's share of the units, except finished units, then wait for the other processes."""
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
        started, seed, device = perf_counter(), self.settings.seed, self.routers.device
        distils, whole_vocab = can_distil(self.structure), DraftUnembed(self.unembed)
        tune = store.sample("tune", [layer], TUNE_CAPACITY, seed)
        states = tune.hidden_states[layer].to(device, self.model.dtype)
        moments = collect_moments(store.batches("fit", [layer]), layer, device)
        drafts = DraftUnembed(self.unembed, tokens) if distils else whole_vocab
        penalty = fit_head(head, moments, states, tune.top_tokens, drafts)
        measured = perf_counter()
        closed_form = draft_agreement(head, states, tune.top_tokens, whole_vocab)
        facts: dict[str, Any] = {"method": "ridge", "penalty": penalty, "ridge_agreement": closed_form}
        if not distils:
            return facts
        now = perf_counter()
        counts = {split: store.num_counted(split) for split in store.splits}
        positions = self._positions_after_heads(counts) / self.processes.count
        afterwards = positions * (now - measured) / len(tune) + (now - started) * (heads_left - 1)
        deadline = self._share_of_rest(1 / heads_left, SAFETY * afterwards)
        fit = store.sample("fit", [layer], DISTIL_CAPACITY, seed)
        ridge = copy.deepcopy(head.state_dict())
        facts |= distil_head(head, layer, fit, tune, self.unembed, tokens, seed + layer, deadline)
        facts["distilled_agreement"] = draft_agreement(head, states, tune.top_tokens, whole_vocab)
        if facts["distilled_agreement"] > closed_form:
            return facts | {"method": "distilled"}
        head.load_state_dict(ridge)
        return facts

    def _positions_after_reading(self, counts: Mapping[str, int]) -> int:
        """Number of positions whose logits are computed after states are read, from those of each split."""
        fits = 2 * min(TUNE_CAPACITY, counts["tune"]) * len(self.routers.exit_layers)
        return fits + counts["certify"] + self._positions_after_heads(counts)

    def _positions_after_heads(self, counts: Mapping[str, int]) -> int:
        """Number of positions whose logits are computed to train routers and to decide, from those of each split."""
        routers = min(FIT_CAPACITY, counts["fit"]) + min(TUNE_CAPACITY, counts["tune"])
        return (routers + counts["certify"] + counts["tune"]) * len(self.routers.exit_layers)

    def _share_of_rest(self, share: float, reserved: float = 0.0) -> float:
        """Deadline of a stage that may use `share` of the remaining time, after `reserved` seconds are set aside."""
        now = perf_counter()
        return now + share * max(0.0, self.end - now - reserved)
