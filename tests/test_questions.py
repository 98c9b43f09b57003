"""Questions with short answers: read from files, asked of a model, and what counts as right."""

import json

import pytest
from test_evaluation import random_routers

from tide_hf import TIDEModelForCausalLM
from tide_hf.errors import CalibrationError, ConfigurationError
from tide_hf.evaluation import QuestionColumns
from tide_hf.evaluation.questions import Question, answer_questions, is_right, read_questions


@pytest.mark.parametrize(
    ("answer", "accepted", "match", "right"),
    [
        ("The Eiffel tower.", ["eiffel Tower"], "exact", True),
        ("It is the Eiffel tower", ["Eiffel tower"], "exact", False),
        ("Rome", ["Paris", "rome"], "exact", True),
        ("so 3 + 4 = 7. It is $1,070.50 then.", ["#### 1070.5"], "number", True),
        ("so 3 + 4 = 7", ["4 and 8"], "number", False),
        ("It is -5", ["5"], "number", False),
        ("It is \N{MINUS SIGN}5", ["-5"], "number", True),
        ("-$1,070.50", ["#### -1070.5"], "number", True),
        ("$-5", ["-5"], "number", True),
        (r"\boxed{-5}", ["-5"], "number", True),
        ("4--5", ["-5"], "number", True),
        ("between 12-15", ["15"], "number", True),
        ("3-5 dollars", ["5"], "number", True),
        ("$3-$5", ["5"], "number", True),
        ("5%-10%", ["10"], "number", True),
        ("in covid-19", ["19"], "number", True),
        ("no idea", ["5"], "number", False),
        ("no idea", ["none"], "number", False),
    ],
)
def test_what_counts_as_right(answer, accepted, match, right):
    assert is_right(answer, accepted, match) is right


def test_questions_from_files(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    rows = [
        {"text": "about", "q": "Who?", "a": "Ada"},
        {"text": "about", "q": "How many?", "a": "7"},
    ]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "qa.parquet")
    columns = QuestionColumns("q", "a", "In a word. {question}")
    for name in ("qa.jsonl", "qa.parquet"):
        found = read_questions(str(tmp_path / name), columns, samples=9, seed=0)
        expected = {Question("In a word. Who?", ("Ada",)), Question("In a word. How many?", ("7",))}
        assert set(found) == expected
    assert len(read_questions(str(tmp_path / "qa.jsonl"), columns, samples=1, seed=0)) == 1


@pytest.mark.parametrize(
    ("answer", "accepted"), [(7, ("7",)), (["a", "b"], ("a", "b")), ({"text": ["a"], "answer_start": [3]}, ("a",))]
)
def test_kinds_of_answers(answer, accepted):
    rows = [{"question": "?", "answer": answer}]
    assert read_questions(rows, QuestionColumns(), samples=1, seed=0) == [Question("?", accepted)]


@pytest.mark.parametrize(
    ("rows", "columns", "error", "message"),
    [
        (
            [{"q": "?"}],
            {},
            CalibrationError,
            r"no question with an answer .*: got the columns q\. .*'question'.*'answer'",
        ),
        ([{"question": "?", "answer": []}], {}, CalibrationError, "no question with an answer"),
        (["?"], {}, CalibrationError, r"no question with an answer .*: got str\."),
        ([], {}, CalibrationError, "there are no questions: got no rows"),
        ([], {"template": "Why?"}, ConfigurationError, r"no place for the question: got 'Why\?'"),
    ],
)
def test_questions_that_cannot_be_asked(rows, columns, error, message):
    with pytest.raises(error, match=message):
        read_questions(rows, QuestionColumns(**columns), samples=5, seed=0)


def test_answers_do_not_depend_on_the_batch(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    questions = [Question(text, ("x",)) for text in ("Why?", "a", "What is it that runs?")]
    limits = {"max_new_tokens": 6}
    plain = answer_questions(model, tiny_tokenizer, questions, **limits, batch_size=1)
    assert answer_questions(model, tiny_tokenizer, questions, **limits, batch_size=3) == plain
    ids = tiny_tokenizer("<user>Why?<answer>", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert plain.tokens[0] == expected
    assert (plain.depths, plain.layers_executed) == ([4.0] * 3, None)
    options = {"tide_mode": "early_exit", "exit_threshold": 0.0}
    TIDEModelForCausalLM.attach(model, random_routers(model))
    early = answer_questions(model, tiny_tokenizer, questions, **limits, batch_size=1, **options)
    lengths = [len(tokens) for tokens in early.tokens]
    assert early.depths == [(4 + length - 1) / length for length in lengths]  # the prompt's pass runs at full depth
    assert early.layers_executed == sum(4 + length - 1 for length in lengths)
    assert min(lengths) < 6  # so that a batch pads it
    assert answer_questions(model, tiny_tokenizer, questions, **limits, batch_size=3, **options).tokens == early.tokens


@pytest.mark.parametrize(
    "said",
    [
        {"num_beams": 2},
        {"repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 9.0},
        {"return_dict_in_generate": True},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=lambda said: next(iter(said)),
)
def test_answers_are_greedy_whatever_the_model_s_own_config_says(tiny_llama, tiny_tokenizer, said):
    model = tiny_llama()
    questions = [Question(text, ("x",)) for text in ("Why?", "What is it that runs?")]
    expected = answer_questions(model, tiny_tokenizer, questions, max_new_tokens=6, batch_size=2)
    model.generation_config.update(**said)
    assert answer_questions(model, tiny_tokenizer, questions, max_new_tokens=6, batch_size=2) == expected
