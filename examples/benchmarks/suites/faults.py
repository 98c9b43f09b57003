"""Faults: work that is killed, a disk that is full, threads, many short requests, damaged files.

Nothing corrupt may be loaded, and nothing that was finished may be lost. All of it runs on a small random model with
the tokenizer at hand.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
import torch

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.contenders import weight_sharing_copy
from tide_hf.errors import TIDEError

from ..bench import Bench, CannotRunError
from ..checks import Check
from ..common import markdown, read_prompts
from ..fault_place import Place, digest, end, kill
from ..fuzzing import OTHER, REFUSED, SAME, equal, fuzz

FILE_LIMIT = 20_000  # bytes; less than any file of weights here
REPO = "org/routers"
WEIGHTS_AND_CONFIG = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class Settings:
    """How often.

    Attributes:
        calibration_kills: Kills of one calibration before it may end.
        save_kills: Kills while saving.
        push_kills: Kills while pushing.
        threads: Threads that generate at once.
        requests: Short requests, one after another.
        fuzz_examples: Damaged files of each kind.
        seed: Of the moments of the kills.
    """

    calibration_kills: int = 10
    save_kills: int = 50
    push_kills: int = 20
    threads: int = 2
    requests: int = 10_000
    fuzz_examples: int = 1000
    seed: int = 0


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Provoke all faults."""
    place, rng = Place(bench), random.Random(settings.seed)
    faults: dict[str, Callable[[], dict[str, Any]]] = {
        "killed while calibrating": lambda: killed_calibration(place, rng, settings.calibration_kills),
        "killed while saving": lambda: killed_saving(place, rng, settings.save_kills),
        "killed while pushing": lambda: killed_pushing(place, rng, settings.push_kills),
        "disk full": lambda: full_disk(place),
        "threads at once": lambda: threads(place, settings.threads),
        "short requests": lambda: short_requests(place, settings.requests),
    }
    record: dict[str, Any] = {"left_out": {}, "faults": {}}
    for name, provoke in faults.items():
        try:
            start = perf_counter()
            record["faults"][name] = provoke() | {"seconds": perf_counter() - start}
        except CannotRunError as error:
            record["left_out"][name] = str(error)
    try:
        folder = place.folder / "routers-0"
        record["damaged"] = fuzz(folder, published_file(place), place.model, settings.fuzz_examples)
    except CannotRunError as error:
        record["left_out"]["damaged files"] = str(error)
    return record


def killed_calibration(place: Place, rng: random.Random, kills: int) -> dict[str, Any]:
    """Kill a calibration again and again; what it ends with is what it ends with when left alone."""
    arguments = ("calibrate", place.folder / "small", place.folder / "texts.json")
    start = perf_counter()
    end(place.work(*arguments, place.folder / "undisturbed"))
    whole = perf_counter() - start
    for _ in range(kills):
        process = place.work(*arguments, place.folder / "disturbed")
        kill(process, rng.uniform(0, whole / 3))
    end(place.work(*arguments, place.folder / "disturbed"))
    same = digest(place.folder / "undisturbed") == digest(place.folder / "disturbed")
    return {"tries": kills, "right": kills if same else 0, "note": "ends with the same weights, byte for byte"}


def killed_saving(place: Place, rng: random.Random, kills: int) -> dict[str, Any]:
    """Kill while routers are saved over others; a reader finds the ones or the others."""
    target = place.folder / "saved"
    place.routers[0].save_pretrained(target)
    found = {"whole": 0, "mixed": 0, "refused": 0}
    for _ in range(kills):
        kill(place.work("save", place.folder / "routers-0", place.folder / "routers-1", target, 0), rng.uniform(0, 0.3))
        try:
            found["whole" if _whole(TIDERouters.from_pretrained(target), place.routers) else "mixed"] += 1
        except TIDEError:
            found["refused"] += 1
    note = f"{found['mixed']} mixed, {found['refused']} refused"
    return {"tries": kills, "right": found["whole"], "note": note}


def killed_pushing(place: Place, rng: random.Random, kills: int) -> dict[str, Any]:
    """Kill while routers are pushed; the repository holds the ones or the others."""
    try:
        hub_module = import_module("tests.loopback_hub")
    except ImportError:
        raise CannotRunError("needs the tests' Hub, which a clone has") from None
    right, pair = 0, place.calibrated()
    both = (place.folder / "calibrated-0", place.folder / "calibrated-1")
    with hub_module.loopback_hub() as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_USER_AGENT_ORIGIN": "tide_hf"}
        for _ in range(kills):
            process = place.work("push", *both, REPO, hub_module.TOKEN, environment=environment)
            while process.poll() is None and not _pushed(hub):
                sleep(0.05)
            if process.poll() is not None:
                end(process)
            kill(process, rng.uniform(0, 1))
            download = place.folder / "downloaded"
            download.mkdir(exist_ok=True)
            for name in WEIGHTS_AND_CONFIG:
                (download / name).write_bytes(_pushed(hub)[name])
            right += _whole(TIDERouters.from_pretrained(download), pair)
    return {"tries": kills, "right": right, "note": f"the first or the second, whole, of {len(_commits(hub))} commits"}


def _whole(routers: TIDERouters, pair: Sequence[TIDERouters]) -> bool:
    """Whether these are the first or the second routers, and no mixture."""
    return any(equal(routers, one) for one in pair)


