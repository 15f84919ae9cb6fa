// Networks of dense layers, of several chains: outputs, gradients, and leapfrog steps (see layers.py).
//
// Of a row x of one chain: h = x, then h = act(W h + b) layer by layer, and out = gate (V h + c) + skip x. Gate and skip
// may be missing; the skip may have more outputs than V, which then come last. Without headers of torch, so that it is
// built in seconds.

#include <cmath>
#include <thread>
#include <vector>

#include "dense.h"
#include "lowrank.h"

namespace isosgd {
namespace {

// -------------------------------------------------------------------------------------------------- activations

struct Unit {
  Vec value, slope;
};

// Some slopes follow from the value, and need not be kept.
template <class A>
concept Slopes = requires(Vec value) { A::slope(value); };

struct Relu {
  static Vec of(Vec z) { return relu(z); }
  static Vec slope(Vec value) { return value <= Vec{} ? Vec{} : 1.0f + Vec{}; }
};

struct Silu {
  static Unit of(Vec z) {
    const Vec sig = sigmoid(z), unit = z * sig;
    return {unit, sig + unit * (1.0f - sig)};
  }
};

struct Tanh {
  static Vec of(Vec z) { return z == z ? tangent(z) : z; }
  static Vec slope(Vec value) { return 1.0f - value * value; }
};

struct Sigmoid {
  static Vec of(Vec z) { return z == z ? sigmoid(z) : z; }
  static Vec slope(Vec value) { return value * (1.0f - value); }
};

struct Gelu {
  static Unit of(Vec z) {
    const Vec below = 0.5f * (1.0f + error_function(0.70710678f * z));
    const Vec near = clamped(z, 12.0f);
    return {z * below, below + 0.39894228f * near * exponential(-0.5f * near * near)};
  }
};

struct TanhGelu {
  static Unit of(Vec z) {
    const Vec square = z * z, t = tangent(clamped(0.79788456f * z * (1.0f + 0.044715f * square), 40.0f));
    const Vec inner = 0.79788456f * (1.0f + 3.0f * 0.044715f * square), near = clamped(z, 12.0f);
    const Vec slope = 0.5f * near * (1.0f - t * t) * (z == near ? inner : Vec{});
    return {0.5f * z * (1.0f + t), 0.5f * (1.0f + t) + slope};
  }
};

// f(activation) for that of a number, in the order of `ACTIVATIONS` in layers.py.
template <class F>
void with_activation(int64_t number, F f) {
  switch (number) {
    case 0: return f(Relu{});
    case 1: return f(Silu{});
    case 2: return f(Tanh{});
    case 3: return f(Sigmoid{});
    case 4: return f(Gelu{});
    default: return f(TanhGelu{});
  }
}

// ------------------------------------------------------------------------------------------------------ networks

struct Layer {
  int64_t in, units, weight, bias, activation;  // weight and bias: places in the parameters of a chain
};

// From the numbers that layers.py gives, in this order. Places of what is missing are negative.
struct Net {
  int64_t total, rows, in, outs, curved, skip, gate, out, offset, count;
  const Layer* layers;
  bool narrow;  // without hidden layers, or with one of fewer units than a vector has: computed unit by unit
  explicit Net(const int64_t* n)
      : total(n[0]), rows(n[1]), in(n[2]), outs(n[3]), curved(n[4]), skip(n[5]), gate(n[6]), out(n[7]), offset(n[8]),
        count(n[9]), layers(reinterpret_cast<const Layer*>(n + 10)), narrow(!count) {
    for (int64_t l = 0; l < count; l++) narrow = narrow || layers[l].units < LANES;
  }
  int64_t before_out() const { return count ? layers[count - 1].units : in; }  // inputs of the output layer
  int64_t units() const {
    int64_t sum = 0;
    for (int64_t l = 0; l < count; l++) sum += layers[l].units;
    return sum;
  }
  int64_t widest() const {
    int64_t most = outs;
    for (int64_t l = 0; l < count; l++) most = std::max(most, layers[l].units);
    return most;
  }
  int64_t weights() const {  // of the hidden layers, whose gradients are summed apart
    int64_t sum = 0;
    for (int64_t l = 0; !narrow && l < count; l++) sum += layers[l].in * layers[l].units;
    return sum;
  }
  int64_t padded() const { return (curved + LANES - 1) / LANES * LANES; }
  bool few() const { return 2 * curved < LANES; }  // outputs: faster as single products with the last hidden layer
  int64_t kept(int64_t of) const { return 2 * of * units(); }  // floats that the hidden layers of so many rows keep
  int64_t turned() const {
    return narrow ? 0 : weights() + (few() ? curved * (before_out() + LANES) : padded() * (before_out() + 1));
  }
  int64_t blocks() const { return std::min(BLOCK, rows); }  // rows at once
};

// f(begin, rows) for blocks of rows.
template <class F>
void each_block(const Net& net, F f) {
  for (int64_t begin = 0; begin < net.rows; begin += BLOCK) f(begin, std::min(BLOCK, net.rows - begin));
}

// What layer l gives for some rows, and behind it the derivatives, unless they are `Slopes`.
template <class T>
T* kept_of(const Net& net, T* kept, int64_t rows, int64_t l) {
  for (int64_t i = 0; i < l; i++) kept += 2 * rows * net.layers[i].units;
  return kept;
}

inline float dot(const float* a, const float* b, int64_t count) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < count; i++) s += a[i] * b[i];
  return s;
}

