// SIMD loads of a model's values, of type `Value`: float, c10::BFloat16 or c10::Half. Kernels compute in float, one
// `Floats` register at a time.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "arguments.h"

using Value = TIDE_VALUE;  // set by the compiler's command line

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

template <class Byte>
inline Floats bytes_to_floats(const Byte* values) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
  return _mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  float found[Floats::size()];
  std::copy(values, values + Floats::size(), found);
  return Floats::loadu(found);
#endif
}

inline Floats to_floats(const int8_t* values) { return bytes_to_floats(values); }
inline Floats to_floats(const uint8_t* values) { return bytes_to_floats(values); }

inline Floats to_floats(const float* values, int64_t count) { return Floats::loadu(values, count); }

template <class Stored>
inline Floats to_floats(const Stored* values, int64_t count) {
  if (count == Floats::size()) return to_floats(values);
  std::array<Stored, Floats::size()> some{};
  std::copy(values, values + count, some.begin());
  return to_floats(some.data());
}

// Load the `count` remaining values, at most one register, and zeros after them.
inline Floats load(const Value* values, int64_t count) {
  return to_floats(values, std::clamp<int64_t>(count, 0, Floats::size()));
}

// Round a register to `Value` and store the `count` remaining values, at most all of it.
inline void store(const Floats& found, Value* values, int64_t count) {
  float some[Floats::size()];
  found.store(some);
  at::vec::convert(some, values, std::clamp<int64_t>(count, 0, Floats::size()));
}

inline float total(const Floats& sum) {
  return at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sum);
}

// Call `run(i)` for each i < count, on threads of PyTorch's pool; a pool of one's own would compete with it.
template <class Run>
inline void on_threads(int64_t count, const Run& run) {
  if (count == 1) return run(0);
  const auto some = [](int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<const Run*>(context))(i);
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, some, const_cast<Run*>(&run)));
}

}  // namespace
