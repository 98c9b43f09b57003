#!/usr/bin/env bash
# Everything about the kernels that needs a GPU, in one run of under ten minutes: builds, tests, memory checks, times.
#
#     hub_kernels/tide-kernels/gpu_checks.sh [RESULTS_FOLDER] [PUBLISHED_SOURCES]
#
# Needs an NVIDIA GPU, nvcc, compute-sanitizer, and a Python with PyTorch (2.10 or later, with CUDA), Triton,
# transformers, pytest, and for the loader's tests kernels. PUBLISHED_SOURCES is tide-inference's source distribution,
# unpacked (pip download --no-deps --no-binary :all: tide-inference==0.2.1); without it that comparison is left out.
# Every step runs, whatever came of the one before; the last lines say which failed, and the exit status is their number.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

results="${1:-hub_kernels/tide-kernels/build/results}"
published="${2:-}"
here=hub_kernels/tide-kernels
python="${PYTHON:-python3}"
pytest=("$python" -m pytest -q -p no:cacheprovider -o addopts= -o filterwarnings= -m "not slow")
"$python" -c 'import xdist' 2> /dev/null && workers=(-n 8) || workers=()
mkdir -p "$results"
failed=()

step() { # NAME SECONDS COMMAND...
  local name="$1" seconds="$2" start=$SECONDS
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" > "$results/$name.log" 2>&1
  local status=$?
  tail -n 12 "$results/$name.log"
  echo "== $name: $([ $status -eq 0 ] && echo passed || echo "FAILED ($status)") after $((SECONDS - start)) s"
  [ $status -eq 0 ] || failed+=("$name")
}

export PYTHONPATH="$PWD:$PWD/$here/tests${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_USER_AGENT_ORIGIN=tide_hf
unset TRITON_INTERPRET
nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader
capability="$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')"
export TORCH_CUDA_ARCH_LIST="$capability"

step build_noarch 20 "$python" "$here/stage.py" noarch --folder "$results/../gpu"
step build_cuda 100 "$python" "$here/stage.py" cuda --capabilities "$capability" --folder "$results/../gpu"
triton_variant="$(tail -n 1 "$results/build_noarch.log")"
cuda_variant="$(tail -n 1 "$results/build_cuda.log")"

step tests_triton 120 env TIDE_KERNELS="$triton_variant" "${pytest[@]}" "${workers[@]}" "$here/tests"
step tests_cuda 50 env TIDE_KERNELS="$cuda_variant" "${pytest[@]}" "${workers[@]}" "$here/tests"
step tests_engine 50 "${pytest[@]}" tests/kernels/test_ops.py tests/kernels/test_kernel_decisions.py
few="kernel and (127 or strided or many_rows or all_slots_move) and not plain and not compiles"
for tool in memcheck racecheck; do
  step "sanitizer_$tool" 45 env TIDE_KERNELS="$cuda_variant" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "$here/tests" -k "$few" -x
done
compare=()
[ -n "$published" ] && compare=(--published "$published")
step benchmark 160 "$python" "$here/benchmarks/benchmark.py" "$triton_variant" "$cuda_variant" "${compare[@]}" \
  --json "$results/benchmark.json"
cat "$results/benchmark.log"

echo "failed: ${failed[*]:-none}"
exit "${#failed[@]}"