inline void add(float* into, float factor, const float* a, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) into[i] += factor * a[i];
}

void transpose(const float* a, int64_t rows, int64_t columns, float* into, int64_t width) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < columns; k++) into[k * width + i] = a[i * columns + k];
}

// Sums over rows, added to `found`; the vectors that may overlap are in one tile, as in `add_weights`.
void add_rows(const Shape& s, const float* d, float* found) {
  in_groups(s.vectors(), [&]<int C>(int64_t first) {
    const Places<C> places(s, first);
    Vec acc[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) acc[c] = load(found + places.at[c]);
    for (int64_t r = 0; r < s.rows; r++)
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) acc[c] += load(d + r * s.hidden + places.at[c]);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(found + places.at[c], acc[c]);
  });
}

// Weights as `products` and `outputs` read them: [in][units]; of few outputs rows in vectors, without what overlaps.
void turn(const Net& net, const float* theta, float* turned) {
  if (net.narrow) return;
  for (int64_t l = 0; l < net.count; l++) {
    const Layer& layer = net.layers[l];
    transpose(theta + layer.weight, layer.units, layer.in, turned, layer.units);
    turned += layer.units * layer.in;
  }
  const int64_t H = net.before_out();
  if (!net.few()) {
    const int64_t P = net.padded();
    std::fill_n(turned, P * (H + 1), 0.0f);
    transpose(theta + net.out, net.curved, H, turned, P);
    if (net.offset >= 0) std::copy_n(theta + net.offset, net.curved, turned + H * P);
    return;
  }
  const Shape s{0, 0, H};
  const int64_t vectors = s.vectors(), overlap = vectors * LANES - H;
  for (int64_t o = 0; o < net.curved; o++)
    for (int64_t v = 0; v < vectors; v++)
      for (int64_t i = 0; i < LANES; i++)
        turned[(o * vectors + v) * LANES + i] =
            v == vectors - 1 && i < overlap ? 0.0f : theta[net.out + o * H + s.place(v) + i];
}

// Products of R rows of units with one output's weights, in vectors as `turn` lays them.
template <int R>
inline void row_products(const Shape& s, const float* units, const float* weights, float* found, int64_t apart) {
  Vec acc[R]{};
  for (int64_t v = 0; v < s.vectors(); v++) {
    const Vec w = load(weights + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] += load(units + r * s.hidden + s.place(v)) * w;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) found[r * apart] = sum(acc[r]);
}

