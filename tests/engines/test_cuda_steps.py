"""What a GPU asks of captured steps, as far as a CPU shows it; on a GPU see test_gpu.py."""

import torch
from on_steps import use_steps
from recorded import as_it_is
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.static import free_memory
from tide_hf.engines.steps.captured_steps import CapturedSteps
from tide_hf.engines.steps.static_cache import StaticCacheSlots, static_cache
from tide_hf.engines.steps.step_store import reserved_bytes


class Copies(TorchDispatchMode):
    """Counts copies between devices; "meta" stands in for a GPU."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device = (kwargs or {}).get("device")
        self.number += func is torch.ops.aten._to_copy.default and device not in (None, args[0].device)
        return func(*args, **(kwargs or {}))


def test_layers_are_compacted_by_one_copy_to_the_device():
    like = DynamicCache()
    for layer_idx in range(4):
        like.update(*torch.zeros((2, 3, 2, 5, 8), device="meta"), layer_idx)
    slots = StaticCacheSlots(
        static_cache(like, 3, 32), 5, torch.ones((3, 5), dtype=torch.long), compaction_threshold=1.0
    )
    slots.commit(4, [1, 4, 2])
    with Copies() as copies:
        slots.settle()
    assert slots.num_compactions == 1
    assert copies.number == 1


def test_memory_of_steps_is_without_what_is_kept_for_later(monkeypatch):
    held = {"steps": 5, "for later": 100, "of cuBLAS": 32}
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: sum(held.values()))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: held.pop("for later", None))
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: held.pop("of cuBLAS", None), raising=False)
    device = torch.device("cuda:0")
    before = reserved_bytes(device)
    held["steps"] += 7
    torch.cuda.empty_cache()  # which the beginning of a capture does
    held["for later"] = 20
    assert reserved_bytes(device) - before == 7
    assert reserved_bytes(torch.device("cpu")) == 0


def test_buffers_that_are_there_need_no_memory(tiny_llama, monkeypatch):
    model, ids = tiny_llama(), torch.arange(3, 11)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    TIDEModelForCausalLM.attach(model, engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    model.generate(ids, **options)
    replays = steps.replays
    monkeypatch.setattr("tide_hf.engines.static.MEMORY_SHARE", 0.0)
    model.generate(ids, **options)
    assert steps.replays == 2 * replays
    model.generate(ids, **{**options, "max_new_tokens": 600})  # for which they are too small
    assert steps.replays == 2 * replays


def test_memory_that_pytorch_keeps_is_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 50)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 20)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10, 80))
    assert free_memory(torch.device("cuda:0")) == 40
