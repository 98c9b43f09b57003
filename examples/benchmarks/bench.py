"""What the suites work on: the model, its routers, and the text that goes with them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tide_hf import TIDERouters
from tide_hf.calibration.documents import Document, describe_source
from tide_hf.calibration.text import plan_writing, write_documents
from tide_hf.common.token_ids import encode_prompt, prompt_tokens
from tide_hf.evaluation.quality import read_texts

from .common import int8_quantizer, read_prompts
from .disagreement import unseen_prompts
from .reading import plain_scores, reading_of

WRITTEN_AT_ONCE = 8
PERPLEXITY_TEXTS, PERPLEXITY_LENGTH = 64, 256


class CannotRunError(Exception):
    """This way of decoding cannot run here; the message says why, for the table."""


@dataclass
class Bench:
    """A loaded model and what is measured on it.

    Attributes:
        model: The base model, never attached: suites attach to copies that share its weights.
        tokenizer: Its tokenizer.
        routers: Its routers; `None` where there are none.
        routers_origin: Where they are from.
        text: Texts for perplexity and calibration, as `calibrate` takes them; `None`: the model writes them.
        published_samples: Texts that the published system is calibrated on where speed is at stake.
        published_length: Tokens of each.
        kept: Things that are made once, by name.
        versions: Of the packages that other engines run, as far as they were started.
    """

    model: Any
    tokenizer: Any
    routers: TIDERouters | None
    routers_origin: str | None = None
    text: Any = None
    published_samples: int = 200
    published_length: int = 128
    kept: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @cached_property
    def work(self) -> Path:
        """A folder that lives as long as this object."""
        self.kept["folder"] = tempfile.TemporaryDirectory(prefix="tide-benchmarks-")
        return Path(self.kept["folder"].name)

    @cached_property
    def folder(self) -> Path:
        """Model and tokenizer as files, for other engines; written once, so not quantised by what comes later."""
        folder = self.work / "model"
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    @torch.no_grad()
    def round_weights(self, dtype: str) -> None:
        """Round the model's weights to the values of another dtype, by its name in PyTorch; their own dtype stays."""
        for weight in self.model.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))

    def quantize(self) -> dict[str, Any]:
        """Quantise the weights of the model's linear layers, its head among them, to int8 with a scale a row.

        Returns:
            "weights": in words; "perplexity" of "text", "unquantized" and "int8".

        Raises:
            MissingPackageError: torchao is not installed.
        """
        quantize = int8_quantizer()
        self.folder  # noqa: B018 - other engines quantise the original
        documents, text = self.documents(PERPLEXITY_TEXTS, PERPLEXITY_LENGTH)
        perplexity = {"unquantized": self.perplexity(documents)}
        quantize(self.model)
        perplexity["int8"] = self.perplexity(documents)
        return {
            "weights": f"int8 weights (torchao {metadata.version('torchao')})",
            "perplexity": perplexity,
            "text": text,
        }

    def perplexity(self, documents: Sequence[Document]) -> float:
        """The model's perplexity."""
        losses, _ = plain_scores(reading_of(self.model), documents, WRITTEN_AT_ONCE, self.model.device)
        return losses.mean().exp().item()

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.model.config.get_text_config().num_hidden_layers

    def need_routers(self) -> TIDERouters:
        """The routers, or `CannotRunError`."""
        if self.routers is None:
            raise CannotRunError("no routers")
        return self.routers

    def prompts(self, per_category: int) -> dict[str, list[dict[str, Any]]]:
        """Encoded prompts by category, as `generate` takes them."""
        texts = read_prompts()
        return {name: [encode_prompt(self.tokenizer, text) for text in texts[name][:per_category]] for name in texts}

    def long_prompt(self, length: int, max_new_tokens: int) -> dict[str, Tensor]:
        """The prompts one after another, over and over, cut to `length` tokens or to what an answer leaves room for."""
        longest = self.model.config.get_text_config().max_position_embeddings - max_new_tokens
        ids = torch.cat([one["input_ids"][0] for found in self.prompts(6).values() for one in found])
        ids = ids.repeat(length // len(ids) + 1)[None, : min(length, longest)]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def documents(self, samples: int, max_length: int) -> tuple[list[Document], str]:
        """Documents to read, and in words where they are from: `text`, or what the model answers to new prompts."""
        if self.text is not None:
            documents, _ = read_texts(self.text, self.tokenizer, samples=samples, max_length=max_length, seed=0)
            return documents, describe_source(self.text)
        key = f"documents of {max_length} tokens"
        if len(self.kept.get(key, [])) < samples:
            self.kept[key] = self._written(samples, max_length)
        return self.kept[key][:samples], "the model's own answers to new prompts"

    def _written(self, samples: int, max_length: int) -> list[Document]:
        calibration = (self.routers.config.calibration if self.routers is not None else None) or {}
        prompts = unseen_prompts(calibration.get("num_documents", 0), calibration.get("seed", 0), samples)
        plan = plan_writing([prompt_tokens(self.tokenizer, text) for text in prompts], WRITTEN_AT_ONCE, 0)
        written = [write_documents(self.model, self.tokenizer, batch, max_length) for batch in plan]
        return [one for documents in written for one in documents]

    def texts(self, samples: int, max_length: int) -> Sequence[str]:
        """The documents as text."""
        return [self.tokenizer.decode(one.tokens) for one in self.documents(samples, max_length)[0]]
