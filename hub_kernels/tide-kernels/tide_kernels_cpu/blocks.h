// Products with panels of integers in groups (`LinearWeight` in arguments.h), by instructions that multiply bytes. Each block of
// 32 columns of the input is written in fixed point, with 24 bits for its largest value, as digits of 8 bits. So weights are
// multiplied as they are stored, and sums of a block are exact: none depends on the order or the number of rows. Fixed
// point loses about as much as sums in float32 do. Here are products with 4-bit integers; see block_tiles.h for AMX, and
// vectorized.h for `Value`.
#pragma once

#include <cmath>

#include "panels.h"

namespace {

constexpr int kBlockColumns = 32;  // at most; a group has whole blocks
constexpr int kBlockDigits = 3;    // of a value, to base 256, from -128 to 127
constexpr int64_t kBlocksAhead = 16;  // that are prefetched, of all panels together

struct Int4Panel {  // from 0 to 15: (column / 8, row, 4): even columns in the first two bytes, from the lowest bits, and odd ones
  static constexpr int kStep = 8, kBytes = 64;
};

// The columns of a panel's bytes, for 8 columns: those in the lower halves of each row's four bytes, then in the upper ones.
constexpr int kByteColumns[] = {0, 4, 1, 5, 2, 6, 3, 7};

struct BlockFacts {  // what the sums of a block's integers are multiplied by, NaN if a value is not finite; the sum of its values
  float unit, sum;
};

inline int32_t four_bytes(const int8_t* bytes) {
  int32_t found;
  std::memcpy(&found, bytes, sizeof(found));
  return found;
}

inline float power_of_two(int exponent) {
  const int32_t bits = (127 + exponent) << 23;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

using Integers = at::vec::Vectorized<int32_t>;  // as many as a register of floats

// Integers in the order of kByteColumns.
inline Integers in_byte_order(const Integers& integers) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), integers);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_permutevar8x32_epi32(integers, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  int32_t from[Integers::size()], to[Integers::size()];
  integers.store(from);
  for (int k = 0; k < Integers::size(); ++k) to[k] = from[k / 8 * 8 + kByteColumns[k % 8]];
  return Integers::loadu(to);
#endif
}

// Round a block of a row of the input to fixed point, in the order of kByteColumns or of the columns.
template <bool kInByteOrder>
inline BlockFacts fixed_block(const Value* x, int64_t columns, int32_t* integers) {
  constexpr int kRegisters = kBlockColumns / Floats::size();
  Floats values[kRegisters], most(0.0f), sum(0.0f);
  for (int i = 0; i < kRegisters; ++i) {
    values[i] = load(x + i * Floats::size(), columns - i * Floats::size());
    most = at::vec::maximum(most, values[i].abs()), sum = sum + values[i];
  }
  const float largest = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return at::vec::maximum(a, b); }, most);
  int32_t bits;
  std::memcpy(&bits, &largest, sizeof(bits));
  const bool is_finite = (bits & 0x7FFFFFFF) < 0x7F800000;
  // 2^exponent times 0x7F0000 / 0x800000, which the digits can hold, is larger than all values.
  const int exponent = is_finite ? std::max(((bits + 0x20000) >> 23) - 126, -96) : 128;
  const Floats factor(power_of_two(23 - exponent));
  for (int i = 0; i < kRegisters; ++i) {
    const Integers found = at::vec::convert_to_int_of_same_size((values[i] * factor).round());
    (kInByteOrder ? in_byte_order(found) : found).store(integers + i * Floats::size());
  }
  return {is_finite ? power_of_two(exponent - 23) : std::numeric_limits<float>::quiet_NaN(), total(sum)};
}

template <bool kOfBytes>
struct BlockDigits {
  static constexpr bool kInByteOrder = kOfBytes;
  int8_t values[kBlockDigits][kBlockColumns];
};
using Int4Digits = BlockDigits<true>;

template <bool kInByteOrder>
inline void write_digits(const int32_t* integers, BlockDigits<kInByteOrder>& digits) {
  for (int d = 0; d < kBlockDigits; ++d)
    for (int k = 0; k < kBlockColumns; ++k)  // no digit borrows from the next
      digits.values[d][k] = static_cast<int8_t>(((integers[k] + 0x808080) ^ 0x808080) >> 8 * d);
}

