// Products with panels of int8 in groups by AMX (see tiles.h). An integer of 8 bits is a bfloat16, so a tile holds 32
// columns of a group, and its sums are multiplied by the group's scales. Integers of some columns of all panels are written as
// tiles before the first of these is loaded, which would wait for it, and all rows of the input use them. See vectorized.h for
// `Value`.
#pragma once

#include "tiles.h"

#if defined(TIDE_AMX)
namespace {

constexpr int64_t kWrittenColumns = 64;  // of kTilePanels panels, whose tiles stay in a core's L1 cache

// Write 32 columns of a panel, as pairs of bfloat16, (16, row, 2).
inline void write_tile(const char* w, char* tile) {
  const __m512i to_top = _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12));
  for (int64_t k = 0; k < kTileColumns; k += Int8Panel::kStep, w += Int8Panel::kBytes) {
    const __m512i part = Int8Panel::load(w, 0);
    const auto bits = [&](int k) {  // no shifts, for which CPUs have one port, and conversions need it
      const __m512i top = _mm512_shuffle_epi8(part, _mm512_add_epi8(to_top, _mm512_set1_epi32(k << 24)));
      return _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(top), _mm512_set1_ps(1.0f / (1 << 24))));
    };
    for_each(std::make_integer_sequence<int, 2>(), [&](auto i) {  // the lower half of an integer's float is zero
      _mm512_store_si512(tile, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(bits(2 * i), 16), bits(2 * i + 1)));
      tile += 64;
    });
  }
}

// Fetch scales of some groups.
inline void fetch_scales(const PanelScales& scales, int64_t first, int64_t count) {
  const int64_t bytes = PanelScales::kOfGroup * (scales.halves != nullptr ? sizeof(at::Half) : sizeof(float));
  const auto* all = scales.halves != nullptr ? static_cast<const void*>(scales.halves) : scales.values;
  for (int64_t i = 0; i < count * bytes; i += 64) prefetch(all, first * bytes + i);
}

// `count` groups of `size` columns, from group `first` on, of up to kTilePanels panels.
struct Groups {
  const char* tiles;  // of these groups, those of each panel `stride` bytes behind those of the last one
  int64_t stride, size, first, count;
  PanelScales scales;  // of all groups
};

// Multiply a tile of the input, with `all` rows, by groups of kPanels panels, and add the products to found (rows, kPanels, 16).
template <int kPanels>
void add_groups(const TileRow* x, int64_t rows, int64_t all, const Groups& groups, float* found) {
  constexpr std::make_integer_sequence<int, kPanels> kAll;
  const PanelScales& scales = groups.scales;
  alignas(64) float sums[2][kPanels][kTileRows][kPanelRows];
  const auto add_group = [&](int64_t i) {
    const int64_t g = groups.first + i;
    for_each(kAll, [&](auto p) {
      const Floats scale = scales.at(p, g, 0), zero = scales.at(p, g, kPanelRows);
      for (int64_t m = 0; m < rows; ++m) {
        float* to = found + (m * kPanels + p) * kPanelRows;
        const Floats sum = at::vec::fmadd(Floats(scales.sums[m * scales.groups + g]), zero, Floats::loadu(to));
        at::vec::fmadd(Floats::loadu(sums[i % 2][p][m]), scale, sum).store(to);
      }
    });
  };
  const char* w = groups.tiles;
  for (int64_t i = 0; i < groups.count; ++i) {
    for_each(kAll, [](auto p) { clear_tile<kSums + p>(); });
    for (int64_t k = 0; k < groups.size; k += kTileColumns, x += all * kParts, w += kTileBytes)
      multiply_columns<kPanels>(x, all, w, groups.stride, 0);
    if (i > 0) add_group(i - 1);  // while these products are not ready
    for_each(kAll, [&](auto p) { store_tile<kSums + p>(sums[i % 2][p], kPanelRows * sizeof(float)); });
  }
  add_group(groups.count - 1);
}

template <int... kPanels>
constexpr auto groups_for_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{add_groups<kPanels + 1>...};
}

// Whether these tiles serve a product, whatever its number of rows.
inline bool fit_group_tiles(int64_t size, int64_t groups) { return size / groups % kTileColumns == 0; }

// Multiply all rows of the input by `count` rows of the weights, whole panels; y (rows, size_out).
inline void multiply_by_group_tiles(const Value* given, int64_t input_id, int64_t rows, int64_t size, const char* w,
                             const PanelScales& scales, const Value* bias, Value* y, int64_t size_out, int64_t count) {
  static constexpr auto kByPanels = groups_for_panels(std::make_integer_sequence<int, kTilePanels>());
  constexpr int64_t kBytes = kTileColumns / Int8Panel::kStep * Int8Panel::kBytes;  // of a panel that a tile holds
  thread_local KnownInput known;
  thread_local std::vector<float> sums, found;
  thread_local std::vector<TileRow> written;
  const int64_t group = size / scales.groups, of_row = size / kTileColumns * kParts, stride = size / kTileColumns * kBytes;
  if (known.replace({given, input_id, rows, scales.groups})) sum_groups(given, rows * scales.groups, group, sums);
  const Tiling tiling(rows, kTileRows);
  const TileRow* tiles = tiles_of(given, input_id, tiling, size);
  const int64_t some = std::max<int64_t>(1, kWrittenColumns / group), of_some = some * group / kTileColumns;  // tiles
  written.resize(kTilePanels * of_some * kTileBytes / sizeof(TileRow));
  char* into = reinterpret_cast<char*>(written.data());
  configure_tiles(tiling.in_tile);
  for (int64_t n = 0; n < count; n += kTilePanels * kPanelRows, w += kTilePanels * stride) {
    const int64_t panels = std::min<int64_t>(kTilePanels, (count - n) / kPanelRows), of_token = panels * kPanelRows;
    const PanelScales own = scales.from(n);
    found.assign(rows * of_token, 0.0f);
    for (int64_t g = 0; g < scales.groups; g += some) {
      Groups groups{into, of_some * kTileBytes, group, g, std::min(some, scales.groups - g), own};
      const int64_t first = g * group / kTileColumns, end = (g + groups.count) * group / kTileColumns;
      // Tiles to those that come next, of the same panels or of others.
      const int64_t ahead = end * kTileColumns < size ? of_some : kTilePanels * size / kTileColumns - first;
      for (int64_t p = 0; p < panels; ++p) {
        fetch_scales(own, p * scales.groups + g + ahead * kTileColumns / group, groups.count);
        for (int64_t t = first; t < end; ++t) {
          const char* from = w + p * stride + t * kBytes;
          for (int64_t i = 0; i < kBytes; i += 64) prefetch(from + i, ahead * kBytes);
          write_tile(from, into + (p * of_some + t - first) * kTileBytes);
        }
      }
      for (int64_t t = 0, m = 0; t < tiling.count; ++t, m += tiling.in_tile) {
        groups.scales.sums = sums.data() + m * scales.groups;
        kByPanels[panels - 1](tiles + m * of_row + first * kParts * tiling.in_tile, tiling.in(t), tiling.in_tile, groups,
                              found.data() + m * of_token);
      }
    }
    finish(found.data(), rows, of_token, nullptr, bias == nullptr ? bias : bias + n, y + n, size_out);
  }
  release_tiles();
}

}  // namespace
#endif
