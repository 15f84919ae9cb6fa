// Hidden layers of SiLU units beside a linear path, of several chains, and their gradient (see layers.py).
//
// Of a row x of one chain: h = x, then h = silu(W h + b) layer by layer, and out = skip x, to whose first entries
// gate (V h + c) is added. Without headers of torch, so that it is built in seconds.

#include <thread>
#include <vector>

#include "dense.h"

namespace isosgd {
namespace {

struct Layer {
  int64_t in, units, weight, bias;  // the last two: places in the parameters of a chain
};

// From the numbers that layers.py gives, in this order.
struct Net {
  int64_t total, rows, in, outs, curved, skip, gate, out, offset, count;
  const Layer* layers;
  explicit Net(const int64_t* n)
      : total(n[0]), rows(n[1]), in(n[2]), outs(n[3]), curved(n[4]), skip(n[5]), gate(n[6]), out(n[7]), offset(n[8]),
        count(n[9]), layers(reinterpret_cast<const Layer*>(n + 10)) {}
  const Layer& last() const { return layers[count - 1]; }
  int64_t units() const {
    int64_t sum = 0;
    for (int64_t l = 0; l < count; l++) sum += layers[l].units;
    return sum;
  }
  int64_t widest() const {
    int64_t most = 0;
    for (int64_t l = 0; l < count; l++) most = std::max(most, layers[l].units);
    return most;
  }
};

// What layer l gives for all rows, and behind it the derivatives.
template <class T>
T* kept_of(const Net& net, T* kept, int64_t l) {
  for (int64_t i = 0; i < l; i++) kept += 2 * net.rows * net.layers[i].units;
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

void transpose(const float* a, int64_t rows, int64_t columns, float* into) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t k = 0; k < columns; k++) into[k * rows + i] = a[i * columns + k];
}

void forward(const Net& net, const float* theta, const float* x, float* out, float* kept, float* scratch) {
  float* weights = scratch;
  for (int64_t l = 0; l < net.count; l++) {
    const Layer& layer = net.layers[l];
    transpose(theta + layer.weight, layer.units, layer.in, weights);
    weights += layer.units * layer.in;
  }
  for (int64_t begin = 0; begin < net.rows; begin += BLOCK) {
    const int64_t rows = std::min(BLOCK, net.rows - begin), H = net.last().units;
    const float *input = x + begin * net.in, *own = scratch;
    for (int64_t l = 0; l < net.count; l++) {
      const Layer& layer = net.layers[l];
      float *h = kept_of(net, kept, l) + begin * layer.units, *slope = h + net.rows * layer.units;
      const Shape s{rows, layer.in, layer.units, 0};
      products(s, input, own, theta + layer.bias, [&](int64_t at, Vec z) {
        const Vec sig = sigmoid(z), unit = z * sig;
        store(h + at, unit);
        store(slope + at, unit + sig * (1.0f - unit));
      });
      own += layer.units * layer.in;
      input = h;
    }
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < net.outs; o++) {
        float found = dot(x + (begin + r) * net.in, theta + net.skip + o * net.in, net.in);
        if (o < net.curved)
          found += theta[net.gate] * (dot(input + r * H, theta + net.out + o * H, H) + theta[net.offset + o]);
        out[(begin + r) * net.outs + o] = found;
      }
  }
}

void backward(const Net& net, const float* theta, const float* x, const float* kept, const float* slope, float* found,
              float* scratch) {
  const int64_t H = net.last().units;
  const float gate = theta[net.gate];
  float *d = scratch, *next = d + BLOCK * net.widest(), *sums = next + BLOCK * net.widest();  // sums: [in][units] each
  int64_t size = 0;
  for (int64_t l = 0; l < net.count; l++) size += net.layers[l].in * net.layers[l].units;
  std::fill_n(sums, size, 0.0f), std::fill_n(found, net.total, 0.0f);
  for (int64_t begin = 0; begin < net.rows; begin += BLOCK) {
    const int64_t rows = std::min(BLOCK, net.rows - begin);
    const float *h = kept_of(net, kept, net.count - 1) + begin * H, *bend = h + net.rows * H;
    std::fill_n(d, rows * H, 0.0f);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < net.outs; o++) {
        const float g = slope[(begin + r) * net.outs + o];
        add(found + net.skip + o * net.in, g, x + (begin + r) * net.in, net.in);
        if (o >= net.curved) continue;
        add(found + net.out + o * H, g, h + r * H, H);
        add(d + r * H, gate * g, theta + net.out + o * H, H);
        found[net.offset + o] += g;
      }
    for (int64_t i = 0; i < rows * H; i++) d[i] *= bend[i];
    float* sum = sums + size;
    for (int64_t l = net.count - 1; l >= 0; l--) {
      const Layer& layer = net.layers[l];
      const float* input = l ? kept_of(net, kept, l - 1) + begin * layer.in : x + begin * layer.in;
      sum -= layer.in * layer.units;
      for (int64_t r = 0; r < rows; r++) add(found + layer.bias, 1.0f, d + r * layer.units, layer.units);
      add_weights(Shape{rows, layer.in, layer.units, 0}, input, d, sum);
      if (!l) break;
      const float* slopes = input + net.rows * layer.in;
      products(Shape{rows, layer.units, layer.in, 0}, d, theta + layer.weight, nullptr,
               [&](int64_t at, Vec z) { store(next + at, z * load(slopes + at)); });
      std::swap(d, next);
    }
  }
  for (int64_t l = 0; l < net.count; l++) {
    const Layer& layer = net.layers[l];
    transpose(sums, layer.in, layer.units, found + layer.weight);
    sums += layer.in * layer.units;
  }
  found[net.gate] = dot(found + net.out, theta + net.out, net.curved * H) +
                    dot(found + net.offset, theta + net.offset, net.curved);
  for (int64_t i = 0; i < net.curved * H; i++) found[net.out + i] *= gate;
  for (int64_t o = 0; o < net.curved; o++) found[net.offset + o] *= gate;
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
  const isosgd::Net net(numbers);
  isosgd::each(chains, threads, net.total, [&](int64_t k, float* scratch) {
    isosgd::forward(net, theta + k * net.total, x + k * apart, out + k * net.rows * net.outs,
                    kept + k * 2 * net.rows * net.units(), scratch);
  });
}

void isosgd_backward(const int64_t* numbers, int64_t chains, int64_t threads, const float* theta, const float* x,
                     int64_t apart, const float* kept, const float* slope, float* found) {
  const isosgd::Net net(numbers);
  isosgd::each(chains, threads, net.total + 2 * isosgd::BLOCK * net.widest(), [&](int64_t k, float* scratch) {
    isosgd::backward(net, theta + k * net.total, x + k * apart, kept + k * 2 * net.rows * net.units(),
                     slope + k * net.rows * net.outs, found + k * net.total, scratch);
  });
}
}
