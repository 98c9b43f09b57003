// Group-wise quantised GEMM for few rows m, with weights w from 1 to 127:
// y[m, n] = sum over k of x[m, k] * scale[n, k / 64] * (w[n, k] - 64) + bias[n]. See vectorized.h for `Value`.
//
// The upper byte of 128 in bfloat16, followed by a byte b < 128, is exactly 128 + b, so two instructions dequantise 64
// weights. The offset of all weights is subtracted in advance: a group's sum starts at minus the offset times sum of x.

#include <vector>

#include "vectorized.h"

namespace {

constexpr int kBlock = 4;                   // rows of the weights at a time, to hide the latency of fused multiply-add
constexpr int64_t kGroupSize = 64;          // weights per scale; rows are padded to whole groups
constexpr int64_t kPrefetchBytes = 8192;    // prefetch distance in the weights
constexpr int64_t kMinWorkPerThread = 65536;  // multiply-adds; for fewer, synchronising another thread costs more

inline void prefetch(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(address) + kPrefetchBytes);
#endif
}

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
struct Dequantized {
  using Stored = at::BFloat16;
  static constexpr float kOffset = 192.0f;  // 128 plus the zero point

  // The place of a group's k-th input value, which matches the order in which unpacking spreads the weights.
  static int64_t place(int64_t k) { return k / 8 % 2 * 32 + k / 16 * 8 + k % 8; }

  static Floats add(const Stored* x, const uint8_t* w, const Floats& sum) {
    const __m512i upper = _mm512_set1_epi8(0x43), bytes = _mm512_loadu_si512(w);
    const auto low = (__m512bh)_mm512_unpacklo_epi8(bytes, upper), high = (__m512bh)_mm512_unpackhi_epi8(bytes, upper);
    const __m512 half = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), low);
    return _mm512_dpbf16_ps(half, (__m512bh)_mm512_loadu_si512(x + 32), high);
  }
};
#else
struct Dequantized {
  using Stored = float;
  static constexpr float kOffset = 64.0f;  // the zero point

  static int64_t place(int64_t k) { return k; }

  static Floats add(const Stored* x, const uint8_t* w, Floats sum) {
    for (int64_t k = 0; k < kGroupSize; k += Floats::size())
      sum = at::vec::fmadd(Floats::loadu(x + k), to_floats(w + k), sum);
    return sum;
  }
};
#endif

// Rows of the input in the order and dtype of `Dequantized`, zero-padded to whole groups, and per group the initial
// value of its sum, which subtracts the offset.
struct Input {
  std::vector<Dequantized::Stored> values;
  std::vector<float> initial;

  void take(const Value* x, int64_t rows, int64_t size, int64_t groups) {
    values.assign(rows * groups * kGroupSize, Dequantized::Stored(0.0f));
    initial.assign(rows * groups * Floats::size(), 0.0f);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t k = 0; k < size; ++k) {
        const int64_t group = m * groups + k / kGroupSize;
        const Dequantized::Stored value(static_cast<float>(x[m * size + k]));
        values[group * kGroupSize + Dequantized::place(k % kGroupSize)] = value;
        initial[group * Floats::size()] -= Dequantized::kOffset * static_cast<float>(value);
      }
  }
};

// Multiply the m-th row of the input by kRows consecutive rows of the weights, of `groups` groups each.
template <int kRows>
inline void multiply(const Input& input, int64_t m, const uint8_t* w, const float* scales, int64_t groups, float* sums) {
  Floats found[kRows];
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n) found[n] = Floats(0.0f);
  const Dequantized::Stored* x = input.values.data() + m * groups * kGroupSize;
  const float* initial = input.initial.data() + m * groups * Floats::size();
  const uint8_t* next = w;
  for (int64_t group = 0; group < groups; ++group) {
    const Floats start = Floats::loadu(initial + group * Floats::size());
#pragma GCC unroll 8
    for (int n = 0; n < kRows; ++n, next += kGroupSize) {
      const Floats part = Dequantized::add(x + group * kGroupSize, w + (n * groups + group) * kGroupSize, start);
      found[n] = at::vec::fmadd(part, Floats(scales[n * groups + group]), found[n]);
      prefetch(next);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n)
    sums[n] = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, found[n]);
}

}  // namespace

template <>
void run<Value>(const GroupwiseGemm& call) {
  const int64_t rows = call.rows, size = call.size, size_out = call.size_out, groups = call.groups;
  const int64_t threads = std::min(call.threads, 1 + rows * size_out * size / kMinWorkPerThread);
  const auto* b = static_cast<const Value*>(call.bias);
  auto* y = static_cast<Value*>(call.output);
  on_threads(threads, [&](int64_t thread) {
    const int64_t start = size_out * thread / threads, end = size_out * (thread + 1) / threads;
    thread_local Input input;
    input.take(static_cast<const Value*>(call.input), rows, size, groups);
    const auto multiply_some = [&](auto block, int64_t n) {
      float sums[decltype(block)::value];
      for (int64_t m = 0; m < rows; ++m) {
        multiply<decltype(block)::value>(input, m, call.weight + n * groups * kGroupSize, call.scales + n * groups, groups,
                                         sums);
        for (int64_t i = 0; i < decltype(block)::value; ++i)
          y[m * size_out + n + i] = static_cast<Value>(b == nullptr ? sums[i] : sums[i] + static_cast<float>(b[n + i]));
      }
    };
    int64_t n = start;
    for (; n + kBlock <= end; n += kBlock) multiply_some(std::integral_constant<int, kBlock>(), n);
    for (; n < end; ++n) multiply_some(std::integral_constant<int, 1>(), n);
  });
}