// Outputs of some rows; `weights` are those of the output layer as `turn` lays them. `scratch`: rows times `padded`.
void outputs(const Net& net, const float* theta, const float* weights, int64_t rows, const float* x, const float* units,
             float* out, float* scratch) {
  const int64_t H = net.before_out();
  const float gate = net.gate >= 0 ? theta[net.gate] : 1.0f;
  if (net.narrow) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < net.curved; o++) {
        const float c = net.offset >= 0 ? theta[net.offset + o] : 0.0f;
        out[r * net.outs + o] = gate * (c + dot(units + r * H, theta + net.out + o * H, H));
      }
  } else if (net.few()) {
    const Shape s{rows, 0, H};
    for (int64_t o = 0; o < net.curved; o++) {
      const float *row = weights + o * s.vectors() * LANES, c = net.offset >= 0 ? theta[net.offset + o] : 0.0f;
      int64_t r = 0;
      for (; r + ROWS <= rows; r += ROWS) row_products<ROWS>(s, units + r * H, row, out + r * net.outs + o, net.outs);
      for (; r < rows; r++) row_products<1>(s, units + r * H, row, out + r * net.outs + o, net.outs);
      for (r = 0; r < rows; r++) out[r * net.outs + o] = gate * (out[r * net.outs + o] + c);
    }
  } else {
    const int64_t P = net.padded();
    products(Shape{rows, H, P}, units, weights, weights + H * P, [&](int64_t at, Vec z) { store(scratch + at, z); });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < net.curved; o++) out[r * net.outs + o] = gate * scratch[r * P + o];
  }
  for (int64_t r = 0; net.skip >= 0 && r < rows; r++)
    for (int64_t o = 0; o < net.outs; o++) {
      float& found = out[r * net.outs + o];
      found = dot(x + r * net.in, theta + net.skip + o * net.in, net.in) + (o < net.curved ? found : 0.0f);
    }
}

// f(place, vector) for vectors of so many numbers, the last of which may be filled up.
template <class F>
void in_vectors(const float* numbers, int64_t count, F f) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) f(i, load(numbers + i));
  if (i == count) return;
  float rest[LANES]{};
  std::copy(numbers + i, numbers + count, rest);
  f(i, load(rest));
}

// Stores what `in_vectors` gave, of `count` numbers in all.
inline void store_some(float* into, int64_t at, int64_t count, Vec v) {
  if (at + LANES <= count) return store(into + at, v);
  float rest[LANES];
  store(rest, v);
  std::copy_n(rest, count - at, into + at);
}

// What the hidden layers of a narrow network give.
const float* narrow_forward(const Net& net, const float* theta, int64_t rows, const float* x, float* kept) {
  const float* input = x;
  for (int64_t l = 0; l < net.count; l++) {
    const Layer& layer = net.layers[l];
    const int64_t count = rows * layer.units;
    float *h = kept_of(net, kept, rows, l), *slope = h + count;
    for (int64_t r = 0; r < rows; r++)
      for (int64_t u = 0; u < layer.units; u++)
        h[r * layer.units + u] = (layer.bias >= 0 ? theta[layer.bias + u] : 0.0f) +
                                 dot(input + r * layer.in, theta + layer.weight + u * layer.in, layer.in);
    with_activation(layer.activation, [&]<class A>(A) {
      in_vectors(h, count, [&](int64_t at, Vec z) {
        if constexpr (Slopes<A>) {
          const Vec value = A::of(z);
          store_some(h, at, count, value), store_some(slope, at, count, A::slope(value));
        } else {
          const Unit unit = A::of(z);
          store_some(h, at, count, unit.value), store_some(slope, at, count, unit.slope);
        }
      });
    });
    input = h;
  }
  return input;
}

// As `backward` below; all goes to `found`.
void narrow_backward(const Net& net, const float* theta, int64_t rows, const float* x, const float* kept,
                     const float* g, float* found, float* d, float* next) {
  const int64_t H = net.before_out();
  const float* input = net.count ? kept_of(net, kept, rows, net.count - 1) : x;
  const float gate = net.gate >= 0 ? theta[net.gate] : 1.0f;
  std::fill_n(d, net.count ? rows * H : 0, 0.0f);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < net.curved; o++) {
      const float slope = g[r * net.outs + o];
      if (net.offset >= 0) found[net.offset + o] += slope;
      add(found + net.out + o * H, slope, input + r * H, H);
      if (net.count) add(d + r * H, gate * slope, theta + net.out + o * H, H);
    }
  for (int64_t l = net.count - 1; l >= 0; l--) {
    const Layer& layer = net.layers[l];
    const int64_t U = layer.units, in = layer.in;
    const float* slope = kept_of(net, kept, rows, l) + rows * U;
    for (int64_t i = 0; i < rows * U; i++) d[i] *= slope[i];
    const float* below = l ? kept_of(net, kept, rows, l - 1) : x;
    std::fill_n(next, l ? rows * in : 0, 0.0f);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t u = 0; u < U; u++) {
        const float own = d[r * U + u];
        if (layer.bias >= 0) found[layer.bias + u] += own;
        add(found + layer.weight + u * in, own, below + r * in, in);
        if (l) add(next + r * in, own, theta + layer.weight + u * in, in);
      }
    std::swap(d, next);
  }
}

