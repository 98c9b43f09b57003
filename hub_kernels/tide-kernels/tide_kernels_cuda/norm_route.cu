// norm_route: norm, router MLP and sigmoid in one launch.
//
// A block takes TOKENS rows and RANKS of the router's hidden units, since one multiprocessor could not read all router
// weights in the time that a launch takes. The last block of a row to finish adds up the partial sums in a fixed order,
// so that results do not vary.

#include "../torch-ext/torch_binding.h"
#include "common.cuh"

namespace tide {
namespace {

constexpr int THREADS = 256;
constexpr int RANKS = 4;

enum Norm : int { RMS = 0, RMS_FLOAT32 = 1, RMS_ONE_PLUS = 2, LAYER = 3 };  // as in torch-ext/tide_kernels/norms.py

struct Arguments {
  const void* hidden_states;
  const void* norm_weight;
  const void* norm_bias;  // may be null, as may the other biases
  const float* down_weight;
  const float* down_bias;
  const float* up_weight;
  const float* up_bias;
  float* partials;  // (rows, parts)
  int* counters;
  float* scores;
  int64_t num_rows, row_stride, col_stride, down_row_stride, down_col_stride;
  int size, rank;
  float eps;
  int norm;
};

// One element after the norm, rounded where the model rounds.
template <typename T, typename W>
__device__ inline float normalized(float x, float mean, float scale, W weight, float bias, int norm) {
  const float y = (x - mean) * scale, w = to_float(weight);
  if (norm == RMS) {
    const float product = w * rounded<T>(y);
    return std::is_same<T, W>::value ? rounded<T>(product) : product;
  }
  if (norm == RMS_ONE_PLUS) return rounded<T>(y * (1.0f + w));
  return rounded<T>(norm == LAYER ? y * w + bias : y * w);
}

template <typename T, int WIDTH>
__device__ inline Vector<T, WIDTH> load(const T* pointer, int64_t stride) {
  if constexpr (WIDTH > 1) {
    return *reinterpret_cast<const Vector<T, WIDTH>*>(pointer);  // strides are 1 here
  } else {
    return {pointer[0 * stride]};
  }
}

template <typename T, typename W, int TOKENS, int WIDTH>
__global__ void __launch_bounds__(THREADS) norm_route_kernel(const Arguments a) {
  __shared__ float scratch[THREADS / WARP * TOKENS * RANKS];
  __shared__ bool is_last;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * TOKENS;
  const int first_unit = blockIdx.y * RANKS, parts = gridDim.y;
  const T* rows[TOKENS];  // rows beyond the last repeat it, and write nothing
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const int64_t row = min(first_row + t, a.num_rows - 1);
    rows[t] = static_cast<const T*>(a.hidden_states) + row * a.row_stride;
  }

  float mean[TOKENS] = {}, scale[TOKENS] = {};
  if (a.norm == LAYER) {
    for (int col = threadIdx.x; col < a.size; col += THREADS) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) mean[t] += to_float(rows[t][col * a.col_stride]);
    }
    block_sum<TOKENS, THREADS>(mean, scratch);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) mean[t] /= a.size;
  }
#pragma unroll (TOKENS == 1 ? 4 : 1)
  for (int col = threadIdx.x * WIDTH; col < a.size; col += THREADS * WIDTH) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const auto x = load<T, WIDTH>(rows[t] + col * a.col_stride, a.col_stride);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const float centred = to_float(x.element[i]) - mean[t];
        scale[t] += centred * centred;
      }
    }
  }
  block_sum<TOKENS, THREADS>(scale, scratch);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) scale[t] = rsqrtf(scale[t] / a.size + a.eps);

  float sums[TOKENS * RANKS] = {};
#pragma unroll (TOKENS == 1 ? 4 : 1)  // several rows keep enough loads in flight, and registers busy, as it is
  for (int col = threadIdx.x * WIDTH; col < a.size; col += THREADS * WIDTH) {
    Vector<float, WIDTH> down[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const int64_t unit = min(first_unit + r, a.rank - 1);  // units beyond the last get no weight below
      down[r] = load<float, WIDTH>(a.down_weight + unit * a.down_row_stride + col * a.down_col_stride, 1);
    }
    const auto weight = load<W, WIDTH>(static_cast<const W*>(a.norm_weight) + col, 1);
    Vector<W, WIDTH> bias = {};
    if (a.norm_bias != nullptr) bias = load<W, WIDTH>(static_cast<const W*>(a.norm_bias) + col, 1);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const auto x = load<T, WIDTH>(rows[t] + col * a.col_stride, a.col_stride);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const float y = normalized<T, W>(
            to_float(x.element[i]), mean[t], scale[t], weight.element[i], to_float(bias.element[i]), a.norm);
#pragma unroll
        for (int r = 0; r < RANKS; ++r) sums[t * RANKS + r] += y * down[r].element[i];
      }
    }
  }
  block_sum<TOKENS * RANKS, THREADS>(sums, scratch);

  if (threadIdx.x == 0) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float part = 0.0f;
