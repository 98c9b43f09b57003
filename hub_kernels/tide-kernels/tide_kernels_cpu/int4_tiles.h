// Products with panels of 4-bit integers by AMX, for several rows of the input: the sums of int4_panels.h. 12 bits of a value are
// two digits, to base 16, of which one meets the weights and the other 16 times the weights, in the same row of a tile. So
// a value takes two rows of a tile of the input, and eight tokens share an instruction. Weights of some blocks are written as
// tiles before the first of these is loaded, which would wait for it. See vectorized.h for `Value`.
#pragma once

#include "int4_panels.h"
#include "tiles.h"

#if defined(TIDE_AMX)
namespace {

constexpr int64_t kHalves = 2;                          // of a value, 12 bits each
constexpr int64_t kBlockTokens = kTileRows / kHalves;   // rows of the input in a tile
constexpr int64_t kFewTokens = 3;      // for which AVX-512 is faster

struct alignas(64) TileDigits {
  int8_t values[kHalves][2][kBlockColumns];  // of each half, first those from -8 to 7
};

inline void write_digits(const int32_t* integers, TileDigits& digits) {
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

template <int kTo, int kInput, int kWeight>
inline void multiply_unsigned_tiles() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kInput), "i"(kWeight));
}

// Write a block of a panel as a tile, (columns / 4, row, 4), and behind it 16 times the weights.
inline void write_block_tile(const char* w, int64_t ahead, char* tile) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(240));
  for (int64_t k = 0; k < kBlockColumns; k += Int4Panel::kStep, w += Int4Panel::kBytes, tile += 2 * Int4Panel::kBytes) {
    const __m512i bytes = _mm512_loadu_si512(w);
    prefetch(w, ahead);
    _mm512_store_si512(tile, _mm512_and_si512(bytes, low));
    _mm512_store_si512(tile + 64, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
    _mm512_store_si512(tile + kTileBytes / 2, _mm512_and_si512(_mm512_slli_epi16(bytes, 4), high));
    _mm512_store_si512(tile + kTileBytes / 2 + 64, _mm512_and_si512(bytes, high));
  }
}

using TileSums = int32_t[kTileRows][kPanelRows];

// Add the products of a block of a panel, by their sums, to found (rows, stride).
inline void add_sums(const TileSums& sums, const BlockFacts* facts, int64_t rows, Floats scale, Floats zero, float* found,
                     int64_t stride) {
  for (int64_t m = 0; m < rows; ++m, found += stride) {
    const Floats low = in_floats(_mm512_load_si512(sums[m * kHalves])), high = in_floats(_mm512_load_si512(sums[m * kHalves + 1]));
    const Floats value = at::vec::fmadd(high, Floats(4096.0f), low) * Floats(facts[m].unit);
    at::vec::fmadd(value, scale, at::vec::fmadd(Floats(facts[m].sum), zero, Floats::loadu(found))).store(found);
  }
}

// Multiply all rows of the input by kPanels panels; found (rows, kPanels, 16).
template <int kPanels>
void multiply_block_tiles(const Blocks<TileDigits>& x, const char* w, const PanelScales scales, float* found) {
  constexpr std::make_integer_sequence<int, kPanels> kAll;
  constexpr int64_t kBytes = kBlockColumns / Int4Panel::kStep * Int4Panel::kBytes;  // of a block of a panel
  alignas(64) char tiles[2][kPanels][kTileBytes];
  alignas(64) TileSums sums[2][kPanels];
  const int64_t stride = x.count * kBytes, rows = x.rows, count = x.count;
  const auto group_of = [per_group = count / scales.groups](int64_t b) { return per_group == 1 ? b : b / per_group; };
  const auto write = [&](auto p, int64_t b) ALWAYS_INLINE {
    const int64_t ahead = blocks_ahead(b, count, kPanels);
    scales.fetch(p, group_of(b + ahead));
    write_block_tile(w + p * stride + b * kBytes, ahead * kBytes, tiles[b % 2][p]);
  };
  int64_t step = 0, last_block = 0, last_row = 0;
  const auto add_last = [&] {
    const BlockFacts* facts = x.facts + last_block * rows + last_row;
    for_each(kAll, [&](auto p) ALWAYS_INLINE {
      const int64_t g = group_of(last_block);
      add_sums(sums[(step + 1) % 2][p], facts, std::min(kBlockTokens, rows - last_row), scales.at(p, g, 0),
               scales.at(p, g, kPanelRows), found + (last_row * kPanels + p) * kPanelRows, kPanels * kPanelRows);
    });
  };
  std::fill(found, found + rows * kPanels * kPanelRows, 0.0f);
  for_each(kAll, [&](auto p) ALWAYS_INLINE { write(p, 0); });
  for (int64_t b = 0; b < count; ++b)
    for (int64_t m = 0; m < rows; m += kBlockTokens, ++step) {
      load_tile<0>(x.digits + b * rows + m, sizeof(TileDigits) / kHalves);
      for_each(kAll, [&](auto p) ALWAYS_INLINE {
        clear_tile<kSums + p>();
        load_tile<kWeights + p % 2>(tiles[b % 2][p], kTileBytes / kTileRows);
        multiply_unsigned_tiles<kSums + p, 0, kWeights + p % 2>();
        if (m == 0 && b + 1 < count) write(p, b + 1);  // and add sums of the last step, while these products are not ready
      });
      if (step > 0) add_last();
      for_each(kAll, [&](auto p) ALWAYS_INLINE { store_tile<kSums + p>(sums[step % 2][p], kPanelRows * sizeof(int32_t)); });
      last_block = b, last_row = m;
    }
  add_last();
}

template <int... kPanels>
constexpr auto blocks_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_block_tiles<kPanels + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, whole panels of whole blocks; y (rows, size_out).
inline void multiply_int4_by_tiles(const Blocks<TileDigits>& x, const char* w, const PanelScales& scales, const Value* bias,
                                   Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = blocks_for_panels(std::make_integer_sequence<int, kTilePanels>());
  thread_local std::vector<float> found;
  found.resize(x.rows * kTilePanels * kPanelRows);
  configure_tiles(std::min(x.rows, kBlockTokens) * kHalves);
  for (int64_t n = 0; n < count; n += kTilePanels * kPanelRows) {
    const int64_t panels = std::min<int64_t>(kTilePanels, (count - n) / kPanelRows);
    kByPanels[panels - 1](x, w + n / 2 * x.count * kBlockColumns, scales.from(n), found.data());
    finish(found.data(), x.rows, panels * kPanelRows, nullptr, bias == nullptr ? bias : bias + n, y + n, size_out);
  }
  release_tiles();
}

}  // namespace
#endif
