"""The config of routers: whatever its fields hold, it is used or refused with an error of the library."""

import json
import operator
from contextlib import suppress
from functools import reduce

import pytest
import torch
from draft_heads import draft_head_for
from families import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf import TIDEConfig, TIDEError, TIDERouters
from tide_hf.cli.inspect import _router_lines
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation.inspection import router_facts
from tide_hf.routers.tables import tables_of

GOOD = TIDERouters.for_model(
    tiny_model("llama"), exit_layers=[1, 3], calibration={"exit_layers": {"1": {"agreement": 0.5}}}
).config.to_diff_dict()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
TOLERANCE = {"tolerance": 0.01, "exit_threshold": None, "disagreement": None, "interval": None, "depth_fraction": 1.0}
RECORD = {
    "exit_layers": {
        "1": {"agreement": 0.5, "router_auc": 0.5, "coverage": {"0.99": 0.1}},
        "3": {"agreement": 0.5, "cost": 0.5, "coverage": {"0.99": 0.1, "0.90": 0.5}},
    },
    "threshold": {"tolerance": 0.01, "confidence": 0.95, "chosen": 0.9},
    "draft_head": {"agreement": 0.5, "parameters": 9, "epochs": 2, "curve": [{"tokens": 9, "agreement": 0.5}]},
    "tolerances": [
        {"tolerance": 0.005},
        TOLERANCE,
        TOLERANCE | {"exit_threshold": 0.9, "disagreement": 0.01, "interval": [0.0, 0.1]},
    ],
}


def changed(**fields):
    return {**json.loads(json.dumps(GOOD)), **fields}


def layer_with(**figures):
    return {"exit_layers": {"1": {"agreement": 0.5, **figures}}}


BAD_RECORDS = [
    7,
    {"exit_layers": {"../1": {"agreement": 0.5}}},
    {"exit_layers": {"9" * 4000: {"agreement": 0.5}}},
    layer_with(agreement="high"),
    layer_with(agreement=7),
    layer_with(cost=10**400),
    layer_with(coverage=3),
    {"threshold": None},
    {"threshold": {}},
    {"threshold": {"tolerance": "a", "confidence": None, "chosen": 0.5}},
    {"tolerances": 7},
    {"tolerances": [{}]},
    {"tolerances": [TOLERANCE | {"depth_fraction": []}]},
    {"tolerances": [TOLERANCE | {"interval": [0.1]}]},
    {"tolerances": [TOLERANCE | {"interval": [0.1, float("nan")]}]},
    {"threshold": {"tolerance": 0.01, "confidence": 0.95, "chosen": float("nan")}},
    {"threshold": {"tolerance": 0.01, "confidence": None, "chosen": 0.5}},
    {"num_documents": -1},
    {"draft_head": {"agreement": 0.5, "documents_before": 2**64}},
    {"draft_head": {"agreement": 0.5, "documents_before": None}},  # to which `calibrate` adds
    {"draft_head": {"agreement": 0.5, "parameters": "many"}},
    {"draft_head": {"agreement": 0.5, "parameters": 9, "epochs": []}},
    {"draft_head": {"agreement": 0.5, "curve": [{"tokens": 9, "agreement": float("nan")}]}},
]


