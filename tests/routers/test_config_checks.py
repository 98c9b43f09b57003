"""A routers' config may be anybody's: whatever its fields hold, it is used or refused with an error of ours."""

import json
import operator
from contextlib import suppress
from functools import reduce

import pytest
import torch
from families import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_hf import TIDEError, TIDERouters
from tide_hf.cli.inspect import _router_lines
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation.inspection import router_facts
from tide_hf.routers.config import TIDEConfig
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
    "tolerances": [
        {"tolerance": 0.005},
        TOLERANCE,
        TOLERANCE | {"exit_threshold": 0.9, "disagreement": 0.01, "interval": [0.0, 0.1]},
    ],
}
BLOCK = {"model_type": "llama", "num_hidden_layers": 2}


def changed(**fields):
    return {**json.loads(json.dumps(GOOD)), **fields}


@settings(max_examples=400, deadline=None)
@given(field=st.sampled_from([*TIDEConfig.__annotations__, "dtype", "architectures", "model_type"]), value=JSON)
def test_any_value_in_any_field(field, value):
    with suppress(TIDEError):
        TIDEConfig.from_dict(changed(**{field: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9, "exit_layers": None},
        {"hidden_size": 10**12},
        {"vocab_size": 10**30},
        {"router_bottleneck_dim": 2**21},
        {"exit_threshold": 10**400},
        {"compaction_threshold": float("nan")},
        {"compaction_threshold": -1},
        {"base_model_name_or_path": "x" * 5000},
        {"base_model_name_or_path": "a\nb"},
        {"base_model_revision": "../../refs"},
        {"base_model_revision": "/etc"},
        {"unembed_hash": "not hexadecimal"},
        {"unembed_hash": "f" * 10**5},
        {"weights_sha256": "not hexadecimal"},
        {"dtype": "load"},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama"},
        {"calibration": {"exit_layers": {"../1": {"agreement": 0.5}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": "high"}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": 7}}}},
        {"calibration": 7},
        {"calibration": [{"exit_layers": {}}]},
        {"calibration": {"exit_layers": {"01": {"agreement": 0.5}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": 0.5, "router_auc": "x"}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": 0.5, "cost": 10**400}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": 0.5, "coverage": 3}}}},
        {"calibration": {"exit_layers": {"1": {"agreement": 0.5, "coverage": {"most": 0.5}}}}},
        {"calibration": {"threshold": None}},
        {"calibration": {"threshold": [1]}},
        {"calibration": {"threshold": {}}},
        {"calibration": {"threshold": {"tolerance": "a", "confidence": None, "chosen": 0.5}}},
        {"calibration": {"tolerances": 7}},
        {"calibration": {"tolerances": [{}]}},
        {"calibration": {"tolerances": [TOLERANCE | {"depth_fraction": []}]}},
        {"calibration": {"tolerances": [TOLERANCE | {"disagreement": "little"}]}},
        {"calibration": {"tolerances": [TOLERANCE | {"interval": [0.1]}]}},
        {"calibration": {"tolerances": [TOLERANCE | {"interval": 0.1}]}},
        {"calibration": {"num_documents": "many"}},
        {"calibration": {"num_documents": -1}},
        {"calibration": {"block": {"agreement": 0.5, "documents_before": 2**64}}},
        {"calibration": {"exit_layers": {}, "block": {}}},
        {"block_layer": 1, "block_config": None},
        {"block_layer": 1, "block_config": {"model_type": "tide"}},
        {"block_layer": 1, "block_config": {**BLOCK, "num_hidden_layers": 10**9}},
        {"block_layer": 1, "block_config": {**BLOCK, "num_local_experts": 10**9}},
        {"block_layer": 1, "block_config": {**BLOCK, "attn_implementation": "org/kernel"}},
        {"block_layer": 1, "block_config": {**BLOCK, "auto_map": {}}},
        {"block_layer": None, "block_config": BLOCK},
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
        {"calibration": {"exit_layers": {"1": {"agreement": 1}, "4095": {"agreement": 0.0}}}},
        {"calibration": {"num_documents": 0, "block": {"agreement": 1.0, "documents_before": 2**63}}},
        {"calibration": {"tolerances": []}},
        {"exit_threshold": 0, "compaction_threshold": 0.0},
        {"base_model_name_or_path": "x" * 1024, "base_model_revision": "v1.0/a-b+c"},
        {"unembed_hash": "f" * 64, "weights_sha256": None},
        {"router_bottleneck_dim": 1, "min_layers": 1},
        {"block_layer": 1, "block_config": {**BLOCK, "num_hidden_layers": 2**12}},
        {"dtype": "bfloat16", "architectures": ["TIDERouters"], "model_type": "tide"},
    ],
    ids=lambda fields: repr(fields)[:60],
)
def test_values_that_are_taken(fields):
    config = TIDEConfig.from_dict(changed(**fields))
    for name, value in fields.items():
        assert name == "dtype" or getattr(config, name) == value


def places(value, place=()):
    """The places of all values inside a value, its own among them."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for name, one in inner for found in places(one, (*place, name)))]


@settings(max_examples=400, deadline=None)
@given(place=st.sampled_from(places(RECORD)[1:]), value=JSON)
def test_a_record_is_refused_or_can_be_shown(place, value):
    record = json.loads(json.dumps(RECORD))
    reduce(operator.getitem, place[:-1], record)[place[-1]] = value
    with suppress(TIDEError):
        config = TIDEConfig.from_dict(changed(calibration=record, exit_threshold=0.9))
        facts = router_facts(TIDERouters(config))
        tables_of(facts, 4)
        _router_lines(facts)


@pytest.mark.parametrize("text", ["3", "null", "[1]", '"text"', "[" * 10**5, '{"hidden_size": 1' + "0" * 5000 + "}"])
def test_a_file_without_an_object_in_it(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ConfigurationError, match=r"the config of the routers cannot be used: got (.|\n)*Expected a config"
    ):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "block",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"model_type": "none"},
        {"model_type": "vit"},
        {"rope_parameters": 3},
    ],
    ids=str,
)
def test_a_block_that_no_model_has(block):
    config = TIDEConfig.from_dict(changed(block_layer=1, block_config={**BLOCK, **block}))
    with pytest.raises(TIDEError, match=r": got .*Expected .*"), torch.device("meta"):
        TIDERouters(config)


def test_a_config_survives_its_own_dictionary():
    config = TIDEConfig.from_dict(changed())
    assert TIDEConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
