"""The scripts in `examples/` run, here on a tiny model."""

import json

from examples.benchmarks import decode


def test_the_decode_benchmark_writes_its_record_and_a_table(tiny_model_folder, tmp_path, capsys):
    output = tmp_path / "decode.json"
    options = {"--max-new-tokens": 4, "--repeats": 1, "--prompts": 1, "--threads": 1}
    arguments = [str(part) for pair in options.items() for part in pair]
    decode.main(["--model", str(tiny_model_folder), "--output", str(output), *arguments])
    record = json.loads(output.read_text())
    assert len(record["categories"]) == 6
    for results in record["categories"].values():
        assert [result["name"] for result in results] == [
            "generate",
            "prompt_lookup_num_tokens=10",
            "assistant_early_exit=2",
            "self_speculative, n-grams only",
        ]
        assert all(result["num_equal"] == 1 for result in results)
    table = capsys.readouterr().out
    assert table.count("6/6") == 4
    assert decode.table(record) in table


def test_no_speed_for_other_tokens(tiny_model_folder, tmp_path):
    prompt = {"tokens_per_s": 2.0, "equal": False}
    plain = {"tokens_per_s": 1.0, "equal": True}
    results = [{"name": "generate", "prompts": [plain]}, {"name": "wrong", "prompts": [prompt]}]
    record = {"dtype": "float32", "categories": {"chat": results}}
    assert "| wrong | differs | differs | 0/1 |" in decode.table(record)
    assert "| wrong | 2.00 | 2.00 | 0/1 |" in decode.table(record | {"dtype": "bfloat16"})
