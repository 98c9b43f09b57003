// Skinny GEMM: y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n], with w in the dtype of x, in fewer bits,
// or as integers with scales (`LinearWeight` in arguments.h). See vectorized.h for `Value`.
//
// The weights are streamed from memory once, sequentially, for all rows of the input. The order of summation does not
// depend on the number of rows.

#include <utility>
#include <vector>

#include "int4_weight.h"
#include "block_tiles.h"
#include "integer_tiles.h"

namespace {

constexpr int64_t kPrefetchBytes = 8192;  // prefetch distance in the weights
constexpr int64_t kCachedBytes = 131072;  // bytes of weights that stay in a core's L2 cache
constexpr int64_t kInnerBytes = 24576;    // bytes of the input that stay in a core's L1 cache beside weights
constexpr int64_t kOuterBytes = 40960;    // bytes of the input beyond which rereading it costs more than parts do
constexpr int64_t kPanel = 96;            // maximum rows of weights in a panel, which all rows of the input use in turn
constexpr int64_t kMinWorkPerThread = 32768;  // multiply-adds; for fewer, synchronising another thread costs more
constexpr int64_t kWorkPerPart = 262144, kMaxParts = 16;  // of a thread's work, that threads take in turn

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
using Lanes =
    std::conditional_t<std::is_same_v<Weight, at::BFloat16> && std::is_same_v<Value, Weight>, AsPairs, AsFloats<Weight>>;
#else
template <class Weight>
using Lanes = AsFloats<Weight>;
#endif

// A tile of accumulators has kTile rows of the input by kBlock rows of the weights, as many as fit into registers. With
// few rows of the input, products are memory-bound, and memory streams best with few rows of weights at a time: one for
// a single row of the input, and for up to kFewFloats in float32 (with two, a pass over two to four tokens takes a fifth
// longer); two for up to kFew rows (with one, four bfloat16 tokens stall on latency: a third slower). A register of int8
// weights takes a quarter of the bytes, so four rows at a time keep up, if kFour rows of the input leave registers for
// them. Scales of groups take registers as well.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kTile = 8, kFew = 4, kFewFloats = 6, kFour = 4, kFourGrouped = 4, kBlock = 3;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kTile = 4, kFew = 3, kFewFloats = 4, kFour = 2, kFourGrouped = 0, kBlock = 3;
#else
constexpr int kTile = 8, kFew = 4, kFewFloats = 1, kFour = 2, kFourGrouped = 0, kBlock = 2;
#endif
template <class Weight, bool kIsGrouped>
constexpr int rows_at_once(int rows) {
  if (kIsGrouped) return rows <= kFourGrouped ? 4 : 2;
  if (std::is_same_v<Weight, int8_t> && rows <= kFour) return 4;
  if (std::is_same_v<Weight, float> && rows <= kFewFloats) return 1;
  return rows == 1 ? 1 : rows <= kFew ? 2 : kBlock;
}

// How a row of weights splits into an unaligned head, `full` aligned registers and a tail. Loads across two cache lines
// take twice as long, and weights in memory-mapped files are seldom aligned. Groups with a scale each start at registers,
// so rows of these have no head.
template <class Weight>
struct Split {
  static constexpr int64_t kLanes = Lanes<Weight>::kSize, kAligned = kLanes * sizeof(Weight);
  int64_t head, full, tail;

  Split(const Weight* w, int64_t size, bool is_grouped) : head(0) {
    if (!is_grouped && size % kLanes == 0) head = (kAligned - reinterpret_cast<uintptr_t>(w) % kAligned) % kAligned / sizeof(Weight);
    full = (size - head) / kLanes;
    tail = size - head - full * kLanes;
  }
  int64_t registers() const { return (head > 0) + full + (tail > 0); }
};

// Scales of rows of int8 weights: one for each row, or for each of its groups, followed by a zero or not.
struct Scales {
  const float* values;
  int64_t groups;
  bool has_zeros;

