"""Processors and criteria that look at whole batches are called as in plain decoding, whatever rows have drafted."""

import pytest
import torch
from drafters import use_drafter
from families import tiny_model
from on_steps import OPTIONS, PROMPT, attach_captured, new_tokens, prompts
from transformers import LogitsProcessor, MinPLogitsWarper, StoppingCriteria, SynthIDTextWatermarkingConfig

from tide_hf.base_model.structure import CACHE

NEW, ROWS = 24, 4
GREEDY = {**OPTIONS, "max_new_tokens": NEW}


def answers(options, kind="mixed", engine="eager"):
    """Plain decoding's answer, and ours with the statistics; `options()` makes processors and criteria for each."""
    model, batch = tiny_model("llama"), prompts(ROWS, pads=3)
    torch.manual_seed(0)
    expected = model.generate(**batch, **GREEDY | options())
    sequences = expected if isinstance(expected, torch.Tensor) else expected.sequences
    attach_captured(model)
    use_drafter(model, kind, new_tokens(sequences))
    torch.manual_seed(0)
    return expected, model.generate(**batch, **GREEDY | options(), tide_engine=engine), model.last_exit_stats


class Calls(LogitsProcessor):
    """Records its arguments."""

    def __init__(self):
        self.arguments = []

    def __call__(self, input_ids, scores):
        self.arguments.append((input_ids.tolist(), tuple(scores.shape)))
        return scores


class FirstRowEndsAll(StoppingCriteria):
    """Written for one sequence, as many are: its answer is no tensor, and holds for every row."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] > PROMPT + 4 and int(input_ids[0, -1]) % 2 == 0


class RowsEndApart(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= PROMPT + 4 + int(row[3]) % 7 for row in input_ids])


class Padded(RowsEndApart):
    eos_token_id = None  # plain decoding pads rows that end by a criterion with this attribute


def words_of_row(row, ids):
    return list(range(3 + 20 * row, 23 + 20 * row))


WHOLE_BATCH = {
    "words for each row": lambda: {"prefix_allowed_tokens_fn": words_of_row},
    "guidance": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": prompts(ROWS)["input_ids"].flip(0)[:, :5]},
    "the prompt's words": lambda: {"encoder_repetition_penalty": 1.5},
    "the prompt's n-grams": lambda: {"encoder_no_repeat_ngram_size": 2},
    "watermark": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3),
        "do_sample": True,
    },
    "a user's own": lambda: {"logits_processor": [Calls()]},
    "one row ends all": lambda: {"stopping_criteria": [FirstRowEndsAll()]},
    "rows without padding": lambda: {"stopping_criteria": [RowsEndApart()]},
    "rows with padding": lambda: {"stopping_criteria": [Padded()]},
}


@pytest.mark.parametrize(("name", "engine"), [*((name, "eager") for name in WHOLE_BATCH), ("guidance", "compiled")])
def test_processors_and_criteria_on_whole_batches_give_what_plain_decoding_gives(name, engine):
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found, _ = answers(lambda: WHOLE_BATCH[name]() | returned, engine=engine)
    for field in ("sequences", "scores", "logits"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), atol=1e-3, rtol=1e-3)
    for layer, other in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)


class TopKLogitsWarper(Calls):
    """Has the name of a processor that looks at each row by itself, and looks at batches."""


@pytest.mark.parametrize(("processor", "kind"), [(Calls, "mixed"), (Calls, "right"), (TopKLogitsWarper, "mixed")])
def test_a_processor_is_called_as_in_plain_decoding(processor, kind):
    made = []
    answers(lambda: made.append(processor()) or {"logits_processor": made[-1:]}, kind)
    plain, ours = made
    assert ours.arguments == plain.arguments


def test_right_drafts_are_all_accepted_and_save_passes():
    expected, found, stats = answers(WHOLE_BATCH["words for each row"], "right")
    assert torch.equal(found, expected)
    assert stats.acceptance_rate == 1.0
    assert stats.layers_executed == ROWS * 4 * (1 + -(-(NEW - 1) // 4))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": [5, 9, 11, 40, 41, 42, 43]},
        {"bad_words_ids": [[7], [9, 10]]},
        {"logits_processor": [MinPLogitsWarper(0.1)]},
    ],
    ids=lambda one: next(iter(one)),
)
def test_processors_of_single_rows_let_each_row_accept_by_itself(options):
    expected, found, stats = answers(lambda: options)
    assert torch.equal(found, expected)
    assert stats.accepted > 0  # though another row's drafts are always wrong
