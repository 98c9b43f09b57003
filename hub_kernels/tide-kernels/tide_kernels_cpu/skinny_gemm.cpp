// Skinny GEMM: y[m, n] = scale[n] * sum over k of x[m, k] * w[n, k] + bias[n], with w as the model stores it: in the
// dtype of x and without scales, or as int8 with them. See vectorized.h for `Value`.
//
// The weights are streamed from memory once, sequentially, for all rows of the input. The order of summation does not
// depend on the number of rows.

#include <utility>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int64_t kPrefetchBytes = 8192;  // prefetch distance in the weights
constexpr int64_t kCachedBytes = 131072;  // bytes of weights that stay in a core's L2 cache
constexpr int64_t kPanel = 96;            // maximum rows of weights in a panel, which all rows of the input use in turn
constexpr int64_t kMaxRows = 256;         // rows of the input at a time, to bound the aligned copy of the input
constexpr int64_t kMinWorkPerThread = 32768;  // multiply-adds; for fewer, synchronising another thread costs more

// Without inlining the accumulators spill out of registers, which is several times slower.
#if defined(__GNUC__)
#define ALWAYS_INLINE __attribute__((always_inline))
#else
#define ALWAYS_INLINE
#endif

inline void prefetch(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(address) + kPrefetchBytes);
#endif
}

// Arithmetic: upcast to float, or bfloat16 dot products (AVX512-BF16). `Kept` is the dtype of the input's copy.
template <class Weight>
struct AsFloats {
  static constexpr int64_t kSize = Floats::size();
  using Kept = float;
  using Part = Floats;
  static Part load(const Weight* values) { return to_floats(values); }
  static Part load(const Weight* values, int64_t count) { return to_floats(values, count); }
  static Part load_kept(const Kept* values) { return Part::loadu(values); }
  static Floats add(const Part& x, const Part& w, const Floats& sum) { return at::vec::fmadd(w, x, sum); }
};

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
struct AsPairs {
  static constexpr int64_t kSize = 32;
  using Kept = at::BFloat16;
  using Part = __m512bh;
  static Part load(const Kept* values) { return (__m512bh)_mm512_loadu_si512(values); }
  static Part load(const Kept* values, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1ULL << count) - 1, values);
  }
  static Part load_kept(const Kept* values) { return load(values); }
  static Floats add(const Part& x, const Part& w, const Floats& sum) { return _mm512_dpbf16_ps(sum, x, w); }
};
template <class Weight>
using Lanes = std::conditional_t<std::is_same_v<Weight, at::BFloat16>, AsPairs, AsFloats<Weight>>;
#else
template <class Weight>
using Lanes = AsFloats<Weight>;
#endif

// A tile of accumulators has kTile rows of the input by kBlock rows of the weights, as many as fit into registers. With
// few rows of the input, products are memory-bound, and memory streams best with few rows of weights at a time: one for
// a single row of the input, two for up to kFew rows (with one, four bfloat16 tokens stall on latency: a third slower).
// A register of int8 weights takes a quarter of the bytes, so four rows at a time keep up, if kFour rows of the input
// leave registers for them.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kTile = 8, kFew = 4, kFour = 4, kBlock = 3;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kTile = 4, kFew = 3, kFour = 2, kBlock = 3;
#else
constexpr int kTile = 8, kFew = 4, kFour = 2, kBlock = 2;
#endif
template <class Weight>
constexpr int rows_at_once(int rows) {
  if (std::is_same_v<Weight, int8_t> && rows <= kFour) return 4;
  return rows == 1 ? 1 : rows <= kFew ? 2 : kBlock;
}

// How a row of weights splits into an unaligned head, `full` aligned registers and a tail. Loads across two cache lines
// take twice as long, and weights in memory-mapped files are seldom aligned.
template <class Weight>
struct Split {
  static constexpr int64_t kLanes = Lanes<Weight>::kSize, kAligned = kLanes * sizeof(Weight);
  int64_t head, full, tail;

