"""Models that take images: the base model's tokens after prompts with images, by every engine and mode."""

from functools import wraps

import pytest
import torch
from drafters import use_drafter
from families import IMAGE_TOKEN, slow_but
from images import LENGTH, SEEING, image_prompts, long_image_prompts, seeing_model
from on_steps import ATTACH, attach_compiled
from transformers import AutoConfig, MllamaForConditionalGeneration, ViTConfig

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.inputs import TYPES
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError
from tide_hf.engines.eager import LONG_PROMPT
from tide_hf.kernels.cpu.cpp_kernels import are_ready
from tide_hf.speculation.drafters import NoDrafter

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SCORED = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
FAMILIES = tuple(SEEING)
FEW = ("gemma3", "qwen2_5_vl")


def differ_from(answer, expected):
    """The largest difference of logits, in parts of the largest logit; infinite where tokens differ."""
    if not torch.equal(answer.sequences, expected.sequences):
        return float("inf")
    ours, theirs = torch.stack(answer.logits), torch.stack(expected.logits)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("engine", "rows", "family"),
    [
        *(("eager", 3, family) for family in FAMILIES),
        *slow_but(FEW, FAMILIES, "eager", 1),
        *slow_but((*FEW, "paligemma"), FAMILIES, "compiled", 1),  # paligemma counts positions from 1
        *slow_but(FEW, FAMILIES, "captured", 1),
        *slow_but(("qwen2_5_vl",), FAMILIES, "compiled", 3),
        *slow_but(("llava",), FAMILIES, "captured", 3),
    ],
)
def test_tokens_after_images_are_the_base_models(family, engine, rows):
    model, inputs = seeing_model(family), image_prompts(family, rows)
    expected = model.generate(**inputs, **SCORED)
    other = model.generate(**inputs | {"pixel_values": -inputs["pixel_values"]}, **SCORED)
    assert differ_from(other, expected) > 1e-3  # answers depend on the image
    steps = ATTACH[engine](model)
    use_drafter(model, "wrong at the last position", expected.sequences[:, LENGTH:].tolist())
    answer = model.generate(**inputs, **SCORED)
    assert differ_from(answer, expected) < 1e-4
    assert 0 < model.last_exit_stats.accepted < model.last_exit_stats.drafted
    if engine != "eager" and (rows == 1 or family in ("llava", "qwen2_5_vl")):  # some others have sliding windows
        assert steps.replays > 0


@pytest.mark.parametrize("engine", ["compiled", "captured"])
def test_calls_with_and_without_images_share_steps(engine):
    model, inputs = seeing_model("qwen2_5_vl"), image_prompts("qwen2_5_vl")
    text = {"input_ids": inputs["input_ids"].clamp(max=80), "attention_mask": inputs["attention_mask"]}
    expected = [model.generate(**batch, **OPTIONS) for batch in (inputs, text)]
    steps = ATTACH[engine](model)
    model._tide.make_drafter = NoDrafter  # what is drafted, and so the widths, depends on measured times
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected[0])
    made = steps.warm_up.num_prepared
    assert torch.equal(model.generate(**text, **OPTIONS), expected[1])
    assert steps.warm_up.num_prepared == made > 0


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_model_that_takes_images_is_loaded_by_its_name(family, tmp_path):
    model, inputs = seeing_model(family), image_prompts(family)
    model.save_pretrained(tmp_path)
    loaded = TIDEModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, type(model))
    assert torch.equal(loaded.generate(**inputs, **OPTIONS), model.generate(**inputs, **OPTIONS))


def test_a_model_of_neither_kind_is_refused_in_transformers_own_words(tmp_path):
    ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        TIDEModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated")  # by transformers 5.17 itself
