"""Draft steps of the exit heads: what they are fed at once is read as what they are fed one by one."""

import pytest
import torch
from families import VOCAB, tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.speculation.drafters import Draft

NEW = 6


class Behind:
    """Has a head draft behind two tokens of another source, fed together or one by one, and throws that away."""

    def __init__(self, shallow, exit_layer):
        self.shallow, self.exit_layer, self.found = shallow, exit_layer, []

    def draft(self, rows, limits):
        if min(limits) > 1:
            others = [[5 + row, 9] for row in rows]
            before = self.shallow.layers_executed
            together = self.shallow.draft(self.exit_layer, others)
            assert self.shallow.layers_executed - before == self.exit_layer * len(rows)
            self.shallow.rollback()
            for length in range(3):
                alone = self.shallow.draft(self.exit_layer, [tokens[:length] for tokens in others])
            self.shallow.rollback()
            self.found.append((together, alone))
        return [Draft() for _ in rows]

    def observe(self, row, draft, new_tokens, n_matches):
        pass


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_head_goes_on_behind_tokens_that_another_source_wrote(family, rows):
    model = tiny_model(family)
    ids = torch.randint(3, VOCAB, (rows, 8), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    torch.nn.init.normal_(routers[2].router.up.weight)  # so that scores tell states apart
    TIDEModelForCausalLM.attach(model, routers)
    drafters = []
    model._tide.make_drafter = lambda _attachment, _prompts, shallow: drafters.append(Behind(shallow, 2)) or drafters[0]
    assert torch.equal(model.generate(ids, **options), expected)
    (drafter,) = drafters
    assert len(drafter.found) > 2
    for together, alone in drafter.found:
        assert together[0] == alone[0]
        assert together[1] == pytest.approx(alone[1], abs=1e-4)
