// exit_compact sorts the rows that continue before those that exit; exit_scatter writes them back. Elements are only
// copied, so only the size of a dtype matters.

#include "../torch-ext/torch_binding.h"
#include "common.cuh"

namespace tide {
namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 1024;  // rows that are counted together
constexpr int ROWS = 8;      // rows that one block moves; divides CHUNK

__device__ inline int block_count(int x) {
  __shared__ int per_warp[THREADS / WARP];
  __syncthreads();
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (threadIdx.x % WARP == 0) per_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / WARP; ++warp) sum += per_warp[warp];
  return sum;
}

// Number of continuing rows in [begin, end), counted by the block.
__device__ inline int count_staying(const bool* exit_mask, int64_t mask_stride, int64_t begin, int64_t end) {
  int staying = 0;
  for (int64_t row = begin + threadIdx.x; row < end; row += THREADS) staying += !exit_mask[row * mask_stride];
  return block_count(staying);
}

__global__ void __launch_bounds__(THREADS)
    count_kernel(const bool* exit_mask, int64_t mask_stride, int* chunk_counts, int64_t num_rows) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * CHUNK;
  const int staying = count_staying(exit_mask, mask_stride, begin, min(begin + CHUNK, num_rows));
  if (threadIdx.x == 0) chunk_counts[blockIdx.x] = staying;
}

// E: the unsigned integer that is moved at a time; a row has `size` of them.
template <typename E>
__global__ void __launch_bounds__(THREADS) compact_kernel(
    const E* hidden_states,
    int64_t row_stride,
    int64_t col_stride,
    const bool* exit_mask,
    int64_t mask_stride,
    const int* chunk_counts,
    E* rows_out,
    int64_t* indices,
    int* counts,
    int64_t num_rows,
    int64_t size) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * ROWS;
  const int64_t chunk = first / CHUNK, num_chunks = (num_rows + CHUNK - 1) / CHUNK;
  int64_t before = count_staying(exit_mask, mask_stride, chunk * CHUNK, first);
  int64_t staying = 0;
  if (chunk_counts == nullptr) {
    staying = before + count_staying(exit_mask, mask_stride, first, num_rows);
  } else {
    int counted = 0, counted_before = 0;
    for (int64_t i = threadIdx.x; i < num_chunks; i += THREADS) {
      counted += chunk_counts[i];
      counted_before += i < chunk ? chunk_counts[i] : 0;
    }
    staying = block_count(counted);
    before += block_count(counted_before);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    counts[0] = static_cast<int>(staying);
    counts[1] = static_cast<int>(num_rows - staying);
  }
  for (int64_t row = first; row < min(first + ROWS, num_rows); ++row) {
    const bool stays = !exit_mask[row * mask_stride];
    const int64_t place = stays ? before : staying + row - before;
    before += stays;
    if (threadIdx.x == 0) indices[place] = row;
    for (int64_t col = threadIdx.x; col < size; col += THREADS) {
      rows_out[place * size + col] = hidden_states[row * row_stride + col * col_stride];
    }
  }
}

template <typename E>
__global__ void __launch_bounds__(THREADS) scatter_kernel(
    const E* rows,
    int64_t row_stride,
    int64_t col_stride,
    const int64_t* indices,
    int64_t index_stride,
    const int* limit,
    E* out,
    int64_t out_row_stride,
    int64_t out_col_stride,
    int64_t num_rows,
    int64_t size) {
  const int64_t row = blockIdx.x;
  if (row >= num_rows || (limit != nullptr && row >= *limit)) return;
  const int64_t place = indices[row * index_stride];
  for (int64_t col = threadIdx.x; col < size; col += THREADS) {
    out[place * out_row_stride + col * out_col_stride] = rows[row * row_stride + col * col_stride];
  }
}

// Calls `run` with an element of the width to move at a time, and with the number of tensor elements in it.
template <typename Run>
void for_width(size_t element_size, bool by_16_bytes, Run run) {
  if (by_16_bytes) return run(uint4{}, 16 / static_cast<int64_t>(element_size));
  switch (element_size) {
    case 1: return run(uint8_t{}, int64_t{1});
    case 2: return run(uint16_t{}, int64_t{1});
    case 4: return run(uint32_t{}, int64_t{1});
    case 8: return run(uint64_t{}, int64_t{1});
    default: STD_TORCH_CHECK(false, "elements of 1, 2, 4 or 8 bytes expected, got ", element_size);
  }
}

