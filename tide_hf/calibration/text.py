"""Calibration text: the user's data, or prompts that the model answers and partly writes itself."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..base_model.adapters import base_inside
from ..base_model.structure import input_device
from ..common.chat_prompts import chat_text, prompt_tokens
from ..common.errors import CalibrationError, ChatTemplateError, describe
from ..common.padding import end_tokens, left_padded, pad_token, up_to_end
from ..engines.shared_heads import shared_heads
from .documents import Document
from .sources import describe_source, read_documents

BEST = 50  # tokens that are drawn from
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Share of prompts that the model writes. With half, the block head drafted better in chats but worse on tasks.
OWN_SHARE = 0.25
LONGEST_OWN_PROMPT = 48  # tokens; what is longer is cut
PLACEHOLDER = "\ue000"  # private use: no template has it
OWN_TEMPERATURE = 1.0
TEMPERATURES = (0.7, 0.85, 1.0)  # of the sampled half of the documents


class DrawFromBest(LogitsProcessor):
    """Makes a greedy choice a draw from the best tokens (top-k sampling).

    `generate` draws a random number for each token of the vocabulary. That took a quarter of the time that 96 texts
    did on a CPU. The largest of the logits plus Gumbel noise is such a draw as well, from those that are noised.

    Args:
        temperature: Of the draw.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Let one token stand out; (rows, vocabulary) each."""
        best, tokens = scores.topk(min(BEST, scores.shape[-1]))
        noise = -torch.empty_like(best).exponential_().log()
        drawn = tokens.gather(1, (best / self.temperature + noise).argmax(dim=-1, keepdim=True))
        return scores.scatter_(1, drawn, torch.inf)


@torch.no_grad()
def continued(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    most: int,
    *,
    temperature: float | None,
    ends: set[int],
    pad: int = 0,
) -> list[list[int]]:
    """Let a model go on with texts, whatever its own generation config says.

    Args:
        model: The base model, at full depth.
        texts: Their tokens.
        most: Tokens that it may add to each.
        temperature: `None` is greedy.
        ends: Tokens that end a text.
        pad: Token that fills a row up.

    Returns:
        What it added to each text, up to a token that ends it, which is not among them. Where there is none, it is as
        long as that of the others.
    """
    draw = LogitsProcessorList([] if temperature is None else [DrawFromBest(temperature)])
    options = {"max_new_tokens": most, "eos_token_id": sorted(ends) or None, "logits_processor": draw}
    with plain_generation(model), shared_heads(model):
        return batch_answers(model, texts, ends, pad=pad, **options)


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Let `generate` find none of the defaults that a model comes with, but its special tokens; it gets them back.

    A config that is passed to `generate` is not enough: what it leaves open is taken from the model's own.

    Args:
        model: The model, or a wrapper, which may have a config of its own.
    """
    plain = GenerationConfig(**{name: getattr(model.generation_config, name) for name in SPECIAL_TOKENS})
    kept = [(one, one.generation_config) for one in (model, base_inside(model)) if "generation_config" in vars(one)]
    try:
        for one, _ in kept:
            one.generation_config = plain
        yield
    finally:
        for one, config in kept:
            one.generation_config = config


