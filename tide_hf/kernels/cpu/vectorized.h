// SIMD loads of a model's values, of type `Value`: float, at::BFloat16 or at::Half. Kernels compute in float, one
// `Floats` register at a time.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>

namespace {

using Floats = at::vec::Vectorized<float>;

// Load a full register, or `count` values and zeros after them.
inline Floats to_floats(const float* values) { return Floats::loadu(values); }

template <class Stored>
inline Floats to_floats(const Stored* values) {
  Floats found;
  at::vec::load_to_float<Stored>(values, found);
  return found;
}

inline Floats to_floats(const float* values, int64_t count) { return Floats::loadu(values, count); }

template <class Stored>
inline Floats to_floats(const Stored* values, int64_t count) {
  if (count == Floats::size()) return to_floats(values);
  std::array<Stored, Floats::size()> some{};
  std::copy(values, values + count, some.begin());
  return to_floats(some.data());
}

}  // namespace
