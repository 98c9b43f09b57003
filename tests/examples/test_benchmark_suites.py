"""The suites of `examples/benchmarks` on a tiny model: structure, counts and errors, no speeds."""

import json
import sys

import pytest
import torch
from hub_repositories import edit_config
from transformers import AutoModelForCausalLM

from examples.benchmarks import __main__ as command
from examples.benchmarks import adapters, disagreement, items, measuring, published, questions, runner
from examples.benchmarks.bench import Bench
from examples.benchmarks.random_models import random_llama, random_routers
from examples.benchmarks.suites import SUITES, decode, passes, quality
from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.calibration.text import draw_prompts
from tide_hf.common.errors import ConfigurationError
from tide_hf.weights.lossless import HalfWeight

TINY = {
    "decode": {
        "ways": ["generate", "prompt_lookup", "static_skip", "confidence", "fixed", "published", "ngrams", "heads"],
        "slow_ways": ["assistant_early_exit"],
        "categories": ["chat", "maths"],
    }
    | {"max_new_tokens": 4, "repeats": 1, "prompts": 1, "batches": [2]}
    | {"published_samples": 4, "published_length": 16, "prompt_lengths": [6, 10**6]},
    "published": {"samples": 8, "max_length": 16, "prompts": 1, "max_new_tokens": 4, "repeats": 2}
    | {"thresholds": [1.0, 0.5], "batches": [1], "random_layers": 4},
    "quality": {"thresholds": [0.5], "documents": 4, "max_length": 12, "maths": 3, "max_new_tokens": 3, "choices": 5},
    "overhead": {"prompts": 1, "max_new_tokens": 3, "repeats": 1, "prompt_lengths": [8], "output_lengths": [3]}
    | {"batches": [2], "num_exit_layers": [1], "depths": [4], "hidden_size": 64, "vocab_size": 300},
    "passes": {"widths": [1, 4], "prompt_tokens": 9, "turns": 3, "repeats": 2, "read_mb": 1},
}


@pytest.fixture
def run(tiny_model_folder, tmp_path, monkeypatch):
    """A function that runs a suite from the command line, with settings that take seconds, and returns its record."""
    edit_config(tiny_model_folder, max_position_embeddings=512)  # so that the longest prompts are short
    monkeypatch.setattr(disagreement, "draw_prompts", lambda count, seed: draw_prompts(min(count, 600), seed))
    record = {"exit_layers": {}, "num_documents": 4, "seed": 0}
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    TIDERouters.for_model(model, exit_layers=[1, 3], calibration=record).save_pretrained(tmp_path / "routers")

    def go(suite, *more, settings=None):
        config = tmp_path / "tiny.json"
        config.write_text(json.dumps({suite: TINY[suite] if settings is None else settings}))
        arguments = ["--suite", suite, "--config", config, "--output-dir", tmp_path, "--threads", "1"]
        arguments += [*more, "--model", tiny_model_folder, "--routers", tmp_path / "routers"]
        assert command.main(["run", *map(str, arguments)]) == 0
        return json.loads((tmp_path / f"{suite}.json").read_text())

    return go


def test_decode_compares_the_methods_that_can_run_and_names_the_others(run, monkeypatch, one_thread):
    monkeypatch.setitem(sys.modules, "TIDE", None)
    record = run("decode")
    assert record["left_out"] == {published.NAME: "not installed"}
    for results in record["categories"].values():
        names = [one["name"].split(",")[0].split(" ")[0] for one in results]
        assert names[:5] == ["generate", "prompt_lookup_num_tokens=10", "static", "softmax", "fixed"]
        assert names[5:] == ["self_speculative", "self_speculative", "assistant_early_exit=2"]
    tables = SUITES["decode"].tables(record)
    assert "| tide-inference 0.2.1 | not installed | - |" in tables["approximate"]
    assert "static skipping, 3 layers" in tables["approximate"]
    longest = list(record["prompt_lengths"])[1]  # cut to what the model has positions for
    assert 6 < int(longest) < 10**6
    assert tables["first_token"].startswith(f"| first token behind | 6 tokens | {longest} tokens |")
    assert "| generate | 1.00 | 1.00 |" in tables["first_token"]
    assert all(check.passed for check in SUITES["decode"].checks(record))
    assert record.keys() >= {"cpu", "commit", "dtype", "torch_threads", "versions", "prompts_sha256", "settings"}


