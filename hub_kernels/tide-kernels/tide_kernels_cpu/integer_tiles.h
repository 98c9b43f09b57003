// Products with panels of int8 by AMX, whose instructions multiply tiles of 16 rows by 64 columns of a panel and sum in int32.
// A row of the input is written in fixed point, 30 bits below its largest value, as digits of 8 bits, each of which is a row
// of a tile. So weights are read as they are stored, four tokens share an instruction, and sums of integers are exact: they
// depend neither on the order nor on the number of rows. Fixed point loses less than sums in float32 do, unless the
// largest value of a row is more than a thousand times as large as most of the others. See vectorized.h for `Value`.
#pragma once

#include "tiles.h"

#if defined(TIDE_AMX)
namespace {

constexpr int kDigits = 4;  // of a value, to base 256, from -128 to 127
constexpr int64_t kTokens = kTileRows / kDigits;  // rows of the input in a tile
constexpr int64_t kDigitColumns = 64;  // that an instruction multiplies
constexpr int64_t kMostColumns = 1 << 17;  // with more, the sum of products of digits and weights may not fit into int32

struct alignas(64) DigitRow {  // a cache line
  int8_t values[kDigitColumns];
};

template <int kTo, int kInput, int kWeight>
inline void multiply_integer_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kInput), "i"(kWeight));
}

// The power of two that brings a row of the input below 2^30, and its reciprocal times 2^24, which is NaN if a value is not
// finite.
inline std::pair<float, float> fixed_point(const Value* x, int64_t size) {
  Floats largest(0.0f), rest(0.0f);
  for (int64_t k = 0; k < size; k += Floats::size()) {
    const Floats value = to_floats(x + k);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(value));
    rest = rest + (value - value);  // 0, or NaN
  }
  const int exponent = std::clamp(std::ilogb(_mm512_reduce_max_ps(largest)), -97, 127) + 1;
  return {std::ldexp(1.0f, 30 - exponent), std::ldexp(1.0f, exponent - 6) + total(rest)};
}

// Write rows of the input as a tile of `all` rows, (size / 64, all, kDigits), and for each row what a sum of its digits is
// multiplied by.
inline void write_digits(const Value* x, int64_t rows, int64_t all, int64_t size, DigitRow* tiles, float* units) {
  const __m512i half = _mm512_set1_epi32(0x80808080);
  const __m512i by_byte = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i by_digit = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t m = 0; m < rows; ++m, x += size) {
    const auto [factor, unit] = fixed_point(x, size);
    units[m] = unit;
    for (int64_t k = 0; k < size; k += Floats::size()) {
      const __m512i value = _mm512_cvtps_epi32(to_floats(x + k) * Floats(factor));
      const __m512i digits = _mm512_xor_si512(_mm512_add_epi32(value, half), half);  // no digit borrows from the next
      const __m512i sorted = _mm512_permutexvar_epi32(by_digit, _mm512_shuffle_epi8(digits, by_byte));
      DigitRow* to = tiles + (k / kDigitColumns * all + m) * kDigits;
      for_each(std::make_integer_sequence<int, kDigits>(), [&](auto i) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to[i].values + k % kDigitColumns), _mm512_extracti32x4_epi32(sorted, i));
      });
    }
  }
}

// The value of sums of digits, (kDigits, 16), times 2^-24.
inline Floats value_of(const int32_t* digits) {
  Floats found(0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < kDigits; ++i, digits += kPanelRows)
    found = at::vec::fmadd(found, Floats(1.0f / 256), Floats(_mm512_cvtepi32_ps(_mm512_load_si512(digits))));
  return found;
}

// Multiply a tile of the input, with `all` rows, by kPanels panels; found (rows, kPanels, 16). Panels that are in memory are
// fetched before they are needed.
template <int kPanels>
void multiply_by_digits(const DigitRow* x, int64_t rows, int64_t all, int64_t size, const char* w, bool are_in_memory,
                        const float* units, float* found) {
  constexpr std::make_integer_sequence<int, kPanels> kAll;
  const int64_t stride = size / kDigitColumns * kTileBytes;
  alignas(64) int32_t sums[kPanels][kTileRows * kPanelRows];
  for_each(kAll, [](auto p) { clear_tile<kSums + p>(); });
  for (int64_t k = 0; k < stride; k += kTileBytes, x += all * kDigits) {
    load_tile<0>(x, sizeof(DigitRow));
    for_each(kAll, [&](auto p) {
      const char* from = w + p * stride + k;
      if (are_in_memory) fetch_tile(from + bytes_ahead<kPanels>(k, stride));
      load_tile<kWeights + p % 2>(from, kTileBytes / kTileRows);
      multiply_integer_tiles<kSums + p, 0, kWeights + p % 2>();
    });
  }
  for_each(kAll, [&](auto p) { store_tile<kSums + p>(sums[p], kPanelRows * sizeof(int32_t)); });
  for (int64_t m = 0; m < rows; ++m)
    for_each(kAll, [&](auto p) {
      (value_of(sums[p] + m * kDigits * kPanelRows) * Floats(units[m])).store(found + (m * kPanels + p) * kPanelRows);
    });
}

template <int... kPanels>
constexpr auto digits_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_by_digits<kPanels + 1>...};
}

// Whether these tiles serve a product, whatever its number of rows.
inline bool fit_digits(int64_t size) { return size % kDigitColumns == 0 && size < kMostColumns; }

// Multiply all rows of the input by `count` rows of the weights, whole panels; y (rows, size_out).
inline void multiply_by_integer_tiles(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w,
                                      const float* scales, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = digits_for_panels(std::make_integer_sequence<int, kTilePanels>());
  thread_local KnownInput known;
  thread_local std::vector<DigitRow> tiles;
  thread_local std::vector<float> units;
  const int64_t of_row = size / kDigitColumns * kDigits;
  const Tiling tiling(rows, kTokens);
  const int64_t all = tiling.in_tile;
  if (known.replace({given, input_id, rows, 0})) {
    tiles.assign(tiling.count * all * of_row, DigitRow{}), units.resize(rows);
    for (int64_t t = 0, m = 0; t < tiling.count; ++t, m += all)
      write_digits(given + m * size, tiling.in(t), all, size, tiles.data() + m * of_row, units.data() + m);
  }
  configure_tiles(all * kDigits);
  for (int64_t n = 0; n < count; n += kTilePanels * kPanelRows) {
    const int64_t panels = std::min<int64_t>(kTilePanels, (count - n) / kPanelRows);
    for (int64_t t = 0, m = 0; t < tiling.count; ++t, m += all) {
      alignas(64) float found[kTokens * kTilePanels * kPanelRows];
      kByPanels[panels - 1](tiles.data() + m * of_row, tiling.in(t), all, size, w + n * size, t == 0, units.data() + m, found);
      finish(found, tiling.in(t), panels * kPanelRows, scales + n, bias == nullptr ? bias : bias + n, y + m * size_out + n,
             size_out);
    }
  }
  release_tiles();
}

}  // namespace
#endif