void forward(const Net& net, const float* theta, const float* turned, int64_t rows, const float* x, float* out,
             float* kept, float* scratch) {
  if (net.narrow) return outputs(net, theta, nullptr, rows, x, narrow_forward(net, theta, rows, x, kept), out, scratch);
  const float *input = x, *weights = turned;
  for (int64_t l = 0; l < net.count; l++) {
    const Layer& layer = net.layers[l];
    const Shape s{rows, layer.in, layer.units};
    float *h = kept_of(net, kept, rows, l), *slope = h + rows * layer.units;
    with_activation(layer.activation, [&]<class A>(A) {
      const float* bias = layer.bias >= 0 ? theta + layer.bias : nullptr;
      products(s, input, weights, bias, [&](int64_t at, Vec z) {
        if constexpr (Slopes<A>) {
          store(h + at, A::of(z));
        } else {
          const Unit unit = A::of(z);
          store(h + at, unit.value), store(slope + at, unit.slope);
        }
      });
    });
    weights += layer.units * layer.in;
    input = h;
  }
  outputs(net, theta, weights, rows, x, input, out, scratch);
}

// Slopes of a layer's sums, from those of what the next one gives and its weights; `h` is what the layer gives.
void through(const Layer& layer, const Shape& s, const float* slopes, const float* weights, const float* h, float factor,
             float* into) {
  const float* kept = h + s.rows * s.hidden;
  with_activation(layer.activation, [&]<class A>(A) {
    products(s, slopes, weights, nullptr, [&](int64_t at, Vec z) {
      if constexpr (Slopes<A>) store(into + at, factor * z * A::slope(load(h + at)));
      else store(into + at, factor * z * load(kept + at));
    });
  });
}

// Adds to the gradient of a chain what some rows give, from the slopes of their outputs: to `sums` for weights of the
// hidden layers, [in][units] each, to `found` for all others, apart from the gate's factor (`finish`).
void backward(const Net& net, const float* theta, int64_t rows, const float* x, const float* kept, const float* slope,
              float* found, float* sums, float* scratch) {
  const int64_t H = net.before_out(), O = net.curved;
  float *d = scratch, *next = d + rows * net.widest();
  const float gate = net.gate >= 0 ? theta[net.gate] : 1.0f;
  for (int64_t r = 0; net.skip >= 0 && r < rows; r++)
    for (int64_t o = 0; o < net.outs; o++)
      add(found + net.skip + o * net.in, slope[r * net.outs + o], x + r * net.in, net.in);
  if (net.narrow) return narrow_backward(net, theta, rows, x, kept, slope, found, d, next);
  const float* g = slope;
  if (O < net.outs) {
    for (int64_t r = 0; r < rows; r++) std::copy_n(slope + r * net.outs, O, next + r * O);
    g = next;
  }
  for (int64_t r = 0; net.offset >= 0 && r < rows; r++)
    for (int64_t o = 0; o < O; o++) found[net.offset + o] += g[r * O + o];
  const float* h = kept_of(net, kept, rows, net.count - 1);
  const Shape out{rows, O, H};
  add_weights(out, g, h, found + net.out);
  through(net.layers[net.count - 1], out, g, theta + net.out, h, gate, d);
  float* sum = sums + net.weights();
  for (int64_t l = net.count - 1; l >= 0; l--) {
    const Layer& layer = net.layers[l];
    const Shape s{rows, layer.in, layer.units};
    const float* input = l ? kept_of(net, kept, rows, l - 1) : x;
    sum -= layer.in * layer.units;
    if (layer.bias >= 0) add_rows(s, d, found + layer.bias);
    add_weights(s, input, d, sum);
    if (!l) break;
    through(net.layers[l - 1], Shape{rows, layer.units, layer.in}, d, theta + layer.weight, input, 1.0f, next);
    std::swap(d, next);
  }
}