def test_decoding_stands_apart_from_the_prompts_and_beside_the_memory(run, one_thread):
    settings = {"ways": ["generate", "eager_plain", "compiled_plain"], "slow_ways": ["assistant_early_exit"]}
    settings |= {"categories": ["chat", "maths"], "prompts": 2, "repeats": 1, "max_new_tokens": 5, "batches": []}
    settings |= {"first_token": False, "sampling_repeats": 0, "decode_apart": True, "read_mb": 1}
    record = run("decode", settings=settings)
    apart, names = record["apart"], ["generate", "no drafts", "no drafts, compiled"]
    assert (apart["num_layers"], apart["memory"]["bytes"], len(apart["memory"]["seconds"])) == (4, 10**6, 4)
    assert list(apart["bytes"]) == names
    assert (apart["bytes"]["generate"], apart["bytes"]["no drafts"] > 0) == (None, True)
    for results in record["categories"].values():
        assert all(prompt["first_token_s"] > 0 for one in results[:3] for prompt in one["prompts"])
        assert "first_token_s" not in results[3]["prompts"][0]
    table = SUITES["decode"].tables(record)["decode_apart"].splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in (*names, "reading the memory")]


def test_a_token_reads_its_part_of_the_bytes_of_a_pass():
    prompts = [{"seconds": [1.0, 2.0, 9.0], "num_new_tokens": 11, "first_token_s": 1.0, "equal": True}] * 2
    ours = {"name": "ours", "prompts": prompts, "layers_per_token": 4 * (1 + 5) / 11}  # a prompt, five passes
    peer = {"name": "peer", "prompts": prompts, "layers_per_token": None}
    apart = {"bytes": {"ours": 3 * 10**8, "peer": None}, "num_layers": 4}
    apart["memory"] = {"bytes": 10**9, "seconds": [0.1, 0.2, 0.3]}
    table = decode.apart_table({"categories": {"chat": [ours, peer]}, "apart": apart}).splitlines()
    assert table[2:] == [
        "| ours | 5.5 | 10.0 | 1000 | 150 | 1.5 | 0.30 | 2/2 |",
        "| peer | 5.5 | 10.0 | 1000 | - | - | - | 2/2 |",
        "| reading the memory | - | - | - | - | 5.0 | 1.00 | - |",
    ]


def test_decode_samples_at_the_temperature_of_the_config(run, monkeypatch, one_thread):
    compared, compare = [], decode.compare
    monkeypatch.setattr(decode, "compare", lambda ways, *args, **_: compared.extend(ways) or compare(ways, *args, **_))
    settings = {"ways": ["generate", "self_speculative"], "slow_ways": [], "batches": [], "first_token": False}
    settings |= {"categories": ["chat"], "prompts": 1, "repeats": 2, "max_new_tokens": 6, "sampling_repeats": 0}
    plain, ours = run("decode", settings=settings | {"temperature": 0.7})["categories"]["chat"]
    assert ours["num_equal"] == len(plain["prompts"]) == 1
    assert all((one.options["do_sample"], one.options["temperature"]) == (True, 0.7) for one in compared)


def test_published_measures_what_the_paper_did(run, monkeypatch, one_thread):
    monkeypatch.setitem(sys.modules, "TIDE", None)
    record = run("published")
    assert set(record["throughput"]["1"]["equal"]) == {"base model", "ours, early_exit", "ours, self_speculative"}
    assert [row["who"] for row in record["decode_exits"]] == ["base model", "ours", "ours"]
    assert record["decode_exits"][1]["exit_rate"] == 0.0  # a threshold of 1 is off, as published
    tables = SUITES["published"].tables(record)
    assert all("not installed" in tables[name] for name in ("prefill_exits", "throughput", "calibration"))


def test_the_published_code_runs_if_it_is_installed(run, tmp_path, one_thread):
    pytest.importorskip("TIDE")
    texts = [f"{number} times the tide came in, and {number} times it went out again; " * 2 for number in range(9)]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    record = run("published", "--text", tmp_path / "texts.txt", settings=TINY["published"] | {"max_length": 128})
    assert record["left_out"] == {}
    found = record["prefill_exits"][1]["published"]["0.5"]  # of the random model, with four layers
    assert found["behind_the_last_layer"] == pytest.approx(sum(found["by_position"].values()))


