"""A batch of requests through the model: prompts in, text out row by row."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from ..chat_prompts import message_tokens
from ..decoding.kept_caches import KeptCaches
from ..decoding.rows import RowCriterion
from ..demo_model import load_demo_model
from ..errors import ChatTemplateError, ConfigurationError, RequestError, TIDEError, UnsupportedOptionError, describe
from ..loading import shipped_routers
from ..model import TIDEModelForCausalLM
from ..padding import end_tokens, left_padded
from ..structure import CACHE, check_rope
from .job import Job
from .protocol import ChatRequest, Event, Sampling
from .requests import refuse
from .text import TextPieces

LEAST_SHARED = 64  # tokens: to read fewer takes no longer than to keep caches
SERVER_DECIDES = {  # whatever the model came with; what a call leaves open, `generate` takes from there
    "use_cache": True,
    "cache_implementation": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "prompt_lookup_num_tokens": None,
}
GREEDY_BELOW = 0.01  # temperatures that would overflow, and change nothing but ties


@dataclass(frozen=True)
class ServingOptions:
    """What one replica loads, and how much it takes on.

    Attributes:
        model: Hub name or folder.
        routers: Folder or Hub repository; `None` is those that are shipped for the model, or none.
        mode: Of decoding.
        exit_threshold: For `early_exit` and `post_hoc`; `None` is the calibrated one.
        engine: What runs the layers.
        dtype: `None` is what the model was saved in.
        threads: CPU threads; `None` is torch's choice.
        max_batch: Most requests that decode together.
        gather_ms: How long a request waits for others to share its batch.
        max_prompt_tokens: Longest prompt.
        max_tokens: Longest answer.
        keep: Conversations whose K/V are kept, so that of a request that goes on with one, and decodes by itself, only
            what is new is read.
    """

    model: str
    routers: str | None = None
    mode: str = "self_speculative"
    exit_threshold: float | None = None
    engine: str = "eager"
    dtype: str | None = None
    threads: int | None = None
    max_batch: int = 8
    gather_ms: float = 10.0
    max_prompt_tokens: int = 4096
    max_tokens: int = 1024
    keep: int = 4


class ServedModel:
    """A model with TIDE, its tokenizer and its limits.

    Args:
        model: The attached model.
        tokenizer: Its tokenizer, with a chat template.
        options: Its limits.

    Raises:
        ConfigurationError: The tokenizer has no chat template.
    """

    def __init__(self, model: Any, tokenizer: Any, options: ServingOptions) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                describe(
                    f"{options.model} cannot answer chats",
                    got="a tokenizer without a chat template",
                    expected="a model made for chat",
                    do="Serve its instruction-tuned version.",
                )
            )
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        model.generation_config.update(**SERVER_DECIDES)
        self.eos_tokens = end_tokens(model.generation_config.eos_token_id)
        self.text_config = model.config.get_text_config()
        self.context = getattr(self.text_config, "max_position_embeddings", None) or 2**31
        self.unreported: Counter[str] = Counter()
        # The other modes leave K/V of their own, by which answers would depend on what was asked before.
        keep = options.keep if options.mode == "self_speculative" else 0
        self.caches = KeptCaches(model.config, keep, LEAST_SHARED)
        tokenizer("a")  # the first call sets truncation and padding; later ones may then run side by side

    @classmethod
    def load(cls, options: ServingOptions) -> ServedModel:
        """Load the model and attach TIDE to it, on the accelerator where there is one."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        model, tokenizer = load_demo_model(options.model, dtype=options.dtype, console=Console(stderr=True))
        model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        return cls(attach(model, options, batch_sizes(options.max_batch)), tokenizer, options)

    def prepare(self, request: ChatRequest, emit: Callable[[Event], None]) -> Job:
        """Encode a request.

        Raises:
            RequestError: It is too long, or the model's chat template refuses it.
        """
        options = self.options
        try:
            prompt = message_tokens(self.tokenizer, list(request.messages))
        except ChatTemplateError as error:
            raise refuse("messages", error.reason, "a conversation that the model's chat template allows") from error
        room = self.context - len(prompt)
        if not 0 < len(prompt) <= options.max_prompt_tokens or room < 1:
            longest = min(options.max_prompt_tokens, self.context - 1)
            raise refuse("messages", f"{len(prompt)} tokens", f"1 to {longest} tokens", code="context_length_exceeded")
        max_tokens = min(options.max_tokens, room) if request.max_tokens is None else request.max_tokens
        if max_tokens > min(options.max_tokens, room):
            expected = f"at most {min(options.max_tokens, room)} after a prompt of {len(prompt)} tokens"
            raise refuse("max_tokens", max_tokens, expected, code="context_length_exceeded")
        job = Job(request, prompt, max_tokens, TextPieces(self.tokenizer, request.stop), emit)
        try:
            self._check([job])
        except TIDEError as error:
            raise RequestError(str(error), code="unsupported_value", param="max_tokens") from error
        return job

    def fits(self, jobs: Sequence[Job]) -> bool:
        """Whether these requests can share a batch."""
        first = jobs[0].request.sampling
        if any(job.request.sampling != first for job in jobs) or (first.seed is not None and len(jobs) > 1):
            return False
        try:
            self._check(jobs)
        except UnsupportedOptionError:
            return False
        return _width(jobs) + _longest_answer(jobs) <= self.context

    def run(self, jobs: list[Job]) -> None:
        """Decode a batch. Events go out as tokens come, and a row that ends costs nothing from then on."""
        model, sampling = self.model, jobs[0].request.sampling
        # With a seed the answer is to be the same again, and what is read at once has a part in how it is rounded.
        alone = len(jobs) == 1 and sampling.seed is None
        cache = self.caches.take(jobs[0].prompt) if alone and self.caches.most else None
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=sampling.seed is not None):
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
            tokens = model.generate(
                **left_padded([job.prompt for job in jobs], device=model.device),
                generation_config=self._generation_config(sampling, _longest_answer(jobs)),
                stopping_criteria=[_Rows(jobs, self.eos_tokens)],
                tokenizer=self.tokenizer,  # asked for where the model's own config has stop_strings
                **({} if cache is None else {CACHE: cache}),
            )
        if cache is not None:
            self.caches.keep(cache, tokens[0].tolist())
        self._count(len(jobs))
        for job in jobs:
            if not job.reported and not job.cancelled:  # also of a row that `generate` ended for a reason of its own
                work, self.unreported = dict(self.unreported), Counter()
                job.report(work)

    def _check(self, jobs: Sequence[Job]) -> None:
        if self.options.mode == "self_speculative":
            check_rope(self.text_config, _width(jobs), _width(jobs) + _longest_answer(jobs))

    def _generation_config(self, sampling: Sampling, max_new_tokens: int) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        if sampling.temperature is not None or sampling.top_p is not None:
            if not config.do_sample:  # what else it says of sampling is of no account
                config.temperature = config.top_p = config.top_k = None
            temperature = _first(sampling.temperature, config.temperature)
            top_p = _first(sampling.top_p, config.top_p)
            config.top_k = config.top_k or 0
            config.do_sample = temperature >= GREEDY_BELOW
            config.temperature, config.top_p = (temperature, top_p) if config.do_sample else (None, None)
        if not config.do_sample:
            config.top_k = None
        config.max_length, config.max_new_tokens = None, max_new_tokens
        config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
        return config

    def _count(self, num_rows: int) -> None:
        stats = self.model.last_exit_stats
        self.unreported.update(
            batches=1,
            batch_rows=num_rows,
            tokens=stats.total_tokens,
            layers_executed=stats.layers_executed,
            layers_plain=stats.total_tokens * stats.num_layers,
            drafted=stats.drafted,
            accepted=stats.accepted,
        )


