"""Put a kernel's variants into a folder as `kernels.get_kernel` reads them: `build/<variant>/`.

    python hub_kernels/tide-kernels/stage.py noarch    # Triton; copies files
    python hub_kernels/tide-kernels/stage.py cuda      # and CUDA C++; needs nvcc and a PyTorch of at least 2.10
    python hub_kernels/tide-kernels/stage.py cpu       # C++ for CPUs; needs a compiler and a PyTorch of at least 2.10

Each replaces the variant that is there. tide_hf itself calls `stage_cpu` on machines that get no ready-made variant.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON_FILES = HERE / "torch-ext" / "tide_kernels"
CUDA_SOURCES = (
    "torch-ext/torch_binding.cpp",
    "tide_kernels_cuda/norm_route.cu",
)
CUDA_HEADERS = ("torch-ext/torch_binding.h", "tide_kernels_cuda/common.cuh")
CPU_SOURCES = (
    *("skinny_gemm", "decode_attention", "prefill_attention"),
    *("decoder_layers", "top_tokens"),
)
CPU_HEADERS = (
    "arguments.h",
    "vectorized.h",
    "rms_norm.h",
    "attend.h",
    "int4_weight.h",
    "panels.h",
    "tiles.h",
    "integer_tiles.h",
    "blocks.h",
    "block_tiles.h",
)
VALUES = ("float", "c10::BFloat16", "c10::Half")
CPU_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),  # sums round as the source says
    f"-ffile-prefix-map={HERE}={HERE.name}",  # error messages name the source, wherever it was compiled
)
AVX512 = "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mf16c"
# For each machine, PyTorch's name and compiler flags of each level, as `cpu_level` names them.
CPU_LEVELS: dict[str, dict[str, tuple[str, str]]] = {
    "x86_64": {
        "amx": ("AVX512", f"{AVX512} -mavx512bf16 -mavx512vnni -DTIDE_AMX"),
        "avx512bf16": ("AVX512", f"{AVX512} -mavx512bf16 -mavx512vnni"),
        "avx512": ("AVX512", AVX512),
        "avx2": ("AVX2", "-mavx2 -mfma -mf16c"),
        "default": ("DEFAULT", ""),
    },
    "aarch64": {"default": ("DEFAULT", "")},
}
NAME, VERSION, LICENSE = "tide-kernels", 1, "apache-2.0"
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
BUILD_SECONDS, VERSION_SECONDS = 600, 10  # that compilers may take: for all sources, and to tell their version
STABLE_ABI = (2, 10)
STABLE_NAME = f"torch-stable-abi{STABLE_ABI[0]}{STABLE_ABI[1]}"
STABLE_TARGET = f"-DTORCH_TARGET_VERSION=0x{STABLE_ABI[0]:02x}{STABLE_ABI[1]:02x}000000000000"

OPS_FILE = '''"""The namespace of this build's ops. Written when the build was staged."""

from __future__ import annotations

import torch
{load}
ops = torch.ops.{unique_name}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an op by its namespace."""
    return f"{unique_name}::{{op_name}}"
'''
CPU_OPS_FILE = '''"""The namespace of this build's ops, with a library for each level. Written by `stage.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from .cpu_level import cpu_level

_NAMESPACE = f"{unique_name}_{{cpu_level()}}"
ops = getattr(torch.ops, _NAMESPACE)
if not hasattr(ops, "skinny_gemm"):  # else the same build was loaded from another folder
    torch.ops.load_library(Path(__file__).with_name(f"{{_NAMESPACE}}.abi3.so"))


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an op by its namespace."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''
LOAD_LIBRARY = """from pathlib import Path

torch.ops.load_library(Path(__file__).with_name("{library}"))
"""


class BuildError(RuntimeError):
    """A compiler is missing, or refuses the sources."""


