"""Calibration text: the user's data, or answers that the model generates to built-in prompts and prompts of its own.

A chat model can also generate the user's side: opening a user turn in its chat template and sampling gives prompts
close to its tuning data and far more varied than prompt templates (Magpie, Xu et al. 2024, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..base_model.structure import CACHE, input_device
from ..base_model.unembed import greedy_tokens, top_tokens
from ..base_model.wrappers import base_inside
from ..common.errors import CalibrationError, ChatTemplateError
from ..common.token_ids import chat_text, eos_token_ids, left_padded, pad_token, prompt_tokens, truncate_at_eos
from ..depth.kv_cache import GrowingLayer
from ..engines.gqa_attention import gqa_attention
from .arguments import USUAL_SAMPLES, Settings
from .documents import Document, describe_source, read_documents
from .fused_writing import FusedWriter, plain_cache
from .training import seeded

TOP_K = 50
STRETCH = 16  # tokens after which rows that have ended leave the batch
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Share of prompts that the model writes. At 0.5, a head drafted better in chats but worse on tasks.
OWN_SHARE = 0.25
LONGEST_OWN_PROMPT = 48  # tokens; longer prompts are truncated
MOST_ROUNDS = 5  # of `USUAL_SAMPLES` documents each, that are planned where time decides how many are written
ROUND_SEEDS = 2**32  # between the seeds of rounds, so that they are not those of a calibration with the next seed
PLACEHOLDER = "\ue000"  # a private-use character, which no chat template contains
OWN_TEMPERATURE = 1.0
TEMPERATURES = (0.7, 0.85, 1.0)  # for the half of the answers that is sampled


class TopKSampling(LogitsProcessor):
    """Top-k sampling inside greedy decoding; see [`draw`]."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the logit of each row's sampled token to infinity, in `scores` (rows, vocabulary)."""
        return scores.scatter_(1, draw(scores, self.temperature)[:, None], torch.inf)


def draw(logits: Tensor, temperature: float) -> Tensor:
    """Draw a token (rows,) among the `TOP_K` likeliest of logits (rows, vocabulary), by the Gumbel-max trick.

    The sampling of `generate` draws a random number for each token of the vocabulary, which took a quarter of the time
    for 96 texts on a CPU. This function draws only `TOP_K` random numbers per row.
    """
    best, tokens = top_tokens(logits, min(TOP_K, logits.shape[-1]))
    best = best.float()
    noise = -torch.empty_like(best).exponential_().log()
    return tokens.gather(1, (best / temperature + noise).argmax(dim=-1, keepdim=True))[:, 0]


def growing_cache(model: PreTrainedModel) -> DynamicCache | None:
    """A cache that appends in place; `None` for models whose layers keep something other than all K/V."""
    cache = plain_cache(model)
    if cache is not None:
        cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float | None,
    ends: set[int],
    pad: int = 0,
    deadline: float = math.inf,
    writer: FusedWriter | None = None,
) -> list[list[int]]:
    """Continue prompts in one batch, independently of the model's generation config.

    A temperature of `None` decodes greedily. `ends` are the end-of-sequence tokens. Returns the new tokens of each
    prompt, without the end-of-sequence token. After `deadline` (in `perf_counter` seconds) no further stretch of
    `STRETCH` tokens begins. A `writer` writes the answers without `generate`.
    """
    if pad >= model.config.get_text_config().vocab_size:  # as the tokenizer's padding token may be
        pad = 0
    if writer is not None:
        choose = greedy_tokens if temperature is None else partial(draw, temperature=temperature)
        return writer.continue_prompts(prompts, max_new_tokens, choose, ends=ends, pad=pad, deadline=deadline)
    sampling = LogitsProcessorList([] if temperature is None else [TopKSampling(temperature)])
    options: dict[str, Any] = {"eos_token_id": sorted(ends) or None, "pad_token_id": pad, "logits_processor": sampling}
    cache, stretch = growing_cache(model), max_new_tokens
    if cache is not None:
        options[CACHE], stretch = cache, STRETCH
    inputs = left_padded(prompts, pad=pad, device=input_device(model))
    answers: list[list[int]] = [[] for _ in prompts]
    rows, room = list(range(len(prompts))), max_new_tokens
    with without_generation_defaults(model), gqa_attention(model):
        while rows and room > 0:
            generated: Any = model.generate(**inputs, max_new_tokens=min(stretch, room), **options)
            new = generated[:, inputs["input_ids"].shape[1] :].tolist()
            for row, tokens in zip(rows, new, strict=True):
                answers[row] += truncate_at_eos(tokens, ends, keep_eos=False)
            if perf_counter() > deadline:
                break
            kept = [number for number, tokens in enumerate(new) if ends.isdisjoint(tokens)]
            rows, room = [rows[number] for number in kept], room - stretch
            mask = functional.pad(inputs["attention_mask"], (0, len(new[0])), value=1)
            inputs = {"input_ids": generated[kept], "attention_mask": mask[kept]}
            if cache is not None and room > 0 and 0 < len(kept) < len(new):  # selecting copies the K/V
                cache.batch_select_indices(torch.tensor(kept, device=generated.device))
    return answers