// Bytes of four columns of as many rows of a panel as a register of floats has lanes, and sums for each row. `add_products`
// adds those of bytes from 0 to 15 and four digits; `settled` gives sums of up to kBlockColumns columns.
#if defined(CPU_CAPABILITY_AVX512)
using Bytes = __m512i;
using FourDigits = __m512i;
using Sums = __m512i;
inline Bytes lower_halves(const char* w) { return _mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(15)); }
inline Bytes upper_halves(const char* w) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w), 4), _mm512_set1_epi8(15));
}
inline Sums no_sums() { return _mm512_setzero_si512(); }
inline FourDigits four_digits(const int8_t* digits) { return _mm512_set1_epi32(four_bytes(digits)); }
inline Sums add_products(Sums sums, Bytes w, FourDigits digits) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, w, digits);
#else
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(w, digits));
#endif
}
inline Sums settled(Sums sums) {
#if defined(__AVX512VNNI__)
  return sums;
#else
  return _mm512_madd_epi16(sums, _mm512_set1_epi16(1));
#endif
}
// sums + 256 next, in floats, which hold them exactly.
inline Floats joined(Sums sums, Sums next) { return _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_slli_epi32(next, 8))); }
inline Floats in_floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
constexpr int kBlockRows = 8;  // of the input at a time
constexpr int block_panels(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : rows <= 4 ? 2 : 1; }
#elif defined(CPU_CAPABILITY_AVX2)
using Bytes = __m256i;
using FourDigits = __m256i;
using Sums = __m256i;
inline Bytes lower_halves(const char* w) {
  return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)), _mm256_set1_epi8(15));
}
inline Bytes upper_halves(const char* w) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  return _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}
inline Sums no_sums() { return _mm256_setzero_si256(); }
inline FourDigits four_digits(const int8_t* digits) { return _mm256_set1_epi32(four_bytes(digits)); }
inline Sums add_products(Sums sums, Bytes w, FourDigits digits) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, digits));
}
inline Sums settled(Sums sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Floats joined(Sums sums, Sums next) { return _mm256_cvtepi32_ps(_mm256_add_epi32(sums, _mm256_slli_epi32(next, 8))); }
inline Floats in_floats(Sums sums) { return _mm256_cvtepi32_ps(sums); }
constexpr int kBlockRows = 2;
constexpr int block_panels(int) { return 1; }
#else
struct Bytes {
  uint8_t of[Floats::size()][4];
};
struct Sums {
  int32_t of[Floats::size()];
};
template <class Take>
inline Bytes halves(const char* w, const Take& take) {
  Bytes found;
  for (int i = 0; i < 4 * Floats::size(); ++i) found.of[i / 4][i % 4] = take(static_cast<uint8_t>(w[i]));
  return found;
}
inline Bytes lower_halves(const char* w) {
  return halves(w, [](uint8_t byte) { return byte & 15; });
}
inline Bytes upper_halves(const char* w) {
  return halves(w, [](uint8_t byte) { return byte >> 4; });
}
inline Sums no_sums() { return {}; }
using FourDigits = const int8_t*;
inline FourDigits four_digits(const int8_t* digits) { return digits; }
inline Sums add_products(Sums sums, const Bytes& w, FourDigits digits) {
  for (int i = 0; i < Floats::size(); ++i)
    for (int k = 0; k < 4; ++k) sums.of[i] += w.of[i][k] * digits[k];
  return sums;
}
inline Sums settled(const Sums& sums) { return sums; }
inline Floats in_floats(const Sums& sums) {
  float found[Floats::size()];
  std::copy(sums.of, sums.of + Floats::size(), found);
  return Floats::loadu(found);
}
inline Floats joined(Sums sums, const Sums& next) {
  for (int i = 0; i < Floats::size(); ++i) sums.of[i] += 256 * next.of[i];
  return in_floats(sums);
}
constexpr int kBlockRows = 1;
constexpr int block_panels(int) { return 1; }
#endif

// A sum of products from those of each digit, rounded once.
ALWAYS_INLINE inline Floats value_of_digits(Sums first, Sums second, Sums third) {
  return at::vec::fmadd(in_floats(settled(third)), Floats(65536.0f), joined(settled(first), settled(second)));
}

// Add a block's product, of which `value` is the sum of integers, to a register of found.
ALWAYS_INLINE inline void add_block(Floats value, const BlockFacts& facts, Floats scale, Floats zero, float* found) {
  const Floats sum = at::vec::fmadd(Floats(facts.sum), zero, Floats::loadu(found));
  at::vec::fmadd(value * Floats(facts.unit), scale, sum).store(found);
}

// The input of a product, (count, rows) blocks of some columns, `per_group` of them in a group.
template <class Digits>
struct Blocks {
  const Digits* digits;
  const BlockFacts* facts;
  int64_t rows, count, columns, per_group;
  Blocks from(int64_t row) const { return {digits + row, facts + row, rows, count, columns, per_group}; }
  int64_t group_of(int64_t block) const { return per_group == 1 ? block : block / per_group; }
};

inline int64_t block_columns(int64_t group) { return group % 32 == 0 ? 32 : 16; }

// The blocks of an input, which a thread keeps. `spare` rows behind the last block's hold anything.
template <class Digits>
inline Blocks<Digits> blocks_of(const Value* given, int64_t input_id, int64_t rows, int64_t size, int64_t groups,
                                int64_t spare = 0) {
  thread_local KnownInput known;
  thread_local std::vector<Digits> digits;
  thread_local std::vector<BlockFacts> facts;
  const int64_t columns = block_columns(size / groups), count = size / columns;
  if (known.replace({given, input_id, rows, columns})) {
    digits.resize(count * rows + spare), facts.resize(count * rows);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t b = 0; b < count; ++b) {
        alignas(64) int32_t integers[kBlockColumns];
        facts[b * rows + m] = fixed_block<Digits::kInByteOrder>(given + m * size + b * columns, columns, integers);
        write_digits(integers, digits[b * rows + m]);
      }
  }
  return {digits.data(), facts.data(), rows, count, columns, count / groups};
}