// The gradient once all rows were added.
void finish(const Net& net, const float* theta, const float* sums, float* found) {
  for (int64_t l = 0; !net.narrow && l < net.count; l++) {
    const Layer& layer = net.layers[l];
    transpose(sums, layer.in, layer.units, found + layer.weight, layer.in);
    sums += layer.in * layer.units;
  }
  if (net.gate < 0) return;
  const int64_t size = net.curved * net.before_out();
  const float gate = theta[net.gate];
  found[net.gate] = dot(found + net.out, theta + net.out, size);
  if (net.offset >= 0) found[net.gate] += dot(found + net.offset, theta + net.offset, net.curved);
  for (int64_t i = 0; i < size; i++) found[net.out + i] *= gate;
  for (int64_t o = 0; net.offset >= 0 && o < net.curved; o++) found[net.offset + o] *= gate;
}

int64_t forward_scratch(const Net& net) { return net.turned() + net.blocks() * net.padded(); }
int64_t backward_scratch(const Net& net) { return net.weights() + 2 * net.blocks() * net.widest(); }

// ------------------------------------------------------------------------------------ whole densities and leapfrog

// Normal noise of one scale, or classes; and a prior of independent entries: normal, and half-Cauchy for the scale of
// the noise. From what layers.py gives, in this order.
struct Density {
  int64_t scale;  // place of the logarithm of the noise scale; negative where it is known: `known`
  double known, prior, cauchy;  // weight of the prior over N, and the scale of the half-Cauchy
  bool classes;
  explicit Density(const double* about)
      : scale(int64_t(about[0])), known(about[1]), prior(about[2]), cauchy(about[3]), classes(about[4] != 0) {}
};

// Targets of a chain: numbers [rows][outs], or labels [rows].
struct Targets {
  const float* numbers;
  const int64_t* labels;
  Targets(const void* y, int64_t skipped, bool classes)
      : numbers(classes ? nullptr : static_cast<const float*>(y) + skipped),
        labels(classes ? static_cast<const int64_t*>(y) + skipped : nullptr) {}
  Targets from(int64_t skipped) const {
    return numbers ? Targets(numbers, skipped, false) : Targets(labels, skipped, true);
  }
};

// Sum of squared residuals; outputs become these, times a factor.
double add_normal(const Net& net, int64_t rows, const float* wanted, float factor, float* out) {
  float sum = 0;
  const int64_t count = rows * net.outs;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) {
    const float residual = out[i] - wanted[i];
    sum += residual * residual;
    out[i] = factor * residual;
  }
  return sum;
}

// Sum of negative log probabilities of labels; outputs become its gradient, times a factor.
double add_classes(const Net& net, int64_t rows, const int64_t* labels, float factor, float* out) {
  double sum = 0;
  for (int64_t r = 0; r < rows; r++) {
    float* row = out + r * net.outs;
    const int64_t label = labels[r];
    if (label < 0 || label >= net.outs) return std::nan("");  // `Layers.gradient` then raises an error
    const float most = *std::max_element(row, row + net.outs);
    float total = 0;
    sum += most - row[label];
    for (int64_t o = 0; o < net.outs; o++) total += row[o] = std::exp(row[o] - most);
    sum += std::log(total);
    for (int64_t o = 0; o < net.outs; o++) row[o] *= factor / total;
    row[label] -= factor;
  }
  return sum;
}