#pragma unroll
      for (int r = 0; r < RANKS; ++r) {
        const int unit = first_unit + r;
        if (unit >= a.rank) continue;
        const float z = sums[t * RANKS + r] + (a.down_bias != nullptr ? a.down_bias[unit] : 0.0f);
        part += z / (1.0f + expf(-z)) * a.up_weight[unit];
      }
      if (first_row + t < a.num_rows) a.partials[(first_row + t) * parts + blockIdx.y] = part;
    }
    __threadfence();
    is_last = atomicAdd(a.counters + blockIdx.x, 1) == parts - 1;
  }
  __syncthreads();
  if (!is_last) return;

  __threadfence();
  const int token = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t row = first_row + token;
  if (token < TOKENS && row < a.num_rows) {
    float logit = 0.0f;
    for (int part = lane; part < parts; part += WARP) logit += __ldcg(a.partials + row * parts + part);
    logit = warp_sum(logit) + (a.up_bias != nullptr ? *a.up_bias : 0.0f);
    if (lane == 0) a.scores[row] = 1.0f / (1.0f + expf(-logit));
  }
  if (threadIdx.x == 0) a.counters[blockIdx.x] = 0;  // ready for the next launch
}

template <typename T, typename W>
void launch(const Arguments& a, cudaStream_t stream) {
  const bool aligned = is_aligned(a.hidden_states, 4 * sizeof(T)) && is_aligned(a.norm_weight, 4 * sizeof(W)) &&
      is_aligned(a.norm_bias, 4 * sizeof(W)) && is_aligned(a.down_weight, 4 * sizeof(float));
  const bool dense = a.size % 4 == 0 && a.row_stride % 4 == 0 && a.col_stride == 1 && a.down_row_stride % 4 == 0 &&
      a.down_col_stride == 1;
  const int tokens = a.num_rows == 1 ? 1 : 4;
  const dim3 grid(ceil_div(a.num_rows, tokens), ceil_div(a.rank, RANKS));
  if (aligned && dense) {
    if (tokens == 1) {
      norm_route_kernel<T, W, 1, 4><<<grid, THREADS, 0, stream>>>(a);
    } else {
      norm_route_kernel<T, W, 4, 4><<<grid, THREADS, 0, stream>>>(a);
    }
  } else if (tokens == 1) {
    norm_route_kernel<T, W, 1, 1><<<grid, THREADS, 0, stream>>>(a);
  } else {
    norm_route_kernel<T, W, 4, 1><<<grid, THREADS, 0, stream>>>(a);
  }
  check_launch("norm_route");
}

template <typename T>
void launch(const Arguments& a, bool norm_in_float32, cudaStream_t stream) {
  norm_in_float32 ? launch<T, float>(a, stream) : launch<T, T>(a, stream);
}

const float* floats(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) return nullptr;
  STD_TORCH_CHECK(
      tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous(), "norm_route: float32 biases expected");
  return static_cast<const float*>(tensor->const_data_ptr());
}

}  // namespace

Tensor norm_route(
    const Tensor& hidden_states,
    const Tensor& norm_weight,
    const std::optional<Tensor>& norm_bias,
    const Tensor& down_weight,
    const std::optional<Tensor>& down_bias,
    const Tensor& up_weight,
    const std::optional<Tensor>& up_bias,
    double eps,
    int64_t norm,
    const Tensor& counters) {
  const ScalarType dtype = hidden_states.scalar_type(), norm_dtype = norm_weight.scalar_type();
  STD_TORCH_CHECK(norm_dtype == dtype || norm_dtype == ScalarType::Float, "norm_route: the norm's weight has a dtype "
                  "that is neither the hidden states' nor float32");
  STD_TORCH_CHECK(!norm_bias.has_value() || norm_bias->scalar_type() == norm_dtype, "norm_route: the norm's weight "
                  "and bias differ in dtype");
  STD_TORCH_CHECK(down_weight.scalar_type() == ScalarType::Float && up_weight.scalar_type() == ScalarType::Float,
                  "norm_route: the router's weights are not float32");
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  const int64_t num_rows = hidden_states.size(0), rank = down_weight.size(0);
  Tensor scores = torch::stable::new_empty(hidden_states, {num_rows}, ScalarType::Float);
  if (num_rows == 0) return scores;
  Tensor partials = torch::stable::new_empty(hidden_states, {num_rows, ceil_div(rank, RANKS)}, ScalarType::Float);

  Arguments a = {};
  a.hidden_states = hidden_states.const_data_ptr();
  a.norm_weight = norm_weight.const_data_ptr();
  a.norm_bias = norm_bias.has_value() ? norm_bias->const_data_ptr() : nullptr;
  a.down_weight = static_cast<const float*>(down_weight.const_data_ptr());
  a.down_bias = floats(down_bias);
  a.up_weight = static_cast<const float*>(up_weight.const_data_ptr());
  a.up_bias = floats(up_bias);
  a.partials = static_cast<float*>(partials.mutable_data_ptr());
  a.counters = static_cast<int*>(counters.mutable_data_ptr());
  a.scores = static_cast<float*>(scores.mutable_data_ptr());
  a.num_rows = num_rows;
  a.row_stride = hidden_states.stride(0);
  a.col_stride = hidden_states.stride(1);
  a.down_row_stride = down_weight.stride(0);
  a.down_col_stride = down_weight.stride(1);
  a.size = static_cast<int>(hidden_states.size(1));
  a.rank = static_cast<int>(rank);
  a.eps = static_cast<float>(eps);
  a.norm = static_cast<int>(norm);
  const cudaStream_t stream = current_stream(hidden_states);
  const bool norm_in_float32 = norm_dtype == ScalarType::Float;
  switch (dtype) {
    case ScalarType::Float: launch<float, float>(a, stream); break;
    case ScalarType::Half: launch<__half>(a, norm_in_float32, stream); break;
    case ScalarType::BFloat16: launch<__nv_bfloat16>(a, norm_in_float32, stream); break;
    default: STD_TORCH_CHECK(false, "norm_route: hidden states in float32, float16 or bfloat16 expected");
  }
  return scores;
}

}  // namespace tide