// How many blocks behind block b of `panels` panels, of `size` blocks, those lie that are fetched with it.
inline int64_t blocks_ahead(int64_t b, int64_t size, int64_t panels) {
  const int64_t some = kBlocksAhead / panels;
  return some + (b + some >= size ? (panels - 1) * size : 0);
}

// Multiply kRows rows of the input by kPanels panels; found (kRows, kPanels * kPanelRows).
template <int kRows, int kPanels>
NO_INLINE void multiply_blocks(Blocks<Int4Digits> x, const char* w, const PanelScales& scales, float* found) {
  constexpr int kRegisters = kPanels * kPerPanel;
  constexpr int kTogether = kRows == 1 || kPerPanel == 1 ? kRegisters : 1;  // whose sums fit into registers
  constexpr std::make_integer_sequence<int, kRows> kAllRows;
  constexpr std::make_integer_sequence<int, kTogether> kSomeRegisters;
  constexpr std::make_integer_sequence<int, kBlockDigits> kAllDigits;
  const int64_t of_block = x.columns / Int4Panel::kStep * Int4Panel::kBytes, stride = x.count * of_block;  // of a panel
  std::fill(found, found + kRows * kPanels * kPanelRows, 0.0f);
  for (int64_t b = 0; b < x.count; ++b, x.digits += x.rows, x.facts += x.rows, w += of_block) {
    const int64_t ahead = blocks_ahead(b, x.count, kPanels), g = x.group_of(b);
    for_each(std::make_integer_sequence<int, kRegisters / kTogether>(), [&](auto part) ALWAYS_INLINE {
      constexpr int kFirst = part * kTogether;
      Sums sums[kRows][kTogether][kBlockDigits];
      for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
        for_each(kSomeRegisters, [&](auto r) ALWAYS_INLINE {
          for_each(kAllDigits, [&](auto d) ALWAYS_INLINE { sums[m][r][d] = no_sums(); });
        });
      });
      const char* next = w;
#if !defined(CPU_CAPABILITY_AVX512)
#pragma GCC unroll 1  // a longer loop would need more than 16 registers
#endif
      for (int64_t k = 0; k < x.columns; k += Int4Panel::kStep, next += Int4Panel::kBytes) {
        Bytes low[kTogether], high[kTogether];
        for_each(kSomeRegisters, [&](auto i) ALWAYS_INLINE {
          constexpr int r = kFirst + i;
          const char* from = next + r / kPerPanel * stride + r % kPerPanel * (Int4Panel::kBytes / kPerPanel);
          low[i] = lower_halves(from), high[i] = upper_halves(from);
          if (r % kPerPanel == 0) prefetch(from, ahead * of_block);
        });
        for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
          for_each(kAllDigits, [&](auto d) ALWAYS_INLINE {
            const int8_t* of = x.digits[m].values[d] + k;
            const FourDigits first = four_digits(of), second = four_digits(of + 4);
            for_each(kSomeRegisters, [&](auto r) ALWAYS_INLINE {
              sums[m][r][d] = add_products(add_products(sums[m][r][d], low[r], first), high[r], second);
            });
          });
        });
      }
      for_each(kSomeRegisters, [&](auto i) ALWAYS_INLINE {
        constexpr int r = kFirst + i, kPanel = r / kPerPanel, kPlace = r % kPerPanel * Floats::size();
        if (kPlace == 0) scales.fetch(kPanel, x.group_of(b + ahead));
        const Floats scale = scales.at(kPanel, g, kPlace), zero = scales.at(kPanel, g, kPanelRows + kPlace);
        for_each(kAllRows, [&](auto m) ALWAYS_INLINE {
          float* to = found + (m * kRegisters + r) * Floats::size();
          add_block(value_of_digits(sums[m][i][0], sums[m][i][1], sums[m][i][2]), x.facts[m], scale, zero, to);
        });
      });
    });
  }
}

