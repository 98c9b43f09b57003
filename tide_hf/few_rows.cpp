// y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n], for a few rows m. `Value` is float or at::BFloat16.
//
// Each row of the weights is read once, in the order in which it stands, for all rows of the input. Sums are made in the
// same order whatever the number of rows is.

#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/inductor/cpp_prefix.h>

namespace {

using Floats = at::vec::Vectorized<float>;

constexpr int64_t kBytesAhead = 8192;    // of the weights, which memory is asked for before they are read
constexpr int64_t kCachedBytes = 32768;  // of the input, which a core's first cache holds

inline void ask_for(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(address) + kBytesAhead);
#endif
}

struct OfFloat {
  static constexpr int64_t kSize = Floats::size();
  using Part = Floats;
  static Part load(const float* values) { return Part::loadu(values); }
  static Floats add(const Part& x, const Part& w, const Floats& sum) { return at::vec::fmadd(w, x, sum); }
};

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
struct OfBFloat16 {
  static constexpr int64_t kSize = 32;
  using Part = __m512bh;
  static Part load(const at::BFloat16* values) { return (__m512bh)_mm512_loadu_si512(values); }
  static Floats add(const Part& x, const Part& w, const Floats& sum) { return _mm512_dpbf16_ps(sum, x, w); }
};
#else
struct OfBFloat16 {
  using Stored = at::vec::Vectorized<at::BFloat16>;
  static constexpr int64_t kSize = Stored::size();
  using Part = std::tuple<Floats, Floats>;
  static Part load(const at::BFloat16* values) { return at::vec::convert_bfloat16_float(Stored::loadu(values)); }
  static Floats add(const Part& x, const Part& w, const Floats& sum) {
    const Floats half = at::vec::fmadd(std::get<0>(x), std::get<0>(w), sum);
    return at::vec::fmadd(std::get<1>(x), std::get<1>(w), half);
  }
};
#endif

using Lanes = std::conditional_t<std::is_same_v<Value, float>, OfFloat, OfBFloat16>;

struct Shape {
  int64_t size_in, size_out;
};

// kRows rows of the input by kBlock rows of the weights.
template <int kRows, int kBlock>
inline void multiply(const Value* x, const Value* w, const Value* bias, Value* y, Shape shape) {
  Floats sums[kRows][kBlock];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n) sums[m][n] = Floats(0.0f);
  const Value* read = w;
  int64_t k = 0;
  for (; k + Lanes::kSize <= shape.size_in; k += Lanes::kSize) {
    typename Lanes::Part parts[kBlock];
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n, read += Lanes::kSize) {
      parts[n] = Lanes::load(w + n * shape.size_in + k);
      ask_for(read);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const auto part = Lanes::load(x + m * shape.size_in + k);
#pragma GCC unroll 16
      for (int n = 0; n < kBlock; ++n) sums[m][n] = Lanes::add(part, parts[n], sums[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n) {
      float sum = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[m][n]);
      for (int64_t rest = k; rest < shape.size_in; ++rest)
        sum += static_cast<float>(x[m * shape.size_in + rest]) * static_cast<float>(w[n * shape.size_in + rest]);
      if (bias != nullptr) sum += static_cast<float>(bias[n]);
      y[m * shape.size_out + n] = static_cast<Value>(sum);
    }
}

// kRows rows of the input by `count` rows of the weights. The more of those at a time, the less often the input is read;
// where it is small, few of them read memory the more evenly.
template <int kRows>
void multiply_rows(const Value* x, const Value* w, const Value* bias, Value* y, Shape shape, int64_t count) {
  constexpr int kFew = kRows <= 4 ? 1 : 2, kMany = kRows <= 4 ? 4 : 3;
  const bool is_large = kRows * shape.size_in * static_cast<int64_t>(sizeof(Value)) > kCachedBytes;
  const auto bias_at = [bias](int64_t n) { return bias == nullptr ? nullptr : bias + n; };
  int64_t n = 0;
  for (; is_large && n + kMany <= count; n += kMany)
    multiply<kRows, kMany>(x, w + n * shape.size_in, bias_at(n), y + n, shape);
  for (; n + kFew <= count; n += kFew) multiply<kRows, kFew>(x, w + n * shape.size_in, bias_at(n), y + n, shape);
  for (; n < count; ++n) multiply<kRows, 1>(x, w + n * shape.size_in, bias_at(n), y + n, shape);
}

constexpr decltype(&multiply_rows<1>) kByRows[] = {
    multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
    multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>,
};

}  // namespace

// x (rows, size_in); weights[i], an address, is of (sizes[i], size_in), and they stand behind each other in the output;
// y (rows, sum of sizes). Threads share the rows of all weights.
extern "C" void kernel(const Value* x, const int64_t* weights, const int64_t* sizes, const Value* bias, Value* y,
                       int64_t has_bias, int64_t rows, int64_t size_in, int64_t num_weights, int64_t threads) {
  int64_t size_out = 0;
  for (int64_t i = 0; i < num_weights; ++i) size_out += sizes[i];
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t start = size_out * thread / all, end = size_out * (thread + 1) / all;
    for (int64_t i = 0, first = 0; i < num_weights; first += sizes[i++]) {
      const int64_t from = std::max(start, first), to = std::min(end, first + sizes[i]);
      if (from >= to) continue;
      const Value* w = reinterpret_cast<const Value*>(weights[i]) + (from - first) * size_in;
      kByRows[rows - 1](x, w, has_bias ? bias + from : nullptr, y + from, Shape{size_in, size_out}, to - from);
    }
  }
}