def batch_answers(
    model: Any, prompts: Sequence[Sequence[int]], ends: set[int], *, pad: int, **options: Any
) -> list[list[int]]:
    """Let `model.generate` go on with prompts, all in one batch.

    Args:
        model: The model, attached or not.
        prompts: Their tokens.
        ends: The tokens that end an answer.
        pad: Token that fills a row up. One that the model does not know, as where a tokenizer was extended and the
            model was not, is replaced: models read what fills up the rows that have ended.
        **options: For `generate`.

    Returns:
        The new tokens of each, without the one that ends it.
    """
    pad = pad if pad < model.config.get_text_config().vocab_size else 0
    inputs = left_padded(prompts, pad=pad, device=input_device(model))
    generated = model.generate(**inputs, **{"pad_token_id": pad, **options})
    new_tokens = generated[:, inputs["input_ids"].shape[1] :].tolist()
    return [up_to_end(tokens, ends, with_end=False) for tokens in new_tokens]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators and give them their old state back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class UserTurn:
    """What a chat template puts around a user's message.

    Attributes:
        before: Tokens in front of it.
        behind: Tokens that end it and let the assistant speak.
    """

    before: list[int]
    behind: list[int]


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn | None:
    """Find a template's user turn; `None` where there is no template, or none that ends a user's turn."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = [{"role": "user", "content": PLACEHOLDER}]
    before, found, behind = chat_text(tokenizer, messages).partition(PLACEHOLDER)
    turn = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, behind)]
    return UserTurn(*turn) if found and all(turn) else None


def write_prompts(model: PreTrainedModel, turn: UserTurn, count: int, ends: set[int]) -> list[list[int]]:
    """Let the model write users' turns.

    Args:
        model: The base model, at full depth.
        turn: What stands around them.
        count: How many are begun; empty ones are left out.
        ends: Tokens that end a text; what stands behind a turn ends it as well.

    Returns:
        Whole prompts, ready for an answer.
    """
    starts = [turn.before] * count
    written = continued(model, starts, LONGEST_OWN_PROMPT, temperature=OWN_TEMPERATURE, ends={*ends, turn.behind[0]})
    return [turn.before + row + turn.behind for row in written if row]


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of like length that are answered together.

    Attributes:
        prompts: Their tokens; none where the model is to write them.
        temperature: Of the answers; `None` is greedy.
        seed: Of all that is sampled.
        turn: What stands around prompts that the model is to write.
        num_own: How many of those.
    """

    prompts: list[list[int]]
    temperature: float | None
    seed: int
    turn: UserTurn | None = None
    num_own: int = 0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, the most that it may have where it has yet to be written."""
        own = [] if self.turn is None else [len(self.turn.before) + LONGEST_OWN_PROMPT + len(self.turn.behind)]
        return max([*map(len, self.prompts), *own])


def draw_prompts(count: int, seed: int) -> list[str]:
    """Draw different prompts from the package's own, every kind of prompt as often as it can be.

    Args:
        count: How many; fewer come back where the package has no more.
        seed: Of the draw.
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
    """Cut prompts into batches, one half to be answered greedily, the other half sampled.

    The batches come in random order, so that those from first to any one are a fair part of the whole.

    Args:
        prompts: Their tokens.
        batch_size: Prompts a batch, those of like length together.
        seed: Of everything random.
        turn: What stands around prompts that the model writes itself.
        num_own: How many of those there shall be besides.
    """
    halves = prompts[: (len(prompts) + 1) // 2], prompts[(len(prompts) + 1) // 2 :]
    batches: list[dict[str, Any]] = []
    for half, temperatures in zip(halves, ((None,), TEMPERATURES), strict=True):
        rows = sorted(half, key=len)  # little padding
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, max_length: int
) -> list[Document]:
    """Let the model answer a batch of prompts, and write them first where it is to.

    Args:
        model: The base model, at full depth.
        tokenizer: Its tokenizer; it need not know a padding token.
        batch: The prompts.
        max_length: Tokens that the model may add to a prompt.

    Returns:
        The documents that hold at least one new position; their prompts are read but not counted.
    """
    pad, ends = pad_token(tokenizer), end_tokens(model.generation_config.eos_token_id)
    with seeded(batch.seed, input_device(model)):
        prompts = list(batch.prompts)
        if batch.turn is not None:
            prompts += write_prompts(model, batch.turn, batch.num_own, ends)
        if not prompts:
            return []
        answers = continued(model, prompts, max_length, temperature=batch.temperature, ends=ends, pad=pad)
    documents = []
    for prompt, answer in zip(prompts, answers, strict=True):
        kept = answer[: max_length - 1]  # what follows was predicted
        documents.append(Document(prompt + kept, first=len(prompt) - 1))
    return [document for document in documents if document.num_positions > 0]


def _fill_slots(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replace each `{slot}`; two slots of one kind get different words."""
    names = re.findall(r"\{(\w+)\}", template)
    words = {name: iter(rng.sample(slots[name], names.count(name))) for name in slots if name in names}
    return re.sub(r"\{(\w+)\}", lambda match: next(words[match[1]]), template)


@dataclass(frozen=True)
class Text:
    """Documents that are there, or prompts that the model has yet to answer.

    Attributes:
        documents: The user's.
        prompts: Batches of prompts where there are none.
        description: What the text is, for the record.
        num_skipped: Rows of the user's data that could not be used.
    """

    documents: list[Document]
    prompts: list[PromptBatch]
    description: str
    num_skipped: int = 0

    def digest(self) -> str:
        """A hash of all of it."""
        documents = [(document.tokens, document.first) for document in self.documents]
        prompts = [asdict(batch) for batch in self.prompts]
        return hashlib.sha256(json.dumps([documents, prompts]).encode()).hexdigest()

    def longest(self, max_length: int) -> int:
        """Tokens of the longest document, the most that it may have where it has yet to be written."""
        if self.documents:
            return max(len(document.tokens) for document in self.documents)
        return max(batch.longest_prompt for batch in self.prompts) + max_length


def load_documents(
    dataset: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    max_length: int,
    batch_size: int,
    seed: int,
) -> Text:
    """Read the user's data, or draw prompts where there is none; see `calibrate` for the arguments.

    Raises:
        CalibrationError: The data cannot be used.
    """
    if dataset is not None:
        documents, num_skipped = read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)
        return Text(documents, [], describe_source(dataset), num_skipped)
    try:
        turn = find_user_turn(tokenizer)
        num_own = round(OWN_SHARE * samples) if turn is not None else 0
        prompts = [prompt_tokens(tokenizer, prompt) for prompt in draw_prompts(samples - num_own, seed)]
    except ChatTemplateError as error:
        raise CalibrationError(
            describe(
                "the chat template refuses a user's message that stands alone",
                got=f"'{error.reason}'",
                expected="a template that takes one",
                do="Pass texts or chats of your own as dataset, or a tokenizer with another chat_template.",
            )
        ) from error
    source = describe_source(None) + (", and to prompts of its own" if num_own else "")
    return Text([], plan_writing(prompts, batch_size, seed, turn, num_own), source)