  const float* of(int64_t row, int64_t group) const { return values + (row * groups + group) * (has_zeros ? 2 : 1); }
  Scales from(int64_t row) const { return {values == nullptr ? values : of(row, 0), groups, has_zeros}; }
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

// Multiply kRows rows of the input, from `first` on, by kBlock consecutive rows of the weights.
template <int kRows, int kBlock, bool kIsGrouped, class Weight>
ALWAYS_INLINE inline void multiply(const Input<Weight>& x, int64_t first, const Split<Weight>& split, const Weight* w,
                                   int64_t size, const Scales& scales, float* found) {
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
  const auto add_full = [&](int64_t i, const Floats* factors, const Floats* zeros) ALWAYS_INLINE {
    Part parts[kBlock];
#pragma GCC unroll 16
    for (int n = 0; n < kBlock; ++n, next += Split<Weight>::kLanes) {
      parts[n] = Lanes<Weight>::load(w + n * size + split.head + i * Split<Weight>::kLanes);
      if constexpr (kIsGrouped) parts[n] = at::vec::fmadd(parts[n], factors[n], zeros[n]);
      if (first == 0) prefetch(next, kPrefetchBytes);
    }
    add(parts);
  };
  if constexpr (kIsGrouped) {
    const int64_t registers = split.full / scales.groups;
    for (int64_t g = 0; g < scales.groups; ++g) {
      Floats factors[kBlock], zeros[kBlock];
#pragma GCC unroll 16
      for (int n = 0; n < kBlock; ++n) {
        const float* of = scales.of(n, g);
        factors[n] = Floats(of[0]), zeros[n] = Floats(scales.has_zeros ? of[1] : 0.0f);
      }
      for (int64_t i = g * registers; i < (g + 1) * registers; ++i) add_full(i, factors, zeros);
    }
  } else {
    for (int64_t i = 0; i < split.full; ++i) add_full(i, nullptr, nullptr);
  }
  if (split.tail > 0) add_some(w + size - split.tail, split.tail);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) horizontal_sums<kBlock>(sums[m], found + m * kPanel);
}

// Multiply kRows rows of the input, from `first` on, by a panel of `count` rows of the weights.
template <class Weight, bool kIsGrouped, int kRows>
void multiply_panel(const Input<Weight>& x, int64_t first, const Split<Weight>& split, const Weight* w, int64_t size,
                    const Scales& scales, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  constexpr int kAtOnce = rows_at_once<Weight, kIsGrouped>(kRows);
  float found[kRows * kPanel];
  const auto multiply_some = [&](auto some, int64_t n) ALWAYS_INLINE {
    multiply<kRows, decltype(some)::value, kIsGrouped>(x, first, split, w + n * size, size, scales.from(n), found + n);
  };
  int64_t n = 0;
  for (; n + kAtOnce <= count; n += kAtOnce) multiply_some(std::integral_constant<int, kAtOnce>(), n);
  if constexpr (kAtOnce > 1)  // the remaining rows; if kAtOnce == 1, no rows remain
    for (; n < count; ++n) multiply_some(std::integral_constant<int, 1>(), n);
  for (int64_t m = 0; m < kRows; ++m) {
    float* row = found + m * kPanel;
    if (!kIsGrouped && scales.values != nullptr)
      for (n = 0; n < count; ++n) row[n] *= scales.values[n];
    if (bias != nullptr)
      for (n = 0; n < count; ++n) row[n] += static_cast<float>(bias[n]);
    at::vec::convert(row, y + (first + m) * size_out, count);
  }
}

// Multiply kRows rows of the input, from `first` on, by a panel of `count` rows of float32 weights, one part of their
// columns after the other, so that the part's input stays in the L1 cache. Sums are those of whole rows.
template <int kRows>
void multiply_in_parts(const Input<float>& x, int64_t first, const Split<float>& split, const float* w, int64_t size,
                       const Scales&, const float* bias, float* y, int64_t size_out, int64_t count) {
  constexpr int64_t kLanes = Split<float>::kLanes, kPart = kInnerBytes / (kRows * kLanes * sizeof(float));
  Floats sums[kRows][kPanel];
  const int64_t has_head = split.head > 0;
  for (int64_t from = 0; from < split.full || from == 0; from += kPart) {
    const int64_t to = std::min(from + kPart, split.full);
    for (int64_t n = 0; n < count; ++n) {
      const float* row = w + n * size;
      Floats own[kRows];
      const auto add = [&](const Floats& weights, int64_t place) ALWAYS_INLINE {
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) own[m] = at::vec::fmadd(weights, Floats::loadu(x.at(first + m, place)), own[m]);
      };
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) own[m] = from > 0 ? sums[m][n] : Floats(0.0f);
      if (from == 0 && has_head) add(to_floats(row, split.head), 0);
      for (int64_t i = from; i < to; ++i) {
        const float* next = row + split.head + i * kLanes;
        add(to_floats(next), has_head + i);
        prefetch(next, size * sizeof(float));
      }
      if (to == split.full && split.tail > 0)
        add(to_floats(row + size - split.tail, split.tail), has_head + split.full);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sums[m][n] = own[m];
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int64_t n = 0; n < count; ++n) {
      float found;
      horizontal_sums<1>(&sums[m][n], &found);
      y[(first + m) * size_out + n] = found + (bias == nullptr ? 0.0f : bias[n]);
    }
}