def stage_noarch(folder: Path, backend: str = "cuda") -> Path:
    """Stage the Triton variant.

    Args:
        folder: Where the variant's folder goes.
        backend: `"cuda"`; or `"cpu"`, which runs under Triton's interpreter alone (`TRITON_INTERPRET=1`).

    Returns:
        The variant's folder.
    """
    variant = _emptied(folder / f"torch-{backend}")
    unique_name = _unique_name(backend, sorted(PYTHON_FILES.glob("*.py")))
    archs = [f"{CAPABILITIES[0]}+PTX"] if backend == "cuda" else None  # Triton compiles for whatever is newer
    _write(variant, unique_name, OPS_FILE.format(load="", unique_name=unique_name), backend, archs)
    return variant


def stage_cuda(
    folder: Path, capabilities: Sequence[str] = CAPABILITIES, verbose_ptxas: bool = False
) -> tuple[Path, str]:
    """Build the CUDA C++ ops against PyTorch's stable ABI, and stage them with the Triton ones.

    Args:
        folder: Where the variant's folder goes.
        capabilities: Compute capabilities, ascending; the last one as PTX as well, which newer GPUs compile themselves.
        verbose_ptxas: Have the assembler report registers and spills.

    Returns:
        The variant's folder, and the compiler's output.

    Raises:
        BuildError: nvcc is missing or refuses the sources.
    """
    release = re.search(r"release (\d+)\.(\d+)", _run(["nvcc", "--version"]))
    if release is None:
        raise BuildError("nvcc --version names no release.")
    cuda = "".join(release.groups())
    variant = _emptied(folder / f"{STABLE_NAME}-cu{cuda}-{platform.machine()}-linux")
    sources = [HERE / name for name in (*CUDA_SOURCES, *CUDA_HEADERS)]
    unique_name = _unique_name("cuda", [*sorted(PYTHON_FILES.glob("*.py")), *sources])
    library = f"{unique_name}.abi3.so"
    with tempfile.TemporaryDirectory() as stubs:
        log = _run(_nvcc_command(variant / library, unique_name, capabilities, _link_flags(Path(stubs)), verbose_ptxas))
    archs = [*capabilities[:-1], f"{capabilities[-1]}+PTX"]
    load = LOAD_LIBRARY.format(library=library)
    _write(variant, unique_name, OPS_FILE.format(load=load, unique_name=unique_name), "cuda", archs)
    return variant, log


def stage_cpu(folder: Path, levels: Sequence[str] = (), values: Sequence[str] = VALUES) -> Path:
    """Build the CPU's C++ ops against PyTorch's stable ABI, and stage them.

    Args:
        folder: Where the variant's folder goes.
        levels: Keys of `CPU_LEVELS` for this machine, each of which gets a library; by default all of them.
        values: Some of `VALUES`, to save time; for the others an op raises.

    Returns:
        The variant's folder.

    Raises:
        BuildError: There is no compiler, it refuses the sources or takes longer than `BUILD_SECONDS`, or this machine
            or PyTorch is not supported.
    """
    check_cpu()
    run = partial(_run, deadline=time.monotonic() + BUILD_SECONDS)
    known = CPU_LEVELS[_machine()]
    variant = _emptied(folder / f"{STABLE_NAME}-cpu-{_machine()}-{platform.system().lower()}")
    unique_name = "_".join([_unique_name("cpu", cpu_files()), *(value.rpartition(":")[2].lower() for value in values)])
    in_folder = tempfile.TemporaryDirectory(dir=folder, prefix=".")  # so that a build that is killed leaves one folder
    with in_folder as objects, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for level in levels or known:
            library = f"{unique_name}_{level}"
            commands = _cpu_commands(library, known[level], values, Path(objects) / level)
            list(pool.map(run, commands))
            link = [*compiler(), "-shared", *(command[-1] for command in commands), *_torch_libraries()]
            target = variant / f"{library}.abi3.so"
            run([*link, "-o", str(target)])
            if not target.is_file():
                raise BuildError(f"{compiler()[0]} ended without an error, and without the library")
    _write(variant, unique_name, CPU_OPS_FILE.format(unique_name=unique_name), "cpu", None)
    return variant


