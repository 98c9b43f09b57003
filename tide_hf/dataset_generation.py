"""Answers to a whole data set: shared between processes, kept shard by shard, so that it can be killed and go on."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from .adapters import base_inside
from .answers import batch_answers, batches_of_like_length
from .calibration.data import seeded
from .calibration.files import read_rows
from .calibration.processes import Processes
from .calibration.work_folder import WorkFolder
from .chat_prompts import message_tokens
from .errors import ChatTemplateError, DatasetError, UnsupportedOptionError, describe, quoted
from .model import TIDEModelForCausalLM
from .option_descriptions import recognisable
from .padding import end_tokens, pad_token
from .structure import input_device
from .unembed import weights_hash

ADDED = ("answer", "num_new_tokens")  # to each row
ONE_ANSWER = {"num_return_sequences": 1, "return_dict_in_generate": False, "streamer": None}


def generate_dataset(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | os.PathLike[str] | Iterable[object],
    output_dir: str | os.PathLike[str],
    *,
    batch_size: int = 8,
    shard_size: int = 64,
    seed: int = 0,
    progress: bool = True,
    **generate_options: Any,
) -> list[Path]:
    """Answer every prompt of a data set with `model.generate`, and write the answers to files.

    Row by row the answers stand in `00000.jsonl`, `00001.jsonl` and so on, in the order of the prompts; each file is
    there whole or not at all. Files that are there are not made again, so work that was killed goes on where it was
    when this is called again with the same arguments, also by another number of processes. Under `torchrun` or
    `accelerate launch` the processes share the files between them; all return when all files are there.

    Args:
        model: A causal language model of transformers, mostly one with TIDE attached.
        tokenizer: Its tokenizer.
        prompts: A .jsonl or .json file, or the rows themselves. A row has a `prompt`, a text that the answer continues,
            or `messages`, which go through the tokenizer's chat template; a text is a prompt.
        output_dir: Where the files go; all processes must see it.
        batch_size: Rows a call of `generate`; those of a file that are of like length go together.
        shard_size: Rows a file, which is also what is lost when a process is killed.
        seed: Of sampling. Each file has draws of its own, so they do not depend on who makes it.
        progress: Show a progress bar, where there is a terminal.
        **generate_options: For `model.generate`: `max_new_tokens`, `do_sample`, `stop_strings`, `tide_mode` and the
            rest. What they leave open is as the model's own generation config has it.

    Returns:
        The files, in order. Their rows are those of the data set with `answer` (text) and `num_new_tokens` added.

    Raises:
        DatasetError: A row has no prompt, or an `answer` of its own, or no form in JSON; a file cannot be read, the
            disk is full, or `output_dir` holds answers to other prompts or by other settings.
        UnsupportedOptionError: `generate_options` ask for anything but one answer a row, or hold what cannot be told
            from another of its kind when the work goes on.
    """
    _check_options(batch_size, shard_size, generate_options)
    given = read_rows(Path(prompts), ()) if isinstance(prompts, (str, os.PathLike)) else prompts
    rows: list[Any] = [{"prompt": row} if isinstance(row, str) else row for row in given]
    encoded = [_encode(tokenizer, row, number) for number, row in enumerate(rows, start=1)]
    settings = {"batch_size": batch_size, "shard_size": shard_size, "seed": seed}
    settings |= _fingerprint(model, encoded, generate_options)
    device = input_device(model)
    processes = Processes.current(model)
    work = WorkFolder(output_dir, task="data set")
    work.folder.mkdir(parents=True, exist_ok=True)
    work.claim(settings, processes)
    starts = range(0, len(rows), shard_size)
    files = [work.folder / f"{shard:05d}.jsonl" for shard in range(len(starts))]
    mine = processes.share([shard for shard, file in enumerate(files) if not file.is_file()])
    processes.wait()  # so that all have looked before the first file is written
    console = Console(stderr=True)
    shown = progress and processes.is_main and console.is_terminal
    for shard in track(mine, description="Answering", console=console, transient=True, disable=not shown):
        here = slice(starts[shard], starts[shard] + shard_size)
        with seeded(random.Random(f"{seed} {shard}").getrandbits(63), device):
            answers = _answer(model, tokenizer, encoded[here], batch_size, generate_options)
        lines = [
            json.dumps({**row, **answer}, ensure_ascii=False) for row, answer in zip(rows[here], answers, strict=True)
        ]
        work.write_bytes(files[shard].name, "".join(f"{line}\n" for line in lines).encode())
    processes.wait()
    return files


def _answer(
    model: Any, tokenizer: Any, prompts: list[list[int]], batch_size: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Answer the prompts of one file, those of like length together."""
    pad, ends = pad_token(tokenizer), end_tokens(_setting(model, options, "eos_token_id"))
    options = options | ONE_ANSWER  # whatever the model's own config says
    stop_strings = _setting(model, options, "stop_strings")
    if stop_strings:
        options["tokenizer"] = tokenizer  # `generate` asks for it then
    stops = StopStringCriteria(tokenizer, stop_strings) if stop_strings else None
    answers: list[dict[str, Any]] = [{} for _ in prompts]
    for batch in batches_of_like_length(prompts, batch_size):
        new_tokens = batch_answers(model, [prompts[position] for position in batch], ends, pad=pad, **options)
        for position, tokens in zip(batch, new_tokens, strict=True):
            answer = tokens if stops is None else _up_to_stop(stops, prompts[position], tokens)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            answers[position] = dict(zip(ADDED, (text, len(answer)), strict=True))
    return answers


