// Products with panels of integers in groups by AMX, from blocks of the input in fixed point: see blocks.h. A block's digits are
// rows of a tile, which an instruction multiplies by a block of a panel. See vectorized.h for `Value`.
#pragma once

#include "blocks.h"
#include "tiles.h"

#if defined(TIDE_AMX)
namespace {

constexpr int64_t kFewTokens = 3;  // for which AVX-512 is faster with 4-bit integers

using TileSums = int32_t[kTileRows][kPanelRows];

// 8-bit integers: a block of a panel is a tile.
struct Int8Tiles {
  using Digits = BlockDigits<false>;
  static constexpr int kRows = kBlockDigits;  // of a tile, for a row of the input
  static constexpr int64_t kBytes = Int8Panel::kBytes / Int8Panel::kStep;  // of a column of a panel
  static constexpr bool kAreWritten = false;

  static int64_t input_bytes(int64_t columns) { return columns; }
  template <int kTo, int kWeight>
  static void multiply() {
    asm volatile("tdpbssd %%tmm%c1, %%tmm0, %%tmm%c0" ::"i"(kTo), "i"(kWeight));
  }
  static Floats value(const int32_t (*sums)[kPanelRows]) {
    return value_of_digits(_mm512_load_si512(sums[0]), _mm512_load_si512(sums[1]), _mm512_load_si512(sums[2]));
  }
};

// 4-bit integers, which are written as tiles. 12 bits of a value are two digits, the lower 4 bits and the upper 8: the first meets
// the weights, and the second 16 times the weights, in the same row of a tile. So a value takes two rows, and eight tokens
// share an instruction.
struct Int4Tiles {
  struct alignas(64) Digits {
    static constexpr bool kInByteOrder = true;
    int8_t values[2][2][kBlockColumns];  // of each 12 bits, first those from -8 to 7
  };
  static constexpr int kRows = 2;
  static constexpr int64_t kBytes = Int4Panel::kBytes / Int4Panel::kStep;
  static constexpr bool kAreWritten = true;

  static int64_t input_bytes(int64_t columns) { return 2 * columns; }
  template <int kTo, int kWeight>
  static void multiply() {
    asm volatile("tdpbsud %%tmm%c1, %%tmm0, %%tmm%c0" ::"i"(kTo), "i"(kWeight));
  }
  static Floats value(const int32_t (*sums)[kPanelRows]) {
    return at::vec::fmadd(in_floats(_mm512_load_si512(sums[1])), Floats(4096.0f), in_floats(_mm512_load_si512(sums[0])));
  }
  // Write a block of a panel as a tile, (columns / 4, row, 4), and behind it 16 times the weights.
  static void write(const char* w, char* tile) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(240));
    for (int64_t k = 0; k < kBlockColumns; k += Int4Panel::kStep, w += Int4Panel::kBytes, tile += 2 * Int4Panel::kBytes) {
      const __m512i bytes = _mm512_loadu_si512(w);
      _mm512_store_si512(tile, _mm512_and_si512(bytes, low));
      _mm512_store_si512(tile + 64, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
      _mm512_store_si512(tile + kTileBytes / 2, _mm512_and_si512(_mm512_slli_epi16(bytes, 4), high));
      _mm512_store_si512(tile + kTileBytes / 2 + 64, _mm512_and_si512(bytes, high));
    }
  }
};

inline void write_digits(const int32_t* integers, Int4Tiles::Digits& digits) {
  for (int k = 0; k < kBlockColumns; k += 16) {
    __m512i left = _mm512_load_si512(integers + k);
    const auto write_lowest = [&](int bits, int8_t* to) {
      const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(left, 32 - bits), 32 - bits);
      _mm_store_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtepi32_epi8(digit));
      left = _mm512_srai_epi32(_mm512_sub_epi32(left, digit), bits);
    };
    for (auto& half : digits.values) write_lowest(4, half[0]), write_lowest(8, half[1]);
  }
}

template <class Tiles>
constexpr int64_t kBlockTokens = kTileRows / Tiles::kRows;  // rows of the input in a tile

// Add the products of a block of a panel, by their sums, to found (rows, stride).
template <class Tiles>
inline void add_sums(const TileSums& sums, const BlockFacts* facts, int64_t rows, Floats scale, Floats zero, float* found,
                     int64_t stride) {
  for (int64_t m = 0; m < rows; ++m, found += stride)
    add_block(Tiles::value(sums + m * Tiles::kRows), facts[m], scale, zero, found);
}

