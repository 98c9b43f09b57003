// Products with weights in panels of 16 rows (`LinearWeight` in arguments.h), for few rows of the input. A register holds
// the same column of as many rows of the weights as it has lanes, so no sum is horizontal, and several panels at a time
// hide the latency of multiply-adds. Each lane sums one row of the weights, column after column, so no sum depends on the
// number of rows of the input. See vectorized.h for `Value`.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int kPerPanel = kPanelRows / Floats::size();  // registers of a panel's sums

#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
constexpr bool kHasDot = std::is_same_v<Value, at::BFloat16>;  // multiply-adds of pairs of bfloat16
#else
constexpr bool kHasDot = false;
#endif

// What each kind of weight stores for `kStep` columns of a panel, in `kBytes`, and how register `v` of the panel's rows is
// read: `load` takes all its columns, and `at` gives one of them.
struct BFloat16Panel {  // pairs of columns: (column / 2, row, 2)
  static constexpr int kStep = 2, kBytes = 64;
#if defined(CPU_CAPABILITY_AVX512)
  using Part = __m512i;
  static Part load(const char* w, int) { return _mm512_loadu_si512(w); }
  static Floats at(Part part, int k) {
    return _mm512_castsi512_ps(k == 0 ? _mm512_slli_epi32(part, 16) : _mm512_and_si512(part, _mm512_set1_epi32(-65536)));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  using Part = __m256i;
  static Part load(const char* w, int v) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + v); }
  static Floats at(Part part, int k) {
    return _mm256_castsi256_ps(k == 0 ? _mm256_slli_epi32(part, 16) : _mm256_and_si256(part, _mm256_set1_epi32(-65536)));
  }
#else
  using Part = const at::BFloat16*;
  static Part load(const char* w, int v) { return reinterpret_cast<Part>(w) + 2 * v * Floats::size(); }
  static Floats at(Part part, int k) {
    float found[Floats::size()];
    for (int i = 0; i < Floats::size(); ++i) found[i] = static_cast<float>(part[2 * i + k]);
    return Floats::loadu(found);
  }
#endif
};

struct HalfPanel {  // (column, row)
  static constexpr int kStep = 1, kBytes = 32;
  using Part = const at::Half*;
  static Part load(const char* w, int v) { return reinterpret_cast<Part>(w) + v * Floats::size(); }
  static Floats at(Part part, int) { return to_floats(part); }
};

struct Int8Panel {  // (column / 4, row, 4)
  static constexpr int kStep = 4, kBytes = 64;
#if defined(CPU_CAPABILITY_AVX512)
  using Part = __m512i;
  static Part load(const char* w, int) { return _mm512_loadu_si512(w); }
  static Floats at(Part part, int k) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(part, 24 - 8 * k), 24));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  using Part = __m256i;
  static Part load(const char* w, int v) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + v); }
  static Floats at(Part part, int k) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(part, 24 - 8 * k), 24));
  }
#else
  using Part = const int8_t*;
  static Part load(const char* w, int v) { return reinterpret_cast<Part>(w) + 4 * v * Floats::size(); }
  static Floats at(Part part, int k) {
    float found[Floats::size()];
    for (int i = 0; i < Floats::size(); ++i) found[i] = part[4 * i + k];
    return Floats::loadu(found);
  }
#endif
};

// As many panels at a time, for a number of rows of the input, as have registers for their sums.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kPanelTile = 8;  // rows of the input at a time
constexpr int panels_at_once(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 3; }
#else
constexpr int kPanelTile = 6;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif
constexpr int64_t kSummedColumns = 256;  // of weights without groups, whose sum is rounded before that of the next is added
constexpr int64_t kPanelAhead = 4096;  // bytes that are prefetched, of all panels together

// Rows of the input as the products read them: floats, or pairs of bfloat16 for dot products.
template <class Panel>
constexpr bool kIsDot = kHasDot && std::is_same_v<Panel, BFloat16Panel>;
template <class Panel>
using PanelInput = std::conditional_t<kIsDot<Panel>, at::BFloat16, float>;

// Scales of panels of integers: 16 for a panel or, in groups, 16 and 16 zeros for each group; and for each row of the
// input the sums of its groups, which zeros are multiplied by.
struct PanelScales {
  const float* values;
  const at::Half* halves;  // instead of values
  int64_t groups;          // 0 for whole rows
  const float* sums;

  static constexpr int64_t kOfGroup = 2 * kPanelRows;

