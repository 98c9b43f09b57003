"""The kernels' variant for CPUs: what the `kernels` client and `torch.compile` need of it, and what it links to."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.fetch import check_files

# Of PyTorch: C functions of its stable ABI, and of SLEEF inside it. Its C++ functions change between versions.
STABLE = re.compile(r"aoti_torch_|torch_|Sleef_")
UNSTABLE = re.compile(r"_Z.*(2at|3c10|5torch)")


@pytest.fixture(scope="module")
def variant(shared_kernels):
    """The kernels for float32."""
    return shared_kernels(torch.float32)


WEIGHTS = [torch.randn(*sizes) for sizes in ((16, 6), (8, 6), (8, 6), (6, 16), (7, 6), (7, 6), (6, 7))]
NO_SCALES = [torch.empty(0)] * 7


def samples():
    rows, heads, states = torch.randn(3, 5), torch.randn(1, 2, 4, 8), torch.randn(1, 4, 6)
    cos, sin, mask = *torch.randn(2, 1, 4, 8), torch.ones(1, 1, 4, 5, dtype=torch.bool)
    cache = torch.randn(1, 1, 5, 8)
    layer = [cache], [cache.clone()], WEIGHTS, NO_SCALES, [torch.ones(6)] * 2, [], []
    return {
        "skinny_gemm": (rows, [torch.randn(7, 5), torch.randn(2, 5)], torch.randn(9), []),
        "decode_attention": (heads, heads, heads, torch.zeros(1, 1, 4, 4), torch.tensor(3), 0.5),
        "prefill_attention": (heads, heads, heads, None, 0.5),
        "decoder_layers": (states, cos, sin, mask, torch.tensor(5), *layer, 1e-5, 1e-5, 0.0, 0.5, [], None, []),
        "top_tokens": (rows, 3, True),
        "are_samples": ([rows], [rows.flatten()[::4].clone()], [4]),
    }


# For `skinny_gemm`.
INTEGERS = {1: [torch.ones(7, 5, dtype=torch.int8), torch.ones(2, 5, dtype=torch.int8)]}
GROUPS = {0: torch.randn(3, 48), 1: [torch.ones(7, 48, dtype=torch.int8)], 2: None}
INT4 = {0: torch.randn(3, 64), 1: [torch.ones(64, 32, dtype=torch.uint8)], 2: None}


PANELS = {0: torch.randn(3, 8), 1: [torch.ones(1, 2, 16, 4, dtype=torch.int8)], 2: None, 3: [torch.ones(16)]}


@pytest.mark.parametrize("name", samples())
def test_opcheck(name):
    op = kernels.load_op(name, torch.float32)
    torch.library.opcheck(op, samples()[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("skinny_gemm", {1: [torch.randn(7, 4)]}, "the weight is of the wrong size"),
        ("skinny_gemm", {1: [torch.randn(7, 5).double()], 2: None}, "not contiguous, or of another dtype"),
        ("skinny_gemm", {0: torch.randn(3, 5, dtype=torch.float64), 1: [], 2: None}, "no kernel for this dtype"),
        ("skinny_gemm", {2: torch.randn(7)}, "bias of the wrong size"),
        ("skinny_gemm", {0: torch.randn(3, 0)}, "an empty input"),
        ("skinny_gemm", {3: [torch.ones(7)]}, "scales for some of the weights"),
        ("skinny_gemm", {3: [torch.ones(7), torch.ones(2)]}, "not contiguous, or of another dtype"),
        ("skinny_gemm", {**INTEGERS, 3: [torch.ones(7), torch.ones(3)]}, "scales of the wrong size"),
        ("skinny_gemm", {**GROUPS, 3: [torch.ones(7, 5)]}, "scales of the wrong size"),
        ("skinny_gemm", {**GROUPS, 3: [torch.ones(7, 3, 1)]}, "scales of the wrong size"),
        ("skinny_gemm", {**GROUPS, 3: [torch.ones(7, 6)]}, "groups not of 16 weights at a time"),
        ("skinny_gemm", {**INT4, 3: [torch.ones(64, 2)]}, "scales of the wrong size"),
        ("skinny_gemm", {**INT4, 3: [torch.ones(64, 2, 2)]}, "scales of the wrong size"),
        ("skinny_gemm", {**INT4, 0: torch.randn(3, 32), 3: [torch.ones(2, 64, 2)]}, "the weight is of the wrong size"),
        ("skinny_gemm", {**INT4, 1: [torch.ones(32, 32, dtype=torch.uint8)]}, "not of 64 rows at a time"),
        ("skinny_gemm", INT4, "not contiguous, or of another dtype"),  # without scales
        ("decode_attention", {4: torch.tensor(5)}, "5 slots"),
        ("decode_attention", {4: torch.tensor(3, dtype=torch.int32)}, "`end` is not one int64"),
        ("decode_attention", {0: torch.randn(2, 4, 8)}, "the query is of the wrong size"),
        ("decode_attention", {1: torch.randn(1, 1, 4, 8)}, "the key is of the wrong size"),
        ("decode_attention", {2: torch.randn(1, 2, 3, 8)}, "the value is of the wrong size"),
        ("decode_attention", {3: torch.zeros(1, 1, 1, 4)}, "the mask is of the wrong size"),
        ("prefill_attention", {0: torch.randn(1, 3, 4, 8)}, "3 heads share 2"),
        ("prefill_attention", {2: torch.randn(1, 1, 4, 8)}, "the value is of the wrong size"),
        ("prefill_attention", {3: torch.ones(1, 1, 4, 4)}, "the mask is not of dtype bool"),
        ("prefill_attention", {3: torch.ones(1, 1, 4, 3, dtype=torch.bool)}, "the mask is of the wrong size"),
        ("skinny_gemm", {**PANELS, 0: torch.randn(3, 6)}, "the weight is of the wrong size"),
        ("skinny_gemm", {**PANELS, 1: [torch.ones(1, 2, 8, 4, dtype=torch.int8)]}, "panels of the wrong size"),
        ("skinny_gemm", {**PANELS, 1: [torch.ones(1, 4, 16, 2, dtype=torch.int8)]}, "panels of the wrong size"),
        ("skinny_gemm", {**PANELS, 3: []}, "panels of another dtype"),
        ("skinny_gemm", {**PANELS, 3: [torch.ones(7)]}, "scales of the wrong size"),
        ("skinny_gemm", {**PANELS, 3: [torch.ones(1, 1, 2, 8)]}, "scales of the wrong size"),
        ("skinny_gemm", {**PANELS, 3: [torch.ones(1, 1, 2, 16)]}, "groups not of 16 weights at a time"),
        ("skinny_gemm", {**PANELS, 1: [torch.ones(1, 8, 16, 1)], 3: []}, "panels of another dtype"),
        ("decoder_layers", {0: torch.randn(4, 6)}, "the input is of the wrong size"),
        ("decoder_layers", {1: torch.randn(2, 4, 8)}, "the cosine is of the wrong size"),
        ("decoder_layers", {2: torch.randn(1, 4, 6)}, "the sine is of the wrong size"),
        ("decoder_layers", {1: torch.randn(1, 4, 7), 2: torch.randn(1, 4, 7)}, "heads of odd size"),
        ("decoder_layers", {3: torch.zeros(1, 1, 3, 5)}, "the mask is of the wrong size"),
        ("decoder_layers", {3: torch.zeros(1, 1, 4, 4)}, "a mask for too few slots"),
        ("decoder_layers", {3: torch.zeros(1, 1, 4, 5, dtype=torch.float64)}, "not contiguous, or of another dtype"),
        ("decoder_layers", {4: torch.tensor(6)}, "6 slots"),
        ("decoder_layers", {4: torch.tensor(3)}, "3 slots"),
        ("decoder_layers", {4: torch.tensor(5.0)}, "`end` is not one int64"),
        ("decoder_layers", {5: [torch.randn(1, 2, 5, 8)]}, "the weight is of the wrong size"),
        ("decoder_layers", {5: [torch.randn(1, 3, 5, 8)]}, "2 heads share 3"),
        ("decoder_layers", {5: [torch.randn(2, 1, 5, 8)]}, "the key cache is of the wrong size"),
        ("decoder_layers", {6: [torch.randn(1, 1, 5, 7)]}, "the cache is of the wrong size"),
        ("decoder_layers", {6: [torch.randn(1, 1, 5, 8).double()]}, "not contiguous, or of another dtype"),
        ("decoder_layers", {5: [torch.randn(1, 1, 8, 5).transpose(2, 3)]}, "not contiguous, or of another dtype"),
        *[("decoder_layers", {i: [torch.ones(6)]}, "lists of the wrong length") for i in range(7, 12)],
        ("decoder_layers", {5: []}, "lists of the wrong length"),
        ("decoder_layers", {7: [*WEIGHTS[:2], WEIGHTS[0], *WEIGHTS[3:]]}, "the weight is of the wrong size"),
        ("decoder_layers", {7: [*WEIGHTS[:6], WEIGHTS[6].double()]}, "not contiguous, or of another dtype"),
        ("decoder_layers", {8: [torch.ones(16), *NO_SCALES[1:]]}, "not contiguous, or of another dtype"),
        ("decoder_layers", {9: [torch.ones(6), torch.ones(5)]}, "the norm or bias is of the wrong size"),
        ("decoder_layers", {10: [torch.ones(16), torch.ones(8), torch.ones(16), torch.ones(6)]}, "the norm or bias"),
        ("decoder_layers", {11: [torch.ones(8), torch.ones(7)]}, "the norm or bias is of the wrong size"),
        ("decoder_layers", {16: [torch.randn(1, 4, 5), torch.ones(6)]}, "the input beside is of the wrong size"),
        ("decoder_layers", {16: [torch.randn(1, 4, 6), torch.ones(5)]}, "the norm beside is of the wrong size"),
        ("decoder_layers", {16: [torch.randn(1, 4, 6)]}, "values beside those of several layers"),
        ("decoder_layers", {16: [torch.randn(1, 4, 6), torch.ones(6)]}, "the weight is of the wrong size"),
        (
            "decoder_layers",
            {17: torch.empty(1, 4, 1, 6), 18: [1, 2]},
            "the buffer of tapped states is of the wrong size",
        ),
        ("decoder_layers", {17: torch.empty(1, 4, 1, 6).double(), 18: [1]}, "not contiguous, or of another dtype"),
        ("are_samples", {2: []}, "lists of the wrong length"),
        ("are_samples", {2: [5]}, "samples beyond their weight"),
        ("are_samples", {2: [0]}, "samples beyond their weight"),
        ("are_samples", {1: [torch.ones(4).double()]}, "not contiguous, or of another dtype"),
        ("top_tokens", {1: 6}, "the best 6"),
        ("top_tokens", {1: 0}, "the best 0"),
        ("top_tokens", {0: torch.randn(3, 20), 1: 17}, "the best 17"),
    ],
)
def test_what_an_op_would_read_wrongly_is_refused(name, change, message):
    arguments = [change.get(i, given) for i, given in enumerate(samples()[name])]
    with pytest.raises(RuntimeError, match=message) as caught:
        kernels.load_op(name, torch.float32)(*arguments)
    assert "/" not in str(caught.value).partition("tide-kernels/")[0]  # the builder's folder


def test_staging_writes_what_the_client_reads(variant):
    client = pytest.importorskip("kernels")
    metadata = client.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("tide-kernels", 1, "apache-2.0")
    check_files(variant)
    found, _ = client.variants.resolve_variant([client.variants.parse_variant(variant.name)], "cpu")
    assert found is not None


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_library_links_to_the_stable_abi_alone(variant):
    (library,) = variant.glob("*.so")
    command = ["nm", "--dynamic", "--undefined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1].partition("@")[0] for line in lines}
    assert [name for name in names if UNSTABLE.match(name)] == []
    assert "torch_parallel_for" in names
    whole = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    c_functions = {name for name in names if not name.startswith("_") and not STABLE.match(name)}
    assert [name for name in c_functions if not hasattr(ctypes.CDLL(None), name)] == [], "found in PyTorch alone"
    assert all(hasattr(whole, name) for name in names if STABLE.match(name))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_variant_for_the_hub_has_a_library_for_every_level(tmp_path):
    stage = kernels.stage_module()
    variant = stage.stage_cpu(tmp_path)
    levels = stage.CPU_LEVELS[stage._machine()]
    assert len(list(variant.glob("*.so"))) == len(levels)
    assert all(list(variant.glob(f"*_{level}.abi3.so")) for level in levels)
    module = stage.load_variant(variant)
    for dtype in kernels.CPU_DTYPES:
        state, weight = torch.randn(3, 40).to(dtype), torch.randn(7, 40).to(dtype)
        found = module.skinny_gemm(state, [weight], None, [])
        torch.testing.assert_close(found, state @ weight.T, atol=1e-1, rtol=1e-2)
