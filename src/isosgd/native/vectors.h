// Vectors of floats, as long as those of the processor. Without headers of torch, so that they are read once.

#pragma once

#include <algorithm>
#include <cstdint>

namespace isosgd {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));

inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }
// What is not a number stays so: a chain that has diverged must show it.
inline Vec relu(Vec a) { return a < Vec{} ? Vec{} : a; }
inline float sum(Vec a) {
  float s = 0;
  for (int64_t i = 0; i < LANES; i++) s += a[i];
  return s;
}

}  // namespace isosgd
