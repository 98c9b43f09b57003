"""A chat that reuses its K/V cache from turn to turn, so that each turn prefills only its new tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..base_model.structure import CACHE, find_structure
from ..common.chat_prompts import encode_messages
from ..common.errors import ConfigurationError, describe
from ..evaluation.benchmark import DecodingMethod, Run, timed_run
from ..speculation.prefix_cache import PrefixCache
from .prompts import check_room


class Conversation:
    """A chat with an attached model.

    Every turn encodes the whole conversation with the chat template and reuses the cached prefix. If the template
    renders an earlier turn differently, the cache is cropped to the common prefix.

    Args:
        method: The attached model and its decoding options.
        tokenizer: The model's tokenizer, with a chat template.
        max_new_tokens: Most tokens per answer.

    Attributes:
        messages: The conversation so far.

    Raises:
        ConfigurationError: There is no chat template.
    """

    def __init__(self, method: DecodingMethod, tokenizer: Any, max_new_tokens: int) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                describe(
                    "this model cannot chat",
                    got="a tokenizer without a chat template",
                    expected="one with a chat template, as instruction-tuned models have",
                    do="Use tide-hf generate, or a model that was tuned to follow instructions.",
                )
            )
        self.method = method
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self._recurrent = find_structure(method.model).is_recurrent
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages: list[dict[str, str]] = []
        self._prefix = None if self._recurrent else PrefixCache(self.method.model.config)

    def ask(self, question: str, streamer: Any = None) -> Run:
        """Take a turn. If it fails or is interrupted, the conversation is unchanged.

        Args:
            question: The user's message.
            streamer: Streamer of `generate`.

        Returns:
            The run that answered.

        Raises:
            ConfigurationError: The conversation has become too long for the model.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        inputs = encode_messages(self.tokenizer, messages)
        tokens = inputs["input_ids"][0].tolist()
        check_room(self.method.model, len(tokens), self.max_new_tokens)
        caches = {} if self._prefix is None else {CACHE: self._prefix.take(tokens)}
        options = self.method.options | caches
        run = timed_run(replace(self.method, options=options), inputs, self.max_new_tokens, streamer)
        if self._prefix is not None:
            self._prefix.keep(caches[CACHE], tokens + run.new_tokens)
        answer = self.tokenizer.decode(run.new_tokens, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return run