// Whether each row consists of whole, aligned groups of 16 bytes.
bool moves_by_16_bytes(const Tensor& tensor) {
  const size_t row = tensor.stride(0) * tensor.element_size(), width = tensor.size(1) * tensor.element_size();
  return tensor.stride(1) == 1 && row % 16 == 0 && width % 16 == 0 && is_aligned(tensor.const_data_ptr(), 16);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> exit_compact(const Tensor& hidden_states, const Tensor& exit_mask) {
  STD_TORCH_CHECK(exit_mask.scalar_type() == ScalarType::Bool, "exit_compact: a mask of bool expected");
  const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
  const int64_t num_rows = hidden_states.size(0), size = hidden_states.size(1);
  Tensor rows = torch::stable::new_empty(hidden_states, {num_rows, size});
  Tensor indices = torch::stable::new_empty(hidden_states, {num_rows}, ScalarType::Long);
  Tensor counts = torch::stable::new_empty(hidden_states, {2}, ScalarType::Int);
  if (num_rows == 0) return {rows, indices, torch::stable::zero_(counts)};
  const cudaStream_t stream = current_stream(hidden_states);
  const bool* mask = static_cast<const bool*>(exit_mask.const_data_ptr());
  const unsigned num_chunks = ceil_div(num_rows, CHUNK);
  Tensor chunk_counts = torch::stable::new_empty(hidden_states, {num_chunks}, ScalarType::Int);
  int* counted = num_chunks > 1 ? static_cast<int*>(chunk_counts.mutable_data_ptr()) : nullptr;
  if (counted != nullptr) {
    count_kernel<<<num_chunks, THREADS, 0, stream>>>(mask, exit_mask.stride(0), counted, num_rows);
    check_launch("exit_compact");
  }
  const bool wide = moves_by_16_bytes(hidden_states) && moves_by_16_bytes(rows);
  for_width(hidden_states.element_size(), wide, [&](auto element, int64_t group) {
    using E = decltype(element);
    compact_kernel<E><<<ceil_div(num_rows, ROWS), THREADS, 0, stream>>>(
        static_cast<const E*>(hidden_states.const_data_ptr()),
        hidden_states.stride(0) / group,
        hidden_states.stride(1),
        mask,
        exit_mask.stride(0),
        counted,
        static_cast<E*>(rows.mutable_data_ptr()),
        static_cast<int64_t*>(indices.mutable_data_ptr()),
        static_cast<int*>(counts.mutable_data_ptr()),
        num_rows,
        size / group);
  });
  check_launch("exit_compact");
  return {rows, indices, counts};
}

void exit_scatter(const Tensor& rows, const Tensor& indices, const Tensor& out, const std::optional<Tensor>& limit) {
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long, "exit_scatter: int64 indices expected");
  STD_TORCH_CHECK(!limit.has_value() || limit->scalar_type() == ScalarType::Int, "exit_scatter: an int32 limit expected");
  if (rows.numel() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  const cudaStream_t stream = current_stream(rows);
  for_width(rows.element_size(), moves_by_16_bytes(rows) && moves_by_16_bytes(out), [&](auto element, int64_t group) {
    using E = decltype(element);
    scatter_kernel<E><<<ceil_div(rows.size(0), 1), THREADS, 0, stream>>>(
        static_cast<const E*>(rows.const_data_ptr()),
        rows.stride(0) / group,
        rows.stride(1),
        static_cast<const int64_t*>(indices.const_data_ptr()),
        indices.stride(0),
        limit.has_value() ? static_cast<const int*>(limit->const_data_ptr()) : nullptr,
        static_cast<E*>(out.mutable_data_ptr()),
        out.stride(0) / group,
        out.stride(1),
        rows.size(0),
        rows.size(1) / group);
  });
  check_launch("exit_scatter");
}

}  // namespace tide