template <class Weight, bool kIsGrouped, int... kRows>
constexpr auto by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_panel<Weight, kIsGrouped, kRows + 1>...};
}

template <int... kRows>
constexpr auto by_rows_in_parts(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_in_parts<kRows + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, one L2-sized panel at a time.
template <class Weight, bool kIsGrouped>
void multiply_rows(const Value* x, int64_t rows, const Weight* w, int64_t size, const Scales& scales, const Value* bias,
                   Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByRows = by_rows<Weight, kIsGrouped>(std::make_integer_sequence<int, kTile>());
  const Split<Weight> split(w, size, kIsGrouped);
  const Input<Weight> input(x, rows, size, split);
  const int64_t held = kCachedBytes / (size * static_cast<int64_t>(sizeof(Weight))) / kBlock * kBlock;
  const int64_t panel = std::clamp<int64_t>(held, kBlock, kPanel), tiles = (rows + kTile - 1) / kTile;
  if constexpr (std::is_same_v<Weight, float>)
    if (rows > 1 && rows <= kFewFloats && rows * size * static_cast<int64_t>(sizeof(float)) > kOuterBytes) {
      static constexpr auto kInParts = by_rows_in_parts(std::make_integer_sequence<int, kFewFloats>());
      for (int64_t n = 0; n < count; n += kPanel)
        kInParts[rows - 1](input, 0, split, w + n * size, size, scales, bias == nullptr ? bias : bias + n, y + n, size_out,
                           std::min(kPanel, count - n));
      return;
    }
  for (int64_t n = 0; n < count; n += panel) {
    const Scales s = scales.from(n);
    const Value* b = bias == nullptr ? bias : bias + n;
    for (int64_t tile = 0; tile < tiles; ++tile) {  // of equal size, since small tiles stall on latency
      const int64_t m = rows * tile / tiles, some = rows * (tile + 1) / tiles - m;
      kByRows[some - 1](input, m, split, w + n * size, size, s, b, y + n, size_out, std::min(panel, count - n));
    }
  }
}

// Multiply all rows of the input by rows of a weight of 4-bit integers in panels.
void multiply_int4_by_panels(const RowsOfProduct& call, const Value* x, const PanelScales& scales, const Value* bias, Value* y) {
  const auto* w = static_cast<const char*>(call.weight->values) + call.first * call.size / 2;
#if defined(TIDE_AMX)
  if (call.rows > kFewTokens && block_columns(call.size / scales.groups) == kBlockColumns)
    return multiply_by_block_tiles<Int4Tiles>(x, call.input_id, call.rows, call.size, w, scales, bias, y, call.stride, call.count);
#endif
  const auto blocks = blocks_of<Int4Digits>(x, call.input_id, call.rows, call.size, scales.groups);
  multiply_int4_panels(blocks, w, scales, bias, y, call.stride, call.count);
}

// Multiply all rows of the input by rows of a weight in panels.
void multiply_by_panels(const RowsOfProduct& call, const Value* x, const Value* bias, Value* y) {
  const LinearWeight& weight = *call.weight;
  PanelScales scales{};
  if (weight.has_half_scales) scales.halves = static_cast<const at::Half*>(weight.scales);
  else scales.values = static_cast<const float*>(weight.scales);
  scales.groups = weight.has_zeros ? weight.groups : 0;
  scales = scales.from(call.first);
  if (weight.stored == Stored::kInt4) return multiply_int4_by_panels(call, x, scales, bias, y);
  const auto run = [&](auto panel, auto is_grouped) {
    using Panel = decltype(panel);
    const auto* w = static_cast<const char*>(weight.values) + call.first / kPanelRows * (call.size / Panel::kStep * Panel::kBytes);
    constexpr bool kIsGrouped = is_grouped.value;
#if defined(TIDE_AMX)
    if constexpr (std::is_same_v<Panel, BFloat16Panel>) {
      const auto run = call.rows == 1 ? multiply_row_by_panels : multiply_by_tiles;
      if (fit_tiles(call.size)) return run(x, call.input_id, call.rows, call.size, w, bias, y, call.stride, call.count);
    } else if constexpr (kIsGrouped) {
      return multiply_by_block_tiles<Int8Tiles>(x, call.input_id, call.rows, call.size, w, scales, bias, y, call.stride,
                                                call.count);
    } else if constexpr (std::is_same_v<Panel, Int8Panel>) {
      if (fit_digits(call.size))
        return multiply_by_integer_tiles(x, call.input_id, call.rows, call.size, w, scales.values, bias, y, call.stride, call.count);
    }
#endif
    multiply_all_panels<Panel, kIsGrouped>(x, call.input_id, call.rows, call.size, w, scales, bias, y, call.stride, call.count);
  };
  constexpr std::true_type kGrouped;
  constexpr std::false_type kWhole;
  if (weight.stored == Stored::kInt8) return weight.has_zeros ? run(Int8Panel(), kGrouped) : run(Int8Panel(), kWhole);
  if (weight.stored == Stored::kBFloat16 || (weight.stored == Stored::kValues && std::is_same_v<Value, at::BFloat16>))
    return run(BFloat16Panel(), kWhole);
  run(HalfPanel(), kWhole);
}

// Multiply all rows of the input by rows of a weight, as it is stored.
void multiply_by(const RowsOfProduct& call, const Value* x, const Value* bias, Value* y) {
  const LinearWeight& weight = *call.weight;
  const int64_t rows = call.rows, size = call.size, first = call.first, stride = call.stride, count = call.count;
  if (weight.in_panels) return multiply_by_panels(call, x, bias, y);
  const auto run_plain = [&](const auto* values) {
    using Weight = std::remove_const_t<std::remove_pointer_t<decltype(values)>>;
    multiply_rows<Weight, false>(x, rows, values + first * size, size, Scales{}, bias, y, stride, count);
  };
  if (weight.stored == Stored::kValues) return run_plain(static_cast<const Value*>(weight.values));
  if constexpr (std::is_same_v<Value, float>) {  // upcast as they are read
    if (weight.stored == Stored::kBFloat16) return run_plain(static_cast<const at::BFloat16*>(weight.values));
    if (weight.stored == Stored::kHalf) return run_plain(static_cast<const at::Half*>(weight.values));
  }
  if (weight.stored == Stored::kInt4) {
    const auto* w = static_cast<const uint8_t*>(weight.values) + first * size / 2;
    const float* s = static_cast<const float*>(weight.scales) + 2 * first;
    multiply_int4_rows(x, rows, w, size, s, weight.groups, call.all, bias, y, stride, count);
  } else {
    const auto* w = static_cast<const int8_t*>(weight.values) + first * size;
    const Scales scales = Scales{static_cast<const float*>(weight.scales), weight.groups, weight.has_zeros}.from(first);
    const bool is_grouped = weight.groups > 1 || weight.has_zeros;
    const auto run = is_grouped ? multiply_rows<int8_t, true> : multiply_rows<int8_t, false>;
    run(x, rows, w, size, scales, bias, y, stride, count);
  }
}

}  // namespace

