"""The text of an answer, cut up into what each token adds to it."""

from tide_hf.display.token_texts import TokenTexts, token_texts


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
