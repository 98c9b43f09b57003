"""Small calibrations."""

import json
import random

import torch
from torch import nn

from tide_hf import calibrate

OPTIONS = {"samples": 20, "max_length": 8, "exit_layers": [1, 2], "batch_size": 8, "progress": False}
OPTIONS["exit_strategy"] = "linear"
WORDS = [
    "the", "river", "runs", "to", "a", "wide", "cold", "sea", "and", "then",
    "it", "comes", "back", "as", "rain", "in", "spring",
]  # fmt: skip
TIMES = ("seconds", "resumed_units", "num_processes")


def texts(count):
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=6)) + f" {number}" for number in range(count)]


def small(model, tokenizer, dataset=None, **options):
    """Calibrate with `OPTIONS` on one thread: faster for tiny models, and with the results of several processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return calibrate(model, tokenizer, dataset, **OPTIONS | options)
    finally:
        torch.set_num_threads(threads)


def without_times(routers):
    record = {name: value for name, value in routers.config.calibration.items() if name not in TIMES}
    return json.loads(json.dumps(record)), routers.config.exit_layers, routers.config.exit_threshold


def assert_same(first, second):
    assert without_times(first) == without_times(second)
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class PackedHead(nn.Module):
    """An output head that stores 8-bit weights and dequantises them at each call."""

    def __init__(self, weight):
        super().__init__()
        self.scale = float(weight.abs().max()) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states):
        return states @ (self.weight.to(states.dtype) * self.scale).T