def check_cpu() -> None:
    """Raise [`BuildError`] if this machine, PyTorch or a missing compiler rules out a build of the CPU's ops."""
    if _machine() not in CPU_LEVELS or platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"there are no CPU kernels for {platform.system()} on {platform.machine()}")
    _check_torch()
    if not compiler_facts():
        raise BuildError(f"{compiler()[0]} was not found")


def compiler() -> list[str]:
    """The C++ compiler: what `CXX` names, a path or a command with arguments such as `ccache g++`, or else `c++`."""
    name = os.environ.get("CXX", "").strip() or "c++"
    try:
        return [name] if shutil.which(name) else shlex.split(name)
    except ValueError as error:
        raise BuildError(f"CXX is no command ({error})") from None


def compiler_facts() -> tuple[str, ...]:
    """Command, path and version of [`compiler`]; empty if it was not found."""
    command = compiler()
    path = shutil.which(command[0])
    return (*command, os.path.realpath(path), _version(*command)) if path is not None else ()


@cache
def _version(*command: str) -> str:
    try:
        return _run([*command, "--version"], time.monotonic() + VERSION_SECONDS)
    except BuildError:  # it takes no such option; what else is wrong with it will show in a build
        return ""


def cpu_files() -> list[Path]:
    """The files that determine what a CPU variant computes."""
    names = ["binding.cpp", *(f"{name}.cpp" for name in CPU_SOURCES), *CPU_HEADERS]
    return [Path(__file__), *sorted(PYTHON_FILES.glob("*.py")), *(HERE / "tide_kernels_cpu" / name for name in names)]


@cache
def cpu_level() -> str:
    """The level of this CPU that [`stage_cpu`] would build for."""
    level: str = _module_at(PYTHON_FILES / "cpu_level.py", "tide_kernels_cpu_level").cpu_level()
    return level


def _cpu_commands(library: str, level: tuple[str, str], values: Sequence[str], objects: Path) -> list[list[str]]:
    """The commands that compile the CPU's ops for one level, each ending with the path of its object file."""
    from torch.utils.cpp_extension import include_paths  # noqa: PLC0415 (copying Triton files needs no PyTorch)

    capability, flags = level
    objects.mkdir()
    common = [*compiler(), *CPU_FLAGS, *(f"-I{path}" for path in include_paths()), "-c"]
    built_for = [f"-DTIDE_{value.rpartition(':')[2].upper()}" for value in values]
    binding = [STABLE_TARGET, f"-DTORCH_EXTENSION_NAME={library}", *built_for]
    units = [("binding", binding)]
    vectors = [*flags.split(), f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    units += [(name, [*vectors, f"-DTIDE_VALUE={value}"]) for name in CPU_SOURCES for value in values]
    sources = HERE / "tide_kernels_cpu"
    return [
        [*common, *options, str(sources / f"{name}.cpp"), "-o", str(objects / f"{number}.o")]
        for number, (name, options) in enumerate(units)
    ]


def _check_torch() -> None:
    import torch  # noqa: PLC0415 (copying Triton files needs no PyTorch)

    if tuple(map(int, torch.__version__.split(".")[:2])) < STABLE_ABI:
        raise BuildError(
            f"PyTorch is {torch.__version__}, and the kernels need {'.'.join(map(str, STABLE_ABI))} or later"
        )


def _machine() -> str:
    """This machine as the `kernels` client names it."""
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def _torch_libraries() -> list[str]:
    import torch  # noqa: PLC0415 (copying Triton files needs no PyTorch)

    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]


def load_variant(variant: Path) -> ModuleType:
    """Import a variant that was staged on this machine; others come through the `kernels` client."""
    name = f"staged_{hashlib.sha256(str(variant.resolve()).encode()).hexdigest()[:8]}"
    return _module_at(variant / "__init__.py", name, submodule_search_locations=[str(variant)])