  Split(const Weight* w, int64_t size) : head(0) {
    if (size % kLanes == 0) head = (kAligned - reinterpret_cast<uintptr_t>(w) % kAligned) % kAligned / sizeof(Weight);
    full = (size - head) / kLanes;
    tail = size - head - full * kLanes;
  }
  int64_t registers() const { return (head > 0) + full + (tail > 0); }
};

// Rows of the input, split as the weights are and zero-padded to whole registers; copied only if needed.
template <class Weight>
class Input {
 public:
  using Kept = typename Lanes<Weight>::Kept;
  static constexpr int64_t kLanes = Lanes<Weight>::kSize;

  Input(const Value* x, int64_t rows, int64_t size, const Split<Weight>& split)
      : values_(reinterpret_cast<const Kept*>(x)), stride_(size) {
    if (std::is_same_v<Value, Kept> && split.head == 0 && split.tail == 0) return;
    constexpr int64_t kRegister = kLanes * sizeof(Kept);
    thread_local std::vector<Kept> kept;
    stride_ = split.registers() * kLanes;
    kept.assign(rows * stride_ + kLanes, Kept(0.0f));
    const auto address = reinterpret_cast<uintptr_t>(kept.data());
    Kept* start = kept.data() + (kRegister - address % kRegister) % kRegister / sizeof(Kept);
    for (int64_t m = 0; m < rows; ++m) {
      const Value* row = x + m * size;
      Kept* to = start + m * stride_;
      std::copy(row, row + split.head, to);
      std::copy(row + split.head, row + size, to + (split.head > 0 ? kLanes : 0));
    }
    values_ = start;
  }
  const Kept* at(int64_t m, int64_t place) const { return values_ + m * stride_ + place * kLanes; }

 private:
  const Kept* values_;
  int64_t stride_;
};

// Horizontal sums of up to four registers, in an order that does not depend on kBlock.
template <int kBlock>
ALWAYS_INLINE inline void horizontal_sums(const Floats* sums, float* found) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto halved = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  constexpr int kLast = kBlock - 1;
  const __m512 a = halved(sums[0], sums[std::min(1, kLast)]), b = halved(sums[std::min(2, kLast)], sums[kLast]);
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0x4E));
  all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0xB1));
  _mm_mask_storeu_ps(found, (1 << kBlock) - 1, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
#elif defined(CPU_CAPABILITY_AVX2)
  constexpr int kLast = kBlock - 1;
  const __m256 a = _mm256_hadd_ps(sums[0], sums[std::min(1, kLast)]);
  const __m256 all = _mm256_hadd_ps(a, _mm256_hadd_ps(sums[std::min(2, kLast)], sums[kLast]));
  float four[4];
  _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  std::copy(four, four + kBlock, found);
#else
  for (int n = 0; n < kBlock; ++n)
    found[n] = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[n]);
#endif
}

// Multiply kRows rows of the input, from `first` on, by kBlock consecutive rows of the weights.
template <int kRows, int kBlock, class Weight>
ALWAYS_INLINE inline void multiply(const Input<Weight>& x, int64_t first, const Split<Weight>& split, const Weight* w,
                                   int64_t size, float* found) {
  using Part = typename Lanes<Weight>::Part;
  Floats sums[kRows][kBlock];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n) sums[m][n] = Floats(0.0f);
  int64_t place = 0;
  const auto add = [&](const Part* parts) ALWAYS_INLINE {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Part part = Lanes<Weight>::load_kept(x.at(first + m, place));
#pragma GCC unroll 16
      for (int n = 0; n < kBlock; ++n) sums[m][n] = Lanes<Weight>::add(part, parts[n], sums[m][n]);
    }
    ++place;
  };
  const auto add_some = [&](const Weight* from, int64_t count) {
    Part parts[kBlock];
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n) parts[n] = Lanes<Weight>::load(from + n * size, count);
    add(parts);
  };
  if (split.head > 0) add_some(w, split.head);
  const Weight* next = w;
  for (int64_t i = 0; i < split.full; ++i) {
    Part parts[kBlock];
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n, next += Split<Weight>::kLanes) {
      parts[n] = Lanes<Weight>::load(w + n * size + split.head + i * Split<Weight>::kLanes);
      if (first == 0) prefetch(next);
    }
    add(parts);
  }
  if (split.tail > 0) add_some(w + size - split.tail, split.tail);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) horizontal_sums<kBlock>(sums[m], found + m * kPanel);
}

