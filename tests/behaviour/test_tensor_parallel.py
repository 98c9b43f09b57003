"""Two processes that share a model decide alike, whatever each of them measures and draws."""

import json

import pytest
import torch
from repository import ROOT, in_two_processes


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_processes_that_share_a_model_decide_alike(tiny_llama, tmp_path):
    tiny_llama(eos_token_id=None).save_pretrained(tmp_path)
    in_two_processes(ROOT / "tests" / "support" / "tensor_parallel_script.py", tmp_path, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["tokens"][0] == first["tokens"][1] == first["plain"]
    assert first["tokens"][2] != first["plain"]
    assert first["drafted"][0][0] > 0