// Multiply all rows of the input by kPanels panels; found (rows, kPanels, 16).
template <class Tiles, int kPanels>
void multiply_tiles_of_blocks(const Blocks<typename Tiles::Digits>& x, const char* w, const PanelScales scales, float* found) {
  constexpr std::make_integer_sequence<int, kPanels> kAll;
  constexpr int64_t kTokens = kBlockTokens<Tiles>;
  alignas(64) char tiles[2][kPanels][Tiles::kAreWritten ? kTileBytes : 1];
  alignas(64) TileSums sums[2][kPanels];
  const int64_t of_block = x.columns * Tiles::kBytes, stride = x.count * of_block, rows = x.rows, count = x.count;
  const auto read = [&](auto p, int64_t b) ALWAYS_INLINE {  // for the first time, while what is needed later is fetched
    const int64_t ahead = blocks_ahead(b, count, kPanels);
    const char* from = w + p * stride + b * of_block;
    scales.fetch(p, x.group_of(b + ahead));
    for (int64_t i = 0; i < of_block; i += 64) prefetch(from + i, ahead * of_block);
    if constexpr (Tiles::kAreWritten) Tiles::write(from, tiles[b % 2][p]);
  };
  int64_t step = 0, last_block = 0, last_row = 0;
  const auto add_last = [&] {
    const BlockFacts* facts = x.facts + last_block * rows + last_row;
    const int64_t g = x.group_of(last_block), some = std::min(kTokens, rows - last_row);
    for_each(kAll, [&](auto p) ALWAYS_INLINE {
      add_sums<Tiles>(sums[(step + 1) % 2][p], facts, some, scales.at(p, g, 0), scales.at(p, g, kPanelRows),
                      found + (last_row * kPanels + p) * kPanelRows, kPanels * kPanelRows);
    });
  };
  std::fill(found, found + rows * kPanels * kPanelRows, 0.0f);
  for_each(kAll, [&](auto p) ALWAYS_INLINE { read(p, 0); });
  for (int64_t b = 0; b < count; ++b)
    for (int64_t m = 0; m < rows; m += kTokens, ++step) {
      load_tile<0>(x.digits + b * rows + m, sizeof(typename Tiles::Digits) / Tiles::kRows);
      for_each(kAll, [&](auto p) ALWAYS_INLINE {
        clear_tile<kSums + p>();
        load_tile<kWeights + p % 2>(Tiles::kAreWritten ? tiles[b % 2][p] : w + p * stride + b * of_block, 4 * kPanelRows);
        Tiles::template multiply<kSums + p, kWeights + p % 2>();
        if (m == 0 && b + 1 < count) read(p, b + 1);  // and add sums of the last step, while these products are not ready
      });
      if (step > 0) add_last();
      for_each(kAll, [&](auto p) ALWAYS_INLINE { store_tile<kSums + p>(sums[step % 2][p], kPanelRows * sizeof(int32_t)); });
      last_block = b, last_row = m;
    }
  add_last();
}

template <class Tiles, int... kPanels>
constexpr auto blocks_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_tiles_of_blocks<Tiles, kPanels + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, whole panels of whole blocks; y (rows, size_out).
template <class Tiles>
void multiply_by_block_tiles(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w,
                             const PanelScales& scales, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = blocks_for_panels<Tiles>(std::make_integer_sequence<int, kTilePanels>());
  constexpr int64_t kTokens = kBlockTokens<Tiles>;
  thread_local std::vector<float> found;
  const auto x = blocks_of<typename Tiles::Digits>(given, input_id, rows, size, scales.groups, kTokens);
  found.resize(rows * kTilePanels * kPanelRows);
  configure_tiles(std::min(rows, kTokens) * Tiles::kRows, Tiles::input_bytes(x.columns));
  for (int64_t n = 0; n < count; n += kTilePanels * kPanelRows) {
    const int64_t panels = std::min<int64_t>(kTilePanels, (count - n) / kPanelRows);
    kByPanels[panels - 1](x, w + n * size * Tiles::kBytes / kPanelRows, scales.from(n), found.data());
    finish(found.data(), rows, panels * kPanelRows, nullptr, bias == nullptr ? bias : bias + n, y + n, size_out);
  }
  release_tiles();
}

}  // namespace
#endif
