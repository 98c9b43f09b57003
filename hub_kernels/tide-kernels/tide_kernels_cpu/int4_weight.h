// Products with weights in int4, as PyTorch's `_convert_weight_to_int4pack_for_cpu` packs them on a CPU with vectors of
// S floats: in blocks of 4 S rows, where each column takes 2 S bytes. Byte S p + d, for p of 0 or 1 and d < S, holds row
// S p + d in its lower half and row S (p + 2) + d in its upper half, each plus 8. See vectorized.h for `Value`.
//
// Each lane sums one row of the weights, one group after another, so no order depends on the number of rows of the input.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int64_t kInt4Rows = 4 * Floats::size();  // of a block
constexpr int64_t kInt4Bytes = 2 * Floats::size();  // of a column of a block

// The integers in the lower and in the upper halves of S bytes, less 8.
inline std::pair<Floats, Floats> unpack(const uint8_t* bytes) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i found = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  return {_mm512_permutexvar_ps(found, values), _mm512_permutexvar_ps(_mm512_srli_epi32(found, 4), values)};
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i found = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(found, _mm256_set1_epi32(15)));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(found, 4)), eight = _mm256_set1_ps(8.0f);
  return {_mm256_sub_ps(low, eight), _mm256_sub_ps(high, eight)};
#else
  float low[Floats::size()], high[Floats::size()];
  for (int64_t d = 0; d < Floats::size(); ++d) low[d] = (bytes[d] & 15) - 8.0f, high[d] = (bytes[d] >> 4) - 8.0f;
  return {Floats::loadu(low), Floats::loadu(high)};
#endif
}

// As many rows of the input at a time as have registers for their sums: four for each row or, with several rows and
// AVX2, two at a time.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kInt4Tile = 6;
constexpr int pairs_at_once(int) { return 2; }
#else
constexpr int kInt4Tile = 4;
constexpr int pairs_at_once(int rows) { return rows <= 2 ? 2 : 1; }
#endif

// Rows of the input in floats, and the sums of their groups, which zeros are multiplied by.
class Int4Input {
 public:
  Int4Input(const Value* x, int64_t rows, int64_t size, int64_t groups) : size(size), groups(groups) {
    thread_local std::vector<float> floats, sums;
    values = reinterpret_cast<const float*>(x);
    if (!std::is_same_v<Value, float>) {
      floats.resize(rows * size);
      at::vec::convert(x, floats.data(), rows * size);
      values = floats.data();
    }
    sums.resize(rows * groups);
    const int64_t group = size / groups;
    for (int64_t i = 0; i < rows * groups; ++i) {
      Floats sum(0.0f);
      for (int64_t k = 0; k < group; k += Floats::size()) sum = sum + Floats::loadu(values + i * group + k);
      sums[i] = total(sum);
    }
    group_sums = sums.data();
  }
  const float *values, *group_sums;  // (rows, size), (rows, groups)
  int64_t size, groups;
};

// Multiply kRows rows of the input, from `first` on, by a block of the weights; `scales` are those of its first row.
template <int kRows>
inline void multiply_block(const Int4Input& input, int64_t first, const uint8_t* w, const float* scales,
                           int64_t scales_stride, float* found) {
  constexpr int64_t kSize = Floats::size();
  constexpr int kPairs = pairs_at_once(kRows);
  const int64_t group = input.size / input.groups;
  const float* x = input.values + first * input.size;
  std::fill(found, found + kRows * kInt4Rows, 0.0f);
  for (int64_t g = 0; g < input.groups; ++g) {
    for (int start = 0; start < 2; start += kPairs) {
      Floats sums[kRows][2 * kPairs];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
        for (int r = 0; r < 2 * kPairs; ++r) sums[m][r] = Floats(0.0f);
      for (int64_t k = g * group; k < (g + 1) * group; ++k) {
        Floats parts[2 * kPairs];
#pragma GCC unroll 2
        for (int p = 0; p < kPairs; ++p)
          std::tie(parts[2 * p], parts[2 * p + 1]) = unpack(w + k * kInt4Bytes + (start + p) * kSize);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const Floats value(x[m * input.size + k]);
#pragma GCC unroll 4
          for (int r = 0; r < 2 * kPairs; ++r) sums[m][r] = at::vec::fmadd(parts[r], value, sums[m][r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < 2 * kPairs; ++r) {
        const int64_t row = (start + r / 2 + r % 2 * 2) * kSize;  // of the block
        const float* of = scales + g * scales_stride + 2 * row;
        const auto [scale, zero] = at::vec::deinterleave2(Floats::loadu(of), Floats::loadu(of + kSize));
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          float* to = found + m * kInt4Rows + row;
          const Floats sum(input.group_sums[(first + m) * input.groups + g]);
          at::vec::fmadd(sums[m][r], scale, at::vec::fmadd(sum, zero, Floats::loadu(to))).store(to);
        }
      }
    }
  }
}

template <int... kRows>
constexpr auto blocks_by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_block<kRows + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, a multiple of `kInt4Rows`. `w` and `scales` are those of
// the first row, and each group has `all` rows' scales.
inline void multiply_int4_rows(const Value* x, int64_t rows, const uint8_t* w, int64_t size, const float* scales,
                               int64_t groups, int64_t all, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByRows = blocks_by_rows(std::make_integer_sequence<int, kInt4Tile>());
  const Int4Input input(x, rows, size, groups);
  const int64_t tiles = (rows + kInt4Tile - 1) / kInt4Tile;
  float found[kInt4Tile * kInt4Rows];
  for (int64_t n = 0; n < count; n += kInt4Rows)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = rows * tile / tiles, some = rows * (tile + 1) / tiles - first;
      kByRows[some - 1](input, first, w + n / 2 * size, scales + 2 * n, 2 * all, found);
      for (int64_t m = 0; m < some; ++m) {
        float* row = found + m * kInt4Rows;
        if (bias != nullptr)
          for (int64_t i = 0; i < kInt4Rows; ++i) row[i] += static_cast<float>(bias[n + i]);
        at::vec::convert(row, y + (first + m) * size_out + n, kInt4Rows);
      }
    }
}

}  // namespace
