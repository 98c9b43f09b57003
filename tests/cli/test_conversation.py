"""Conversations: the cache that is kept changes what is computed, and never what is said."""

import pytest
from families import tiny_model

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.cli.conversation import Conversation
from tide_hf.common.chat_prompts import encode_messages
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation.baselines import tide_method

NEW_TOKENS = 10
QUESTIONS = ("hello", "and abc abc?", "who")


@pytest.fixture
def talk(tiny_tokenizer):
    """A function that makes a conversation with an attached tiny model, which notes the width of every pass."""

    def make(family="llama", mode="self_speculative", threshold=0.5, **options):
        model = tiny_model(family, vocab_size=260, eos_token_id=257, pad_token_id=257)
        routers = TIDERouters.for_model(model, exit_layers=[1, 2], **options) if mode != "self_speculative" else None
        TIDEModelForCausalLM.attach(model, routers, mode=mode)
        widths = make.widths = []
        base_forward = model.forward
        model.forward = lambda *args, **kwargs: (
            widths.append(kwargs["input_ids"].shape[1]),
            base_forward(*args, **kwargs),
        )[1]
        return Conversation(tide_method(model, mode, threshold), tiny_tokenizer, NEW_TOKENS)

    return make


def fresh_answer(conversation, question):
    """What the model answers when the whole conversation is computed anew."""
    inputs = encode_messages(conversation.tokenizer, [*conversation.messages, {"role": "user", "content": question}])
    options = conversation.method.options | {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    output = conversation.method.model.generate(**inputs, **options)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), inputs["input_ids"].shape[1]


@pytest.mark.parametrize(("family", "mode"), [
    ("llama", "self_speculative"), ("llama", "early_exit"), ("llama", "post_hoc"), ("gpt2", "self_speculative"),
])  # fmt: skip
def test_turns_go_on_from_the_cache_and_say_the_same(talk, family, mode):
    conversation = talk(family, mode)
    for turn, question in enumerate(QUESTIONS):
        expected, length = fresh_answer(conversation, question)
        talk.widths.clear()
        assert conversation.ask(question).new_tokens == expected
        fed = talk.widths[0]
        assert fed == length if turn == 0 else 0 < fed < length
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3
    conversation.reset()
    assert conversation.messages == []
    expected, length = fresh_answer(conversation, "hello")
    talk.widths.clear()
    assert conversation.ask("hello").new_tokens == expected
    assert talk.widths[0] == length


REWRITING = "{% for m in messages %}<{{ m['role'][0] }}{{ loop.revindex }}>{{ m['content'] }}{% endfor %}<answer>"


@pytest.mark.parametrize(("family", "mode"), [
    ("llama", "self_speculative"), ("mistral", "self_speculative"), ("mamba", "post_hoc"),
])  # fmt: skip
def test_a_template_that_words_earlier_turns_otherwise_is_believed(talk, tiny_tokenizer, monkeypatch, family, mode):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", REWRITING)
    conversation = talk(family, mode)
    for question in QUESTIONS:
        expected, _ = fresh_answer(conversation, question)
        assert conversation.ask(question).new_tokens == expected


def test_the_same_prompt_again_is_answered_again(talk, tiny_tokenizer, monkeypatch):
    """With a template that forgets, all of it is in the cache, and yet something has to be fed."""
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{{ messages[-1]['content'] }}<answer>")
    conversation = talk()
    assert conversation.ask("hello").new_tokens == conversation.ask("hello").new_tokens
    assert len(talk.widths) > 2


def test_sliding_windows_go_on_from_the_cache(talk):
    conversation = talk("mistral")
    for question in QUESTIONS:
        expected, _ = fresh_answer(conversation, question)
        assert conversation.ask(question).new_tokens == expected


def test_an_interrupted_turn_leaves_the_conversation_as_it_was(talk):
    conversation = talk()
    conversation.ask("hello")
    before = list(conversation.messages)

    class Interrupting:
        def __init__(self):
            self.left = 4

        def put(self, value):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("and?", Interrupting())
    assert conversation.messages == before
    expected, length = fresh_answer(conversation, "who")
    talk.widths.clear()
    assert conversation.ask("who").new_tokens == expected
    assert talk.widths[0] == length  # the cache of the interrupted call is not gone on from


def test_what_cannot_be_answered_is_refused_and_costs_nothing(talk, tiny_tokenizer, monkeypatch):
    conversation = talk()
    conversation.ask("hello")
    before = list(conversation.messages)
    with pytest.raises(ConfigurationError, match="too long for the model: got 2"):
        conversation.ask("a" * 2500)
    assert conversation.messages == before
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with pytest.raises(ConfigurationError, match="this model cannot chat"):
        talk()


def test_the_answers_are_the_plain_models(talk, tiny_tokenizer):
    conversation = talk()
    for question in QUESTIONS:
        conversation.ask(question)
    model = TIDEModelForCausalLM.detach(conversation.method.model)
    for turn, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            inputs = encode_messages(tiny_tokenizer, conversation.messages[:turn])
            output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
            new = output[0, inputs["input_ids"].shape[1] :]
            assert tiny_tokenizer.decode(new, skip_special_tokens=True) == message["content"]
