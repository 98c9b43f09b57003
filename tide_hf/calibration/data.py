"""Documents that calibration reads: written by the model itself, split three ways, cut into batches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import CalibrationError, describe
from ..generation import TIDEGenerationMixin

SHARES = {"fit": 0.5, "tune": 0.1, "certify": 0.4}  # certifying 2% at 95% takes at least 149 documents
TEMPERATURES = (0.7, 0.85, 1.0)  # of the sampled half of the self-written documents


@dataclass(frozen=True)
class Document:
    """One text, as tokens.

    Attributes:
        tokens: The tokens that the model reads.
        first: Calibration looks at the positions from here on; before it stands a prompt.
    """

    tokens: list[int]
    first: int

    @property
    def num_positions(self) -> int:
        """Positions that calibration looks at."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Splits:
    """Documents that fit the heads and routers, tune their scores, and certify the threshold; disjoint."""

    fit: list[Document]
    tune: list[Document]
    certify: list[Document]


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded documents.

    Attributes:
        input_ids: (rows, length).
        attention_mask: (rows, length), 1 where there is a token.
        counts: (rows, length), True at the positions that calibration looks at.
        document_ids: (rows,) positions of the documents in the list they came from.
    """

    input_ids: Tensor
    attention_mask: Tensor
    counts: Tensor
    document_ids: Tensor


@contextmanager
def full_depth(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` be what it was before TIDE was attached, in evaluation mode; restore both afterwards."""
    attached, was_training = type(model), model.training
    if isinstance(model, TIDEGenerationMixin):
        model.__class__ = model._tide.base_class  # the gates let everything pass while no run is active
    model.eval()
    try:
        yield
    finally:
        model.__class__ = attached
        model.train(was_training)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators and give them their old state back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


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


def num_positions(documents: Sequence[Document]) -> int:
    """Positions of all documents that calibration looks at."""
    return sum(document.num_positions for document in documents)


def write_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    max_length: int,
    batch_size: int,
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Document]:
    """Let the model answer prompts, one half greedily, the other half sampled.

    Args:
        model: The base model, at full depth.
        tokenizer: Its tokenizer; its chat template is used where it has one.
        samples: Number of documents.
        max_length: Tokens that the model may add to a prompt.
        batch_size: Prompts a `generate` call.
        seed: Of the prompts. Sampling draws from torch's own generator (see [`seeded`]).
        advance: Told the number of documents after each batch.

    Returns:
        The documents; their prompts are read but not counted.
    """
    prompts = [_encode_prompt(tokenizer, prompt) for prompt in draw_prompts(samples, seed)]
    halves = prompts[: (len(prompts) + 1) // 2], prompts[(len(prompts) + 1) // 2 :]
    documents = []
    for half, temperatures in zip(halves, ((None,), TEMPERATURES), strict=True):
        rows = sorted(half, key=len)  # little padding
        for number, start in enumerate(range(0, len(rows), batch_size)):
            batch = rows[start : start + batch_size]
            temperature = temperatures[number % len(temperatures)]
            documents += _write_batch(model, _pad_token(tokenizer), batch, max_length, temperature)
            advance(len(batch))
    return documents


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, add_generation_prompt: bool
) -> list[int]:
    """Put messages through the tokenizer's chat template.

    Args:
        tokenizer: The base model's; it has a chat template.
        messages: Each with "role" and "content".
        add_generation_prompt: Whether the assistant is to speak next.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def split_documents(documents: Sequence[Document], seed: int) -> Splits:
    """Split by document, at random, in the shares of `SHARES`.

    Raises:
        CalibrationError: There are fewer than three documents.
    """
    if len(documents) < len(SHARES):
        raise CalibrationError(
            describe(
                "too few documents to fit, tune and certify on different ones",
                got=len(documents),
                expected=f"at least {len(SHARES)}, better several hundred",
                do="Pass more texts, or raise samples.",
            )
        )
    shuffled = random.Random(seed).sample(list(documents), len(documents))
    num_tune = max(1, round(SHARES["tune"] * len(shuffled)))
    num_certify = max(1, round(SHARES["certify"] * len(shuffled)))
    tune_end = num_tune + num_certify
    return Splits(fit=shuffled[tune_end:], tune=shuffled[:num_tune], certify=shuffled[num_tune:tune_end])


def token_batches(documents: Sequence[Document], batch_size: int) -> Iterator[TokenBatch]:
    """Cut documents into right-padded batches, those of like length together.

    Padding stands on the right, so that a position is the same number with and without it; a causal model never
    looks at it from the positions that count.
    """
    order = sorted(range(len(documents)), key=lambda i: len(documents[i].tokens))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        shape = (len(rows), len(documents[rows[-1]].tokens))
        input_ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        counts = torch.zeros(shape, dtype=torch.bool)
        for row, i in enumerate(rows):
            length = len(documents[i].tokens)
            input_ids[row, :length] = torch.tensor(documents[i].tokens)
            mask[row, :length] = 1
            counts[row, documents[i].first : length] = True
        yield TokenBatch(input_ids, mask, counts, torch.tensor(rows))


def _fill_slots(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replace each `{slot}`; two slots of one kind get different words."""
    names = re.findall(r"\{(\w+)\}", template)
    words = {name: iter(rng.sample(slots[name], names.count(name))) for name in slots if name in names}
    return re.sub(r"\{(\w+)\}", lambda match: next(words[match[1]]), template)


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer(prompt)["input_ids"]
    return encode_messages(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any token can pad, since every use goes with a mask."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in candidates if token is not None)


def _write_batch(
    model: PreTrainedModel, pad: int, prompts: list[list[int]], max_length: int, temperature: float | None
) -> list[Document]:
    """Answer left-padded prompts; greedily where there is no temperature."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = _generation_config(model, pad, max_length, temperature)
    generated = model.generate(
        input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
    )
    ends = _end_tokens(config)
    documents = []
    for prompt, answer in zip(prompts, generated[:, width:].tolist(), strict=True):
        length = next((i for i, token in enumerate(answer) if token in ends), len(answer) - 1)
        documents.append(Document(prompt + answer[:length], first=len(prompt) - 1))  # what follows was predicted
    return documents


def _generation_config(
    model: PreTrainedModel, pad: int, max_length: int, temperature: float | None
) -> GenerationConfig:
    own: Any = model.generation_config
    settings: dict[str, Any] = {"max_new_tokens": max_length, "pad_token_id": pad, "num_beams": 1}
    settings |= {"eos_token_id": own.eos_token_id, "bos_token_id": own.bos_token_id, "repetition_penalty": 1.0}
    if temperature is not None:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": 50, "top_p": 1.0}
    return GenerationConfig(**settings) if temperature is not None else GenerationConfig(**settings, do_sample=False)


def _end_tokens(config: GenerationConfig) -> set[int]:
    ends = config.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, (list, tuple)) else {ends}
