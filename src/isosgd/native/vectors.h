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

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// 1 / (1 + e^-a) to rounding; beyond 40 as there, and of what is not a number some number.
inline Vec sigmoid(Vec a) {
  a = -(a < 40.0f ? a : 40.0f + Vec{});
  a = a < 40.0f ? a : 40.0f + Vec{};
  // e^a = 2^n e^r, by Cephes' polynomial; adding 1.5 * 2^23 rounds to an integer, which is in the lowest bits then.
  const Vec magic = 12582912.0f + Vec{}, shifted = a * 1.44269504f + magic, n = shifted - magic;
  const Vec r = a - n * 0.693359375f + n * 2.12194440e-4f;
  const Vec square = r * r;
  Vec p = (1.9875691500e-4f * r + 1.3981999507e-3f) * square + (8.3334519073e-3f * r + 4.1665795894e-2f);
  p = p * square + (1.6666665459e-1f * r + 5.0000001201e-1f);
  p = p * square + (r + 1.0f);
  const Ints power = (reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(magic) + 127) << 23;
  return 1.0f / (1.0f + p * reinterpret_cast<Vec>(power));
}

}  // namespace isosgd
