"""Calibration records made by hand."""

import functools

import torch
from families import tiny_model

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.calibration.documents import Document
from tide_hf.calibration.record import calibration_record
from tide_hf.calibration.threshold import Decisions, choose_threshold


def made_up_decisions(num_documents=400, length=25):
    """Decisions whose scores are the probability of agreement, so that the scores are calibrated."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_documents * length, 2, generator=generator)
    scores[:, 1] = scores[:, 1] ** 0.1
    agrees = torch.rand(scores.shape, generator=generator) < scores
    return Decisions([4, 12], 16, scores, agrees, torch.arange(num_documents).repeat_interleave(length))


@functools.cache
def made_up_record():
    decisions = made_up_decisions()
    model = tiny_model("llama", num_hidden_layers=16)
    routers = TIDERouters.for_model(model, exit_layers=[4, 12], exit_strategy="linear")
    documents = [Document([1, 2, 3], 1)] * 3
    choice = choose_threshold(decisions, tolerance=0.05, confidence=0.9)
    splits = dict.fromkeys(("fit", "tune", "certify"), documents[:1])
    return calibration_record(decisions, choice, documents, splits, routers, find_structure(model))


ROW = {"agreement": 0.25, "router_auc": 0.7, "expected_calibration_error": 0.02, "exit_rate": 0.125}
SPLIT = {"documents": 5, "tokens": 50}


def record(chosen=0.9):
    table = [
        {"exit_threshold": t, "disagreement": 0.01, "depth_fraction": t, "p_value": 0.01, "certified": t >= chosen}
        for t in (0.99, 0.95, 0.9, 0.8, 0.7)
    ]
    return {
        "exit_layers": {"12": ROW, "4": ROW},  # keys in the order of text, as in a file
        "threshold": {"tolerance": 0.02, "confidence": 0.95, "chosen": chosen, "table": table},
        "data": "texts given by the caller",
        "num_documents": 15,
        "num_tokens": 150,
        "splits": {"fit": SPLIT, "tune": SPLIT, "certify": SPLIT},
        "max_length": 64,
        "seed": 0,
        "dtype": "torch.float32",
        "seconds": 12.5,
        "versions": {"tide_hf": "0.1.0", "torch": "2", "transformers": "5"},
    }