@pytest.mark.parametrize(
    "fields",
    [
        *({"exit_layers": layers} for layers in ([], [0], [4], [-1], [1.5], ["1"], [True], "all")),
        {"num_hidden_layers": 10**9, "exit_layers": None},
        {"num_hidden_layers": 0},
        {"hidden_size": 10**12},
        {"vocab_size": 10**30},
        {"router_bottleneck_dim": 2**21},
        {"checkpoint_interval": 0},
        {"translator_rank": 0},
        {"draft_vocab_size": 0},
        {"exit_threshold": 10**400},
        {"exit_threshold": "high"},
        {"compaction_threshold": float("nan")},
        {"exit_strategy": "magic"},
        {"base_model_name_or_path": "x" * 5000},
        {"base_model_name_or_path": "a\nb"},
        {"base_model_revision": "../../refs"},
        {"unembed_hash": "not hexadecimal"},
        {"weights_sha256": "not hexadecimal"},
        {"dtype": "load"},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama"},
        *({"calibration": record} for record in BAD_RECORDS),
        *({"draft_head": shape} for shape in (7, [], {}, {"hidden_size": 32})),
        {"some_new_field": 1},
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_values_that_are_refused(fields):
    with pytest.raises(ConfigurationError, match=r": got (.|\n)*\. Expected .*\. ") as refused:
        TIDEConfig.from_dict(changed(**fields))
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    "fields",
    [
        {"calibration": None},
        {"calibration": RECORD},
        {"calibration": {"heads": {"1": {"loss": float("inf")}}}},  # which nothing reads
        {"calibration": {"num_documents": 0, "draft_head": {"agreement": 1.0, "documents_before": 2**63}}},
        {"exit_threshold": 0, "compaction_threshold": 0.0},
        {"base_model_name_or_path": "x" * 1024, "base_model_revision": "v1.0/a-b+c"},
        {"unembed_hash": "f" * 64, "weights_sha256": None},
        {"router_bottleneck_dim": 1, "min_layers": 1},
        {"dtype": "bfloat16", "architectures": ["TIDERouters"], "model_type": "tide"},
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_values_that_are_accepted(fields):
    config = TIDEConfig.from_dict(changed(**fields))
    for name, value in fields.items():
        assert name == "dtype" or getattr(config, name) == value
    assert TIDEConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 2**21, f"hidden_size of {2**21} is not a whole number from 1 to {2**20}"),
        ("draft_vocab_size", 0, f"draft_vocab_size of 0 is not a whole number from 1 to {2**24}"),
        ("head_dim", True, "'head_dim' expected int, got bool"),
        ("qk_norm", 1, "'qk_norm' expected bool, got int"),
        ("hidden_act", "exec", "'hidden_act' expected one of"),
        ("tap_layers", [3, 1], r"tap_layers of \[3, 1\] are not 1 to 16 ascending"),
        ("tap_layers", [], r"tap_layers of \[\] are not"),
        ("tap_layers", [-1], "are not 1 to 16 ascending numbers of layers"),
        (
            "tap_layers",
            [4, 5],
            r"invalid tap_layers in draft_head: got \[4, 5\]. Expected layers of a model that has 4",
        ),
        ("rms_norm_eps", float("nan"), "rms_norm_eps of nan is not a small positive number"),
        ("num_key_value_heads", 3, "num_key_value_heads of 3 does not divide"),
        ("rope_parameters", {"rope_type": "exec"}, "are not numbers and a rope_type of"),
        ("rope_parameters", {"factor": [[1]]}, "are not numbers"),
        ("target_hidden_size", 64, "invalid target_hidden_size in draft_head: got 64. Expected 32, the base model's"),
        (
            "another",
            1,
            "invalid draft_head: got .*unexpected keyword argument 'another'.* Expected fields of hidden_size",
        ),
    ],
)
def test_draft_heads_that_are_refused(field, value, message):
    fields = draft_head_for(tiny_model("llama")).config.to_dict()
    fields["draft_head"][field] = value
    with pytest.raises(ConfigurationError, match=message) as refused:
        TIDEConfig.from_dict(fields)
    assert "Load the head again" in str(refused.value)


def paths(value, path=()):
    """The paths of all values inside a value, its own among them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for name, one in inner for found in paths(one, (*path, name)))]


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(paths(GOOD | {"calibration": RECORD})[1:]), value=JSON)
def test_any_config_is_refused_or_can_be_used_and_shown(path, value):
    fields = changed(calibration=json.loads(json.dumps(RECORD)), exit_threshold=0.9)
    reduce(operator.getitem, path[:-1], fields)[path[-1]] = value
    with suppress(TIDEError), torch.device("meta"):
        config = TIDEConfig.from_dict(fields)
        facts = router_facts(TIDERouters(config))
        tables_of(facts, 4)
        _router_lines(facts)


def test_default_exit_layers_follow_the_interval_and_the_minimum():
    deep = {"hidden_size": 32, "num_hidden_layers": 30, "vocab_size": 96}
    assert TIDEConfig(**deep).exit_layers == [8, 12, 16, 20, 24, 28]
    assert TIDEConfig(**deep, checkpoint_interval=10, min_layers=20).exit_layers == [20]
    assert TIDEConfig(**deep, exit_layers=[3, 1, 3]).exit_layers == [1, 3]  # min_layers does not apply
    assert TIDEConfig(**deep | {"num_hidden_layers": 4}).exit_layers == [2]


@pytest.mark.parametrize("strategy", ["recompute", "propagate"])
def test_a_field_of_earlier_versions_is_left_out(strategy, caplog):
    assert not hasattr(TIDEConfig.from_dict(changed(kv_cache_strategy=strategy)), "kv_cache_strategy")
    assert ("kv_cache_strategy='propagate' is gone" in caplog.text) == (strategy == "propagate")