  // Those from a row on.
  PanelScales from(int64_t row) const {
    PanelScales found = *this;
    const int64_t skipped = groups == 0 ? row : row / kPanelRows * groups * kOfGroup;
    if (values != nullptr) found.values += skipped;
    if (halves != nullptr) found.halves += skipped;
    return found;
  }
  // Fetch those of a group of a panel.
  void fetch(int64_t panel, int64_t group) const {
    const int64_t first = (panel * groups + group) * kOfGroup;
    if (halves != nullptr) return prefetch(halves + first, 0);
    prefetch(values + first, 0), prefetch(values + first + kPanelRows, 0);
  }
  // A register of the scales of a group of a panel, from a place on.
  Floats at(int64_t panel, int64_t group, int64_t place) const {
    const int64_t i = (panel * groups + group) * kOfGroup + place;
    return halves != nullptr ? to_floats(halves + i) : to_floats(values + i);
  }
};

// Multiply kRows rows of the input (kRows, size) by kPanels panels; found (kRows, kPanels * kPanelRows).
template <class Panel, bool kIsGrouped, int kRows, int kPanels>
ALWAYS_INLINE inline void multiply_panels(const PanelInput<Panel>* x, int64_t size, const char* w, const PanelScales& scales,
                                          float* found) {
  constexpr int kRegisters = kPanels * kPerPanel;
  constexpr std::make_integer_sequence<int, kRows> kAllRows;
  constexpr std::make_integer_sequence<int, kRegisters> kAllRegisters;
  const int64_t stride = size / Panel::kStep * Panel::kBytes;  // of panels
  std::fill(found, found + kRows * kPanels * kPanelRows, 0.0f);
  const int64_t group = kIsGrouped ? size / scales.groups : kSummedColumns;
  for (int64_t start = 0, g = 0; start < size; start += group, ++g) {
    const int64_t end = std::min(start + group, size);
    Floats sums[kRows][kRegisters];
    for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
      for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE { sums[m][r] = Floats(0.0f); });
    });
    for (int64_t k = start; k < end; k += Panel::kStep, w += Panel::kBytes) {
      typename Panel::Part parts[kRegisters];
      for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE {
        parts[r] = Panel::load(w + r / kPerPanel * stride, r % kPerPanel);
        if (r % kPerPanel == 0) prefetch(w + r / kPerPanel * stride, kPanelAhead / kPanels);
      });
#if defined(__AVX512BF16__) && defined(CPU_CAPABILITY_AVX512)
      if constexpr (kIsDot<Panel>) {
        for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
          int pair;
          std::memcpy(&pair, x + m * size + k, sizeof(pair));
          for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE {
            sums[m][r] = _mm512_dpbf16_ps(sums[m][r], (__m512bh)parts[r], (__m512bh)_mm512_set1_epi32(pair));
          });
        });
        continue;
      }
#endif
      if constexpr (!kIsDot<Panel>) {
        for_each(std::make_integer_sequence<int, Panel::kStep>(), [&](auto i) ALWAYS_INLINE {
          Floats weights[kRegisters];
          for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE { weights[r] = Panel::at(parts[r], i); });
          for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
            const Floats value(x[m * size + k + i]);
            for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE { sums[m][r] = at::vec::fmadd(weights[r], value, sums[m][r]); });
          });
        });
      }
    }
    for_each(kAllRegisters, [&](auto r) ALWAYS_INLINE {
      const bool is_scaled = !kIsGrouped && scales.values != nullptr && end == size;
      const auto of_group = [&](int64_t place) {
        return scales.at(r / kPerPanel, g, place + r % kPerPanel * Floats::size());
      };
      for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
        float* to = found + (m * kRegisters + r) * Floats::size();
        Floats sum = Floats::loadu(to);
        if constexpr (kIsGrouped) {
          sum = at::vec::fmadd(Floats(scales.sums[m * scales.groups + g]), of_group(kPanelRows), sum);
          sum = at::vec::fmadd(sums[m][r], of_group(0), sum);
        } else {
          sum = sum + sums[m][r];
          if (is_scaled) sum = sum * Floats::loadu(scales.values + r * Floats::size());
        }
        sum.store(to);
      });
    });
  }
}

// Round (rows, count) sums, times scales and with a bias where there are any, to `Value`.
inline void finish(float* found, int64_t rows, int64_t count, const float* scales, const Value* bias, Value* y,
                   int64_t size_out) {
  for (int64_t m = 0; m < rows; ++m, found += count) {
    for (int64_t i = 0; i < count; i += Floats::size()) {
      Floats sum = Floats::loadu(found + i);
      if (scales != nullptr) sum = sum * Floats::loadu(scales + i);
      if (bias != nullptr) sum = sum + to_floats(bias + i);
      sum.store(found + i);
    }
    at::vec::convert(found, y + m * size_out, count);
  }
}