def test_cross_attention_to_images_is_left_to_post_hoc():
    vision = {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32, "max_num_tiles": 1}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    vision |= SEEING["gemma3"]["vision_config"]
    text = {**SEEING["llava"]["text_config"], "model_type": "mllama_text_model", "cross_attention_layers": [1]}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mllama", text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN)
    model = MllamaForConditionalGeneration(config).eval()
    ids, one = torch.randint(3, 80, (1, 12)), torch.ones(1, 1, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image = {"pixel_values": torch.randn(1, 1, 1, 3, 16, 16), "aspect_ratio_ids": one, "aspect_ratio_mask": one[None]}
    image["cross_attention_mask"] = torch.ones(1, 12, 1, 1, dtype=torch.long)
    expected = [model.generate(**inputs, **more, **OPTIONS) for more in ({}, image)]
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]))
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected[0])
    assert torch.equal(model.generate(**inputs, **image, **OPTIONS, tide_mode="post_hoc"), expected[1])
    for mode in ("self_speculative", "early_exit"):
        with pytest.raises(UnsupportedOptionError, match=r"got cross_attention_mask.* Choose tide_mode='post_hoc'"):
            model.generate(**inputs, **image, **OPTIONS, tide_mode=mode, tide_strict=True)
    assert torch.equal(model.generate(**inputs, **image, **OPTIONS), expected[1])
    attach_compiled(TIDEModelForCausalLM.detach(model))
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected[0])  # some layers keep nothing of it


def test_a_model_that_computes_positions_by_itself_runs_eagerly(caplog, monkeypatch):
    """As those that make two dimensions of them at each pass."""
    model, inputs = seeing_model("llava"), image_prompts("llava")
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def prepare_without(*args, **options):
        return prepare(*args, **options) | {"position_ids": None}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", prepare_without)
    expected = model.generate(**inputs, **OPTIONS)
    attach_compiled(model)
    with caplog.at_level("INFO", logger="tide_hf"):
        assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert "runs eagerly after prefill: the model computes positions by itself" in caplog.text


@pytest.mark.parametrize(("family", "rows"), [("gemma3", 2), ("qwen2_5_vl", 1)])
@pytest.mark.usefixtures("fresh_kernels")
def test_prefill_kernels_mask_images_as_the_model_does(family, rows):
    model = seeing_model(family, attention="sdpa", max_position_embeddings=512)
    inputs = long_image_prompts(family, rows, 2 * LONG_PROMPT)
    expected = model.generate(**inputs, **SCORED)
    TIDEModelForCausalLM.attach(model)
    model.tide_warm_up()
    assert are_ready(model.dtype)
    assert differ_from(model.generate(**inputs, **SCORED), expected) < 1e-4


@pytest.mark.parametrize(
    ("engine", "family"),
    [*(("eager", family) for family in ("gemma3", "qwen2_5_vl", "qwen3_vl")), ("compiled", "qwen2_5_vl")],
)
def test_a_second_turn_goes_on_after_the_images_of_the_first(family, engine):
    model, inputs = seeing_model(family), image_prompts(family)
    question = torch.randint(3, 80, (1, 9), generator=torch.Generator().manual_seed(5))

    def talk():
        first = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, question], dim=1)
        turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: first[CACHE]}
        for name in TYPES:
            if name in inputs:
                turn[name] = torch.cat([inputs[name], torch.zeros_like(ids[:, LENGTH:])], dim=1)
        return model.generate(**turn, **SCORED)

    expected = talk()
    ATTACH[engine](model)
    assert differ_from(talk(), expected) < 1e-4


@pytest.mark.parametrize("family", slow_but(FEW, FAMILIES))
def test_tokens_exit_after_images_as_they_do_where_all_layers_run(family):
    """K/V stay exact, so the tokens are those of `post_hoc`, which skips nothing."""
    model, inputs = seeing_model(family), image_prompts(family, 3)
    routers = TIDERouters.for_model(model, exit_layers=[1, 2], exit_threshold=0.5)
    TIDEModelForCausalLM.attach(model, routers)
    early = model.generate(**inputs, **OPTIONS, tide_mode="early_exit")
    layers = model.last_exit_stats.per_token
    late = model.generate(**inputs, **OPTIONS, tide_mode="post_hoc")
    assert torch.equal(early, late)
    assert layers == model.last_exit_stats.per_token
    assert len({layer for row in layers for layer in row}) > 1