template <int kRows, int... kPanels>
constexpr auto blocks_by_panels(std::integer_sequence<int, kPanels...>) {
  return std::array{multiply_blocks<kRows, kPanels + 1>...};
}

// Multiply kRows rows of the input by `panels` panels, as many at a time as registers hold.
template <int kRows>
void multiply_blocks_by_panels(const Blocks<Int4Digits>& x, const char* w, PanelScales scales, const Value* bias, Value* y, int64_t size_out,
                               int64_t panels) {
  constexpr int kAtOnce = block_panels(kRows);
  static constexpr auto kByPanels = blocks_by_panels<kRows>(std::make_integer_sequence<int, kAtOnce>());
  float found[kRows * kAtOnce * kPanelRows];
  for (int64_t p = 0; p < panels; p += kAtOnce) {
    const int64_t some = std::min<int64_t>(kAtOnce, panels - p), n = p * kPanelRows;
    const char* from = w + p * (x.count * x.columns / Int4Panel::kStep * Int4Panel::kBytes);
    kByPanels[some - 1](x, from, scales.from(n), found);
    finish(found, kRows, some * kPanelRows, nullptr, bias == nullptr ? bias : bias + n, y + n, size_out);
  }
}

template <int... kRows>
constexpr auto digits_by_rows(std::integer_sequence<int, kRows...>) {
  return std::array{multiply_blocks_by_panels<kRows + 1>...};
}

// Multiply all rows of the input by `count` rows of the weights, whole panels; y (rows, size_out).
inline void multiply_int4_panels(const Blocks<Int4Digits>& x, const char* w, const PanelScales& scales, const Value* bias, Value* y,
                                 int64_t size_out, int64_t count) {
  static constexpr auto kByRows = digits_by_rows(std::make_integer_sequence<int, kBlockRows>());
  const int64_t of_panel = x.count * x.columns / Int4Panel::kStep * Int4Panel::kBytes, tiles = (x.rows + kBlockRows - 1) / kBlockRows;
  const int64_t all = count / kPanelRows, some = tiles == 1 ? all : std::clamp<int64_t>(kPanelBytes / of_panel, 4, 24) / 4 * 4;
  for (int64_t p = 0; p < all; p += some) {
    const int64_t panels = std::min(some, all - p), n = p * kPanelRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t m = x.rows * tile / tiles, part = x.rows * (tile + 1) / tiles - m;
      kByRows[part - 1](x.from(m), w + p * of_panel, scales.from(n), bias == nullptr ? bias : bias + n, y + m * size_out + n,
                        size_out, panels);
    }
  }
}

}  // namespace
