"""Whether samples of `self_speculative` have the base model's distribution, by a chi-square test."""

import itertools
import math
from collections import Counter

import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.speculation.drafts import ROOT, Draft

VOCAB, LENGTH, SAMPLES = 5, 3, 4000
WARPERS = {"do_sample": True, "temperature": 0.8, "top_k": 4, "eos_token_id": None}
PROMPT = torch.tensor([[1, 3, 2, 4]])


class BadDrafter:
    """Drafts the same tree every round: two tokens, of which the first is likely now and then, and others beside."""

    def draft(self, rows, limits):
        return [self._draft(limit) for limit in limits]

    def _draft(self, limit):
        draft = Draft().add([2, 1][:limit], "script", probability=0.9)
        if limit > 1:
            draft.add([3], "script", parent=0, probability=0.2)
        return draft.add([4, 3][:limit], "script", parent=ROOT, probability=0.1)

    def observe(self, row, draft, accepted):
        pass


def model_for_sampling():
    """An attached model with a tiny vocabulary, whose drafts are mostly rejected."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = tiny_model("llama", vocab_size=VOCAB, **tokens)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)  # flatter, so that many sequences are likely
    TIDEModelForCausalLM.attach(model)
    model._tide.make_drafter = lambda *_: BadDrafter()
    return model


def exact_probabilities(model) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `LENGTH` tokens under temperature and top-k, by enumeration."""
    probabilities = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        ids = torch.cat([PROMPT, torch.tensor([sequence])], dim=1)
        with torch.no_grad():
            logits = (
                model(input_ids=ids.to(model.device)).logits.cpu()[0, PROMPT.shape[1] - 1 : -1].float()
                / WARPERS["temperature"]
            )
        kept = torch.where(logits >= logits.topk(WARPERS["top_k"]).values[:, -1:], logits, -torch.inf)
        steps = kept.softmax(dim=-1)[range(LENGTH), list(sequence)]
        probabilities[sequence] = float(steps.prod())
    return probabilities


def samples(model) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    result = []
    for _ in range(SAMPLES // 500):
        output = model.generate(PROMPT.to(model.device), max_new_tokens=LENGTH, num_return_sequences=500, **WARPERS)
        result += [tuple(row) for row in output[:, PROMPT.shape[1] :].tolist()]
    return result


def chi_square_excess(observed: Counter, expected: dict[object, float]) -> float:
    """Chi-square statistic over its critical value at a significance of 1e-3; above 1 the fit is rejected.

    Cells that expect fewer than five are merged. The critical value is Wilson and Hilferty's approximation.
    """
    rare = [cell for cell, probability in expected.items() if probability * SAMPLES < 5]
    cells = [(observed[cell], expected[cell] * SAMPLES) for cell in expected if cell not in rare]
    merged = sum(observed[cell] for cell in rare), sum(expected[cell] for cell in rare) * SAMPLES
    cells += [merged] if merged[1] > 0 else []
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / critical


def check_distribution(model):
    """Check the distribution of tokens and sequences."""
    exact, drawn = exact_probabilities(model), samples(model)
    assert all(exact[sequence] > 0 for sequence in drawn)
    assert model.last_exit_stats.accepted > 0
    assert chi_square_excess(Counter(drawn), exact) < 1
    second = {token: sum(p for sequence, p in exact.items() if sequence[1] == token) for token in range(VOCAB)}
    assert chi_square_excess(Counter(sequence[1] for sequence in drawn), second) < 1
