"""``tide-hf inspect``: what it shows of models, and of routers with older calibration records too."""

import dataclasses
import json
from pathlib import Path

from draft_heads import draft_head_for
from families import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf import TIDERouters
from tide_hf.cli.demo_model import DEFAULT_MODEL
from tide_hf.cli.main import main
from tide_hf.evaluation.inspection import convergence_by_layer
from tide_hf.hub.load import shipped_routers


def test_json_of_a_model_without_routers_on_a_text(tiny_model_folder, fresh_kernels, tmp_path, capsys):
    (tmp_path / "text").write_text("the river\nruns\n\n\n to the sea\n", encoding="utf-8")
    assert main(["inspect", str(tiny_model_folder), "--text", str(tmp_path / "text"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["structure"]["vocab_size"] == 260
    assert facts["routers"] is None
    notes = [fact["note"] for fact in facts["modes"].values()]
    assert notes == [None, *["needs routers, and there are none"] * 2]
    assert (facts["kernels"]["dtype"], set(facts["kernels"]["ops"].values())) == ("float32", {"torch"})
    model, tokenizer = (kind.from_pretrained(tiny_model_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = convergence_by_layer(model, tokenizer, ["the river\nruns", "to the sea"])
    assert facts["convergence"] == [dataclasses.asdict(row) for row in rows]


def test_a_recurrent_model_cannot_run_two_modes_and_the_reason_is_shown(
    tiny_tokenizer, fresh_kernels, tmp_path, capsys
):
    for part in (tiny_model("mamba", vocab_size=260), tiny_tokenizer):
        part.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "self_speculative no: MambaForCausalLM keeps a recurrent state" in out
    assert "early_exit       no: MambaForCausalLM keeps a recurrent state" in out
    assert "post_hoc         yes" in out
    assert "routers: none" in out
    assert "fused kernels: none, plain PyTorch runs (CPU, float32): no kernels are published yet" in out


def test_the_exit_threshold_is_shown(tiny_model_folder, tmp_path, capsys):
    routers = draft_head_for(AutoModelForCausalLM.from_pretrained(tiny_model_folder))
    routers.config.calibration = {"threshold": {"tolerance": 0.02, "confidence": 0.95, "chosen": 0.75}}
    for chosen, shown in ((0.75, "0.75 (disagreement below 2.0% with"), (0.5, "0.5 (not certified)"), (2.0, "none: ")):
        routers.config.exit_threshold = chosen
        routers.save_pretrained(tmp_path)
        assert main(["inspect", str(tiny_model_folder), "--routers", str(tmp_path)]) == 0
        assert f"exit threshold   {shown}" in capsys.readouterr().out


def test_older_calibration_records_are_shown(tiny_model_folder, tmp_path, capsys):
    shipped = json.loads((Path(shipped_routers(DEFAULT_MODEL)) / "config.json").read_text())["tide"]["calibration"]
    shipped["threshold"]["chosen"] = 0.9
    for row in shipped["exit_layers"].values():
        row.pop("coverage", None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    sparse = {"exit_layers": {"3": {"agreement": 0.6}}}
    for record, shown in ((sparse, "60.0%"), (shipped, "0.9 (disagreement below 2.0% with 95% confidence)")):
        routers = TIDERouters.for_model(model, exit_layers=[3], exit_threshold=0.9, calibration=record)
        routers.save_pretrained(tmp_path / "routers")
        assert main(["inspect", str(tiny_model_folder), "--routers", str(tmp_path / "routers")]) == 0
        assert shown in capsys.readouterr().out
