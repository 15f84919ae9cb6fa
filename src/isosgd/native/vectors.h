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
  float part[LANES];
  store(part, a);
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
}

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

// e^a to rounding, where a is between -80 and 80.
inline Vec exponential(Vec a) {
  // e^a = 2^n e^r, by Cephes' polynomial; adding 1.5 * 2^23 rounds to an integer, which is in the lowest bits then.
  const Vec magic = 12582912.0f + Vec{}, shifted = a * 1.44269504f + magic, n = shifted - magic;
  const Vec r = a - n * 0.693359375f + n * 2.12194440e-4f;
  const Vec square = r * r;
  Vec p = (1.9875691500e-4f * r + 1.3981999507e-3f) * square + (8.3334519073e-3f * r + 4.1665795894e-2f);
  p = p * square + (1.6666665459e-1f * r + 5.0000001201e-1f);
  p = p * square + (r + 1.0f);
  const Ints power = (reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(magic) + 127) << 23;
  return p * reinterpret_cast<Vec>(power);
}

// Within [-most, most]; of what is not a number some number.
inline Vec clamped(Vec a, float most) {
  a = a < most ? a : most + Vec{};
  return a > -most ? a : -most + Vec{};
}

// 1 / (1 + e^-a) to rounding; beyond 40 as there, and of what is not a number some number.
inline Vec sigmoid(Vec a) { return 1.0f / (1.0f + exponential(clamped(-a, 40.0f))); }

// tanh a, by Cephes' polynomial near zero; of what is not a number some number.
inline Vec tangent(Vec a) {
  const Vec z = a * a;
  Vec p = (-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f;
  p = (p * z + 1.33314422036e-1f) * z - 3.33332819422e-1f;
  const Vec far = 1.0f - 2.0f / (1.0f + exponential(clamped(2.0f * a, 40.0f)));
  return z < 0.390625f ? a + a * z * p : far;
}

// erf a to a few roundings, as a quotient of polynomials (that of XLA); of what is not a number some number.
inline Vec error_function(Vec a) {
  a = clamped(a, 3.832506856900711f);
  const Vec z = a * a;
  Vec p = (0.00022905065861350646f * z + 0.0034082910107109506f) * z + 0.050955695062380861f;
  p = (p * z + 0.18520832239976145f) * z + 1.128379143519084f;
  Vec q = (-1.1791602954361697e-7f * z + 0.000023547966471313185f) * z + 0.0010179625278914885f;
  q = ((q * z + 0.014070470171167667f) * z + 0.11098505178285362f) * z + 0.49746925110067538f;
  return a * p / (q * z + 1.0f);
}

}  // namespace isosgd