template <>
void run<Value>(const RowsOfProduct& call) {
  if (call.count == 0) return;
  const auto *x = static_cast<const Value*>(call.input), *bias = static_cast<const Value*>(call.bias);
  auto* y = static_cast<Value*>(call.output);
  for (int64_t m = 0; m < call.rows; m += kMaxRows) {
    RowsOfProduct some = call;
    some.rows = std::min(kMaxRows, call.rows - m);
    multiply_by(some, x + m * call.size, bias, y + m * call.stride);
  }
}

// Threads take parts of the concatenated rows of all weights in turn, since one may be slower than another.
template <>
void run<Value>(const SkinnyGemm& call) {
  const int64_t rows = call.rows, size = call.size, size_out = call.size_out, work = rows * size_out * size;
  const int64_t threads = std::min(call.threads, 1 + work / kMinWorkPerThread);
  const int64_t parts = threads == 1 ? 1 : threads * std::clamp<int64_t>(work / threads / kWorkPerPart, 1, kMaxParts);
  const auto* b = static_cast<const Value*>(call.bias);
  auto* y = static_cast<Value*>(call.output);
  const int64_t input_id = ++last_input_id;
  std::atomic<int64_t> next{0};
  on_threads(threads, [&](int64_t) {
    for (int64_t part = next++; part < parts; part = next++) {
      const int64_t start = size_out * part / parts, end = size_out * (part + 1) / parts;
      int64_t first = 0;
      for (int64_t i = 0; i < call.count; first += call.sizes_out[i++]) {
        const int64_t all = call.sizes_out[i], unit = unit_of(call.weights[i]);
        const auto bound = [=](int64_t row) { return row >= all ? all : std::max<int64_t>(row, 0) / unit * unit; };
        const int64_t from = bound(start - first), count = bound(end - first) - from;
        run<Value>(RowsOfProduct{call.weights + i, input_id, call.input, b == nullptr ? b : b + first + from, y + first + from, all, rows,
                                 size, from, count, size_out});
      }
    }
  });
}
