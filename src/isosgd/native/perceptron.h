// Linear -> ReLU -> Linear for one network, and its gradient (see perceptron.py).
//
// Its rows pass through registers in tiles: hidden units side by side in vectors, a few rows or inputs at a time. Where
// the number of units is not a multiple of a vector's length the last vector overlaps the one before: what both compute
// is written twice, and the same.

#pragma once

#include "vectors.h"

namespace isosgd {

constexpr int MOST = 5;  // vectors of hidden units, or inputs, of a tile ...
constexpr int ROWS = 4;  // ... and rows

struct Shape {
  int64_t rows, in, hidden, out;
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

// ---------------------------------------------------------------------------------------------------- forward

// R rows, C vectors of hidden units. `weights` is [in + 1][hidden], the bias last.
template <int R, int C>
__attribute__((noinline)) void hidden_tile(const Shape& s, const float* x, const float* weights, const int64_t* at,
                                           float* h) {
  Vec acc[R][C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
    const Vec bias = load(weights + s.in * s.hidden + at[c]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][c] = bias;
  }
  add_products(acc, s.in, x, s.in, 1, weights, s.hidden, at);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(h + r * s.hidden + at[c], relu(acc[r][c]));
}

template <int R>
void hidden_rows(const Shape& s, const float* x, const float* weights, float* h) {
  in_groups(s.vectors(), [&]<int C>(int64_t first) {
    hidden_tile<R, C>(s, x, weights, Places<C>(s, first).at, h);
  });
}

inline void forward_one(const Shape& s, const float* x, const float* w1, const float* b1, const float* w2,
                        const float* b2, float* out, float* h, float* scratch) {
  const int64_t H = s.hidden, vectors = s.vectors(), overlap = vectors * LANES - H;
  float* weights = scratch;
  for (int64_t j = 0; j < H; j++) {
    for (int64_t k = 0; k < s.in; k++) weights[k * H + j] = w1[j * s.in + k];
    weights[s.in * H + j] = b1[j];
  }
  float* second = scratch + (s.in + 1) * H;  // [out][vectors * LANES], nothing where the last vector overlaps
  for (int64_t o = 0; o < s.out; o++)
    for (int64_t v = 0; v < vectors; v++)
      for (int64_t i = 0; i < LANES; i++)
        second[(o * vectors + v) * LANES + i] = v == vectors - 1 && i < overlap ? 0.0f : w2[o * H + s.place(v) + i];
  int64_t r = 0;
  for (; r + ROWS <= s.rows; r += ROWS) hidden_rows<ROWS>(s, x + r * s.in, weights, h + r * H);
  for (; r < s.rows; r++) hidden_rows<1>(s, x + r * s.in, weights, h + r * H);
  for (r = 0; r < s.rows; r++)
    for (int64_t o = 0; o < s.out; o++) {
      const float *row = second + o * vectors * LANES, *units = h + r * H;
      Vec even = load(units + H - LANES) * load(row + (vectors - 1) * LANES), odd{};
      int64_t v = 0;
      for (; v + 2 < vectors; v += 2) {
        even += load(units + v * LANES) * load(row + v * LANES);
        odd += load(units + (v + 1) * LANES) * load(row + (v + 1) * LANES);
      }
      if (v + 1 < vectors) odd += load(units + v * LANES) * load(row + v * LANES);
      out[r * s.out + o] = sum(even + odd) + b2[o];
    }
}

// ---------------------------------------------------------------------------------------------------- backward

// K inputs, C vectors of hidden units, over some rows: added to the gradient of the first weights, [in][hidden].
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

// C vectors of hidden units, over some rows: their slopes before the ReLU, and what is a sum over rows, added.
template <int C>
__attribute__((noinline)) void unit_tile(const Shape& s, const float* w2, const float* h, const float* g,
                                         const int64_t* at, float* d, float* db1, float* dw2) {
  const int64_t H = s.hidden, O = s.out;
  Vec bias[C], second[C], w[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) bias[c] = load(db1 + at[c]), second[c] = load(dw2 + at[c]), w[c] = load(w2 + at[c]);
  for (int64_t r = 0; r < s.rows; r++) {
    const float* slopes = g + r * O;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      Vec unit = load(h + r * H + at[c]), slope = slopes[0] * w[c];
      for (int64_t o = 1; o < O; o++) slope += slopes[o] * load(w2 + o * H + at[c]);
      slope = unit <= Vec{} ? Vec{} : slope;  // as torch does where it is not a number
      second[c] += slopes[0] * unit;
      bias[c] += slope;
      store(d + r * H + at[c], slope);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) store(dw2 + at[c], second[c]), store(db1 + at[c], bias[c]);
  for (int64_t o = 1; o < O; o++) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) second[c] = load(dw2 + o * H + at[c]);
    for (int64_t r = 0; r < s.rows; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) second[c] += g[r * O + o] * load(h + r * H + at[c]);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(dw2 + o * H + at[c], second[c]);
  }
}

// Rows are taken in blocks, whose slopes stay in the cache. What is added to is read and written by one tile at a time,
// and the two vectors that may overlap are always in one tile, or their common part would be added twice.
constexpr int64_t BLOCK = 256;

inline void backward_one(const Shape& all, const float* x, const float* w2, const float* h, const float* g, float* dw1,
                         float* db1, float* dw2, float* db2, float* scratch) {
  const int64_t H = all.hidden, O = all.out, D = all.in;
  float *d = scratch, *found = scratch + BLOCK * H;
  std::fill_n(found, D * H, 0.0f), std::fill_n(db1, H, 0.0f), std::fill_n(dw2, O * H, 0.0f), std::fill_n(db2, O, 0.0f);
  for (int64_t begin = 0; begin < all.rows; begin += BLOCK) {
    const Shape s{std::min(BLOCK, all.rows - begin), D, H, O};
    const float *rows = x + begin * D, *units = h + begin * H, *slopes = g + begin * O;
    in_groups(s.vectors(), [&]<int C>(int64_t first) {
      unit_tile<C>(s, w2, units, slopes, Places<C>(s, first).at, d, db1, dw2);
    });
    for (int64_t r = 0; r < s.rows; r++)
      for (int64_t o = 0; o < O; o++) db2[o] += slopes[r * O + o];
    in_groups(D, [&]<int K>(int64_t input) {
      in_groups(s.vectors(), [&]<int C>(int64_t first) {
        weight_tile<K, C>(s, rows + input, d, Places<C>(s, first).at, found + input * H);
      });
    });
  }
  for (int64_t j = 0; j < H; j++)
    for (int64_t k = 0; k < D; k++) dw1[j * D + k] = found[k * H + j];
}

}  // namespace isosgd
