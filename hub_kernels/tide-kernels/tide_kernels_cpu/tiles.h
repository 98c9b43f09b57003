// Products with weights of bfloat16 in panels by AMX, whose instructions multiply tiles of 16 rows of the input by 32 columns
// of a panel and sum in float. A value of 32 bits is the sum of three in bfloat16, and one of half precision of two, so
// nothing of the input is rounded. As each row of a tile has sums of its own, none depends on the number of rows. A pass
// over 16 tokens thus takes little longer than the memory needs to give the weights. A single row of the input is
// multiplied by AVX-512, which keeps the memory busier, in the order in which AMX sums. See vectorized.h for `Value`.
#pragma once

#include "panels.h"

#if defined(TIDE_AMX)
namespace {

constexpr int64_t kTileRows = 16, kTileColumns = 32, kTileBytes = kTileRows * kTileColumns * 2;
constexpr int kParts = std::is_same_v<Value, float> ? 3 : std::is_same_v<Value, at::Half> ? 2 : 1;  // of a value
constexpr int kWeights = 2, kSums = 4;  // the first tiles of weights and of sums, after those of the input
constexpr int64_t kTilesAhead = 12;  // that are prefetched, of all panels together

struct alignas(64) TileRow {  // a cache line
  uint16_t values[kTileColumns];
};

// Assembly, since the compilers' functions do not say which memory they read.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTo, int kInput, int kWeight>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kInput), "i"(kWeight));
}

// Give this thread tiles of `rows` rows of the input, of some bytes, and of sums.
inline void configure_tiles(int64_t rows, int64_t bytes = 64) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = i < kWeights ? bytes : 64, config.rows[i] = rows;
  for (int i = kWeights; i < kSums; ++i) config.rows[i] = bytes / 4;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }

inline __m512 widened(__m256i bfloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16));
}

// Call `take(part, bfloat16)` for each part of 16 values, from the largest.
template <class Take>
inline void split(__m512 values, const Take& take) {
  for_each(std::make_integer_sequence<int, kParts>(), [&](auto part) {
    const auto taken = (__m256i)_mm512_cvtneps_pbh(values);
    take(part, taken);
    values = _mm512_sub_ps(values, widened(taken));
  });
}

// Write rows of the input as tiles of `all` rows, (size / 32, kParts, all).
inline void write_input(const Value* x, int64_t rows, int64_t all, int64_t size, TileRow* tiles) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t k = 0; k < size; k += Floats::size()) {
      TileRow* to = tiles + k / kTileColumns * kParts * all + m;
      split(to_floats(x + m * size + k), [&](int part, __m256i values) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[part * all].values + k % kTileColumns), values);
      });
    }
}

// How rows of an input are divided among tiles of up to `most` rows. All tiles have as many, since to configure tiles of
// another height takes long; the last one may end in rows of zeros.
struct Tiling {
  Tiling(int64_t rows, int64_t most) : rows(rows), in_tile(std::min(rows, most)), count((rows + most - 1) / most) {}
  int64_t rows, in_tile, count;
  int64_t in(int64_t tile) const { return std::min(in_tile, rows - tile * in_tile); }  // rows of the input
};

// Add the products of 32 columns of the input, in tiles, and of as many of kPanels panels to the tiles of sums. Panels take
// turns, since products that are added to one tile wait for each other. What lies `ahead` bytes further in a panel (0: nothing)
// is prefetched between them, since many prefetches at once would keep loads waiting.
template <int kPanels>
inline void multiply_columns(const TileRow* x, int64_t rows, const char* w, int64_t stride, int64_t ahead) {
  for_each(std::make_integer_sequence<int, (kPanels + 1) / 2>(), [&](auto pair) {
    constexpr int kFirst = 2 * pair;
    constexpr std::make_integer_sequence<int, std::min(2, kPanels - kFirst)> kBoth;
    const char* from = w + kFirst * stride;
    int64_t fetched = 0;
    const auto fetch_quarter = [&] {
      if (ahead == 0) return;
      for (const int64_t end = fetched + kTileBytes / 4; fetched < end; fetched += 64)
        for_each(kBoth, [&](auto p) { prefetch(from + p * stride + fetched, ahead); });
    };
    for_each(kBoth, [&](auto p) {
      fetch_quarter();
      load_tile<kWeights + p>(from + p * stride, kTileBytes / kTileRows);
    });
    for_each(std::make_integer_sequence<int, kParts>(), [&](auto i) {
      constexpr bool kIsLoaded = kFirst != 0 && (kParts < 3 || i == 1);  // the third part takes the first one's tile
      if constexpr (!kIsLoaded) load_tile<i % 2>(x + i * rows, sizeof(TileRow));
      if constexpr (i < 2) fetch_quarter();
      for_each(kBoth, [&](auto p) { multiply_tiles<kSums + kFirst + p, i % 2, kWeights + p>(); });
    });
  });
}

// Fetch a tile of weights.
inline void fetch_tile(const char* from) {
  for_each(std::make_integer_sequence<int, kTileBytes / 64>(), [&](auto i) {
    asm volatile("prefetcht0 %c1(%0)" ::"r"(from), "i"(64 * i));  // compilers would keep an address for each
  });
}

// The distance to the bytes that are prefetched in a panel of `size` bytes, from the tile at `k` on, while kPanels are read:
// after their last tiles come the next panels' first ones.
template <int kPanels>
inline int64_t bytes_ahead(int64_t k, int64_t size) {
  constexpr int64_t kAhead = kTilesAhead / kPanels * kTileBytes;
  return kAhead + (k + kAhead >= size ? (kPanels - 1) * size : 0);
}

