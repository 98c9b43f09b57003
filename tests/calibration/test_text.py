"""Text that a model writes: built-in prompts and its own, and answers that follow its own distribution."""

from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, GenerationConfig

from tide_hf.base_model.structure import CACHE
from tide_hf.calibration.text import (
    LONGEST_OWN_PROMPT,
    TOP_K,
    TopKSampling,
    continue_prompts,
    find_user_turn,
    growing_cache,
    load_documents,
    plan_writing,
    write_documents,
)

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_samples_follow_the_distribution_of_the_top_tokens(temperature):
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = logits.expand(20_000, -1).clone()
    drawn = TopKSampling(temperature)(None, rows).argmax(dim=-1)
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, (logits / temperature).softmax(dim=0), atol=0.015, rtol=0.0)
    flat = torch.arange(2.0 * TOP_K).expand(2000, -1) / 1000
    assert TopKSampling(1.0)(None, flat.clone()).argmax(dim=-1).min() == TOP_K


def test_continuations_are_those_of_generate(tiny_llama):
    model = tiny_llama()
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    rows = continue_prompts(model, PROMPTS, 6, temperature=None, ends=set())
    assert rows == [row.tolist() for row in expected]
    ends = {rows[0][3]}
    ended = continue_prompts(model, PROMPTS, 6, temperature=None, ends=ends)
    assert ended == [row[: row.index(*ends)] if ends & set(row) else row for row in rows]
    # a padding token that the tokenizer has and the model has not
    assert continue_prompts(model, PROMPTS, 6, temperature=None, ends=ends, pad=model.config.vocab_size) == ended


def test_rows_that_have_ended_leave_the_batch(tiny_llama, monkeypatch):
    model = tiny_llama()
    rows = continue_prompts(model, PROMPTS, 12, temperature=None, ends=set())
    ends = {rows[0][2], rows[1][7]}
    expected = [row[: min(map(row.index, ends & set(row)), default=12)] for row in rows]
    assert len(set(map(len, expected))) > 2
    monkeypatch.setattr("tide_hf.calibration.text.STRETCH", 2)
    sizes = []
    model.register_forward_pre_hook(lambda _, __, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    assert continue_prompts(model, PROMPTS, 12, temperature=None, ends=ends) == expected
    # a row leaves after the two tokens in which it ends
    assert sizes == [sum(len(row) >= step - step % 2 for row in expected) for step in range(len(sizes))]
    assert sizes[-1] < len(PROMPTS)


def test_answers_end_at_the_deadline(tiny_llama, monkeypatch):
    whole = continue_prompts(tiny_llama(), PROMPTS, 12, temperature=None, ends=set())
    monkeypatch.setattr("tide_hf.calibration.text.STRETCH", 2)
    clock = iter([7.0, 8.0, 9.0])
    monkeypatch.setattr("tide_hf.calibration.text.perf_counter", lambda: next(clock))
    rows = continue_prompts(tiny_llama(), PROMPTS, 12, temperature=None, ends=set(), deadline=8.5)
    assert rows == [row[:6] for row in whole]


@pytest.mark.parametrize(("family", "grows"), [("llama", True), ("gemma3", False), ("mamba", False)])
def test_k_v_are_appended_in_place_where_a_cache_keeps_all_of_them(family, grows, monkeypatch):
    model = tiny_model(family)
    cache = growing_cache(model)
    assert (cache is not None) == grows
    if cache is None:
        return
    monkeypatch.setattr("tide_hf.depth.kv_cache.SPARE_SLOTS", 4)
    ids, usual = torch.tensor([[5, 6, 7], [8, 9, 10]]), DynamicCache(config=model.config)
    addresses = []
    for _ in range(12):
        with torch.no_grad():
            logits, expected = (model(ids, **{CACHE: one}).logits[:, -1] for one in (cache, usual))
        assert torch.equal(logits, expected)
        ids = logits.argmax(dim=-1, keepdim=True)
        addresses.append(cache.layers[0].keys.data_ptr())
    assert len(set(addresses)) == 3  # of 12 steps; each growth has room for 4 more


@pytest.mark.parametrize("in_peft", [False, True])
def test_the_model_s_own_generation_config_is_ignored_and_restored(in_peft):
    base = tiny_model("llama")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")) if in_peft else base
    expected = continue_prompts(model, PROMPTS, 6, temperature=None, ends={9})
    for options in (
        {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "min_length": 30, "suppress_tokens": list(range(80))},
        {"max_time": 1e-9, "return_dict_in_generate": True, "output_scores": True, "stop_strings": ["x"]},
        {"prompt_lookup_num_tokens": 3, "tide_mode": "post_hoc"},
        {"num_return_sequences": 2, "num_beams": 2},
    ):
        own = base.generation_config = GenerationConfig(eos_token_id=[3, 4], **options)
        assert continue_prompts(model, PROMPTS, 6, temperature=None, ends={9}) == expected
        assert base.generation_config is own
        assert options.items() <= own.to_dict().items()


# Prompts that the model writes itself


@pytest.mark.parametrize(
    ("template", "num_own"),
    [("own", 8), (None, 0), ("no message", 0), ("User: {{ messages[-1]['content'] }}", 0)],
)
def test_a_quarter_of_the_prompts_are_the_model_s_own_if_the_template_has_turns(
    tiny_tokenizer, monkeypatch, template, num_own
):
    if template != "own":
        monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    text = load_documents(None, tiny_tokenizer, SimpleNamespace(samples=32, batch_size=4, seed=0))
    prompts = [tuple(prompt) for batch in text.prompts for prompt in batch.prompts]
    assert len(prompts) == 32 - num_own
    assert template != "own" or len(set(prompts)) == 24
    assert sum(batch.num_own for batch in text.prompts) == num_own
    assert len({batch.seed for batch in text.prompts}) == len(text.prompts)
    assert ("to prompts of its own" in text.description) == (num_own > 0)


def test_own_prompts_end_at_a_new_turn_and_a_batch_of_them_is_repeatable(tiny_llama, tiny_tokenizer):
    model, turn = tiny_llama(), find_user_turn(tiny_tokenizer)
    (batch,) = plan_writing([], 64, 0, turn, 64)
    documents = write_documents(model, tiny_tokenizer, batch, 8)
    torch.manual_seed(1)
    assert documents == write_documents(model, tiny_tokenizer, batch, 8)
    lengths = set()
    whole = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": "|"}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in whole.split("|"))
    for document in documents:
        prompt = document.tokens[: document.first + 1]
        assert prompt[: len(before)] == before
        assert prompt[-len(after) :] == after
        written = prompt[len(before) : -len(after)]
        assert turn.after[0] not in written
        lengths.add(len(written))
    assert len(lengths) > 1
    assert 0 < min(lengths) <= max(lengths) <= LONGEST_OWN_PROMPT
