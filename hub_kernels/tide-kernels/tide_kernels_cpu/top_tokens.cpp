// The largest values of each row, as of logits: torch.topk takes several times as long over a whole vocabulary. See
// vectorized.h for `Value`.
//
// Threads share the rows, or parts of them, in which few blocks hold a value that is larger than the smallest one kept.

#include <cmath>

#include "vectorized.h"

namespace {

constexpr int64_t kBlock = 4 * Floats::size();
constexpr int64_t kMinPart = 8192;  // values; for fewer, another thread costs more than it saves

// Whether a value comes before another. NaN comes first, as in torch.max.
inline bool is_above(float value, float other) { return !std::isnan(other) && !(value <= other); }

// The best values so far, in descending order; of equal ones, the first.
struct Best {
  int64_t most, count = 0;
  float values[kMaxTop];
  int64_t places[kMaxTop];

  bool takes(float value) const { return count < most || is_above(value, values[count - 1]); }
  void add(float value, int64_t place) {
    if (!takes(value)) return;
    int64_t i = count < most ? count++ : count - 1;
    for (; i > 0 && is_above(value, values[i - 1]); --i) values[i] = values[i - 1], places[i] = places[i - 1];
    values[i] = value, places[i] = place;
  }
};

inline void find(const Value* row, int64_t from, int64_t to, Best& best) {
  int64_t i = from;
  for (; i + kBlock <= to; i += kBlock) {
    Floats highest = to_floats(row + i);
    for (int64_t d = Floats::size(); d < kBlock; d += Floats::size())
      highest = at::vec::maximum(highest, to_floats(row + i + d));
    if (!best.takes(at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return at::vec::maximum(a, b); }, highest)))
      continue;
    for (int64_t d = 0; d < kBlock; ++d) best.add(static_cast<float>(row[i + d]), i + d);
  }
  for (; i < to; ++i) best.add(static_cast<float>(row[i]), i);
}

// The logarithm of the sum of the exponentials of `size` values, of which the largest is given.
inline float log_sum(const Value* row, int64_t size, float largest) {
  Floats sums(0.0f);
  for (int64_t d = 0; d < size; d += Floats::size()) {
    const int64_t left = size - d;
    Floats part = (load(row + d, left) - Floats(largest)).exp();
    if (left < Floats::size()) part = Floats::set(Floats(0.0f), part, left);
    sums = sums + part;
  }
  return largest + std::log(total(sums));
}

}  // namespace

template <>
void run<Value>(const TopTokens& call) {
  const int64_t share = (call.threads + call.rows - 1) / call.rows;  // of threads, for a row
  const int64_t parts = std::clamp<int64_t>(call.size / kMinPart, 1, share);
  std::vector<Best> found(call.rows * parts, Best{call.count});
  const int64_t all = call.rows * parts, threads = std::min({call.threads, all, 1 + call.rows * call.size / kMinPart});
  on_threads(threads, [&](int64_t thread) {
    for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; ++i) {
      const int64_t row = i / parts, part = i % parts;
      find(static_cast<const Value*>(call.input) + row * call.size, call.size * part / parts, call.size * (part + 1) / parts,
           found[i]);
    }
  });
  for (int64_t row = 0; row < call.rows; ++row) {
    Best best = found[row * parts];
    for (int64_t part = 1; part < parts; ++part) {
      const Best& other = found[row * parts + part];
      for (int64_t i = 0; i < other.count; ++i) best.add(other.values[i], other.places[i]);
    }
    std::copy(best.values, best.values + call.count, call.values + row * call.count);
    std::copy(best.places, best.places + call.count, call.places + row * call.count);
    if (call.log_sums != nullptr)
      call.log_sums[row] = log_sum(static_cast<const Value*>(call.input) + row * call.size, call.size, best.values[0]);
  }
}
