"""The memory of earlier answers: what is found, what is forgotten, and that it never leaves the process."""

import copy
import pickle
import random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import in_three_threads

from tide_hf.speculation import answer_memory
from tide_hf.speculation.answer_memory import MATCH_LENGTHS, AnswerMemory

LENGTHS = (1, 2, 4)
TEXTS = st.lists(st.integers(0, 2), max_size=6)


def kept(texts, max_tokens):
    """Of (prompt, answer), oldest first and without repeats, the latest that have at most `max_tokens` tokens."""
    found, length = [], 0
    for prompt, answer in reversed(texts):
        one = (prompt[-LENGTHS[-1] :], answer)
        if len(one[0]) + len(answer) > max_tokens or one in found:
            continue
        length += len(one[0]) + len(answer)
        if length > max_tokens:
            break
        found.append(one)
    return found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=8), TEXTS, st.integers(0, 30))
def test_the_longest_and_latest_match_of_the_latest_answers_is_found(texts, end, max_tokens):
    with patch.object(answer_memory, "MATCH_LENGTHS", LENGTHS):
        memory = AnswerMemory(max_tokens)
        for prompt, answer in texts:
            memory.add(prompt, answer)
        found = memory.find(end, 3)
    remembered, expected = kept(texts, max_tokens), (0, ())
    for length in LENGTHS:
        for prompt, answer in reversed(remembered):
            text = [*prompt, *answer]
            for position in range(max(len(prompt) + 1, length), len(text)):
                if len(end) >= length and text[position - length : position] == end[-length:]:
                    expected = (length, tuple(text[position : position + 3]))
    assert found == expected
    assert memory.num_tokens == sum(len(prompt) + len(answer) for prompt, answer in remembered) <= max_tokens


def test_the_oldest_answers_leave_first_with_all_that_was_stored_of_them():
    memory = AnswerMemory(100)
    answers = [list(range(start, start + 40)) for start in range(0, 400, 40)]
    for answer in answers:
        memory.add([], answer)
    assert memory.num_tokens == 80
    assert [memory.find(answer[:12], 2) for answer in answers] == [(0, ())] * 8 + [
        (12, (372 - 40, 373 - 40)),
        (12, (372, 373)),
    ]
    assert len(memory._next) <= len(MATCH_LENGTHS) * memory.num_tokens
    memory.add([], range(101))  # too long to be remembered
    assert memory.num_tokens == 80
    memory.add([], answers[8])  # which is the latest again
    memory.add([], answers[0])
    assert [bool(memory.find(answer[:12], 2)[0]) for answer in answers] == [True] + [False] * 7 + [True, False]
    memory.clear()
    assert (memory.num_tokens, memory._next, memory.find(answers[0], 2)) == (0, {}, (0, ()))


def test_nothing_is_remembered_where_that_is_turned_off():
    memory = AnswerMemory(0)
    memory.add([1], range(20))
    assert (memory.num_tokens, memory.find(range(12), 3)) == (0, (0, ()))


def test_copies_and_pickles_hold_no_answer():
    memory = AnswerMemory(1000)
    memory.add([], range(40))
    for twin in (copy.copy(memory), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert (twin.max_tokens, twin.num_tokens, twin.find(range(12), 3)) == (1000, 0, (0, ()))
    assert memory.num_tokens == 40


def test_threads_may_share_a_memory():
    memory = AnswerMemory(200)

    def use(seed):
        chance = random.Random(seed)
        for _ in range(200):
            memory.add([], [chance.randrange(2) for _ in range(30)])
            memory.find([chance.randrange(2) for _ in range(32)], 15)

    in_three_threads(use)
    assert memory.num_tokens == sum(len(text) for text, _ in memory._texts) <= 200
    assert {place[0] for place in memory._next.values()} <= {text for text, _ in memory._texts}
