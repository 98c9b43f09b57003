// Attention, softmax(scale * q.k + mask).v, of a few queries of one head, which read its keys and then its values once.
// Sums are in float, in an order that depends neither on the number of queries nor on masked slots, wherever they are:
// padding, and other branches of a tree. See vectorized.h for `Value`.
#pragma once

#include <limits>
#include <vector>

#include "vectorized.h"

namespace {

constexpr int64_t kMaxQueries = 4;
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kWide = 4, kSlotsAtOnce = 4;  // registers of a value, and slots, at a time, to hide the latency of multiply-adds
#else
constexpr int kWide = 2, kSlotsAtOnce = 2;
#endif

inline int64_t rounded_up(int64_t slots) { return (slots + Floats::size() - 1) / Floats::size() * Floats::size(); }

// The sum of weights, `size` of them, a multiple of the register size. Those that are zero, as of masked slots, have no
// place in its order. `spare` has room for as many.
inline float sum_of(const float* weights, int64_t size, float* spare) {
  int64_t count = 0, first = 0;
  for (int64_t s = 0; s < size; ++s) count += weights[s] != 0.0f;
  for (int64_t s = 0; s < count; ++s) first += weights[s] != 0.0f;
  if (first < count) {  // with zeros among them
    for (int64_t s = 0, next = 0; next < count; ++s) {
      spare[next] = weights[s];
      next += weights[s] != 0.0f;
    }
    std::fill(spare + count, spare + rounded_up(count), 0.0f);
    weights = spare;
  }
  Floats sums(0.0f);
  for (int64_t s = 0; s < count; s += Floats::size()) sums = sums + Floats::loadu(weights + s);
  return total(sums);
}

// Softmax in place; all zeros if everything is masked. `size` is a multiple of the register size.
inline void softmax(float* scores, int64_t size, float* spare) {
  const float kMasked = -std::numeric_limits<float>::infinity();
  Floats highest(kMasked);
  for (int64_t s = 0; s < size; s += Floats::size()) highest = at::vec::maximum(highest, Floats::loadu(scores + s));
  const float largest =
      at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return at::vec::maximum(a, b); }, highest);
  if (largest == kMasked) return std::fill(scores, scores + size, 0.0f);
  for (int64_t s = 0; s < size; s += Floats::size()) (Floats::loadu(scores + s) - Floats(largest)).exp().store(scores + s);
  const Floats share(1.0f / sum_of(scores, size, spare));
  for (int64_t s = 0; s < size; s += Floats::size()) (Floats::loadu(scores + s) * share).store(scores + s);
}

// Weights that a thread multiplies by next, `groups` times `panels` that it reads side by side. It fetches them, a few cache
// lines at a time, while it computes what keeps the memory idle.
struct Ahead {
  const char* from;
  int64_t bytes, panels, groups;  // bytes: of a panel
  int64_t panel = 0, place = 0;

  void fetch(int64_t lines) {
    for (; lines > 0 && groups > 0; --lines) {
      prefetch(from, panel * bytes + place);
      if (++panel < panels) continue;
      panel = 0, place += 64;
      if (place < bytes) continue;
      place = 0, from += panels * bytes, --groups;
    }
  }
};

// Queries of a head, with what each adds to its scores (slots), or null, and where its result goes; (size) each.
struct Queries {
  const Value* values[kMaxQueries];
  const float* masks[kMaxQueries];
  Value* outputs[kMaxQueries];
  Ahead* ahead;  // or null
};

// Load `left` remaining values, at most one register, or a whole register of them.
template <bool kIsWhole>
inline Floats some(const Value* values, int64_t left) {
  if constexpr (kIsWhole) return to_floats(values);
  return load(values, left);
}

