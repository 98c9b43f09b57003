// Decode attention, softmax(scale * q.k + mask).v, for few queries per head. See vectorized.h for `Value`.
//
// Blocks of queries are divided among threads. A block streams the keys and then the values once. Sums are in float,
// in an order that depends neither on the number of queries nor on masked slots at the end.

#include <limits>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int64_t kSize = Floats::size();
constexpr int kWide = 2;  // registers per accumulation step, to hide the latency of fused multiply-add

inline int64_t rounded_up(int64_t slots) { return (slots + Floats::size() - 1) / Floats::size() * Floats::size(); }

// Softmax in place; all zeros if everything is masked. `size` is a multiple of the register size.
inline void softmax(float* scores, int64_t size) {
  const float kMasked = -std::numeric_limits<float>::infinity();
  Floats highest(kMasked), sums(0.0f);
  for (int64_t s = 0; s < size; s += Floats::size()) highest = at::vec::maximum(highest, Floats::loadu(scores + s));
  const float largest =
      at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return at::vec::maximum(a, b); }, highest);
  if (largest == kMasked) return std::fill(scores, scores + size, 0.0f);
  for (int64_t s = 0; s < size; s += Floats::size()) {
    const Floats weights = (Floats::loadu(scores + s) - Floats(largest)).exp();
    weights.store(scores + s);
    sums = sums + weights;
  }
  const Floats share(1.0f / total(sums));
  for (int64_t s = 0; s < size; s += Floats::size()) (Floats::loadu(scores + s) * share).store(scores + s);
}

// Attention of `kQueries` queries of one head, each padded to `rounded_up(size)` floats. See arguments.h.
template <int kQueries>
void attend(const float* q, const Value* k, const Value* v, const Value* mask, Value* y, float* scores, int64_t slots,
            int64_t all_slots, int64_t size, float scale) {
  const int64_t even = rounded_up(slots), wide = rounded_up(size);
  for (int64_t s = 0; s < slots; ++s) {
    Floats sums[kQueries];
    for (int m = 0; m < kQueries; ++m) sums[m] = Floats(0.0f);
    for (int64_t d = 0; d < size; d += kSize) {
      const Floats key = load(k + s * size + d, size - d);
      for (int m = 0; m < kQueries; ++m) sums[m] = at::vec::fmadd(Floats::loadu(q + m * wide + d), key, sums[m]);
    }
    for (int m = 0; m < kQueries; ++m)
      scores[m * even + s] = total(sums[m]) * scale + static_cast<float>(mask[m * all_slots + s]);
  }
  for (int m = 0; m < kQueries; ++m) {
    std::fill(scores + m * even + slots, scores + (m + 1) * even, -std::numeric_limits<float>::infinity());
    softmax(scores + m * even, even);
  }
  for (int64_t d = 0; d < size; d += kWide * kSize) {
    Floats sums[kQueries][kWide];
    for (int m = 0; m < kQueries; ++m)
      for (int i = 0; i < kWide; ++i) sums[m][i] = Floats(0.0f);
    for (int64_t s = 0; s < slots; ++s) {
      Floats value[kWide];
      for (int i = 0; i < kWide; ++i) value[i] = load(v + s * size + d + i * kSize, size - d - i * kSize);
      for (int m = 0; m < kQueries; ++m)
        for (int i = 0; i < kWide; ++i)
          sums[m][i] = at::vec::fmadd(Floats(scores[m * even + s]), value[i], sums[m][i]);
    }
    for (int m = 0; m < kQueries; ++m)
      for (int i = 0; i < kWide; ++i) store(sums[m][i], y + m * size + d + i * kSize, size - d - i * kSize);
  }
}

constexpr decltype(&attend<1>) kByQueries[] = {attend<1>, attend<2>, attend<3>, attend<4>};
constexpr int64_t kMaxQueries = 4;

constexpr int64_t kMinWorkPerThread = 8192;  // multiply-adds; for fewer, another thread costs more than it saves

}  // namespace

template <>
void run<Value>(const DecodeAttention& call) {
  const int64_t heads = call.heads, queries = call.queries, size = call.size, slots = call.slots;
  const int64_t blocks = (queries + kMaxQueries - 1) / kMaxQueries, all = call.rows * heads * blocks;
  const int64_t products = call.rows * heads * queries * size * slots;
  const int64_t threads = std::min({call.threads, all, 1 + products / kMinWorkPerThread});
  const auto *q = static_cast<const Value*>(call.query), *k = static_cast<const Value*>(call.key);
  const auto *v = static_cast<const Value*>(call.value), *mask = static_cast<const Value*>(call.mask);
  auto* y = static_cast<Value*>(call.output);
  on_threads(threads, [&](int64_t thread) {
    std::vector<float> scores(kMaxQueries * rounded_up(slots)), floats(kMaxQueries * rounded_up(size));
    for (int64_t block = all * thread / threads; block < all * (thread + 1) / threads; ++block) {
      const int64_t head = block / blocks, first = block % blocks * kMaxQueries;
      const int64_t count = std::min(kMaxQueries, queries - first), at = (head * queries + first) * size;
      const int64_t row = call.has_row_masks ? head / heads * queries + first : first;
      for (int64_t m = 0; m < count; ++m)  // upcast once rather than for each slot
        for (int64_t d = 0; d < size; d += kSize)
          load(q + at + m * size + d, size - d).store(floats.data() + m * rounded_up(size) + d);
      const int64_t kv = head * call.all_slots * size;
      kByQueries[count - 1](floats.data(), k + kv, v + kv, mask + row * call.all_slots, y + at, scores.data(),
                            slots, call.all_slots, size, call.scale);
    }
  });
}
