"""Families that a row in `LAYOUTS` takes, and those in which n-grams alone draft."""

import logging

import pytest
import torch
from drafters import use_drafter, use_heads
from families import BY_NGRAMS, FAMILIES, LAYERS, MORE, VOCAB, random_model, tiny_model
from images import SEEING
from on_steps import attach_captured
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    CpmAntConfig,
    CpmAntForCausalLM,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
)

from tide_hf import TIDEModelForCausalLM, TIDERouters, UnsupportedModelError
from tide_hf.base_model.parity import check_parity
from tide_hf.base_model.structure import find_structure

PROMPT, NEW = 9, 20  # beyond the windows of all families
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SINGLE = ("lfm2", "gemma3n_text")  # their batches decode plainly: layers hold a convolution's state, or share K/V


def padded(rows):
    ids = torch.randint(3, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(PROMPT) >= 3 * torch.arange(rows)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, **OPTIONS}


def check_drafts(model, inputs, expected):
    """Check drafts of a script, right and wrong ones, with rows that accept differently."""
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(**inputs), expected)
    return model.last_exit_stats


@pytest.mark.parametrize("family", [*MORE, *BY_NGRAMS])
def test_drafts_leave_the_tokens_as_they_are(family):
    model = random_model(family, {**MORE, **BY_NGRAMS}[family])
    calls = [(inputs, model.generate(**inputs)) for inputs in map(padded, (1, 3))]
    TIDEModelForCausalLM.attach(model, strict=family not in SINGLE)
    stats = [check_drafts(model, *call) for call in calls]
    assert stats[0].accepted > 0
    assert stats[0].depth_fraction < 1
    assert stats[1].accepted > 0 or family in SINGLE
    TIDEModelForCausalLM.detach(model)
    attach_captured(model)
    for call in calls:
        check_drafts(model, *call)


@pytest.mark.parametrize("family", MORE)
def test_a_row_tells_how_heads_are_read(family):
    model = random_model(family, MORE[family])
    check_parity(model, find_structure(model))
    expected = model.generate(**padded(1))
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 3]))
    use_heads(model, [1, 3])
    assert torch.equal(model.generate(**padded(1)), expected)
    assert model.last_exit_stats.drafted > 0
    expected = model.generate(**padded(1), tide_mode="post_hoc", exit_threshold=0.0)
    assert torch.equal(model.generate(**padded(1), tide_mode="early_exit", exit_threshold=0.0), expected)
    assert model.last_exit_stats.exits_per_layer == {1: NEW - 1}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prompt_may_attend_to_its_later_tokens(attention):
    """PaliGemma's does; Gemma 1 is its text model."""
    settings = {**SEEING["paligemma"], "text_config": {**FAMILIES["llama"], "model_type": "gemma"}}
    model = random_model("paligemma", settings, attention=attention)
    calls = [(inputs, model.generate(**inputs)) for inputs in map(padded, (1, 3))]
    TIDEModelForCausalLM.attach(model, strict=True)
    assert all(check_drafts(model, *call).accepted > 0 for call in calls)


def test_gpt_neo_says_why_it_never_runs_compiled(caplog):
    model = random_model("gpt_neo", MORE["gpt_neo"])
    TIDEModelForCausalLM.attach(model, engine="compiled", pack_weights=False)
    model.generate(**padded(1))
    assert model.last_exit_stats.engine == "eager"
    assert "runs eagerly: GPTNeoForCausalLM supports no static cache" in caplog.text


@pytest.mark.parametrize("family", ["bert", "gemma3n_text"])
def test_where_n_grams_alone_draft_heads_are_refused(family, caplog):
    model = random_model(family, BY_NGRAMS[family])
    with caplog.at_level(logging.INFO):
        TIDEModelForCausalLM.attach(model)
    assert "n-grams alone can draft, since the logits of" in caplog.text
    assert model._tide.structure.num_layers == LAYERS
    TIDEModelForCausalLM.detach(model)
    with pytest.raises(UnsupportedModelError, match="cannot be reproduced from its last decoder layer"):
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]))


def test_an_encoder_decoder_is_refused():
    config = BartConfig(
        **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24},
        **{"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    )
    with pytest.raises(UnsupportedModelError, match="got an encoder beside the decoder"):
        TIDEModelForCausalLM.attach(AutoModelForSeq2SeqLM.from_config(config))


def test_a_model_with_several_heads_is_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 4, "num_codebooks": 2}
    config = MusicgenDecoderConfig(vocab_size=VOCAB, pad_token_id=VOCAB, bos_token_id=VOCAB, **sizes)
    with pytest.raises(UnsupportedModelError, match="got no output head"):
        TIDEModelForCausalLM.attach(MusicgenForCausalLM(config))


def test_a_model_with_tokens_of_its_own_before_the_prompt_is_refused():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2}
    model = CpmAntForCausalLM(CpmAntConfig(vocab_size=VOCAB, **sizes)).eval()
    with pytest.raises(UnsupportedModelError, match=r"got '. logits for . tokens'"):
        TIDEModelForCausalLM.attach(model)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("prepares", [True, False], ids=["prepared inputs", "forward"])
def test_rows_advance_together_where_a_model_is_passed_no_positions(engine, prepares):
    """Such a model counts slots, those of rejected drafts too; left alone, each row would have its own."""
    model = tiny_model("llama")
    base = type(model)

    class CountsSlots(base):
        if prepares:

            def prepare_inputs_for_generation(self, input_ids, **kwargs):
                return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "position_ids": None}

        else:

            def forward(self, input_ids=None, attention_mask=None, **kwargs):
                return super().forward(input_ids, attention_mask, **kwargs)

    model.__class__ = CountsSlots
    expected = model.generate(**padded(3))
    if engine == "eager":
        TIDEModelForCausalLM.attach(model, strict=True)
    else:
        attach_captured(model, strict=True)
    assert check_drafts(model, padded(3), expected).accepted > 0