def test_quality_compares_exit_rules(run, one_thread):
    record = run("quality")
    assert [row["name"].split(" ")[0] for row in record["rows"]] == ["base", "routers", "confidence", "fixed", "static"]
    assert record["rows"][0]["ratio"]["value"] == pytest.approx(1)
    assert (record["num_choices"], record["num_questions"]) == (5, 3)
    assert SUITES["quality"].tables(record)["quality"].count("\n") == 1 + 5


def test_overhead_measures_every_kind_of_scaling(run, one_thread):
    record = run("overhead")
    kinds = ["tokens of the prompt", "tokens of the answer", "rows", "exit layers, exits off"]
    assert list(record["scaling"]) == [*kinds, "layers of a random model"]
    assert all(one["num_equal"] == len(one["prompts"]) for one in record["exits_off"])
    assert record["memory"]["routers"] > 0
    assert SUITES["overhead"].tables(record)["scaling"].count("\n") == 1 + 9


def test_passes_of_each_width_take_turns_with_reading_the_memory(run, monkeypatch, one_thread):
    widths, verify = {"eager": [], "compiled": []}, passes.TimedRule.accept

    def accept(rule, batch, verified):
        widths[rule.engine].append(verified.inputs.shape[1])
        return verify(rule, batch, verified)

    def timed_call(model, *args, timed_call=passes.timed_call):
        monkeypatch.setattr(passes.TimedRule, "engine", model._tide.engine, raising=False)
        tokens = timed_call(model, *args)
        return tokens[:-1] + [tokens[-1] + 1] if model._tide.engine == "compiled" else tokens

    monkeypatch.setattr(passes.TimedRule, "accept", accept)
    monkeypatch.setattr(passes, "timed_call", timed_call)
    record = run("passes")
    for name, found in record["engines"].items():
        ran = widths[name]
        assert ran == (ran[:1] + 3 * [1, 1, 4] + 4 * [1]) * 3  # the prompt, which is no pass; a cold pass, each width
        assert {key: len(seconds) for key, seconds in found["seconds"].items()} == {"memory": 6, "1": 6, "4": 6}
    assert record["memory_bytes"] == 10**6
    assert [check.passed for check in SUITES["passes"].checks(record)] == [True, False]
    assert SUITES["passes"].checks(record | {"dtype": "bfloat16"}) == []  # where rounding explains it
    table = SUITES["passes"].tables(record)["passes"].splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["reading alone", "1", "4"] * 2


def test_the_table_of_passes_compares_turn_by_turn():
    seconds = {"memory": [0.01, 0.03, 0.01], "1": [0.002, 0.006, 0.002], "4": [0.003, 0.009, 0.003]}
    found = {"eager": {"equal": True, "seconds": seconds, "bytes": 5 * 10**7}}
    table = passes.tables({"engines": found, "memory_bytes": 5 * 10**8})["passes"].splitlines()
    assert table[2:] == [
        "| eager | reading alone | 10.0 | - | 500 | 50.0 | 1 |",
        "| eager | 1 | 2.0 | 1.00 (1.00 to 1.00) | 50 | 25.0 | 0.50 (0.50 to 0.50) |",
        "| eager | 4 | 3.0 | 1.50 (1.50 to 1.50) | 50 | 16.7 | 0.33 (0.33 to 0.33) |",
    ]


def test_a_pass_reads_the_weights_of_its_linear_layers_in_the_bits_that_they_are_stored_in(tiny_llama):
    model = tiny_llama()
    linears = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    plain = sum(weight.nbytes for weight in linears)
    assert measuring.bytes_read(passes.attached(Bench(model, None, None), "eager")) == plain
    for weight in linears:
        weight.data = weight.bfloat16().float()
    ours = passes.attached(Bench(model, None, None), "eager")
    read = measuring.bytes_read(ours)
    halves = [one for one in ours._tide.weights.gates() if HalfWeight in one.converted]
    stored = sum(one.converted[HalfWeight].values.nbytes for one in halves)
    assert read == plain - sum(one.num_bytes for one in halves) + stored
    assert stored < 0.6 * sum(one.num_bytes for one in halves)  # panels have some rows of padding


