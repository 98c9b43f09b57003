"""The main path on SmolLM2-135M-Instruct, 30 layers, float32, with the routers that this repository ships."""

import copy

import pytest
import torch
from repository import SHIPPED

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.token_ids import encode_prompt

pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("real_model")]

NEW_TOKENS = 48
PROMPTS = (
    "Why does bread rise?",
    "Tell me a story about a fox who wanted to learn to swim.",
    "What should I pack for a week in the mountains in October?",
    "Write a Python function that counts the vowels in a string.",
    "Translate into French: The library closes at six, and the cafe next door at eight.",
    "A train travels 180 kilometres in two hours. How far does it go in five hours at the same speed?",
    "Say the days of the week three times in a row.",
    "Give me five names for a bakery.",
    "Explain what a black hole is to someone who has never heard of one.",
    "Summarise: The council met on Monday to decide about the bridge. The bridge is old and needs repairs, but the "
    "council has no money this year. The council decided to close the bridge to lorries and to meet again in spring.",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "List the planets of the solar system in order, with one fact for each.",
    "Correct the mistakes: Me and him goes to school every days by the bus.",
    "What is the difference between weather and climate?",
    "Repeat after me: one two three four five, one two three four five, one two three four five.",
    "Write a short poem about rain on a tin roof.",
    "How do I boil an egg so that the yolk stays soft?",
    "Write a JSON object with the keys name, age and city for three people.",
    "Is it better to learn the piano or the guitar first?",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Continue the list: red, orange, yellow,",
    "Describe a day in the life of a lighthouse keeper.",
)


@pytest.fixture(scope="module")
def pair(smollm2):
    """The plain model, a copy with TIDE attached, and the encoded prompts with the plain model's answers."""
    model, tokenizer = smollm2
    attached = TIDEModelForCausalLM.attach(copy.deepcopy(model), SHIPPED)
    inputs = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    answers = [model.generate(**one, max_new_tokens=NEW_TOKENS, do_sample=False) for one in inputs]
    return attached, inputs, answers


@pytest.mark.timeout(1500)  # 24 answers twice, on one thread of a machine that may be busy
def test_self_speculative_equals_generate_token_for_token(pair):
    model, inputs, answers = pair
    for one, answer in zip(inputs, answers, strict=True):
        assert torch.equal(model.generate(**one, max_new_tokens=NEW_TOKENS, do_sample=False), answer)


def test_a_batch_equals_generate_token_for_token(pair, smollm2):
    """Four prompts of different lengths, padded on the left; plain decoding of the same batch is the reference."""
    model, _, _ = pair
    plain, tokenizer = smollm2
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    options = {"max_new_tokens": 32, "do_sample": False}
    assert torch.equal(model.generate(**batch, **options), plain.generate(**batch, **options))
