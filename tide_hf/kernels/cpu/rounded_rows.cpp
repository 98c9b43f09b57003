// y[m, n] = sum over k of x[m, k] * scale[n, k / 64] * (w[n, k] - 64) + bias[n], for a few rows m and weights w from 1
// to 127. See values.h for `Value`.
//
// A byte below 128, put behind the upper byte of 128 in bfloat16, is 128 and the byte, without rounding. So two
// instructions make 64 weights into numbers that can be multiplied. What all of them have too much is taken away before
// they are added up, by way of the sum of x.

#include <omp.h>

#include <vector>

namespace {

constexpr int kBlock = 4;                   // rows of the weights at a time, so that sums do not wait for each other
constexpr int64_t kLine = 64;               // bytes, and weights; rows of the weights are filled up to whole ones
constexpr int64_t kBytesAhead = 8192;       // of the weights, which memory is asked for before they are read
constexpr int64_t kLeastPerThread = 65536;  // multiplications; for fewer, waiting for another thread takes longer

inline void ask_for(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(address) + kBytesAhead);
#endif
}

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
struct Numbers {
  using Stored = at::BFloat16;
  static constexpr float kTooMuch = 192.0f;  // 128, and the 64 of zero

  // Where a line's k-th number goes: weights are spread over two registers in the order in which that is done fastest.
  static int64_t place(int64_t k) { return k / 8 % 2 * 32 + k / 16 * 8 + k % 8; }

  static Floats add(const Stored* x, const uint8_t* w, const Floats& sum) {
    const __m512i upper = _mm512_set1_epi8(0x43), bytes = _mm512_loadu_si512(w);
    const auto low = (__m512bh)_mm512_unpacklo_epi8(bytes, upper), high = (__m512bh)_mm512_unpackhi_epi8(bytes, upper);
    const __m512 half = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x), low);
    return _mm512_dpbf16_ps(half, (__m512bh)_mm512_loadu_si512(x + 32), high);
  }
};
#else
struct Numbers {
  using Stored = float;
  static constexpr float kTooMuch = 64.0f;

  static int64_t place(int64_t k) { return k; }

  static Floats load(const uint8_t* w) {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))));
#elif defined(CPU_CAPABILITY_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w))));
#else
    float values[Floats::size()];
    for (int i = 0; i < Floats::size(); ++i) values[i] = static_cast<float>(w[i]);
    return Floats::loadu(values);
#endif
  }

  static Floats add(const Stored* x, const uint8_t* w, Floats sum) {
    for (int64_t k = 0; k < kLine; k += Floats::size()) sum = at::vec::fmadd(Floats::loadu(x + k), load(w + k), sum);
    return sum;
  }
};
#endif

// Rows of the input as `Numbers` wants them, with zeros behind each up to a whole line, and for each line what the sum
// of its products starts from.
struct Input {
  std::vector<Numbers::Stored> numbers;
  std::vector<float> starts;

  void take(const Value* x, int64_t rows, int64_t size, int64_t lines) {
    numbers.assign(rows * lines * kLine, Numbers::Stored(0.0f));
    starts.assign(rows * lines * Floats::size(), 0.0f);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t k = 0; k < size; ++k) {
        const int64_t line = m * lines + k / kLine;
        const Numbers::Stored number(static_cast<float>(x[m * size + k]));
        numbers[line * kLine + Numbers::place(k % kLine)] = number;
        starts[line * Floats::size()] -= Numbers::kTooMuch * static_cast<float>(number);
      }
  }
};

// The m-th row of the input by kRows rows of the weights, `lines` long and behind each other, as their scales are.
template <int kRows>
inline void multiply(const Input& input, int64_t m, const uint8_t* w, const float* scales, int64_t lines, float* sums) {
  Floats found[kRows];
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n) found[n] = Floats(0.0f);
  const Numbers::Stored* x = input.numbers.data() + m * lines * kLine;
  const float* starts = input.starts.data() + m * lines * Floats::size();
  const uint8_t* next = w;
  for (int64_t line = 0; line < lines; ++line) {
    const Floats start = Floats::loadu(starts + line * Floats::size());
#pragma GCC unroll 8
    for (int n = 0; n < kRows; ++n, next += kLine) {
      const Floats part = Numbers::add(x + line * kLine, w + (n * lines + line) * kLine, start);
      found[n] = at::vec::fmadd(part, Floats(scales[n * lines + line]), found[n]);
      ask_for(next);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kRows; ++n)
    sums[n] = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, found[n]);
}

}  // namespace

extern "C" void run(const RoundedRows& call) {
  const int64_t rows = call.rows, size = call.size, size_out = call.size_out, lines = call.lines;
  const int64_t threads = std::min(call.threads, 1 + rows * size_out * size / kLeastPerThread);
  const auto* b = static_cast<const Value*>(call.bias);
  auto* y = static_cast<Value*>(call.output);
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t start = size_out * thread / all, end = size_out * (thread + 1) / all;
    thread_local Input kept;
    kept.take(static_cast<const Value*>(call.input), rows, size, lines);
    const auto multiply_some = [&](auto block, int64_t n) {
      float sums[decltype(block)::value];
      for (int64_t m = 0; m < rows; ++m) {
        multiply<decltype(block)::value>(kept, m, call.weight + n * lines * kLine, call.scales + n * lines, lines, sums);
        for (int64_t i = 0; i < decltype(block)::value; ++i)
          y[m * size_out + n + i] = static_cast<Value>(b == nullptr ? sums[i] : sums[i] + static_cast<float>(b[n + i]));
      }
    };
    int64_t n = start;
    for (; n + kBlock <= end; n += kBlock) multiply_some(std::integral_constant<int, kBlock>(), n);
    for (; n < end; ++n) multiply_some(std::integral_constant<int, 1>(), n);
  }
}