// Multiply the configured rows of the input, in tiles, by kPanels panels; found (rows, kPanels, 16).
template <int kPanels>
void multiply_panels_by_tiles(const TileRow* x, int64_t rows, int64_t size, const char* w, float* found) {
  constexpr std::make_integer_sequence<int, kPanels> kAll;
  const int64_t stride = size / kTileColumns * kTileBytes;  // of panels
  for_each(kAll, [](auto p) { clear_tile<kSums + p>(); });
  for (int64_t k = 0; k < stride; k += kTileBytes, x += kParts * rows)
    multiply_columns<kPanels>(x, rows, w + k, stride, bytes_ahead<kPanels>(k, stride));
  for_each(kAll, [&](auto p) { store_tile<kSums + p>(found + p * kPanelRows, kPanels * kPanelRows * sizeof(float)); });
}

// The same for one row of the input, in floats (kParts, size): even and odd columns of a tile are summed apart.
template <int kPanels>
void multiply_panels_of_row(const float* x, int64_t size, const char* w, float* found) {
  const int64_t stride = size / kTileColumns * kTileBytes;
  Floats sums[kPanels];
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) sums[p] = Floats(0.0f);
  for (int64_t k = 0; k < stride; k += kTileBytes) {
    const int64_t ahead = bytes_ahead<kPanels>(k, stride);
    Floats some[kPanels][kParts][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 3
      for (int part = 0; part < kParts; ++part) some[p][part][0] = some[p][part][1] = Floats(0.0f);
    for (int64_t i = 0; i < kTileBytes; i += BFloat16Panel::kBytes, x += 2) {
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
        const char* from = w + p * stride + k + i;
        const auto pair = BFloat16Panel::load(from, 0);
        prefetch(from, ahead);
        const Floats weights[2] = {BFloat16Panel::at(pair, 0), BFloat16Panel::at(pair, 1)};
#pragma GCC unroll 3
        for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 2
          for (int odd = 0; odd < 2; ++odd)
            some[p][part][odd] = at::vec::fmadd(weights[odd], Floats(x[part * size + odd]), some[p][part][odd]);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 3
      for (int part = 0; part < kParts; ++part) sums[p] = sums[p] + (some[p][part][0] + some[p][part][1]);
  }
  for (int p = 0; p < kPanels; ++p) sums[p].store(found + p * kPanelRows);
}

template <int... kPanels>
constexpr auto tiles_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_panels_by_tiles<kPanels + 1>...};
}

template <int... kPanels>
constexpr auto row_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_panels_of_row<kPanels + 1>...};
}

// Call `run(panels, first, found)` with up to kTilePanels of all panels at a time, and finish what it finds.
template <class Run>
inline void for_panels(int64_t all, int64_t rows, const Value* bias, Value* y, int64_t size_out, const Run& run) {
  alignas(64) float found[kTileRows * kTilePanels * kPanelRows];
  for (int64_t p = 0; p < all; p += kTilePanels) {
    const int64_t panels = std::min<int64_t>(kTilePanels, all - p), n = p * kPanelRows;
    run(panels, p, found);
    finish(found, rows, panels * kPanelRows, nullptr, bias == nullptr ? bias : bias + n, y + n, size_out);
  }
}

// Whether tiles serve a product, whatever its number of rows.
inline bool fit_tiles(int64_t size) { return size % kTileColumns == 0; }

// Multiply one row of the input by `count` rows of the weights, whole panels.
inline void multiply_row_by_panels(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w,
                                   const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = row_for_panels(std::make_integer_sequence<int, kTilePanels>());
  thread_local KnownInput known;
  thread_local std::vector<float> floats;
  if (known.replace({given, input_id, rows, 0})) {
    floats.resize(kParts * size);
    for (int64_t k = 0; k < size; k += Floats::size())
      split(to_floats(given + k), [&](int part, __m256i values) {
        _mm512_storeu_ps(floats.data() + part * size + k, widened(values));
      });
  }
  const auto mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // AMX takes the smallest numbers for zero
  for_panels(count / kPanelRows, rows, bias, y, size_out, [&](int64_t panels, int64_t p, float* found) {
    kByPanels[panels - 1](floats.data(), size, w + p * (size / kTileColumns * kTileBytes), found);
  });
  _mm_setcsr(mode);
}

// All rows of the input as tiles, which a thread keeps.
inline const TileRow* tiles_of(const Value* given, int64_t input_id, const Tiling& tiling, int64_t size) {
  thread_local KnownInput known;
  thread_local std::vector<TileRow> tiles;
  if (known.replace({given, input_id, tiling.rows, 0})) {
    const int64_t of_tile = tiling.in_tile * (size / kTileColumns * kParts);
    tiles.assign(tiling.count * of_tile, TileRow{});
    for (int64_t t = 0; t < tiling.count; ++t)
      write_input(given + t * tiling.in_tile * size, tiling.in(t), tiling.in_tile, size, tiles.data() + t * of_tile);
  }
  return tiles.data();
}

// Multiply all rows of the input by `count` rows of the weights, whole panels; y (rows, size_out).
inline void multiply_by_tiles(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w,
                              const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = tiles_for_panels(std::make_integer_sequence<int, kTilePanels>());
  const Tiling tiling(rows, kTileRows);
  const TileRow* tiles = tiles_of(given, input_id, tiling, size);
  configure_tiles(tiling.in_tile);
  for (int64_t t = 0; t < tiling.count; ++t, tiles += tiling.in_tile * (size / kTileColumns * kParts))
    for_panels(count / kPanelRows, tiling.in(t), bias, y + t * kTileRows * size_out, size_out,
               [&](int64_t panels, int64_t p, float* found) {
                 kByPanels[panels - 1](tiles, tiling.in_tile, size, w + p * (size / kTileColumns * kTileBytes), found);
               });
  release_tiles();
}

}  // namespace
#endif
