"""What can only be seen on a GPU: `pytest -m gpu`."""

import pytest
import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("cache", [None, "offloaded", "static"])
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_the_base_model_s(family, cache, rows):
    if cache == "static" and (rows > 1 or family == "gemma2"):
        pytest.skip("refused with a typed error")
    model = tiny_model(family).cuda()
    ids = torch.randint(3, 90, (rows, 9), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(ids, **options), expected)
