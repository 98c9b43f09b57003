"""`TIDELogitsProcessor` is `post_hoc` without attaching."""

import pytest
import torch
from draft_heads import REFERENCE, base_model
from families import FAMILIES, VOCAB, prompt, tiny_model
from skipping_calls import random_routers

from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import (
    BaseModelMismatchError,
    ConfigurationError,
    RoutersNotFoundError,
    UnsupportedModelError,
    UnsupportedOptionError,
)

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_post_hoc(family):
    model = tiny_model(family)
    routers = random_routers(model, exit_threshold=0.5)
    plain = model.generate(prompt(2), **OPTIONS)
    with TIDELogitsProcessor(model, routers) as processor:
        result = model.generate(prompt(2), logits_processor=[processor], **OPTIONS)
    assert torch.equal(model.generate(prompt(2), **OPTIONS), plain)
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc")
    assert torch.equal(model.generate(prompt(2), **OPTIONS), result)
    assert model.last_exit_stats.exit_rate > 0


def test_a_draft_head_alone_has_no_exit_layers():
    with pytest.raises(UnsupportedOptionError, match="TIDELogitsProcessor has no layer at which tokens could exit"):
        TIDELogitsProcessor(base_model(), str(REFERENCE / "llama"))


def test_routers_may_be_a_path(tmp_path):
    model = tiny_model("llama")
    random_routers(model).save_pretrained(tmp_path)
    with TIDELogitsProcessor(model, tmp_path) as named, TIDELogitsProcessor(model, str(tmp_path)) as same:
        assert named.routers.exit_layers == same.routers.exit_layers == [1, 3]
    with pytest.raises(RoutersNotFoundError):
        TIDELogitsProcessor(model, tmp_path / "none")


def test_unusable_arguments_are_refused():
    model = tiny_model("llama")
    with pytest.raises(ConfigurationError, match="invalid exit_threshold"):
        TIDELogitsProcessor(model, random_routers(model), exit_threshold="high")
    with pytest.raises(BaseModelMismatchError):
        TIDELogitsProcessor(tiny_model("llama", seed=4), random_routers(model))
    with pytest.raises(UnsupportedModelError, match="is for models without TIDE: got a model that TIDE is attached to"):
        TIDELogitsProcessor(TIDEModelForCausalLM.attach(tiny_model("llama")), random_routers(model))
    with TIDELogitsProcessor(model, random_routers(model)) as processor:
        cache = model(input_ids=prompt(2), use_cache=True)[CACHE]
        model(input_ids=prompt(2)[:, :1], **{CACHE: cache})
        with pytest.raises(UnsupportedOptionError, match="got 3 rows of scores for 2 rows of states"):
            processor(prompt(3), torch.zeros(3, VOCAB))