@contextmanager
def without_generation_defaults(model: Any) -> Iterator[None]:
    """Temporarily keep only the special tokens in the generation config of a model, or of a wrapper and its model.

    Passing a config to `generate` is not enough: `generate` fills unset fields from the model's own config.
    """
    plain = GenerationConfig(**{name: getattr(model.generation_config, name) for name in SPECIAL_TOKENS})
    configs = [(one, one.generation_config) for one in (model, base_inside(model)) if "generation_config" in vars(one)]
    try:
        for one, _ in configs:
            one.generation_config = plain
        yield
    finally:
        for one, config in configs:
            one.generation_config = config


class UserTurn(NamedTuple):
    """Tokens that a chat template puts before a user message, and after it, up to the assistant's answer."""

    before: list[int]
    after: list[int]


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn | None:
    """The user turn of the chat template; `None` without a template, or if no tokens mark its start or end."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = [{"role": "user", "content": PLACEHOLDER}]
    before, found, after = chat_text(tokenizer, messages).partition(PLACEHOLDER)
    turn = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return UserTurn(*turn) if found and all(turn) else None


def write_prompts(
    model: PreTrainedModel, turn: UserTurn, count: int, ends: set[int], writer: FusedWriter | None = None
) -> list[list[int]]:
    """Sample `count` user messages. A message ends at a token of `ends`, or at the first token of `turn.after`.

    Returns whole prompts, up to where the answer begins; empty messages are dropped.
    """
    starts = [turn.before] * count
    ends = {*ends, turn.after[0]}
    options: dict[str, Any] = {"temperature": OWN_TEMPERATURE, "ends": ends, "writer": writer}
    written = continue_prompts(model, starts, LONGEST_OWN_PROMPT, **options)
    return [turn.before + row + turn.after for row in written if row]


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of similar length to answer in one batch, or `num_own` prompts that the model writes in a user turn.

    A temperature of `None` decodes greedily; `seed` is for all sampling in the batch.
    """

    prompts: list[list[int]]
    temperature: float | None
    seed: int
    turn: UserTurn | None = None
    num_own: int = 0

    @property
    def longest_prompt(self) -> int:
        """Length in tokens of the longest prompt; an upper bound if prompts are not yet written."""
        own = [] if self.turn is None else [len(self.turn.before) + LONGEST_OWN_PROMPT + len(self.turn.after)]
        return max([*map(len, self.prompts), *own])


def draw_prompts(count: int, seed: int) -> list[str]:
    """Draw `count` distinct prompts, by filling the slots of the built-in templates at random.

    Fewer are returned if filling all templates once more gives no new prompt.
    """
    package = json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
    templates = [template for group in package["prompts"].values() for template in group]
    rng = random.Random(seed)
    rng.shuffle(templates)
    prompts: dict[str, None] = {}
    before = -1
    while len(prompts) < count and len(prompts) > before:
        before = len(prompts)
        prompts |= dict.fromkeys(_fill_slots(template, package["slots"], rng) for template in templates)
    return list(prompts)[:count]


