"""Tables of decode speeds, from records made by hand."""

from examples.benchmarks.report import README
from examples.benchmarks.suites import decode


def result(name, *prompts):
    return {"name": name, "prompts": [{"speedup": speedup, "equal": equal} for speedup, equal in prompts]}


def record_of(categories, **more):
    parts = {"batches": {}, "dtype": "float32", "device": "cpu", "torch_threads": 2, "model": "org/name"}
    return parts | {"categories": categories} | more


def test_no_speed_for_other_tokens():
    plain, wrong = result("generate", (1.0, True)), result("wrong", (2.0, False))
    record = record_of({"chat": [plain, wrong]}, batches={"8": [plain]}, sampling=[plain])
    assert "| wrong | differs | differs | 0/1 | - | - |" in decode.table(record)
    assert "| wrong | 2.00 | 2.00 | 0/1 | - | - |" in decode.table(record | {"dtype": "bfloat16"})


def test_the_summary_has_the_means_over_all_prompts():
    chat = [result("generate", (1.0, True)), result("self_speculative", (1.5, True)), result("other", (9.0, True))]
    story = [result("generate", (1.0, True), (1.0, True)), result("self_speculative", (1.0, True), (2.0, True))]
    lines = decode.summary_table(record_of({"chat": chat, "story": story})).splitlines()
    assert lines[0] == "| name, float32, 2 CPU threads | speed | answers equal |"
    assert lines[2:] == ["| plain `generate` | 1.00 | 3/3 |", "| **with tide_hf** | **1.50** | **3/3** |"]


def test_the_summary_has_no_speed_for_other_tokens():
    parts = {"chat": [result("generate", (1.0, True)), result("self_speculative", (3.0, False))]}
    assert "| **with tide_hf** | **differs** | **0/1** |" in decode.summary_table(record_of(parts))
    assert "cuda:0" in decode.summary_table(record_of(parts, device="cuda:0")).splitlines()[0]


def test_the_readme_begins_with_the_summary():
    assert "<!-- report: engines-summary -->" in README.read_text(encoding="utf-8").partition("```")[0]
