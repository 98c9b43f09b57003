"""What a graph of a module takes for given."""

import pytest
import torch
from torch import nn

from tide_hf.engines.steps.module_guards import hooks_of, settings_of


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("scale", 1.0, 2.0), ("merged", False, True), ("kind", "a", "b"), ("active", ["a"], ["a", "b"])],
)
def test_a_setting_that_changes_is_seen(name, before, after):
    module = nn.Linear(2, 2)
    setattr(module, name, before)
    first = settings_of(module)
    assert settings_of(module) == first
    setattr(module, name, after)
    assert settings_of(module) != first
    if isinstance(before, list):  # also in place
        getattr(module, name)[:] = before
        assert settings_of(module) == first


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (None, torch.ones(1)), ([torch.ones(2)], [torch.zeros(2)]), (["a", 1], ["a", 2])]
)
def test_what_counts_calls_or_is_set_by_them_is_no_setting(before, after):
    module = nn.Linear(2, 2)
    module.state = before
    first = settings_of(module)
    module.state = after
    assert settings_of(module) == first


@pytest.mark.parametrize("register", [nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook])
def test_a_hook_that_comes_or_goes_is_seen(register):
    module = nn.Linear(2, 2)
    first = hooks_of(module)
    handle = register(module, lambda *_: None)
    assert hooks_of(module) != first
    handle.remove()
    assert hooks_of(module) == first
