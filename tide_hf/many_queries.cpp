// softmax(scale * q.k + mask).v for many queries, such as a prompt's. `Value` is float or at::BFloat16.
//
// Threads take blocks of queries, and go through keys and values block by block (online softmax: Milakov and
// Gimelshein, arXiv 1805.02867; by blocks: Dao et al., arXiv 2205.14135). Registers lie along queries: scores and sums
// are kept as (keys, queries) and (size, queries), so that keys and values are read as they are stored, one number at a
// time for a row of registers, and nothing is added up across a register.

#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/inductor/cpp_prefix.h>

#include <cstring>
#include <limits>
#include <vector>

namespace {

using Floats = at::vec::Vectorized<float>;

constexpr int64_t kQueries = 64, kKeys = 64;         // of a block
constexpr int kWide = 2;                             // registers of a tile, side by side
constexpr int kHigh = Floats::size() >= 16 ? 8 : 4;  // and one above the other: CPUs with longer ones have more of them
constexpr float kNothing = -std::numeric_limits<float>::infinity();

static_assert(kQueries % (kWide * Floats::size()) == 0);

// out (kRows, queries) = or += sum over `count` of factors[row * by_row + i * by_step] * columns (count, kQueries).
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
  for (; r < rows; ++r) tile<1>(factors + r * by_row, by_row, by_step, columns, count, out + r * kQueries, adds);
}

// Values of a block as floats: where they stand, or copied to `into`.
inline const float* floats(const float* values, int64_t stride, int64_t, int64_t, std::vector<float>&, int64_t& step) {
  step = stride;
  return values;
}
inline const float* floats(const at::BFloat16* values, int64_t stride, int64_t rows, int64_t size,
                           std::vector<float>& into, int64_t& step) {
  using Stored = at::vec::Vectorized<at::BFloat16>;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < size; d += Stored::size()) {
      const int64_t count = std::min<int64_t>(Stored::size(), size - d);
      const auto [low, high] = at::vec::convert_bfloat16_float(Stored::loadu(values + r * stride + d, count));
      low.store(into.data() + r * size + d, std::min<int64_t>(count, Floats::size()));
      if (count > Floats::size()) high.store(into.data() + r * size + d + Floats::size(), count - Floats::size());
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

// What a mask says of a block: nothing, something or everything of it is seen.
enum class Seen { nothing, some, all };

inline Seen seen(const bool* mask, int64_t stride, int64_t queries, int64_t keys) {
  bool any = false, all = true;
  for (int64_t q = 0; q < queries; ++q) {
    const bool* row = mask + q * stride;
    any = any || std::memchr(row, 1, keys) != nullptr;
    all = all && std::memchr(row, 0, keys) == nullptr;
  }
  return all ? Seen::all : any ? Seen::some : Seen::nothing;
}

// Scores (keys, kQueries) to weights; what is summed up so far is scaled to the new highest score.
inline void weigh(Scratch& s, int64_t keys, int64_t size) {
  for (int64_t q = 0; q < kQueries; q += Floats::size()) {
    const Floats before = Floats::loadu(s.highest + q);
    Floats highest = before;
    for (int64_t k = 0; k < keys; ++k) highest = at::vec::maximum(highest, Floats::loadu(s.scores.data() + k * kQueries + q));
    highest.store(s.highest + q);
    const Floats base = Floats::blendv(highest, Floats(0.0f), highest == Floats(kNothing));  // not -inf - -inf
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

}  // namespace

// q (rows, heads, queries, size), k and v (rows, shared, slots, size) with strides of their own but for the last
// dimension; y (rows, queries, heads, size). A mask (rows or 1, queries, slots) says what is seen; without one query i
// sees keys up to slots - queries + i.
extern "C" void kernel(const Value* q, const Value* k, const Value* v, const bool* mask, Value* y, int64_t rows,
                       int64_t heads, int64_t shared, int64_t queries, int64_t slots, int64_t size, int64_t q_row,
                       int64_t q_head, int64_t q_token, int64_t k_row, int64_t k_head, int64_t k_token, int64_t v_row,
                       int64_t v_head, int64_t v_token, int64_t has_mask, int64_t mask_row, int64_t threads,
                       float scale) {
  const int64_t blocks = (queries + kQueries - 1) / kQueries;
#pragma omp parallel num_threads(threads)
  {
    Scratch s(size);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < rows * heads * blocks; ++item) {
      const int64_t row = item % (rows * heads) / heads, head = item % heads;
      const int64_t first = (blocks - 1 - item / (rows * heads)) * kQueries;  // the longest ones first
      const int64_t count = std::min(kQueries, queries - first), ahead = slots - queries + first;
      const Value* query = q + row * q_row + head * q_head + first * q_token;
      const Value* key = k + row * k_row + head * shared / heads * k_head;
      const Value* value = v + row * v_row + head * shared / heads * v_head;
      for (int64_t d = 0; d < size; ++d)
        for (int64_t i = 0; i < kQueries; ++i)
          s.query[d * kQueries + i] = i < count ? static_cast<float>(query[i * q_token + d]) * scale : 0.0f;
      std::fill(s.sums.begin(), s.sums.end(), 0.0f);
      std::fill(s.highest, s.highest + kQueries, kNothing);
      std::fill(s.totals, s.totals + kQueries, 0.0f);
      const int64_t end = has_mask ? slots : std::min(slots, ahead + count);
      for (int64_t from = 0; from < end; from += kKeys) {
        const int64_t keys = std::min(kKeys, end - from);
        const bool* hidden = mask + row * mask_row + first * slots + from;
        const Seen here = has_mask ? seen(hidden, slots, count, keys) : Seen::all;
        if (here == Seen::nothing) continue;
        int64_t step;
        const float* part = floats(key + from * k_token, k_token, keys, size, s.keys, step);
        multiply(part, step, 1, s.query.data(), keys, size, s.scores.data(), false);
        for (int64_t i = 0; i < keys; ++i) {
          float* scores = s.scores.data() + i * kQueries;
          if (here == Seen::some)
            for (int64_t j = 0; j < count; ++j) scores[j] = hidden[j * slots + i] ? scores[j] : kNothing;
          else if (!has_mask && from + i > ahead)
            std::fill(scores, scores + std::min(kQueries, from + i - ahead), kNothing);
        }
        weigh(s, keys, size);
        part = floats(value + from * v_token, v_token, keys, size, s.values, step);
        multiply(part, 1, step, s.scores.data(), size, keys, s.sums.data(), true);
      }
      for (int64_t i = 0; i < count; ++i) {
        Value* out = y + ((row * queries + first + i) * heads + head) * size;
        const float share = s.totals[i] > 0.0f ? 1.0f / s.totals[i] : 0.0f;
        for (int64_t d = 0; d < size; ++d) out[d] = static_cast<Value>(s.sums[d * kQueries + i] * share);
      }
    }
  }
}