// Negative log likelihood of a chain, a mean over rows, and the gradient with the prior's part.
float gradient(const Net& net, const Density& density, const float* precisions, const float* theta, const float* x,
               const Targets& y, float* found, float* scratch) {
  const double noise = density.scale >= 0 ? std::exp(double(theta[density.scale])) : density.known;
  const double inverse = 1.0 / (noise * noise);
  float *turned = scratch, *rest = turned + forward_scratch(net), *sums = rest, *moved = sums + net.weights();
  float *kept = moved + 2 * net.blocks() * net.widest(), *out = kept + net.kept(net.blocks());
  turn(net, theta, turned);
  std::fill_n(found, net.total, 0.0f), std::fill_n(sums, net.weights(), 0.0f);
  double total = 0;
  each_block(net, [&](int64_t begin, int64_t rows) {
    const float* own = x + begin * net.in;
    forward(net, theta, turned, rows, own, out, kept, turned + net.turned());
    total += density.classes
                 ? add_classes(net, rows, y.labels + begin, 1.0f / net.rows, out)
                 : add_normal(net, rows, y.numbers + begin * net.outs, float(inverse / net.rows), out);
    backward(net, theta, rows, own, kept, out, found, sums, moved);
  });
  finish(net, theta, sums, found);
  total /= net.rows;
  if (!density.classes) {
    total *= inverse;
    if (density.scale >= 0) {
      const double ratio = noise / density.cauchy, square = ratio * ratio;
      found[density.scale] = float(net.outs - total - density.prior * (1.0 - 2.0 * square / (1.0 + square)));
    }
    total = 0.5 * total + net.outs * (std::log(noise) + 0.91893853320467274178);
  }
  const float weight = float(density.prior);
  for (int64_t i = 0; i < net.total; i++) found[i] += weight * precisions[i] * theta[i];
  return float(total);
}

int64_t gradient_scratch(const Net& net) {
  return forward_scratch(net) + backward_scratch(net) + net.kept(net.blocks()) + net.blocks() * net.outs;
}

// Steps inside a trajectory of one chain: kicks by (rate g + S^T back S g) own, S of k directions (`LeapfrogMultiStep`).
float leapfrog(const Net& net, const Density& density, const float* precisions, int64_t steps, float own, double unit,
               int64_t k, const float* basis, const float* back, const float* rate, const float* x, const Targets& y,
               float* theta, float* velocity, float* gained, float* scratch) {
  const int64_t d = net.total;
  float *g = scratch, *pull = g + d, *more = pull + d, loss = 0;
  double gain = *gained;
  for (int64_t step = 0; step < steps; step++) {
    loss = gradient(net, density, precisions, theta, x, y, g, more);
    float total = loss;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < d; i++) total += g[i];
    if (!std::isfinite(total)) std::fill_n(g, d, 0.0f);
    inverse_one(d, k, basis, back, rate, g, nullptr, pull, more);
    float kinetic = 0;
#pragma omp simd reduction(+ : kinetic)
    for (int64_t i = 0; i < d; i++) {
      const float kick = own * pull[i];
      kinetic += g[i] * (kick - velocity[i]);
      velocity[i] -= 2.0f * kick;
      theta[i] += velocity[i];
    }
    gain += kinetic / unit;
  }
  *gained = float(gain);
  return loss;
}

// Several steps on minibatches, as `Updates` in layers.py says: theta -= p, or v = (1 - friction) v - p and theta += v.
// From what layers.py gives, in these orders. Tensors that are missing are null; those of step s and chain k begin at
// `s * chains + k` times their size (`rate` only where it `changes`), others at k times.
struct Updates {
  int64_t steps, changes, width, k;
  double friction, memory;  // friction is negative without velocities
  const float *rate, *drawn;
  float* velocity;
  const float *basis, *back, *add, *amplitude;
  const double *pull, *push, *shares, *sight;
  float *level, *loss, *total;
  Updates(const int64_t* sizes, const double* factors, void* const* given)
      : steps(sizes[0]), changes(sizes[1]), width(sizes[2]), k(sizes[3]), friction(factors[0]), memory(factors[1]) {
    const auto next = [&]<class T>(T*& into) { into = static_cast<T*>(*given++); };
    for (const float** floats : {&rate, &drawn}) *floats = static_cast<const float*>(*given++);
    next(velocity);
    for (const float** floats : {&basis, &back, &add, &amplitude}) *floats = static_cast<const float*>(*given++);
    for (const double** doubles : {&pull, &push, &shares, &sight}) *doubles = static_cast<const double*>(*given++);
    next(level), next(loss), next(total);
  }
};

