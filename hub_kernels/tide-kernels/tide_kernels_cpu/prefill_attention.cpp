// Prefill attention, softmax(scale * q.k + mask).v, for many queries. See vectorized.h for `Value`.
//
// FlashAttention (Dao et al., arXiv 2205.14135) with an online softmax (Milakov and Gimelshein, arXiv 1805.02867):
// threads share the blocks of queries and stream keys and values block by block. Registers are vectorised over queries:
// scores are (keys, queries) and accumulators (size, queries), so that keys and values are read in memory order and
// broadcast, and no sum goes across a register.

#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int64_t kQueries = 64, kKeys = 64;         // per block
constexpr int kWide = 2;                             // registers per row of a tile
constexpr int kHigh = Floats::size() >= 16 ? 8 : 6;  // rows of a tile: AVX-512 has more registers
constexpr float kMasked = -std::numeric_limits<float>::infinity();

static_assert(kQueries % (kWide * Floats::size()) == 0);

// out[row] = (or += if `adds`) sum over i < count of factors[row * by_row + i * by_step] * columns[i], kQueries each.
template <int kRows>
inline void tile(const float* factors, int64_t by_row, int64_t by_step, const float* columns, int64_t count, float* out,
                 bool adds) {
  for (int64_t first = 0; first < kQueries; first += kWide * Floats::size()) {
    Floats sums[kRows][kWide];
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w)
        sums[r][w] = adds ? Floats::loadu(out + r * kQueries + first + w * Floats::size()) : Floats(0.0f);
    for (int64_t i = 0; i < count; ++i) {
      Floats column[kWide];
      for (int w = 0; w < kWide; ++w) column[w] = Floats::loadu(columns + i * kQueries + first + w * Floats::size());
      for (int r = 0; r < kRows; ++r) {
        const Floats factor(factors[r * by_row + i * by_step]);
        for (int w = 0; w < kWide; ++w) sums[r][w] = at::vec::fmadd(factor, column[w], sums[r][w]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w) sums[r][w].store(out + r * kQueries + first + w * Floats::size());
  }
}

inline void multiply(const float* factors, int64_t by_row, int64_t by_step, const float* columns, int64_t rows,
                     int64_t count, float* out, bool adds) {
  int64_t r = 0;
  for (; r + kHigh <= rows; r += kHigh)
    tile<kHigh>(factors + r * by_row, by_row, by_step, columns, count, out + r * kQueries, adds);
  for (; r + 2 <= rows; r += 2) tile<2>(factors + r * by_row, by_row, by_step, columns, count, out + r * kQueries, adds);
  for (; r < rows; ++r) tile<1>(factors + r * by_row, by_row, by_step, columns, count, out + r * kQueries, adds);
}

// A block's values as floats: in place for float, otherwise upcast into `into`.
inline const float* floats(const float* values, int64_t stride, int64_t, int64_t, std::vector<float>&, int64_t& step) {
  step = stride;
  return values;
}
template <class Stored>
inline const float* floats(const Stored* values, int64_t stride, int64_t rows, int64_t size, std::vector<float>& into,
                           int64_t& step) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < size; d += Floats::size()) {
      const int64_t count = std::min<int64_t>(Floats::size(), size - d);
      to_floats(values + r * stride + d, count).store(into.data() + r * size + d, count);
    }
  step = size;
  return into.data();
}

struct Scratch {
  std::vector<float> query, scores, sums, keys, values;
  alignas(64) float highest[kQueries], totals[kQueries];
  explicit Scratch(int64_t size)
      : query(size * kQueries), scores(kKeys * kQueries), sums(size * kQueries), keys(kKeys * size), values(kKeys * size) {}
};

// How much of a block the mask lets queries attend to.
enum class Visible { none, some, all };

inline Visible visible_part(const bool* mask, int64_t stride, int64_t queries, int64_t keys) {
  bool any = false, all = true;
  for (int64_t q = 0; q < queries; ++q) {
    const bool* row = mask + q * stride;
    any = any || std::memchr(row, 1, keys) != nullptr;
    all = all && std::memchr(row, 0, keys) == nullptr;
  }
  return all ? Visible::all : any ? Visible::some : Visible::none;
}

// One step of the online softmax: exponentiate the scores (keys, kQueries) and rescale the accumulators.
inline void online_softmax(Scratch& s, int64_t keys, int64_t size) {
  for (int64_t q = 0; q < kQueries; q += Floats::size()) {
    const Floats before = Floats::loadu(s.highest + q);
    Floats highest = before;
    for (int64_t k = 0; k < keys; ++k) highest = at::vec::maximum(highest, Floats::loadu(s.scores.data() + k * kQueries + q));
    highest.store(s.highest + q);
    const Floats base = Floats::blendv(highest, Floats(0.0f), highest == Floats(kMasked));  // avoids -inf - -inf = NaN
    const Floats scale = (before - base).exp();
    Floats total = Floats::loadu(s.totals + q) * scale;
    for (int64_t k = 0; k < keys; ++k) {
      float* at = s.scores.data() + k * kQueries + q;
      const Floats weight = (Floats::loadu(at) - base).exp();
      weight.store(at);
      total = total + weight;
    }
    total.store(s.totals + q);
    for (int64_t d = 0; d < size; ++d) {
      float* at = s.sums.data() + d * kQueries + q;
      (Floats::loadu(at) * scale).store(at);
    }
  }
}