def _module_at(path: Path, name: str, **options: list[str]) -> ModuleType:
    spec: Any = spec_from_file_location(name, path, **options)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _nvcc_command(
    output: Path, unique_name: str, capabilities: Sequence[str], link_flags: list[str], verbose_ptxas: bool
) -> list[str]:
    """The command that compiles and links the CUDA C++ ops."""
    from torch.utils.cpp_extension import include_paths  # noqa: PLC0415 (copying Triton files needs no PyTorch)

    codes = [capability.replace(".", "") for capability in capabilities]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    targets.append(f"-gencode=arch=compute_{codes[-1]},code=compute_{codes[-1]}")
    return [
        "nvcc",
        "-shared",
        "-O3",
        "-std=c++17",
        "--threads=0",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *(["-Xptxas=-v"] if verbose_ptxas else []),
        *targets,
        *(f"-I{path}" for path in include_paths()),
        STABLE_TARGET,
        "-DUSE_CUDA",
        f"-DTORCH_EXTENSION_NAME={unique_name}",
        *(str(HERE / name) for name in CUDA_SOURCES),
        *link_flags,
        "-o",
        str(output),
    ]


def _link_flags(stubs: Path) -> list[str]:
    """Flags that link to PyTorch.

    Where this PyTorch has no CUDA, one function of its CUDA library is linked from a stub, which is not shipped: at run
    time the linker takes the library of that name that PyTorch has loaded.
    """
    import torch  # noqa: PLC0415 (copying Triton files needs no PyTorch)

    libraries = Path(torch.__file__).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        source = stubs / "stub.cpp"
        source.write_text('extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }')
        stub = stubs / "libtorch_cuda.so"
        _run(["nvcc", "-shared", "-Xcompiler=-fPIC", "-Xlinker=-soname=libtorch_cuda.so", str(source), "-o", str(stub)])
    return [f"-L{libraries}", f"-L{stubs}", "-ltorch_cpu", "-ltorch_cuda"]


def _write(variant: Path, unique_name: str, ops_file: str, backend: str, archs: list[str] | None) -> None:
    for file in sorted(PYTHON_FILES.glob("*.py")):
        shutil.copy(file, variant)
    (variant / "_ops.py").write_text(ops_file)
    files = sorted(path for path in variant.iterdir() if path.is_file())
    metadata = {
        "name": NAME,
        "id": unique_name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend, **({"archs": archs} if archs else {})},
        "digest": {"algorithm": "sha256", "files": {path.name: _sha256(path) for path in files}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _unique_name(backend: str, files: list[Path]) -> str:
    """A name for the ops that changes with the sources, so that two builds can be loaded side by side."""
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"_{NAME.replace('-', '_')}_{backend}_{content[:8]}"


def _sha256(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _run(command: list[str], deadline: float | None = None) -> str:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=left)
    except FileNotFoundError:
        raise BuildError(f"{command[0]} was not found") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} takes too long, and was stopped. CXX may name another compiler.") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), "it says nothing of an error")
        raise BuildError(f"{command[0]} failed: {first}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    """Stage what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("noarch", "cuda", "cpu"))
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"), help="of noarch (default: %(default)s)")
    parser.add_argument("--capabilities", nargs="+", default=CAPABILITIES, help="of cuda (default: all supported)")
    parser.add_argument("--levels", nargs="+", default=(), help="of cpu (default: all of this machine)")
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="(default: build/ beside this file)")
    args = parser.parse_args()
    try:
        if args.what == "noarch":
            variant = stage_noarch(args.folder, args.backend)
        elif args.what == "cpu":
            variant = stage_cpu(args.folder, args.levels)
        else:
            variant, _ = stage_cuda(args.folder, args.capabilities)
    except BuildError as error:
        raise SystemExit(str(error)) from None
    print(variant)


if __name__ == "__main__":
    main()