// Compute the scores of kSlots slots from `from` on; those of each query are `stride` apart.
template <int kQueries, int kSlots, bool kIsWhole>
inline void score(const Queries& queries, const float* q, const Value* k, int64_t from, int64_t size, float scale, float* scores,
                  int64_t stride) {
  constexpr int64_t kSize = Floats::size();
  Floats sums[kQueries][kSlots];
#pragma GCC unroll 4
  for (int m = 0; m < kQueries; ++m)
#pragma GCC unroll 4
    for (int s = 0; s < kSlots; ++s) sums[m][s] = Floats(0.0f);
  for (int64_t d = 0; d < size; d += kSize) {
    Floats keys[kSlots];
#pragma GCC unroll 4
    for (int s = 0; s < kSlots; ++s) keys[s] = some<kIsWhole>(k + (from + s) * size + d, size - d);
#pragma GCC unroll 4
    for (int m = 0; m < kQueries; ++m) {
      const Floats query = Floats::loadu(q + m * rounded_up(size) + d);
#pragma GCC unroll 4
      for (int s = 0; s < kSlots; ++s) sums[m][s] = at::vec::fmadd(query, keys[s], sums[m][s]);
    }
  }
  for (int m = 0; m < kQueries; ++m) {
    float found[kSlots];
    horizontal_sums<kSlots>(sums[m], found);
    for (int s = 0; s < kSlots; ++s)
      scores[m * stride + from + s] = found[s] * scale + (queries.masks[m] == nullptr ? 0.0f : queries.masks[m][from + s]);
  }
}

template <int kQueries, bool kIsWhole>
void attend_in_parts(const Queries& queries, const Value* k, const Value* v, int64_t slots, int64_t size, float scale) {
  constexpr int64_t kSize = Floats::size();
  const int64_t even = rounded_up(slots), wide = rounded_up(size);
  thread_local std::vector<float> held;
  held.resize(kQueries * (even + wide) + even);
  float *scores = held.data(), *q = scores + kQueries * even, *spare = q + kQueries * wide;
  for (int m = 0; m < kQueries; ++m)  // upcast once rather than for each slot
    for (int64_t d = 0; d < size; d += kSize) load(queries.values[m] + d, size - d).store(q + m * wide + d);
  int64_t slot = 0;
  for (; slot + kSlotsAtOnce <= slots; slot += kSlotsAtOnce) {
    score<kQueries, kSlotsAtOnce, kIsWhole>(queries, q, k, slot, size, scale, scores, even);
    if (queries.ahead != nullptr) queries.ahead->fetch(kSlotsAtOnce);
  }
  for (; slot < slots; ++slot) score<kQueries, 1, kIsWhole>(queries, q, k, slot, size, scale, scores, even);
  for (int m = 0; m < kQueries; ++m) {
    float* own = scores + m * even;
    std::fill(own + slots, own + even, -std::numeric_limits<float>::infinity());
    softmax(own, even, spare);
  }
  for (int64_t d = 0; d < size; d += kWide * kSize) {
    Floats sums[kQueries][kWide];
    for (int m = 0; m < kQueries; ++m)
      for (int i = 0; i < kWide; ++i) sums[m][i] = Floats(0.0f);
    for (int64_t s = 0; s < slots; ++s) {
      if (queries.ahead != nullptr) queries.ahead->fetch(1);
      Floats value[kWide];
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) value[i] = some<kIsWhole>(v + s * size + d + i * kSize, size - d - i * kSize);
#pragma GCC unroll 4
      for (int m = 0; m < kQueries; ++m) {
        const Floats weight(scores[m * even + s]);
#pragma GCC unroll 4
        for (int i = 0; i < kWide; ++i) sums[m][i] = at::vec::fmadd(weight, value[i], sums[m][i]);
      }
    }
    for (int m = 0; m < kQueries; ++m)
      for (int i = 0; i < kWide; ++i) store(sums[m][i], queries.outputs[m] + d + i * kSize, size - d - i * kSize);
  }
}

// Attention of `kQueries` queries over `slots` slots of K/V, (slots, size) each.
template <int kQueries>
void attend(const Queries& queries, const Value* k, const Value* v, int64_t slots, int64_t size, float scale) {
  if (size % (kWide * Floats::size()) == 0) return attend_in_parts<kQueries, true>(queries, k, v, slots, size, scale);
  attend_in_parts<kQueries, false>(queries, k, v, slots, size, scale);
}

constexpr decltype(&attend<1>) kByQueries[] = {attend<1>, attend<2>, attend<3>, attend<4>};

}  // namespace
