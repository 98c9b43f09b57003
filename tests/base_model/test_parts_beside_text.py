"""Multimodal models: attention is changed in the text model alone, and what does not run on text is refused."""

import pytest
import torch
from drafters import use_drafter
from families import _COMMON, LAYERS, prompt
from images import seeing_model
from transformers import (
    KyutaiSpeechToTextConfig,
    KyutaiSpeechToTextForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PreTrainedModel,
    VibeVoiceAsrConfig,
    VibeVoiceAsrForConditionalGeneration,
)

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import UnsupportedModelError
from tide_hf.engines.gqa_attention import NAME, gqa_attention
from tide_hf.engines.steps.capture import capturable_forward

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TEXT = {**_COMMON, "tie_word_embeddings": False}
ENCODER = {"model_type": "vibevoice_acoustic_tokenizer_encoder", "hidden_size": 8, "num_filters": 4}
ENCODER |= {"depths": [1, 1], "downsampling_ratios": [2], "kernel_size": 3}
CODEC = {"model_type": "mimi", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CODEC |= {"num_key_value_heads": 2, "num_filters": 2, "codebook_size": 16, "codebook_dim": 8, "upsample_groups": 16}
CODEC |= {"upsampling_ratios": [4, 2], "num_residual_layers": 1, "intermediate_size": 16}
CODEC |= {"vector_quantization_hidden_dimension": 8}
VISION = {"hidden_size": 16, "attention_heads": 2, "image_size": 16, "patch_size": 4, "num_hidden_layers": 2}
VISION |= {"num_global_layers": 1, "intermediate_size": 24, "vision_output_dim": 48, "max_num_tiles": 1}
VISION |= {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0, 1]}


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


@pytest.mark.parametrize("change", [gqa_attention, lambda model: capturable_forward(model, 1)])
def test_the_attention_of_all_parts_is_restored_after_an_error(hears, change):
    before = attention_of(hears)

    def fail():
        assert attention_of(hears) != before
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), change(hears):
        fail()
    assert attention_of(hears) == before


def test_each_parts_own_attention_is_restored():
    model = seeing_model("gemma3")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager", "": "sdpa"})
    before = attention_of(model)
    with gqa_attention(model):
        assert NAME in attention_of(model)
    assert attention_of(model) == before
    assert "eager" in before


def test_an_error_while_the_attention_is_being_changed_restores_it(hears):
    before = attention_of(hears)

    class Broken:
        def use_attention_of(self, config):
            if config._attn_implementation == NAME:
                raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"), gqa_attention(hears, Broken()):
        pass
    assert attention_of(hears) == before
    with gqa_attention(hears):
        assert NAME in attention_of(hears)
    assert attention_of(hears) == before


def test_a_last_layer_that_needs_images_is_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {**TEXT, "cross_attention_layers": [LAYERS - 1], "rope_parameters": rope}
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=VISION)).eval()
    with pytest.raises(UnsupportedModelError, match="got a last layer that does not run on text alone"):
        TIDEModelForCausalLM.attach(model)
    assert type(model) is MllamaForConditionalGeneration


@pytest.mark.parametrize("num_codebooks", [2, 7])  # the second makes inputs as long as the probe
def test_a_model_that_takes_audio_tokens_beside_text_is_refused(num_codebooks):
    settings = {**TEXT, "ffn_dim": 48, "codebook_vocab_size": 17, "audio_pad_token_id": 0, "audio_bos_token_id": 1}
    config = KyutaiSpeechToTextConfig(num_codebooks=num_codebooks, codec_config=CODEC, **settings)
    model = KyutaiSpeechToTextForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"KyutaiSpeech.* does not run on text alone: got '.*[dD]imension"):
        TIDEModelForCausalLM.attach(model)
    assert type(model) is KyutaiSpeechToTextForConditionalGeneration