def _up_to_stop(stops: StopStringCriteria, prompt: list[int], answer: list[int]) -> list[int]:
    """An answer without the padding behind a stop string, by the rule that ended it."""
    tokens = torch.tensor([prompt + answer])
    lengths = range(1, len(answer))
    return answer[: next((n for n in lengths if stops(tokens[:, : len(prompt) + n], None).item()), len(answer))]


def _encode(tokenizer: PreTrainedTokenizerBase, row: Any, number: int) -> list[int]:
    if isinstance(row, Mapping):
        _check_columns(row, number)
    prompt, messages = (row.get(name) if isinstance(row, Mapping) else None for name in ("prompt", "messages"))
    tokens: Sequence[int] = []
    problem = f"keys {', '.join(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__
    if isinstance(prompt, str):
        tokens, problem = tokenizer(prompt)["input_ids"], "an empty prompt"
    elif isinstance(messages, list) and not all(_is_message(message) for message in messages):
        problem = "messages without a role"  # a template may print nothing for them, and say nothing
    elif isinstance(messages, list) and tokenizer.chat_template is not None:
        try:
            tokens = message_tokens(tokenizer, messages)
        except ChatTemplateError as error:
            problem = f"messages that the chat template refuses ({error.reason})"
    elif isinstance(messages, list):
        problem = "messages, and a tokenizer without chat template"
    if not tokens:
        raise DatasetError(
            describe(
                f"row {number} cannot be answered",
                got=problem,
                expected="a mapping with a prompt (text), or with messages and a tokenizer that has a chat template",
                do="Mend the row or leave it out.",
            )
        )
    return list(tokens)


def _check_columns(row: Mapping[Any, Any], number: int) -> None:
    """Refuse a row that could not be written with its answer."""
    taken = [name for name in ADDED if name in row]
    if taken:
        raise DatasetError(
            describe(
                f"row {number} has a column that the answer would take the place of",
                got=", ".join(taken),
                expected=f"no column {' or '.join(ADDED)}",
                do="Rename the column in all rows, to 'reference' say.",
            )
        )
    try:
        json.dumps(dict(row), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise DatasetError(
            describe(
                f"row {number} cannot be written to a file",
                got=quoted(error),
                expected="values that JSON has: texts, numbers, lists, mappings",
                do="Turn the others into texts or numbers, or leave them out.",
            )
        ) from error


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _check_options(batch_size: int, shard_size: int, options: dict[str, Any]) -> None:
    for name, size in {"batch_size": batch_size, "shard_size": shard_size}.items():
        if not isinstance(size, int) or size < 1:
            raise DatasetError(
                describe(f"{name} is no usable number", got=repr(size), expected="1 or more", do="Leave it out.")
            )
    asked = {name: getattr(options.get("generation_config"), name, None) for name in ONE_ANSWER} | options
    wrong = {name: asked[name] for name, only in ONE_ANSWER.items() if asked[name] not in (None, only)}
    if wrong:
        raise UnsupportedOptionError(
            describe(
                "generate_dataset() writes one answer a row",
                got=", ".join(f"{name}={value!r}" for name, value in wrong.items()),
                expected="none of these",
                do="Leave them out; for several answers repeat the rows and pass do_sample=True.",
            )
        )


def _fingerprint(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """All that the answers depend on."""
    base = base_inside(model)
    facts = {
        "model": f"{type(base).__name__} {base.config._name_or_path}",
        "dtype": str(base.dtype),
        "weights_hash": weights_hash(base),
        "data_hash": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "generate_options": {name: recognisable(name, value) for name, value in sorted(options.items())},
        "generation_config": recognisable("model.generation_config", model.generation_config),
    }
    if isinstance(model, TIDEModelForCausalLM):
        attachment = base._tide
        facts |= {"tide_mode": attachment.mode, "exit_threshold": attachment.exit_threshold}
        mode = _setting(model, options, "tide_mode") or attachment.mode
        if mode != "self_speculative" and attachment.routers is not None:  # else they do not decide on any token
            facts["routers_hash"] = weights_hash(attachment.routers)
            facts["kv_cache_strategy"] = attachment.routers.config.kv_cache_strategy
    return facts


def _setting(model: Any, options: dict[str, Any], name: str) -> Any:
    """What `generate` goes by: an option, else what a config says that is passed to it, else the model's own."""
    configs = (options.get("generation_config"), model.generation_config)
    said = (getattr(config, name, None) for config in configs)
    return options[name] if name in options else next((value for value in said if value is not None), None)
