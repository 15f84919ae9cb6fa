// Linear -> ReLU -> Linear for one network, and its gradient (see perceptron.py).

#pragma once

#include "dense.h"

namespace isosgd {

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
  products(s, x, weights, weights + s.in * H, [&](int64_t at, Vec found) { store(h + at, relu(found)); });
  for (int64_t r = 0; r < s.rows; r++)
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
    add_weights(s, rows, d, found);
  }
  for (int64_t j = 0; j < H; j++)
    for (int64_t k = 0; k < D; k++) dw1[j * D + k] = found[k * H + j];
}

}  // namespace isosgd
