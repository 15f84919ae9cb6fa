// Products of rows with a layer's weights, and the gradient of these weights.
//
// Rows pass through registers in tiles: hidden units side by side in vectors, a few rows or inputs at a time. Where the
// number of units is not a multiple of a vector's length the last vector overlaps the one before: what both compute is
// written twice, and the same.

#pragma once

#include "vectors.h"

namespace isosgd {

constexpr int MOST = 5;  // vectors of hidden units, or inputs, of a tile ...
constexpr int ROWS = 4;  // ... and rows

struct Shape {
  int64_t rows, in, hidden;
  int64_t vectors() const { return (hidden + LANES - 1) / LANES; }
  int64_t place(int64_t vector) const { return std::min(vector * LANES, hidden - LANES); }
};

// `f.operator()<C>(first)` for groups of C things each, at most `MOST` and about equally many, out of so many things.
template <class F>
inline void in_groups(int64_t things, F f) {
  const int64_t groups = (things + MOST - 1) / MOST;
  for (int64_t g = 0, first = 0; g < groups; g++) {
    const int64_t count = (things - first + groups - g - 1) / (groups - g);
    switch (count) {
      case 1: f.template operator()<1>(first); break;
      case 2: f.template operator()<2>(first); break;
      case 3: f.template operator()<3>(first); break;
      case 4: f.template operator()<4>(first); break;
      default: f.template operator()<MOST>(first);
    }
    first += count;
  }
}

// Where C vectors of hidden units begin.
template <int C>
struct Places {
  int64_t at[C];
  Places(const Shape& s, int64_t first) {
    for (int c = 0; c < C; c++) at[c] = s.place(first + c);
  }
};

// acc[a][c] += x[a * lead + i * step] * rows[i][at[c] ...] over so many rows, which are `width` wide.
template <int A, int C>
__attribute__((always_inline)) inline void add_products(Vec (&acc)[A][C], int64_t count, const float* x, int64_t lead,
                                                        int64_t step, const float* rows, int64_t width,
                                                        const int64_t* at) {
  int64_t place[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) place[c] = at[c];
  for (int64_t i = 0; i < count; i++) {
    Vec row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) row[c] = load(rows + i * width + place[c]);
#pragma GCC unroll 8
    for (int a = 0; a < A; a++) {
      const float value = x[a * lead + i * step];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) acc[a][c] += value * row[c];
    }
  }
}

// R rows, C vectors of units: `finish(row, place, products)`. `weights` is [in][hidden], `bias` may be null.
template <int R, int C, class F>
__attribute__((noinline)) void product_tile(const Shape& s, const float* x, const float* weights, const float* bias,
                                            const int64_t* at, F finish) {
  Vec acc[R][C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
    const Vec first = bias ? load(bias + at[c]) : Vec{};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][c] = first;
  }
  add_products(acc, s.in, x, s.in, 1, weights, s.hidden, at);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) finish(r, at[c], acc[r][c]);
}

// The same of all rows of a layer: `finish` is given the place in a `[rows][hidden]` array.
template <class F>
inline void products(const Shape& s, const float* x, const float* weights, const float* bias, F finish) {
  const auto some = [&]<int R>(int64_t row) {
    in_groups(s.vectors(), [&]<int C>(int64_t first) {
      product_tile<R, C>(s, x + row * s.in, weights, bias, Places<C>(s, first).at,
                         [&](int64_t r, int64_t at, Vec found) { finish((row + r) * s.hidden + at, found); });
    });
  };
  int64_t row = 0;
  for (; row + ROWS <= s.rows; row += ROWS) some.template operator()<ROWS>(row);
  for (; row < s.rows; row++) some.template operator()<1>(row);
}

// K inputs, C vectors of hidden units, over some rows: added to the gradient of a layer's weights, [in][hidden].
template <int K, int C>
__attribute__((noinline)) void weight_tile(const Shape& s, const float* x, const float* d, const int64_t* at,
                                           float* found) {
  Vec acc[K][C];
#pragma GCC unroll 8
  for (int k = 0; k < K; k++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[k][c] = load(found + k * s.hidden + at[c]);
  add_products(acc, s.rows, x, 1, s.in, d, s.hidden, at);
#pragma GCC unroll 8
  for (int k = 0; k < K; k++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(found + k * s.hidden + at[c], acc[k][c]);
}

// Gradient of all weights of a layer over some rows, added to `[in][hidden]`. What is added to is read and written by
// one tile at a time, and the two vectors that may overlap are always in one tile, or their common part would be added
// twice.
inline void add_weights(const Shape& s, const float* x, const float* d, float* found) {
  in_groups(s.in, [&]<int K>(int64_t input) {
    in_groups(s.vectors(), [&]<int C>(int64_t first) {
      weight_tile<K, C>(s, x + input, d, Places<C>(s, first).at, found + input * s.hidden);
    });
  });
}

constexpr int64_t BLOCK = 256;  // rows that are taken at once, so that what is made of them stays in the cache

}  // namespace isosgd
