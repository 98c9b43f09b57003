"""What `torch.compile` needs from the ops, and which files staging writes."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stage
import torch
from reference64 import norm_route_arguments

from tide_hf.kernels.fetch import check_files


@pytest.fixture
def registered(kernel_module):
    """The ops as `torch.ops` has them."""
    metadata = json.loads((Path(kernel_module.__file__).parent / "metadata.json").read_text())
    return getattr(torch.ops, metadata["id"])


def samples(device):
    rows, counters = torch.randn(3, 5, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    router = norm_route_arguments(torch.float32, 3, 5, device=device)
    return {
        "norm_route": (*router[:5], router[5].flatten(), router[6], 1e-5, 0, counters),
        "kv_compact": (rows[None, None], rows[None, None].clone(), torch.tensor([[0, 2]], device=device)),
        "draft_top1": (rows, torch.randn(7, 5, device=device), None),
    }


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck(registered, device, name):
    op = getattr(registered, name).default
    torch.library.opcheck(op, samples(device)[name], test_utils=("test_schema", "test_faketensor"))


def test_compiles_without_a_graph_break(kernel_module, device):
    args = norm_route_arguments(torch.float32, 3, 5, device=device)

    def route(*args):
        return kernel_module.norm_route(*args, eps=1e-5)

    assert torch.equal(torch.compile(route, backend="aot_eager", fullgraph=True)(*args), route(*args))


def test_every_op_names_its_backend(kernel_module, device):
    assert set(kernel_module.implementations()) == set(samples(device))
    assert set(kernel_module.implementations().values()) <= {"triton", "cuda"}
    assert all(hasattr(kernel_module, name) for name in kernel_module.__all__)


def test_staging_writes_what_the_client_reads(tmp_path):
    kernels = pytest.importorskip("kernels")
    variant = stage.stage_noarch(tmp_path, "cuda")
    assert variant.name == "torch-cuda"
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("tide-kernels", 1, "apache-2.0")
    assert metadata.backend.archs == ["7.5+PTX"]
    assert set(metadata.digest.files) == {file.name for file in variant.iterdir()} - {"metadata.json"}
    check_files(variant)


def test_a_copy_of_a_loaded_build_can_be_loaded(kernel_module, tmp_path):
    copy = shutil.copytree(Path(kernel_module.__file__).parent, tmp_path / "copy")
    again = stage.load_variant(copy)
    assert again is not kernel_module
    assert again.implementations() == kernel_module.implementations()


def test_staging_replaces_an_earlier_build(tmp_path):
    variant = stage.stage_noarch(tmp_path)
    (variant / "left_over.py").touch()
    stage.stage_noarch(tmp_path)
    assert not (variant / "left_over.py").exists()


def test_build_config_and_staging_agree():
    config = (stage.HERE / "build.toml").read_text()
    for named in (*stage.CUDA_SOURCES, *stage.CUDA_HEADERS, *stage.CAPABILITIES, stage.NAME):
        assert f'"{named}"' in config
    assert f'cuda = "{stage.STABLE_ABI[0]}.{stage.STABLE_ABI[1]}"' in config


LOAD = """
import ctypes, pathlib, sys
if len(sys.argv) > 2:
    ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)  # stands in for PyTorch's CUDA library
import stage, torch
print(stage.load_variant(pathlib.Path(sys.argv[1])).implementations())
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_cuda_library_loads_and_takes_precedence(tmp_path):
    variant, _ = stage.stage_cuda(tmp_path, ["9.0"])
    command = [sys.executable, "-c", LOAD, str(variant)]
    if torch.version.cuda is None:
        source, stub = tmp_path / "stub.c", tmp_path / "libtorch_cuda.so"
        source.write_text("int aoti_torch_get_current_cuda_stream(int device, void** stream) { return 1; }")
        flags = ["-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so"]
        subprocess.run(["cc", *flags, str(source), "-o", str(stub)], check=True)
        command.append(str(stub))
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=stage.HERE)
    written_in = ast.literal_eval(done.stdout)
    assert {name for name, language in written_in.items() if language == "cuda"} == {"norm_route"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.timeout(1800)
def test_the_cuda_sources_compile_without_spills(tmp_path):
    variant, log = stage.stage_cuda(tmp_path, verbose_ptxas=True)
    for capability in stage.CAPABILITIES:
        assert f"sm_{capability.replace('.', '')}" in log
    reports = [line for line in log.splitlines() if "spill stores" in line]
    assert len(reports) >= 20 * len(stage.CAPABILITIES)
    assert [line for line in reports if "0 bytes spill stores, 0 bytes spill loads" not in line] == []
    check_files(variant)
