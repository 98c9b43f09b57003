// Decode attention, softmax(scale * q.k + mask).v, for few queries per head. See vectorized.h for `Value`.
//
// Blocks of queries are divided among threads.

#include "attend.h"

namespace {

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
    std::vector<float> masks(kMaxQueries * slots);
    for (int64_t block = all * thread / threads; block < all * (thread + 1) / threads; ++block) {
      const int64_t head = block / blocks, first = block % blocks * kMaxQueries;
      const int64_t count = std::min(kMaxQueries, queries - first), at = (head * queries + first) * size;
      const int64_t row = call.has_row_masks ? head / heads * queries + first : first, kv = head * call.all_slots * size;
      Queries some{};
      for (int64_t m = 0; m < count; ++m) {
        some.values[m] = q + at + m * size, some.outputs[m] = y + at + m * size, some.masks[m] = masks.data() + m * slots;
        at::vec::convert(mask + (row + m) * call.all_slots, masks.data() + m * slots, slots);
      }
      kByQueries[count - 1](some, k + kv, v + kv, slots, size, call.scale);
    }
  });
}