// Multiply kRows rows of the input, from `first` on, by a panel of `count` rows of the weights.
template <class Weight, int kRows>
void multiply_panel(const Input<Weight>& x, int64_t first, const Split<Weight>& split, const Weight* w, int64_t size,
                    const float* scales, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  constexpr int kAtOnce = rows_at_once<Weight>(kRows);
  float found[kRows * kPanel];
  int64_t n = 0;
  for (; n + kAtOnce <= count; n += kAtOnce) multiply<kRows, kAtOnce>(x, first, split, w + n * size, size, found + n);
  if constexpr (kAtOnce > 1)  // the remaining rows; if kAtOnce == 1, no rows remain
    for (; n < count; ++n) multiply<kRows, 1>(x, first, split, w + n * size, size, found + n);
  for (int64_t m = 0; m < kRows; ++m) {
    float* row = found + m * kPanel;
    if (scales != nullptr)
      for (n = 0; n < count; ++n) row[n] *= scales[n];
    if (bias != nullptr)
      for (n = 0; n < count; ++n) row[n] += static_cast<float>(bias[n]);
    at::vec::convert(row, y + (first + m) * size_out, count);
  }
}

template <class Weight, int... kRows>
constexpr auto by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_panel<Weight, kRows + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, one L2-sized panel at a time.
template <class Weight>
void multiply_rows(const Value* x, int64_t rows, const Weight* w, int64_t size, const float* scales, const Value* bias,
                   Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByRows = by_rows<Weight>(std::make_integer_sequence<int, kTile>());
  const Split<Weight> split(w, size);
  const Input<Weight> input(x, rows, size, split);
  const int64_t held = kCachedBytes / (size * static_cast<int64_t>(sizeof(Weight))) / kBlock * kBlock;
  const int64_t panel = std::clamp<int64_t>(held, kBlock, kPanel), tiles = (rows + kTile - 1) / kTile;
  for (int64_t n = 0; n < count; n += panel) {
    const float* s = scales == nullptr ? scales : scales + n;
    const Value* b = bias == nullptr ? bias : bias + n;
    for (int64_t tile = 0; tile < tiles; ++tile) {  // of equal size, since small tiles stall on latency
      const int64_t m = rows * tile / tiles, some = rows * (tile + 1) / tiles - m;
      kByRows[some - 1](input, m, split, w + n * size, size, s, b, y + n, size_out, std::min(panel, count - n));
    }
  }
}

// Threads split the concatenated rows of all weights.
template <class Weight>
void run_with(const SkinnyGemm& call) {
  const int64_t rows = call.rows, size = call.size, size_out = call.size_out;
  const int64_t threads = std::min(call.threads, 1 + rows * size_out * size / kMinWorkPerThread);
  const auto *x = static_cast<const Value*>(call.input), *b = static_cast<const Value*>(call.bias);
  auto* y = static_cast<Value*>(call.output);
  on_threads(threads, [&](int64_t thread) {
    const int64_t start = size_out * thread / threads, end = size_out * (thread + 1) / threads;
    int64_t first = 0;
    for (int64_t i = 0; i < call.count; first += call.sizes_out[i++]) {
      const int64_t from = std::max(start, first), to = std::min(end, first + call.sizes_out[i]);
      if (from >= to) continue;
      const Weight* w = static_cast<const Weight*>(call.weights[i]) + (from - first) * size;
      const float* scales = call.scales == nullptr ? nullptr : call.scales[i] + (from - first);
      for (int64_t m = 0; m < rows; m += kMaxRows)
        multiply_rows(x + m * size, std::min(kMaxRows, rows - m), w, size, scales, b == nullptr ? b : b + from,
                      y + m * size_out + from, size_out, to - from);
    }
  });
}

}  // namespace

template <>
void run<Value>(const SkinnyGemm& call) {
  if (call.scales == nullptr) run_with<Value>(call);
  else run_with<int8_t>(call);
}