def _commits(hub: Any) -> dict[str, Any]:
    return hub.repos["models", REPO].commits if ("models", REPO) in hub.repos else {}


def _pushed(hub: Any) -> dict[str, bytes]:
    """The routers' files in the repository; nothing before they are there."""
    commits = _commits(hub)
    files = hub.repos["models", REPO].files() if commits else {}
    return files if files.keys() >= set(WEIGHTS_AND_CONFIG) else {}


def full_disk(place: Place) -> dict[str, Any]:
    """Files that may not grow: saving and calibrating stop with an error, and what was there stays."""
    target, limit = place.folder / "limited", ("--file-limit", FILE_LIMIT)
    place.routers[0].save_pretrained(target)
    both = (place.folder / "routers-0", place.folder / "routers-1")
    saving = place.work("save", *both[::-1], target, 1, *limit)
    said_save = saving.communicate()[1].strip().splitlines()
    kept = equal(TIDERouters.from_pretrained(target), place.routers[0])
    arguments = ("calibrate", place.folder / "small", place.folder / "texts.json", place.folder / "limited-work")
    calibrating = place.work(*arguments, *limit)
    said_calibrate = calibrating.communicate()[1].strip().splitlines()
    end(place.work(*arguments))
    resumed = digest(place.folder / "limited-work") == digest(place.folder / "undisturbed")
    right = [saving.returncode == 1 and kept, calibrating.returncode == 1 and resumed]
    said = [lines[-1].partition(":")[0] if lines else "nothing" for lines in (said_save, said_calibrate)]
    return {"tries": 2, "right": sum(right), "note": f"{said[0]} in saving, {said[1]} in calibrating"}


def threads(place: Place, count: int) -> dict[str, Any]:
    """Threads that generate at once with one attached model say what each says alone."""
    model = TIDEModelForCausalLM.attach(weight_sharing_copy(place.model), place.routers[0])
    modes = [{}, {"tide_mode": "early_exit", "exit_threshold": 0.5}, {"tide_mode": "post_hoc", "exit_threshold": 0.5}]
    jobs = [(ids, options) for ids in _short_prompts(place, 4) for options in modes]
    alone = [_tokens(model, ids, options, 24) for ids, options in jobs]
    found: list[tuple[int, list[int]]] = []

    def work(first: int) -> None:
        for number in range(first, len(jobs), 1):
            found.append((number, _tokens(model, *jobs[number], 24)))

    running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    right = sum(tokens == alone[number] for number, tokens in found)
    expected = sum(len(jobs) - number for number in range(count))
    return {"tries": expected, "right": right, "note": f"{count} threads, three modes"}


def short_requests(place: Place, count: int) -> dict[str, Any]:
    """Short requests one after another: the base model's tokens every time, and no memory that grows."""
    model = TIDEModelForCausalLM.attach(weight_sharing_copy(place.model), place.routers[0])
    prompts = _short_prompts(place, 8)
    expected = [_tokens(place.model, ids, {}, 4) for ids in prompts]
    right, resident = 0, []
    for number in range(count):
        which = number % len(prompts)
        right += _tokens(model, prompts[which], {}, 4) == expected[which]
        if number in (count // 2, count - 1):
            resident.append(psutil.Process().memory_info().rss)
    grown = (resident[-1] - resident[0]) / 1e6
    return {"tries": count, "right": right, "note": f"memory grew by {grown:.1f} MB in the second half"}


def published_file(place: Place) -> Path:
    """A file in the form of the published system's router.pt."""
    layer = {"down.weight": torch.randn(128, 64), "up.weight": torch.randn(1, 128)}
    file = place.folder / "router.pt"
    torch.save({"hidden_dim": 64, "bottleneck_dim": 128, "router_layers": {1: layer}}, file)
    return file


def _short_prompts(place: Place, count: int) -> list[torch.Tensor]:
    texts = [text for found in read_prompts().values() for text in found][:count]
    return [place.tokenizer(text, return_tensors="pt")["input_ids"][:, :8] for text in texts]


def _tokens(model: Any, ids: torch.Tensor, options: dict[str, Any], length: int) -> list[int]:
    limits = {"max_new_tokens": length, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **limits, **options)[0].tolist()


def tables(record: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    rows = [[name, str(found["tries"]), str(found["right"]), found["note"]] for name, found in record["faults"].items()]
    rows += [[name, "-", "-", why] for name, why in record["left_out"].items()]
    tables = {"faults": markdown(["fault", "tries", "as it should be", ""], rows)}
    rows = []
    for kind, counts in record.get("damaged", {}).items():
        broke = sum(count for name, count in counts.items() if name not in (REFUSED, SAME, OTHER))
        rows.append([kind, *(str(counts.get(name, 0)) for name in (REFUSED, SAME, OTHER)), str(broke)])
    return tables | {"damaged": markdown(["damaged", REFUSED, SAME, OTHER, "other errors"], rows)}


def checks(record: dict[str, Any]) -> list[Check]:
    """Tokens of threads and of short requests."""
    faults = record["faults"]
    names: Sequence[str] = [name for name in ("threads at once", "short requests") if name in faults]
    return [
        Check(f"faults: {name} give the right tokens", faults[name]["right"] == faults[name]["tries"]) for name in names
    ]