// A block of queries of one head, with all keys and values of the head.
struct Block {
  const Value *query, *key, *value;
  int64_t q_token, k_token, v_token;  // strides between tokens
  const bool* mask;                   // (count, slots) or null
  int64_t count, slots, size;
  int64_t past;  // cached keys before the first query, for the causal mask
};

// Set the scores of masked keys to -inf.
inline void apply_mask(const Block& block, Visible visible, int64_t from, int64_t keys, float* scores) {
  for (int64_t k = 0; k < keys; ++k, scores += kQueries) {
    if (visible == Visible::some)
      for (int64_t q = 0; q < block.count; ++q)
        scores[q] = block.mask[q * block.slots + from + k] ? scores[q] : kMasked;
    else if (block.mask == nullptr && from + k > block.past)
      std::fill(scores, scores + std::min(kQueries, from + k - block.past), kMasked);
  }
}

// Leave the unnormalised outputs, (size, kQueries), and the softmax denominators in `s`.
inline void attend(const Block& block, float scale, Scratch& s) {
  const int64_t size = block.size, count = block.count;
  for (int64_t d = 0; d < size; ++d)
    for (int64_t q = 0; q < kQueries; ++q)
      s.query[d * kQueries + q] = q < count ? static_cast<float>(block.query[q * block.q_token + d]) * scale : 0.0f;
  std::fill(s.sums.begin(), s.sums.end(), 0.0f);
  std::fill(s.highest, s.highest + kQueries, kMasked);
  std::fill(s.totals, s.totals + kQueries, 0.0f);
  const int64_t end = block.mask != nullptr ? block.slots : std::min(block.slots, block.past + count);
  for (int64_t from = 0; from < end; from += kKeys) {
    const int64_t keys = std::min(kKeys, end - from);
    const Visible visible =
        block.mask != nullptr ? visible_part(block.mask + from, block.slots, count, keys) : Visible::all;
    if (visible == Visible::none) continue;
    int64_t step;
    const float* part = floats(block.key + from * block.k_token, block.k_token, keys, size, s.keys, step);
    multiply(part, step, 1, s.query.data(), keys, size, s.scores.data(), false);
    apply_mask(block, visible, from, keys, s.scores.data());
    online_softmax(s, keys, size);
    part = floats(block.value + from * block.v_token, block.v_token, keys, size, s.values, step);
    multiply(part, 1, step, s.scores.data(), size, keys, s.sums.data(), true);
  }
}

constexpr int64_t kMinWorkPerThread = 65536;  // query-key pairs; for fewer, another thread costs more than it saves

}  // namespace

template <>
void run<Value>(const PrefillAttention& call) {
  const int64_t rows = call.rows, heads = call.heads, queries = call.queries, size = call.size, slots = call.slots;
  const int64_t blocks = (queries + kQueries - 1) / kQueries;
  const auto part_of = [](const void* values, const int64_t* strides, int64_t row, int64_t head) {
    return static_cast<const Value*>(values) + row * strides[0] + head * strides[1];
  };
  auto* y = static_cast<Value*>(call.output);
  const int64_t threads = std::min(call.threads, 1 + rows * heads * queries * slots / kMinWorkPerThread);
  std::atomic<int64_t> next{0};  // item, since items take unequal times
  on_threads(threads, [&](int64_t) {
    Scratch s(size);
    for (int64_t item = next++; item < rows * heads * blocks; item = next++) {
      const int64_t row = item % (rows * heads) / heads, head = item % heads, kv_head = head * call.kv_heads / heads;
      const int64_t first = (blocks - 1 - item / (rows * heads)) * kQueries;  // longest first, for load balance
      Block block{part_of(call.query, call.query_strides, row, head) + first * call.query_strides[2],
                  part_of(call.key, call.key_strides, row, kv_head),
                  part_of(call.value, call.value_strides, row, kv_head),
                  call.query_strides[2], call.key_strides[2], call.value_strides[2]};
      block.mask = call.mask == nullptr ? nullptr : call.mask + row * call.mask_stride + first * slots;
      block.count = std::min(kQueries, queries - first);
      block.slots = slots, block.size = size, block.past = slots - queries + first;
      attend(block, call.scale, s);
      for (int64_t q = 0; q < block.count; ++q) {
        Value* out = y + ((row * queries + first + q) * heads + head) * size;
        const float share = s.totals[q] > 0.0f ? 1.0f / s.totals[q] : 0.0f;
        for (int64_t d = 0; d < size; ++d) out[d] = static_cast<Value>(s.sums[d * kQueries + q] * share);
      }
    }
  });
}
