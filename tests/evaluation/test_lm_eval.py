"""The model `tide_hf` in lm-eval itself, on tasks in local files."""

import json
import subprocess
import sys

import pytest
import torch

from tide_hf import TIDERouters
from tide_hf.common.errors import MissingPackageError, UnsupportedOptionError
from tide_hf.evaluation import exit_logits

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

from tide_hf.evaluation.lm_eval.model import TIDELM  # noqa: E402

ROWS = [{"question": f"{n} plus {n} is", "choices": ["even", "odd", "or"], "answer": n % 2} for n in range(6)]
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "write": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["Q", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """Folders of a model, of its routers and of the tasks."""
    home = tmp_path_factory.mktemp("lm_eval")
    model = tiny_llama()
    model.save_pretrained(home / "model")
    tiny_tokenizer.save_pretrained(home / "model")
    torch.manual_seed(1)
    routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear")
    for layer in routers.exit_layers:
        torch.nn.init.normal_(routers[layer].router.up.weight)
        torch.nn.init.normal_(routers[layer].head.translator.weight, std=0.1)
    routers.save_pretrained(home / "routers")
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    (home / "tasks").mkdir()
    for name, settings in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(home / "rows.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}" if name != "read" else "",
            "doc_to_target": "{{answer}}",
            **settings,
        }
        (home / "tasks" / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return home


@pytest.fixture(scope="module", autouse=True)
def datasets_cache(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def evaluate(places, model, tasks=tuple(TASKS), **model_args):
    args = {"pretrained": str(places / "model"), "dtype": "float32", **model_args}
    return lm_eval.simple_evaluate(
        model=model,
        model_args=args,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(places / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )


def responses(results, task):
    return [sample["filtered_resps"] for sample in results["samples"][task]]


@pytest.fixture(scope="module")
def plain(places):
    return evaluate(places, "hf")


def test_without_exits_the_answers_are_the_base_model_s(places, plain):
    found = evaluate(places, "tide_hf", routers=str(places / "routers"))
    for task in TASKS:
        assert str(responses(found, task)) == str(responses(plain, task))
    assert len({str(response) for response in responses(plain, "write")}) > 1
    assert found["config"]["tide"]["mode"] == "self_speculative"
    never = evaluate(places, "tide_hf", routers=str(places / "routers"), tide_mode="early_exit", exit_threshold=1.5)
    assert responses(never, "write") == responses(plain, "write")
    tide = never["config"]["tide"]
    assert tide["likelihood_depth_fraction"] == tide["generation_depth_fraction"] == 1.0


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_exits_are_scored_as_they_decode(places, plain, mode, tiny_tokenizer):
    found = evaluate(places, "tide_hf", routers=str(places / "routers"), tide_mode=mode, exit_threshold=0.5)
    lm = TIDELM(str(places / "model"), str(places / "routers"), mode, 0.5, device="cpu", dtype="float32")
    model = lm.model
    first = next(sample for sample in found["samples"]["choose"] if sample["doc_id"] == 0)
    for choice, (score, is_greedy) in zip(ROWS[0]["choices"], first["filtered_resps"], strict=True):
        ids = tiny_tokenizer(f"{ROWS[0]['question']} {choice}", return_tensors="pt")["input_ids"]
        logits = exit_logits(model, model._tide.routers, ids, exit_threshold=0.5).logits[0, :-1].log_softmax(-1)
        last = slice(-len(choice) - 1, None)
        tokens = ids[0, 1:][last]
        assert float(score) == pytest.approx(float(logits[last].gather(1, tokens[:, None]).sum()), rel=1e-4)
        assert str(is_greedy) == str(bool((logits[last].argmax(-1) == tokens).all()))
    text = next(sample for sample in found["samples"]["write"] if sample["doc_id"] == 0)
    ids = tiny_tokenizer(ROWS[0]["question"], return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    written = tiny_tokenizer.decode(answer, skip_special_tokens=True)
    assert text["filtered_resps"] == [written.split("Q")[0].split("\n")[0]]
    assert str(responses(found, "choose")) != str(responses(plain, "choose"))
    tide = found["config"]["tide"]
    assert (tide["mode"], tide["exit_threshold"]) == (mode, 0.5)
    assert 0.25 <= tide["likelihood_depth_fraction"] < 1
    assert 0.25 <= tide["generation_depth_fraction"] < 1


def test_the_command_knows_the_model(places):
    command = [sys.executable, "-m", "tide_hf.evaluation.lm_eval", "--model", "tide_hf", "--tasks", "choose"]
    arguments = f"pretrained={places / 'model'},routers={places / 'routers'},tide_mode=early_exit,exit_threshold=0.5"
    paths = ["--include_path", str(places / "tasks"), "--output_path", str(places / "out")]
    command += ["--device", "cpu", "--model_args", arguments, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "|choose|" in done.stdout
    (file,) = (places / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["config"]["tide"]["mode"] == "early_exit"


def test_exits_need_routers(places, tiny_llama, tiny_tokenizer):
    routers = TIDERouters.from_pretrained(places / "routers")
    evaluate(places, "tide_hf", ["write"], routers=routers, tide_mode="early_exit")
    with pytest.raises(UnsupportedOptionError, match="tide_mode='post_hoc' needs routers"):
        TIDELM(tiny_llama(), tide_mode="post_hoc", tokenizer=tiny_tokenizer)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tide_hf.evaluation.lm_eval")
    with pytest.raises(MissingPackageError, match=r"missing to run in lm-eval: .*Run: pip install tide-hf\[lm-eval\]"):
        __import__("tide_hf.evaluation.lm_eval")
