"""What answers to a data set depend on: work goes on by the same settings alone."""

import pytest
import torch
from test_dataset_generation import LAYOUT, OPTIONS, prompts, read
from test_evaluation import random_routers
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from tide_hf import TIDEModelForCausalLM, generate_dataset
from tide_hf.errors import DatasetError, UnsupportedOptionError


@pytest.fixture
def parts(tiny_llama, tiny_tokenizer):
    return TIDEModelForCausalLM.attach(tiny_llama()), tiny_tokenizer


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 7}, "'max_new_tokens': '6'.*now.*'max_new_tokens': '7'"),
        ({"prompts": prompts(9)}, "data_hash="),
        ({"shard_size": 5}, r"shard_size=4 \(now 5\)"),
    ],
)
def test_answers_by_other_settings_are_not_mixed(parts, tmp_path, changed, message):
    options = {"prompts": prompts(), **LAYOUT, **OPTIONS}
    generate_dataset(*parts, output_dir=tmp_path, **options)
    with pytest.raises(
        DatasetError,
        match=f"the work of another data set, or one by other settings: got .*{message}.*start it as it was",
    ):
        generate_dataset(*parts, output_dir=tmp_path, **options | changed)


def test_answers_by_another_generation_config_are_not_mixed(parts, tmp_path):
    generate_dataset(*parts, ["a"], tmp_path, **OPTIONS)
    parts[0].generation_config.repetition_penalty = 5.0
    with pytest.raises(DatasetError, match=r"got generation_config=.*now .*'repetition_penalty': '5\.0'"):
        generate_dataset(*parts, ["a"], tmp_path, **OPTIONS)


@pytest.mark.parametrize(("mode", "decides"), [("early_exit", True), ("post_hoc", True), ("self_speculative", False)])
@pytest.mark.parametrize("by_option", [True, False])
def test_answers_by_other_routers_are_not_mixed_where_they_decide(parts, tmp_path, mode, decides, by_option):
    base = TIDEModelForCausalLM.detach(parts[0])

    def answer(routers):
        usual = {"mode": "post_hoc" if mode == "self_speculative" else "self_speculative"} if by_option else {}
        model = TIDEModelForCausalLM.attach(base, routers, **{"mode": mode, **usual})
        asked = {"tide_mode": mode} if by_option else {}
        return read(generate_dataset(model, parts[1], ["a"], tmp_path, **OPTIONS, **asked))

    routers = random_routers(base)
    first = answer(routers)
    with torch.no_grad():
        next(routers.parameters()).add_(1.0)
    if decides:
        with pytest.raises(DatasetError, match=r"got routers_hash='\w+' \(now '\w+'\)"):
            answer(routers)
    else:
        assert answer(routers) == first


def only_b(_row, _tokens):
    return [98]


class Threshold:
    """Stands for a user's criterion that is told a number."""

    def __init__(self, most, seen=None):
        self.most, self.seen = most, seen

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def objects(temperature=0.5, suppressed=5, most=3):
    """Options that are objects, made anew."""
    return {
        "logits_processor": LogitsProcessorList(
            [TemperatureLogitsWarper(temperature), SuppressTokensLogitsProcessor([suppressed])]
        ),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(40), Threshold(most, {"by": (only_b, {1, 2})})]),
        "generation_config": GenerationConfig(do_sample=False),
        "prefix_allowed_tokens_fn": only_b,
    }


@pytest.mark.parametrize("changed", [{}, {"temperature": 0.25}, {"suppressed": 6}, {"most": 4}], ids=str)
def test_options_that_are_objects_are_told_apart_by_what_they_hold(parts, tmp_path, changed):
    first = generate_dataset(*parts, ["a"], tmp_path, max_new_tokens=3, **objects())
    kept = objects()  # elsewhere in memory
    if changed:
        with pytest.raises(DatasetError, match=f"generate_options=.*{next(iter(changed.values()))}"):
            generate_dataset(*parts, ["a"], tmp_path, max_new_tokens=3, **objects(**changed))
    assert generate_dataset(*parts, ["a"], tmp_path, max_new_tokens=3, **kept) == first


def holding_itself():
    criterion = Threshold(1)
    criterion.seen = criterion
    return criterion


@pytest.mark.parametrize("make", [lambda: lambda *_: [98], holding_itself])
def test_options_that_cannot_be_recognised_are_refused(parts, tmp_path, make):
    name = "prefix_allowed_tokens_fn"
    with pytest.raises(
        UnsupportedOptionError, match=rf"could not tell .* the same: got {name}=.* at 0x.*Expected a val"
    ):
        generate_dataset(*parts, ["a"], tmp_path / "out", **OPTIONS, **{name: make()})
    assert not (tmp_path / "out").exists()