def attach(model: Any, options: ServingOptions, rows: Sequence[int]) -> Any:
    """Attach TIDE to a loaded model, and make its engine ready, so that no request waits for that.

    Args:
        model: The model.
        options: How it decodes.
        rows: Numbers of requests that decode together.

    Raises:
        ConfigurationError: The mode needs routers, and there are none.
        UnsupportedOptionError: The engine cannot run here.
    """
    routers = options.routers or shipped_routers(options.model)
    if routers is None and options.mode != "self_speculative":
        raise ConfigurationError(
            describe(
                f"{options.mode} needs routers",
                got=f"none for {options.model}",
                expected="routers made for this model",
                do="Pass --routers; tide-hf calibrate makes them.",
            )
        )
    settings: dict[str, Any] = {
        "mode": options.mode,
        "exit_threshold": options.exit_threshold,
        "engine": options.engine,
    }
    attached = TIDEModelForCausalLM.attach(model, routers, **settings)
    if options.mode == "self_speculative":  # the other modes run layer by layer
        attached.tide_warm_up(rows)
    return attached


def batch_sizes(most: int) -> list[int]:
    """Numbers of rows whose steps serve batches of any number up to `most`: powers of two, and `most`."""
    return [*(2**power for power in range((most - 1).bit_length())), most]


class _Rows(RowCriterion):
    """Hands each row's tokens to its job. All but the last to end are told at once; the last one takes the counts."""

    def __init__(self, jobs: list[Job], eos_tokens: set[int]) -> None:
        self.jobs = jobs
        self.eos_tokens = eos_tokens

    def stops_row(self, index: int, token: int) -> bool:
        job = self.jobs[index]
        if not job.take(token, self.eos_tokens):
            return False
        others_go = any(other.reason is None and not other.cancelled for other in self.jobs)
        if others_go and job.reason is not None and not job.reported:
            job.report({})
        return True


def _first(asked: float | None, own: float | None) -> float:
    """What the client says, else what the model's config does, else what changes nothing."""
    return asked if asked is not None else own if own is not None else 1.0


def _width(jobs: Sequence[Job]) -> int:
    return max(len(job.prompt) for job in jobs)


def _longest_answer(jobs: Sequence[Job]) -> int:
    return max(job.max_tokens for job in jobs)
