"""The report of `examples/benchmarks`: its tables, what it refuses, and that the pages show the committed results."""

import json
import shutil

import pytest

from examples.benchmarks import __main__ as command
from examples.benchmarks import gpu_speed, report
from examples.benchmarks.common import RESULTS
from examples.benchmarks.suites import decode


@pytest.fixture
def results(tmp_path):
    """A copy of the committed results of the quick form."""
    return shutil.copytree(RESULTS / "quick", tmp_path / "quick")


def reported(results, page, *more):
    return command.main(["report", "--results", str(results), "--page", str(page), *more])


def test_results_that_failed_the_token_check_or_cannot_be_read_are_refused(results, tmp_path, capsys):
    page, decoded = tmp_path / "README.md", results / "decode.json"
    page.write_text("nothing")
    record = json.loads(decoded.read_text())
    category = next(iter(record["categories"].values()))
    next(one for one in category if one["name"] == "self_speculative, no kernels")["num_equal"] = 0
    decoded.write_text(json.dumps(record))
    assert reported(results, page) == 2
    assert "the token check of decode.json failed" in capsys.readouterr().err
    decoded.write_text(json.dumps(record | {"dtype": "bfloat16"}))  # where rounding explains it
    assert reported(results, page) == 0
    assert reported(tmp_path, page) == 2
    assert "there is nothing to report" in capsys.readouterr().err
    (results / "quality.json").write_text('{"rows": []}')
    assert reported(results, page) == 2
    assert "quality.json cannot be read" in capsys.readouterr().err


def test_only_the_text_between_known_markers_is_replaced(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- report: speed -->\nold\n<!-- end of speed -->\nb\n<!-- report: x -->\n<!-- end of x -->")
    assert reported(results, readme, "--check") == 2
    assert "does not show the results" in capsys.readouterr().err
    assert reported(results, readme) == 0
    text = readme.read_text()
    assert text.startswith("a\n<!-- report: speed -->\n\n|  | chat |")
    assert text.endswith("|\n\n<!-- end of speed -->\nb\n<!-- report: x -->\n<!-- end of x -->")
    assert reported(results, readme, "--check") == 0
    smaller = {path.name for path in RESULTS.iterdir() if path.is_dir()} - {"quick"}
    pages = "".join(page.read_text(encoding="utf-8") for page in report.PAGES)
    tables = ("speed", "throughput", "passes", "decode-apart")
    marks = {name: [f"<!-- report: {name}-{table} -->" in pages for table in tables] for name in smaller}
    assert [name for name, found in marks.items() if not any(found)] == []


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in RESULTS.glob("*/REPORT.md")))
def test_the_pages_show_the_committed_results(folder):
    """Tables rendered again from the committed JSON are those of the pages; plots were drawn from the same JSON."""
    from PIL import Image  # noqa: PLC0415  # comes with matplotlib

    assert command.main(["report", "--results", str(RESULTS / folder), "--check"]) == 0
    records = report.read_results(RESULTS / folder)
    assert (RESULTS / folder / "REPORT.md").read_text(encoding="utf-8") == report.whole(report.sections_of(records))
    plots = sorted((RESULTS / folder / "plots").glob("*.png"))
    assert [plot.stem for plot in plots] == sorted({"decode", "overhead", "quality"} & records.keys())
    for plot in plots:
        with Image.open(plot) as image:
            assert image.text["Source"] == report.digest(RESULTS / folder)


def test_the_pages_show_the_committed_run_on_a_gpu():
    assert command.main(["report", "--results", str(RESULTS / "gpu"), "--check"]) == 0
    lines = json.loads((RESULTS / "gpu" / "speed.json").read_text())["models"][gpu_speed.LLAMA]["lines"]
    ours, plain = (lines[name]["ms_per_token"] for name in ("our plain decoding", "eager generate"))
    assert f"takes {ours:.1f} ms a token without drafts, `generate` {plain:.1f} (" in report.README.read_text()
    leads = [abs(found["lead"]) for line in lines.values() for found in line.get("divergences", [])]
    guide = next(page for page in report.PAGES if page.name == "measuring.md").read_text()
    assert f"its token led by {max(leads):.2f} at most" in guide


