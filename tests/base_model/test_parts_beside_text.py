"""Multimodal models: attention is changed in the text model alone, and restored in all parts."""

import pytest
import torch
from drafters import use_drafter
from families import _COMMON, prompt
from transformers import PreTrainedModel, VibeVoiceAsrConfig, VibeVoiceAsrForConditionalGeneration

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.gqa_attention import NAME, gqa_attention
from tide_hf.engines.steps.capture import capturable_forward

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TEXT = {**_COMMON, "tie_word_embeddings": False}
ENCODER = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8, "num_filters": 4}
ENCODER |= {"depths": [1, 1], "downsampling_ratios": [2], "kernel_size": 3}


@pytest.fixture
def hears():
    """A model whose encoders support `eager` attention alone."""
    torch.manual_seed(0)
    config = VibeVoiceAsrConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        acoustic_tokenizer_encoder_config=dict(ENCODER),
        semantic_tokenizer_encoder_config=dict(ENCODER),
    )
    return VibeVoiceAsrForConditionalGeneration(config).eval()


def attention_of(model):
    return [part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)]


@pytest.mark.filterwarnings("ignore:.acoustic_tokenizer_chunk_size. is deprecated:FutureWarning")  # 5.17's own call
def test_a_batch_leaves_the_attention_of_encoders_alone(hears):
    before = attention_of(hears)
    assert {"sdpa", "eager"} == set(before)
    ids = prompt(2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, **OPTIONS}
    expected = hears.generate(**inputs)
    TIDEModelForCausalLM.attach(hears)
    use_drafter(hears, "mixed", expected[:, 9:].tolist(), 3)
    seen = set()
    hears.model.language_model.register_forward_pre_hook(lambda part, _: seen.add(part.config._attn_implementation))
    assert torch.equal(hears.generate(**inputs), expected)
    assert seen == {NAME}
    assert attention_of(hears) == before


@pytest.mark.parametrize(
    "change", [gqa_attention, lambda model: capturable_forward(model, 1)], ids=["attention", "capture"]
)
def test_the_attention_of_all_parts_is_restored_after_an_error(hears, change):
    before = attention_of(hears)

    def fail():
        assert attention_of(hears) != before
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), change(hears):
        fail()
    assert attention_of(hears) == before
    with gqa_attention(hears):
        assert NAME in attention_of(hears)
    assert attention_of(hears) == before
