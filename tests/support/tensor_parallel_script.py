"""One of two processes that share a model; `test_tensor_parallel.py` starts them.

The two processes measure different times and draw different random numbers.
"""

import json
import os
import sys

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.engines import round_clock

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
rank = int(os.environ["RANK"])
ids = torch.arange(5, 15)[None]
options = {"max_new_tokens": 40, "do_sample": False}
plain = model.generate(ids, **options)
routers = TIDERouters.for_model(model, exit_layers=[1, 2], calibration={"exit_layers": {"1": {"agreement": 0.9}}})
TIDEModelForCausalLM.attach(model, routers)

now, ticks = 0.0, 0


def perf_counter():
    """A clock by which all passes take equally long in process 0, and each takes longer than the last in process 1."""
    global now, ticks  # noqa: PLW0603
    ticks += 1
    now += 0.01 * (1 + rank * ticks)
    return now


round_clock.perf_counter = perf_counter
tokens, drafted = [], []
for seed, sampling in ((0, {}), (0, {}), (rank, {"do_sample": True, "temperature": 1.5})):
    torch.manual_seed(seed)
    tokens.append(model.generate(ids, **{**options, **sampling}).tolist())
    drafted.append([model.last_exit_stats.drafted, model.last_exit_stats.rounds])
costs = {f"{key}": table.verify(1) for key, table in model._tide.costs.items()}
found = {"plain": plain.tolist(), "tokens": tokens, "drafted": drafted, "costs": costs}
with open(f"{sys.argv[2]}/{rank}.json", "w", encoding="utf-8") as file:
    json.dump(found, file)
distributed.barrier()
os._exit(0)  # skips clean-up, which aborted one process in ten on a busy machine ('terminate called')