// Elements of `out` and of this for a d x d matrix.
template <class X, class F>
void each_product(int64_t d, const double* matrix, const X* x, F f) {
  for (int64_t i = 0; i < d; i++) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < d; j++) sum += matrix[i * d + j] * x[j];
    f(i, sum);
  }
}

// p of a step at chain k, the `at`-th of all steps and chains, from its gradient. `scratch`: d + 3 k, or 2 d doubles.
void pull_of(const Updates& u, int64_t d, int64_t k, int64_t at, const float* g, float* pull, float* scratch) {
  const float* drawn = u.drawn + at * u.width;
  if (u.pull) {
    double* own = reinterpret_cast<double*>(scratch);
    for (int64_t i = 0; i < d; i++)
      own[i] = u.shares ? std::sqrt(std::max(0.0, 1.0 - u.level[k] * u.shares[k * d + i])) * drawn[i] : drawn[i];
    double* along = own + d;
    each_product(d, u.pull + k * d * d, g, [&](int64_t i, double sum) { along[i] = sum; });
    each_product(d, u.push + k * d * d, own, [&](int64_t i, double sum) { pull[i] = float(along[i] + sum); });
    return;
  }
  const float* rate = u.rate + (u.changes ? at : k) * d;
  if (u.k) {
    const int64_t n = u.k;
    displace_one(d, n, u.basis + k * n * d, u.back + k * n * n, u.add + k * n * n, rate, u.amplitude + k * d, g, drawn,
                 drawn + d, pull, scratch);
  } else {
    for (int64_t i = 0; i < d; i++) pull[i] = rate[i] * g[i] + drawn[i];
  }
}

// Gradient of a minibatch from those of its halves, whose difference tells the level of the noise.
float gradient_and_level(const Net& net, const Density& density, const float* precisions, const float* theta,
                         const float* x, const Targets& y, const Updates& u, int64_t k, float* g, float* other,
                         float* scratch) {
  const int64_t d = net.total, n = net.rows;
  Net first = net, second = net;
  first.rows = n / 2, second.rows = n - n / 2;
  const double share = double(first.rows) / n, scale = std::sqrt(double(first.rows) * second.rows) / n;
  const float one = gradient(first, density, precisions, theta, x, y, g, scratch);
  const float two = gradient(second, density, precisions, theta, x + first.rows * net.in,
                             y.from(density.classes ? first.rows : first.rows * net.outs), other, scratch);
  for (int64_t i = 0; i < d; i++) {
    const float difference = g[i] - other[i];
    g[i] = float(other[i] + share * difference);
    other[i] = float(scale * difference);
  }
  double seen = 0;
  each_product(d, u.sight + k * d * d, other, [&](int64_t, double sum) { seen += sum * sum; });
  u.level[k] += float(u.memory) * (float(seen) - u.level[k]);
  return float(share * one + (1.0 - share) * two);
}

// f(k, scratch) for each chain, shared among threads.
template <class F>
void each(int64_t chains, int64_t threads, int64_t scratch, F f) {
  const auto some = [&](int64_t first) {
    std::vector<float> own(scratch);
    for (int64_t k = first; k < chains; k += threads) f(k, own.data());
  };
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; t++) others.emplace_back(some, t);
  some(0);
  for (auto& other : others) other.join();
}

}  // namespace
}  // namespace isosgd