// Multiply kRows rows of the input by kPanels panels; y (kRows, size_out).
template <class Panel, bool kIsGrouped, int kRows, int kPanels>
void multiply_tile(const PanelInput<Panel>* x, int64_t size, const char* w, const PanelScales& scales, const Value* bias, Value* y,
                   int64_t size_out) {
  constexpr int kCount = kPanels * kPanelRows;
  float found[kRows * kCount];
  multiply_panels<Panel, kIsGrouped, kRows, kPanels>(x, size, w, scales, found);
  finish(found, kRows, kCount, nullptr, bias, y, size_out);
}

template <class Panel, bool kIsGrouped, int kRows, int... kPanels>
constexpr auto tiles_by_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_tile<Panel, kIsGrouped, kRows, kPanels + 1>...};
}

// Multiply kRows rows of the input by `panels` panels, in equal parts that fit into registers.
template <class Panel, bool kIsGrouped, int kRows>
void multiply_rows_by_panels(const PanelInput<Panel>* x, int64_t size, const char* w, PanelScales scales, const Value* bias,
                             Value* y, int64_t size_out, int64_t panels) {
  constexpr int kAtOnce = panels_at_once(kRows);
  static constexpr auto kByPanels =
      tiles_by_panels<Panel, kIsGrouped, kRows>(std::make_integer_sequence<int, kAtOnce>());
  const int64_t parts = (panels + kAtOnce - 1) / kAtOnce;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t count = panels * (part + 1) / parts - panels * part / parts, rows = count * kPanelRows;
    kByPanels[count - 1](x, size, w, scales, bias, y, size_out);
    w += count * (size / Panel::kStep * Panel::kBytes), y += rows;
    if (bias != nullptr) bias += rows;
    scales = scales.from(rows);
  }
}

template <class Panel, bool kIsGrouped, int... kRows>
constexpr auto panels_by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_rows_by_panels<Panel, kIsGrouped, kRows + 1>...};
}

constexpr int64_t kPanelBytes = 262144;  // of weights that stay in a core's L2 cache while all rows of the input use them

// An input that a thread has converted, for all products with its id.
struct KnownInput {
  const Value* from = nullptr;
  int64_t id = -1, rows = 0, groups = 0;

  // Whether it is another; it is known then.
  bool replace(const KnownInput& other) {
    if (from == other.from && id == other.id && rows == other.rows && groups == other.groups) return false;
    *this = other;
    return true;
  }
};

// Sum each of `count` groups of `size` values, a multiple of the register size.
template <class Input>
void sum_groups(const Input* x, int64_t count, int64_t size, std::vector<float>& sums) {
  sums.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    Floats sum(0.0f);
    for (int64_t k = 0; k < size; k += Floats::size()) sum = sum + to_floats(x + i * size + k);
    sums[i] = total(sum);
  }
}

// Multiply all rows of the input by `count` rows of the weights, whole panels; y (rows, size_out).
template <class Panel, bool kIsGrouped>
void multiply_all_panels(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w, PanelScales scales,
                         const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByRows = panels_by_rows<Panel, kIsGrouped>(std::make_integer_sequence<int, kPanelTile>());
  using Input = PanelInput<Panel>;
  thread_local KnownInput known;
  thread_local std::vector<Input> floats;
  thread_local std::vector<float> sums;
  constexpr bool kIsConverted = !std::is_same_v<Value, Input>;
  const auto* x = reinterpret_cast<const Input*>(given);
  if (known.replace({given, input_id, rows, kIsGrouped ? scales.groups : 0})) {
    if constexpr (kIsConverted) {
      floats.resize(rows * size);
      at::vec::convert(given, floats.data(), rows * size);
    }
    if constexpr (kIsGrouped) sum_groups(given, rows * scales.groups, size / scales.groups, sums);
  }
  if constexpr (kIsConverted) x = floats.data();
  scales.sums = sums.data();
  const int64_t bytes = size / Panel::kStep * Panel::kBytes, tiles = (rows + kPanelTile - 1) / kPanelTile;
  const int64_t all = count / kPanelRows, some = tiles == 1 ? all : std::clamp<int64_t>(kPanelBytes / bytes, 4, 24) / 4 * 4;
  for (int64_t p = 0; p < all; p += some) {
    const int64_t panels = std::min(some, all - p), n = p * kPanelRows;
    PanelScales own = scales.from(n);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t m = rows * tile / tiles, part = rows * (tile + 1) / tiles - m;
      own.sums = kIsGrouped ? scales.sums + m * scales.groups : nullptr;
      kByRows[part - 1](x + m * size, size, w + p * bytes, own, bias == nullptr ? bias : bias + n, y + m * size_out + n, size_out,
                        panels);
    }
  }
}

}  // namespace