def speeds_of(folder):
    """The speed of each line in the summary of a folder's results, as it is written."""
    table = decode.summary_table(report.read_results(RESULTS / folder)["decode"])
    rows = [line.replace("*", "").split(" | ") for line in table.splitlines()[2:]]
    return {name.removeprefix("| "): speed for name, speed, _ in rows}


def test_what_the_pages_say_beside_other_engines_was_measured():
    compiled = 'with tide_hf, `engine="compiled"`'
    names = ("bfloat16", "peers-intel", "peers-second-model", "peers-third-model")
    here, intel, second, third = map(speeds_of, names)
    without = intel["with tide_hf, without a C++ compiler"]
    said = f"in bfloat16 the default gives {here['with tide_hf']} there, compiled {here[compiled]}, and in float32 "
    said += f"Qwen2.5-Coder-0.5B {second[compiled]} and gemma-3-270m {third[compiled]}, compiled. An earlier version "
    said += f"on an Intel Xeon, without kernels by default, gave {without}, compiled {intel[compiled]}, OpenVINO "
    said += f"{intel['OpenVINO GenAI']}."
    assert said in " ".join(report.README.read_text(encoding="utf-8").split())
    peers, int8 = (report.read_results(RESULTS / name)["decode"] for name in ("peers-intel", "peers-int8-intel"))
    measuring = report.PAGES[1].read_text(encoding="utf-8")
    slow = [
        decode._mean(one["prompts"], None)
        for name in ("translation", "story")
        for one in peers["categories"][name]
        if one["name"] == "self_speculative, no kernels"
    ]
    assert "translations ({}) and stories ({})".format(*slow) in measuring
    perplexity = int8["quantized"]["perplexity"]
    assert f"{perplexity['int8']:.2f} with these int8 weights and {perplexity['unquantized']:.2f} without" in measuring


def result(name, *prompts):
    return {"name": name, "prompts": [{"speedup": speedup, "equal": equal} for speedup, equal in prompts]}


def test_tables_have_means_over_all_prompts_and_no_speed_for_tokens_that_differ():
    rest = {"batches": {}, "dtype": "float32", "device": "cpu", "torch_threads": 2, "model": "org/name"}
    plain, wrong = result("generate", (1.0, True)), result("wrong", (2.0, False))
    record = rest | {"categories": {"chat": [plain, wrong]}, "batches": {"8": [plain]}, "sampling": [plain]}
    assert "| wrong | differs | differs | 0/1 | - | - |" in decode.table(record)
    assert "| wrong | 2.00 | 2.00 | 0/1 | - | - |" in decode.table(record | {"dtype": "bfloat16"})
    peer, exits = (result(name, (3.0, False)) | {"lossless": False} for name in ("vLLM, float32", "fixed exit at 28"))
    lines = decode.table(rest | {"categories": {"chat": [plain, peer, exits]}}).splitlines()
    assert lines[3:] == ["| vLLM, float32 | 3.00 | 3.00 | 0/1 |"]  # which claims no tokens; exits have their own table
    chat = [result("generate", (1.0, True)), result("self_speculative", (1.5, True)), result("other", (9.0, True))]
    story = [result("generate", (1.0, True), (1.0, True)), result("self_speculative", (1.0, True), (2.0, True))]
    lines = decode.summary_table(rest | {"categories": {"chat": chat, "story": story}}).splitlines()
    assert lines[0] == "| name, float32, 2 CPU threads | speed | answers equal |"
    assert lines[2:] == ["| plain `generate` | 1.00 | 3/3 |", "| **with tide_hf** | **1.50** | **3/3** |"]
    differing = rest | {"categories": {"chat": [plain, result("self_speculative", (3.0, False))]}}
    assert "| **with tide_hf** | **differs** | **0/1** |" in decode.summary_table(differing)
    assert "cuda:0" in decode.summary_table(differing | {"device": "cuda:0"}).splitlines()[0]