extern "C" {

// `x` of chain k begins at `k * apart`, so that chains may share it.
void isosgd_forward(const int64_t* numbers, int64_t chains, int64_t threads, const float* theta, const float* x,
                    int64_t apart, float* out, float* kept) {
  using namespace isosgd;
  const Net net(numbers);
  each(chains, threads, forward_scratch(net), [&](int64_t k, float* scratch) {
    const float *own = theta + k * net.total, *rows_of = x + k * apart;
    turn(net, own, scratch);
    each_block(net, [&](int64_t begin, int64_t rows) {
      forward(net, own, scratch, rows, rows_of + begin * net.in, out + (k * net.rows + begin) * net.outs,
              kept + net.kept(k * net.rows + begin), scratch + net.turned());
    });
  });
}

void isosgd_backward(const int64_t* numbers, int64_t chains, int64_t threads, const float* theta, const float* x,
                     int64_t apart, const float* kept, const float* slope, float* found) {
  using namespace isosgd;
  const Net net(numbers);
  each(chains, threads, backward_scratch(net), [&](int64_t k, float* scratch) {
    const float* own = theta + k * net.total;
    float *mine = found + k * net.total, *sums = scratch;
    std::fill_n(mine, net.total, 0.0f), std::fill_n(sums, net.weights(), 0.0f);
    each_block(net, [&](int64_t begin, int64_t rows) {
      backward(net, own, rows, x + k * apart + begin * net.in, kept + net.kept(k * net.rows + begin),
               slope + (k * net.rows + begin) * net.outs, mine, sums, sums + net.weights());
    });
    finish(net, own, sums, mine);
  });
}

// Loss and gradient with the prior's part. `about`: `Density` as doubles; targets `y` of chain k begin at `k * beyond`.
void isosgd_gradient(const int64_t* numbers, int64_t chains, int64_t threads, const float* theta, const float* x,
                     int64_t apart, const void* y, int64_t beyond, const double* about, const float* precisions,
                     float* found, float* loss) {
  using namespace isosgd;
  const Net net(numbers);
  const Density density(about);
  each(chains, threads, gradient_scratch(net), [&](int64_t k, float* scratch) {
    loss[k] = gradient(net, density, precisions, theta + k * net.total, x + k * apart, Targets(y, k * beyond, density.classes),
                       found + k * net.total, scratch);
  });
}

// Steps, each on a minibatch of its own, that begins at `apart` or `beyond` times `s * chains + k`; moves `theta`, and
// velocities and levels of the noise. Finds the last losses and the sums over steps.
void isosgd_steps(const int64_t* numbers, int64_t chains, int64_t threads, float* theta, const float* x, int64_t apart,
                  const void* y, int64_t beyond, const double* about, const float* precisions, const int64_t* sizes,
                  const double* factors, void* const* given) {
  using namespace isosgd;
  const Net net(numbers);
  const Density density(about);
  const Updates u(sizes, factors, given);
  const int64_t d = net.total, own = std::max(gradient_scratch(net), std::max(d + 3 * u.k, 4 * d));
  each(chains, threads, 2 * d + own, [&](int64_t k, float* scratch) {
    float *g = scratch, *other = g + d, *more = other + d, *place = theta + k * d, sum = 0;
    for (int64_t s = 0; s < u.steps; s++) {
      const int64_t at = s * chains + k;
      const float* rows = x + at * apart;
      const Targets targets(y, at * beyond, density.classes);
      const float loss = u.sight ? gradient_and_level(net, density, precisions, place, rows, targets, u, k, g, other, more)
                                 : gradient(net, density, precisions, place, rows, targets, g, more);
      sum += u.loss[k] = loss;
      pull_of(u, d, k, at, g, other, more);
      if (u.friction < 0) {
        for (int64_t i = 0; i < d; i++) place[i] -= other[i];
        continue;
      }
      float *velocity = u.velocity + k * d, kept = float(1.0 - u.friction);
      for (int64_t i = 0; i < d; i++) place[i] += velocity[i] = kept * velocity[i] - other[i];
    }
    u.total[k] = sum;
  });
}

// Steps inside trajectories; moves `theta`, `velocity` and `gained`.
void isosgd_leapfrog(const int64_t* numbers, int64_t chains, int64_t threads, float* theta, const float* x,
                     int64_t apart, const void* y, int64_t beyond, const double* about, const float* precisions,
                     int64_t steps, const float* own, double unit, int64_t directions, const float* basis,
                     const float* back, const float* rate, float* velocity, float* gained, float* loss) {
  using namespace isosgd;
  const Net net(numbers);
  const Density density(about);
  const int64_t d = net.total, n = directions;
  each(chains, threads, 2 * d + std::max(gradient_scratch(net), 2 * n), [&](int64_t k, float* scratch) {
    loss[k] = leapfrog(net, density, precisions, steps, own[k], unit, n, basis + k * n * d, back + k * n * n,
                       rate + k * d, x + k * apart, Targets(y, k * beyond, density.classes), theta + k * d, velocity + k * d, gained + k,
                       scratch);
  });
}
}
