// SIMD loads of a model's values, of type `Value`: float, c10::BFloat16 or c10::Half. Kernels compute in float, one
// `Floats` register at a time.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"

using Value = TIDE_VALUE;  // set by the compiler's command line

namespace {

using Floats = at::vec::Vectorized<float>;

// Without inlining the accumulators spill out of registers, which is several times slower.
#if defined(__GNUC__)
#define ALWAYS_INLINE __attribute__((always_inline))
#define NO_INLINE __attribute__((noinline))  // for loops that need all registers for themselves
#else
#define ALWAYS_INLINE
#define NO_INLINE
#endif

// Call `run` with 0 to kCount - 1, as constants, by which compilers keep arrays in registers.
template <int... kIndices, class Run>
ALWAYS_INLINE inline void for_each(std::integer_sequence<int, kIndices...>, const Run& run) {
  (run(std::integral_constant<int, kIndices>()), ...);
}

// Fetch what lies `distance` bytes behind an address.
inline void prefetch(const void* address, int64_t distance) {
#if defined(__GNUC__)
  __builtin_prefetch(static_cast<const char*>(address) + distance);
#endif
}

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
  if constexpr (std::is_same_v<Value, float>)
    if (count >= Floats::size()) return found.store(values);
  float some[Floats::size()];
  found.store(some);
  at::vec::convert(some, values, std::clamp<int64_t>(count, 0, Floats::size()));
}

inline float total(const Floats& sum) {
  return at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sum);
}

// Horizontal sums of up to four registers, in an order that does not depend on kBlock.
template <int kBlock>
ALWAYS_INLINE inline void horizontal_sums(const Floats* sums, float* found) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto halved = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  };
  constexpr int kLast = kBlock - 1;
  const __m512 a = halved(sums[0], sums[std::min(1, kLast)]), b = halved(sums[std::min(2, kLast)], sums[kLast]);
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0x4E));
  all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0xB1));
  _mm_mask_storeu_ps(found, (1 << kBlock) - 1, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
#elif defined(CPU_CAPABILITY_AVX2)
  constexpr int kLast = kBlock - 1;
  const __m256 a = _mm256_hadd_ps(sums[0], sums[std::min(1, kLast)]);
  const __m256 all = _mm256_hadd_ps(a, _mm256_hadd_ps(sums[std::min(2, kLast)], sums[kLast]));
  float four[4];
  _mm_storeu_ps(four, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  std::copy(four, four + kBlock, found);
#else
  for (int n = 0; n < kBlock; ++n)
    found[n] = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[n]);
#endif
}

#if defined(TIDE_AMX)
constexpr int kTilePanels = 4;  // that products multiply together; see tiles.h
#else
constexpr int kTilePanels = 1;
#endif

// Rows of a weight that products take together, except for the last ones.
inline int64_t unit_of(const LinearWeight& weight) {
  return weight.in_panels ? kTilePanels * kPanelRows : weight.stored == Stored::kInt4 ? 64 : 1;
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

// The threads that run one call together, and wait for each other between its parts.
class Team {
 public:
  Team(int64_t places, int64_t phases) : places_(places), claimed_(places * phases) {}

  // Join with some of the places; return the member's index once all places are taken.
  int64_t join(int64_t places) {
    const int64_t member = members_.fetch_add(1);
    taken_.fetch_add(places);
    wait([this] { return taken_.load() == places_; });
    return member;
  }
  int64_t members() const { return members_.load(std::memory_order_relaxed); }

  // Claim one of the parts that a member has to do in one of a call's phases; false if all have been claimed.
  bool claim(int64_t phase, int64_t member, int64_t end, int64_t& part) {
    part = claimed_[phase * places_ + member].fetch_add(1, std::memory_order_relaxed);
    return part < end;
  }

  // Wait until all members have arrived.
  void meet() {
    if (members() == 1) return;
    const int64_t round = round_.load();
    if (arrived_.fetch_add(1) + 1 == members()) {
      arrived_.store(0);
      round_.store(round + 1);
    } else {
      wait([this, round] { return round_.load() != round; });
    }
  }

 private:
  template <class Done>
  static void wait(const Done& done) {
    for (int64_t spins = 0; !done(); ++spins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins > kSpins) std::this_thread::yield();  // on a machine that does other work
    }
  }
  static constexpr int64_t kSpins = 4096;
  const int64_t places_;
  std::vector<std::atomic<int64_t>> claimed_;
  std::atomic<int64_t> taken_{0}, members_{0}, arrived_{0}, round_{0};
};

// Call `run(team, member)` on up to `threads` threads of PyTorch's pool at the same time. Fewer join where PyTorch gives a
// thread several places, as it does in a call from one of its own threads.
template <class Run>
inline void on_team(int64_t threads, int64_t phases, const Run& run) {
  struct Shared {
    Team team;
    const Run& run;
  } shared{{threads, phases}, run};
  if (threads == 1) return run(shared.team, shared.team.join(1));
  const auto some = [](int64_t begin, int64_t end, void* context) {
    auto* found = static_cast<Shared*>(context);
    found->run(found->team, found->team.join(end - begin));
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, threads, 1, some, &shared));
}

}  // namespace
