"""The text of an answer, cut up into what each token adds to it."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tide_hf.common.display.token_texts import TokenTexts, token_texts


def test_a_character_of_several_tokens_is_the_last_ones(tiny_tokenizer):
    tokens = tiny_tokenizer("né 🦊!")["input_ids"]
    assert texts_of(tokens, tiny_tokenizer) == ["n", "", "é", " ", "", "", "", "🦊", "!"]
    assert texts_of([*tokens[:2], tiny_tokenizer.eos_token_id], tiny_tokenizer)[0] == "n"
    assert texts_of(tokens[:2], tiny_tokenizer) == ["n", "\N{REPLACEMENT CHARACTER}"]


def texts_of(tokens, tokenizer):
    """Of a whole answer, and the same of one that grows."""
    texts = TokenTexts(tokenizer)
    added = "".join(texts.add(token) for token in tokens) + texts.finish()
    assert added == "".join(texts.shown)
    assert token_texts(tokens, tokenizer) == texts.shown
    return texts.shown


def test_only_the_last_tokens_are_read_again(tiny_tokenizer):
    longest = 0

    class Counting:
        def decode(self, tokens, **options):
            nonlocal longest
            longest = max(longest, len(tokens))
            return tiny_tokenizer.decode(tokens, **options)

    text = "The quick brown fox, né 🦊! " * 20
    assert "".join(token_texts(tiny_tokenizer(text)["input_ids"], Counting())) == text
    assert longest <= 8


@pytest.fixture(scope="module")
def sentencepiece_tokenizer():
    """Its decoder strips the space in front of the first word, as Llama 2's and Mistral's do."""
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", "\u2581", "\u2581a", "\u2581b", "c", "<0xFF>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([3, 1, 4, 5], ["a", "", " b", "c"]),
        ([3, 1, 1, 4], ["a", "", "", " b"]),
        ([2, 4, 1, 3], ["", " b", "", " a"]),
        ([5, *[6] * 8, 4], ["c", *[""] * 7, "\N{REPLACEMENT CHARACTER}" * 8, " b"]),
    ],
)
def test_a_word_behind_tokens_without_text_keeps_its_space(sentencepiece_tokenizer, tokens, expected):
    assert texts_of(tokens, sentencepiece_tokenizer) == expected
    assert sentencepiece_tokenizer.decode(tokens, skip_special_tokens=True) == "".join(expected)