def test_static_skipping_keeps_the_first_the_last_and_evenly_spaced_layers():
    assert adapters.kept_layers(30, 24)[:3] == [0, 1, 3]
    assert adapters.kept_layers(8, 8) == list(range(8))
    model = random_llama(4, 64, 50)
    fewer = adapters.without_layers(model, 2)
    assert fewer.model.layers[1].mlp.up_proj.weight is model.model.layers[3].mlp.up_proj.weight
    assert (fewer.config.num_hidden_layers, model.config.num_hidden_layers) == (2, 4)
    assert fewer.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_questions_are_deterministic_and_enough():
    assert len({row["question"] for row in items.maths_questions(400)}) == 400
    assert items.maths_questions(5)[0] == items.maths_questions(400)[0]
    chosen = items.multiple_choice(1000)
    assert chosen[:3] == items.multiple_choice(3)
    assert all(len(set(item.endings)) == 4 for item in chosen)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("so 3 + 4 = 7. It is $1,070.50 then.", "1070.5", True),
        ("It is \N{MINUS SIGN}5", "-5", True),
        ("5%-10%", "10", True),
        ("no idea", "5", False),
    ],
)
def test_the_last_number_is_the_answer(answer, expected, right):
    assert questions.is_right(answer, expected) is right


def test_answers_and_their_depths_do_not_depend_on_the_batch(tiny_llama, tiny_tokenizer):
    model, asked = tiny_llama(), ["Why?", "a", "What is it that runs?"]
    plain = questions.answer_questions(model, tiny_tokenizer, asked, max_new_tokens=6, batch_size=1)
    assert plain[1] == [4.0] * 3
    TIDEModelForCausalLM.attach(model, random_routers(model, [1]))
    options = {"max_new_tokens": 6, "tide_mode": "early_exit", "exit_threshold": 0.0}
    alone = questions.answer_questions(model, tiny_tokenizer, asked, batch_size=1, **options)
    assert alone == questions.answer_questions(model, tiny_tokenizer, asked, batch_size=3, **options)
    assert all(1 < depth < 4 for depth in alone[1])  # the prompt's pass, of which comes the first token, runs whole


def test_the_likeliest_ending_is_the_choice():
    endings = tuple("abcd")
    chosen = [items.Choices("", endings, 1), items.Choices("", endings, 0)]
    losses = torch.tensor([[3.0, 9.0], [1.0, 9.0], [2.0, 0.0], [2.0, 9.0]] * 2)
    empty = torch.empty(0)
    scores = quality.TextScores([1], 2, torch.ones(8, 1), losses, empty, empty, torch.arange(8))
    assert quality.picked_right(scores, 0.5, chosen).tolist() == [True, False]
    assert quality.picked_right(scores, 2.0, chosen).tolist() == [False, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the config cannot be read"),
        ('{"speed": {}}', "got speed"),
        ('{"decode": {"runs": 3}}', "got runs for decode"),
        ('{"decode": {"categories": ["songs"]}}', "no prompt has: got songs. Expected chat, maths"),
        ('{"passes": {"widths": [1, 3]}}', "no pass has: got 1, 3. Expected 1, and any of 2, 4, 8, 16"),
        ('{"passes": {"widths": [4]}}', "no pass has: got 4. Expected 1, and any of 2, 4, 8, 16"),
    ],
)
def test_an_invalid_config_is_refused(tmp_path, capsys, content, message):
    (tmp_path / "bad.json").write_text(content)
    suite = "passes" if "passes" in content else "decode"
    assert command.main(["run", "--suite", suite, "--config", str(tmp_path / "bad.json")]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigurationError):
        runner.read_config("none")


def test_the_configs_fit_the_suites():
    for file in runner.CONFIGS.glob("*.json"):
        _, found = runner.read_config(file.stem)
        whole, own = file.stem in ("quick", "full"), [name for name in SUITES if file.stem.startswith(name)]
        assert list(found) == (list(SUITES) if whole else own or ["decode"])
        for suite in found:
            runner.settings_of(suite, found)
    full = runner.read_config("full")[1]["quality"]
    assert min(full[name] for name in ("documents", "maths", "choices")) >= 200
