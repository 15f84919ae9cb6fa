// A step of a Lambda with a diagonal part and k directions, for one chain (see geometry/lowrank.py).

#pragma once

#include "vectors.h"

namespace isosgd {

constexpr int DIRECTIONS = 5;  // at a time
constexpr int WIDE = 8;        // vectors at a time

// Products of N rows with a vector; two sums for each, lest one wait for the other.
template <int N>
inline void products(int64_t d, const float* rows, const float* x, float* found) {
  Vec even[N], odd[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) even[i] = odd[i] = Vec{};
  int64_t j = 0;
  for (; j + 2 * LANES <= d; j += 2 * LANES) {
    const Vec first = load(x + j), second = load(x + j + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      even[i] += load(rows + i * d + j) * first;
      odd[i] += load(rows + i * d + j + LANES) * second;
    }
  }
  if (j + LANES <= d) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) even[i] += load(rows + i * d + j) * load(x + j);
    j += LANES;
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) found[i] = sum(even[i] + odd[i]);
  for (; j < d; j++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) found[i] += rows[i * d + j] * x[j];
}

inline void all_products(int64_t k, int64_t d, const float* rows, const float* x, float* found) {
  int64_t i = 0;
  for (; i + DIRECTIONS <= k; i += DIRECTIONS) products<DIRECTIONS>(d, rows + i * d, x, found + i);
  for (; i < k; i++) products<1>(d, rows + i * d, x, found + i);
}

// C vectors, one behind the other, of x + S^T along, where x is rate force.
template <int C>
inline void spread(int64_t d, int64_t k, const float* basis, const float* along, const float* rate, const float* force,
                   float* out) {
  Vec acc[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) acc[c] = load(rate + c * LANES) * load(force + c * LANES);
  for (int64_t i = 0; i < k; i++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[c] += along[i] * load(basis + i * d + c * LANES);
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) store(out + c * LANES, acc[c]);
}

// out = rate force + S^T (back S force + injected), where `injected` may be null; S is [k][d].
inline void inverse_one(int64_t d, int64_t k, const float* basis, const float* back, const float* rate,
                        const float* force, const float* injected, float* out, float* scratch) {
  float *seen = scratch, *along = seen + k;
  all_products(k, d, basis, force, seen);
  all_products(k, k, back, seen, along);
  for (int64_t i = 0; injected && i < k; i++) along[i] += injected[i];
  int64_t j = 0;
  for (; j + WIDE * LANES <= d; j += WIDE * LANES) spread<WIDE>(d, k, basis + j, along, rate + j, force + j, out + j);
  for (; d < LANES && j < d; j++) {
    out[j] = rate[j] * force[j];
    for (int64_t i = 0; i < k; i++) out[j] += along[i] * basis[i * d + j];
  }
  // What is left in vectors again, of which the last may overlap the one before: both write the same.
  for (; j < d; j += LANES) {
    const int64_t a = std::min(j, d - LANES);
    spread<1>(d, k, basis + a, along, rate + a, force + a, out + a);
  }
}

// The same with force = gradient + amplitude own and injected = add shared.
inline void displace_one(int64_t d, int64_t k, const float* basis, const float* back, const float* add,
                         const float* rate, const float* amplitude, const float* gradient, const float* own,
                         const float* shared, float* out, float* scratch) {
  float *force = scratch, *injected = scratch + d;
  for (int64_t j = 0; j < d; j++) force[j] = gradient[j] + amplitude[j] * own[j];
  all_products(k, k, add, shared, injected);
  inverse_one(d, k, basis, back, rate, force, injected, out, injected + k);
}

}  // namespace isosgd
