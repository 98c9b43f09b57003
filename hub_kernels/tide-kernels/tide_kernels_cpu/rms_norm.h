// RMSNorm (arXiv 1910.07467) of rows of a model's values, as its ops of a decoder layer begin.
#pragma once

#include <cmath>

#include "vectorized.h"

namespace {

// y = x / sqrt(mean of x^2 + eps) * weight. As in models, the quotient is rounded to `Value` before it is multiplied.
inline void rms_norm(const Value* x, const Value* weight, Value* y, int64_t size, float eps) {
  constexpr int64_t kSize = Floats::size();
  Floats sums(0.0f);
  for (int64_t d = 0; d < size; d += kSize) {
    const Floats part = load(x + d, size - d);
    sums = at::vec::fmadd(part, part, sums);
  }
  const Floats factor(1.0f / std::sqrt(total(sums) / static_cast<float>(size) + eps));
  for (int64_t d = 0; d < size; d += kSize) {
    store(load(x + d, size - d) * factor, y + d, size - d);
    store(load(y + d, size - d) * load(weight + d, size - d), y + d, size - d);
  }
}

}  // namespace
