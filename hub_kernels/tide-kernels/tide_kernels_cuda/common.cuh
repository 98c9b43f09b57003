// What the kernels share: PyTorch's stable ABI, conversions to and from float32, sums over a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

// Declared by the shim's header only where USE_CUDA is defined.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace tide {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline unsigned ceil_div(int64_t a, int64_t b) {
  return static_cast<unsigned>((a + b - 1) / b);
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// `x` rounded to the nearest value that T has, ties to even.
template <typename T>
__device__ inline float rounded(float x);
template <>
__device__ inline float rounded<float>(float x) { return x; }
template <>
__device__ inline float rounded<__half>(float x) { return __half2float(__float2half_rn(x)); }
template <>
__device__ inline float rounded<__nv_bfloat16>(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Vector {
  T element[WIDTH];
};

constexpr int WARP = 32;

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sum over the block, for each of COUNT values; every thread gets it. `scratch` holds COUNT floats per warp.
template <int COUNT, int THREADS>
__device__ inline void block_sum(float (&x)[COUNT], float* scratch) {
  constexpr int WARPS = THREADS / WARP;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  __syncthreads();  // the scratch may still be read from the sum before
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float sum = warp_sum(x[i]);
    if (lane == 0) scratch[warp * COUNT + i] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += scratch[w * COUNT + i];
    x[i] = sum;
  }
}

}  // namespace tide