def plan_writing(
    prompts: list[list[int]], batch_size: int, seed: int, turn: UserTurn | None = None, num_own: int = 0
) -> list[PromptBatch]:
    """Split prompts into batches, half of them answered greedily and half sampled.

    The `num_own` prompts that the model writes in a user turn are planned in batches of their own. All batches are in
    random order, so that a calibration cut short by its time budget still has a random sample.
    """
    halves = prompts[: (len(prompts) + 1) // 2], prompts[(len(prompts) + 1) // 2 :]
    batches: list[dict[str, Any]] = []
    for half, temperatures in zip(halves, ((None,), TEMPERATURES), strict=True):
        rows = sorted(half, key=len)  # similar lengths need little padding
        for number, start in enumerate(range(0, len(rows), batch_size)):
            temperature = temperatures[number % len(temperatures)]
            batches.append({"prompts": rows[start : start + batch_size], "temperature": temperature})
    for number, start in enumerate(range(0, num_own, batch_size)):
        temperature = TEMPERATURES[number // 2 % len(TEMPERATURES)] if number % 2 else None
        own = {"turn": turn, "num_own": min(batch_size, num_own - start)}
        batches.append({"prompts": [], "temperature": temperature, **own})
    random.Random(seed).shuffle(batches)
    return [
        PromptBatch(**batch, seed=random.Random(f"{seed} {number}").getrandbits(63))
        for number, batch in enumerate(batches)
    ]


def write_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: PromptBatch,
    max_length: int,
    deadline: float = math.inf,
    writer: FusedWriter | None = None,
) -> list[Document]:
    """Generate answers to a batch of prompts, after sampling the prompts themselves where needed.

    A document is prompt and answer; only positions that predict the answer, or the token after it, are counted. Answers
    end at `deadline`; see [`continue_prompts`].
    """
    pad, ends = pad_token(tokenizer), eos_token_ids(model.generation_config.eos_token_id)
    with seeded(batch.seed, input_device(model)):
        prompts = list(batch.prompts)
        if batch.turn is not None:
            prompts += write_prompts(model, batch.turn, batch.num_own, ends, writer)
        if not prompts:
            return []
        options: dict[str, Any] = {"temperature": batch.temperature, "ends": ends, "pad": pad}
        answers = continue_prompts(model, prompts, max_length, deadline=deadline, writer=writer, **options)
    answers = [answer[: max_length - 1] for answer in answers]  # the prompt's last position is counted too
    return [Document(prompt + answer, len(prompt) - 1) for prompt, answer in zip(prompts, answers, strict=True)]


def _fill_slots(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replace each `{slot}` by a random word; two slots of the same name get different words."""
    names = re.findall(r"\{(\w+)\}", template)
    words = {name: iter(rng.sample(slots[name], names.count(name))) for name in slots if name in names}
    return re.sub(r"\{(\w+)\}", lambda match: next(words[match[1]]), template)


@dataclass(frozen=True)
class Text:
    """The user's documents, or batches of prompts for the model to answer.

    `description` names the source in the record; `num_skipped` counts rows that could not be used. `num_usual` batches
    of prompts are answered where no time budget says how many.
    """

    documents: list[Document]
    prompts: list[PromptBatch]
    description: str
    num_skipped: int = 0
    num_usual: int = 0

    def digest(self) -> str:
        """A hash of documents and prompts."""
        documents = [(document.tokens, document.first) for document in self.documents]
        prompts = [asdict(batch) for batch in self.prompts]
        return hashlib.sha256(json.dumps([documents, prompts]).encode()).hexdigest()

    def longest(self, max_length: int) -> int:
        """Length in tokens of the longest document; an upper bound if documents are not yet generated."""
        if self.documents:
            return max(len(document.tokens) for document in self.documents)
        return max(batch.longest_prompt for batch in self.prompts) + max_length


def load_documents(dataset: object, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> Text:
    """Read the user's data, or draw prompts if `dataset` is `None`; [`CalibrationError`] if it cannot be used."""
    samples, seed = settings.samples or USUAL_SAMPLES, settings.seed
    if dataset is not None:
        options = {"samples": samples, "max_length": settings.max_length, "seed": seed}
        documents, num_skipped = read_documents(dataset, tokenizer, **options)
        return Text(documents, [], describe_source(dataset), num_skipped)
    num_rounds = 1 if settings.samples is not None else MOST_ROUNDS
    try:
        turn = find_user_turn(tokenizer)
        num_own = round(OWN_SHARE * samples) if turn is not None else 0
        drawn = samples - num_own
        prompts = [prompt_tokens(tokenizer, prompt) for prompt in draw_prompts(num_rounds * drawn, seed)]
    except ChatTemplateError as error:
        raise CalibrationError(
            "the chat template refuses a chat of a single user message",
            got=error.got,
            expected="a template that accepts this chat",
            do="Pass texts or chats of your own as dataset, or a tokenizer with another chat_template.",
        ) from error
    source = describe_source(None) + (", and to prompts of its own" if num_own else "")
    rounds = [
        plan_writing(part, settings.batch_size, seed + number * ROUND_SEEDS, turn, num_own)
        for number, part in enumerate(prompts[i : i + drawn] for i in range(0, len(prompts), drawn))
    ]
    return Text([], list(itertools.chain(*rounds)), source, num_usual=len(rounds[0]))
