"""Processors and criteria that look at a whole batch see what plain decoding shows them, whatever rows have drafted."""

import pytest
import torch
from calls import PROCESSED
from drafters import KINDS, use_drafter
from families import tiny_model
from on_steps import OPTIONS, PROMPT, new_tokens, prompts
from on_steps import attach_captured as attach
from transformers import LogitsProcessor, MinPLogitsWarper, StoppingCriteria, SynthIDTextWatermarkingConfig

from tide_hf.base_model.structure import CACHE

NEW, ROWS = 24, 4
GREEDY = {**OPTIONS, "max_new_tokens": NEW}


def answers(options, kind="mixed", captured=False):
    """Plain decoding's answer, and ours with the statistics; `options()` makes processors and criteria for each."""
    model, batch = tiny_model("llama"), prompts(ROWS, pads=3)
    torch.manual_seed(0)
    expected = model.generate(**batch, **GREEDY | options())
    sequences = expected if isinstance(expected, torch.Tensor) else expected.sequences
    attach(model)
    use_drafter(model, kind, new_tokens(sequences))
    torch.manual_seed(0)
    engine = "compiled" if captured else "eager"
    return expected, model.generate(**batch, **GREEDY | options(), tide_engine=engine), model.last_exit_stats


class Calls(LogitsProcessor):
    """Notes what it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.tolist(), tuple(scores.shape)))
        return scores


class FirstRowEndsAll(StoppingCriteria):
    """Written for one sequence, as many are: its answer is no tensor, and holds for every row."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] > PROMPT + 4 and int(input_ids[0, -1]) % 2 == 0


class RowsEndApart(StoppingCriteria):
    """Ends a row once it has as many tokens as one of its prompt is worth."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= PROMPT + 4 + int(row[3]) % 7 for row in input_ids])


class Padded(RowsEndApart):
    eos_token_id = None  # by this name plain decoding knows that rows are padded


def own_words(row, ids):
    return list(range(3 + 20 * row, 23 + 20 * row))


WHOLE_BATCH = {
    "words for each row": lambda: {"prefix_allowed_tokens_fn": own_words},
    "guidance": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": prompts(ROWS)["input_ids"].flip(0)[:, :5]},
    "the prompt's words": lambda: {"encoder_repetition_penalty": 1.5},
    "the prompt's n-grams": lambda: {"encoder_no_repeat_ngram_size": 2},
    "watermark": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3),
        "do_sample": True,
    },
    "a user's own": lambda: {"logits_processor": [Calls()]},
    "one row ends all": lambda: {"stopping_criteria": [FirstRowEndsAll()]},
    "rows run on": lambda: {"stopping_criteria": [RowsEndApart()]},
    "rows are padded": lambda: {"stopping_criteria": [Padded()]},
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("options", WHOLE_BATCH.values(), ids=WHOLE_BATCH)
def test_what_looks_at_a_batch_gives_plain_decodings_tokens(options, kind, captured):
    expected, found, stats = answers(options, kind, captured)
    assert torch.equal(found, expected)
    assert stats.accepted > 0 or kind not in ("right", "wrong at the last position")


@pytest.mark.parametrize("padded", [False, True])
def test_scores_and_caches_are_plain_decodings(padded):
    def options():
        returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        return {"stopping_criteria": [Padded() if padded else RowsEndApart()], **returned}

    expected, found, _ = answers(options)
    for name in ("sequences", "scores", "logits"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-3, rtol=1e-3)
    for layer, other in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)


def calls_of(kind_of_processor, kind):
    """What plain decoding, and ours, asks such a processor."""
    made = []

    def options():
        made.append(kind_of_processor())
        return {"logits_processor": made[-1:]}

    answers(options, kind)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_is_asked_what_plain_decoding_asks(kind):
    plain, own = calls_of(Calls, kind)
    assert own.seen == plain.seen


def test_right_drafts_are_all_accepted_and_save_passes():
    *_, stats = answers(WHOLE_BATCH["words for each row"], "right")
    assert stats.acceptance_rate == 1.0
    assert stats.layers_executed == ROWS * 4 * (1 + -(-(NEW - 1) // 4))


@pytest.mark.parametrize(
    "options",
    [
        *PROCESSED,
        {"logits_processor": [MinPLogitsWarper(0.1)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_looks_at_rows_lets_each_accept_by_itself(options):
    expected, found, stats = answers(lambda: options)
    assert torch.equal(found, expected)
    assert stats.accepted > 0  # though another row's drafts are always wrong


def test_a_class_of_a_known_name_is_not_a_known_class():
    class TopKLogitsWarper(Calls):
        """Looks at batches."""

    plain, own = calls_of(TopKLogitsWarper, "mixed")
    assert own.seen == plain.seen
