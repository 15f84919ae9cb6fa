// The operations that torch sees: shapes, strides, and networks or chains shared among threads.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "lowrank.h"
#include "perceptron.h"

namespace isosgd {
namespace {

using at::Tensor;

int64_t leading(const Tensor& t, int64_t own) {
  int64_t count = 1;
  for (int64_t i = 0; i < t.dim() - own; i++) count *= t.size(i);
  return count;
}

// [networks, ...] from any number of leading dimensions. Only these may have gaps: weights are parts of flat vectors.
Tensor laid(const Tensor& t, int64_t own) {
  TORCH_CHECK(t.scalar_type() == at::kFloat && t.device().is_cpu(), "isosgd: float32 on a CPU");
  std::vector<int64_t> sizes{-1};
  for (int64_t i = t.dim() - own; i < t.dim(); i++) sizes.push_back(t.size(i));
  sizes[0] = leading(t, own);
  Tensor flat = t.reshape(sizes);
  int64_t step = 1;
  for (int64_t i = own; i > 0; step *= flat.size(i), i--)
    if (flat.size(i) != 1 && flat.stride(i) != step) return flat.contiguous();
  return flat;
}

// A tensor that must have these dimensions, for as many networks or chains as the others.
struct Part {
  Tensor tensor;
  Part(const Tensor& t, int64_t count, std::initializer_list<int64_t> sizes) {
    const int64_t own = sizes.size();
    TORCH_CHECK(t.dim() >= own, "isosgd: too few dimensions, ", t.sizes());
    tensor = laid(t, own);
    bool right = tensor.size(0) == count;
    int64_t i = 1;
    for (int64_t size : sizes) right = right && tensor.size(i++) == size;
    TORCH_CHECK(right, "isosgd: ", t.sizes(), " does not go with ", count, " of ", at::IntArrayRef(sizes));
  }
  const float* operator[](int64_t i) const { return tensor.const_data_ptr<float>() + i * tensor.stride(0); }
};

std::vector<int64_t> sized(const Tensor& like, int64_t own, std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> found(like.sizes().begin(), like.sizes().end() - own);
  found.insert(found.end(), sizes);
  return found;
}

// f(i, scratch) for each of several networks or chains, among threads where the work (products of one) is worth it.
template <class F>
void each(int64_t count, int64_t work, int64_t scratch, F f) {
  const int64_t grain = std::max<int64_t>(1, 200000 / std::max<int64_t>(1, work));
  at::parallel_for(0, count, grain, [&](int64_t a, int64_t b) {
    thread_local std::vector<float> own;
    if (own.size() < static_cast<size_t>(scratch)) own.resize(scratch);
    for (int64_t i = a; i < b; i++) f(i, own.data());
  });
}

std::tuple<Tensor, Tensor> perceptron(const Tensor& x_, const Tensor& w1_, const Tensor& b1_, const Tensor& w2_,
                                      const Tensor& b2_) {
  const int64_t n = x_.size(-2), D = x_.size(-1), H = w1_.size(-2), O = w2_.size(-2), B = leading(x_, 2);
  const Part x(x_, B, {n, D}), w1(w1_, B, {H, D}), b1(b1_, B, {H}), w2(w2_, B, {O, H}), b2(b2_, B, {O});
  TORCH_CHECK(H >= LANES, "perceptron: at least ", LANES, " hidden units");
  Tensor out = at::empty(sized(x_, 2, {n, O}), x_.options()), h = at::empty(sized(x_, 2, {n, H}), x_.options());
  float *po = out.mutable_data_ptr<float>(), *ph = h.mutable_data_ptr<float>();
  const Shape s{n, D, H, O};
  each(B, n * D * H, (D + 1) * H + O * s.vectors() * LANES, [&](int64_t i, float* scratch) {
    forward_one(s, x[i], w1[i], b1[i], w2[i], b2[i], po + i * n * O, ph + i * n * H, scratch);
  });
  return {out, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> perceptron_backward(const Tensor& x_, const Tensor& w2_, const Tensor& h_,
                                                               const Tensor& g_) {
  const int64_t n = x_.size(-2), D = x_.size(-1), H = w2_.size(-1), O = w2_.size(-2), B = leading(x_, 2);
  const Part x(x_, B, {n, D}), w2(w2_, B, {O, H}), h(h_, B, {n, H}), g(g_, B, {n, O});
  TORCH_CHECK(H >= LANES, "perceptron: at least ", LANES, " hidden units");
  Tensor dw1 = at::empty(sized(x_, 2, {H, D}), x_.options()), db1 = at::empty(sized(x_, 2, {H}), x_.options());
  Tensor dw2 = at::empty(sized(x_, 2, {O, H}), x_.options()), db2 = at::empty(sized(x_, 2, {O}), x_.options());
  float *p1 = dw1.mutable_data_ptr<float>(), *pb = db1.mutable_data_ptr<float>();
  float *p2 = dw2.mutable_data_ptr<float>(), *pc = db2.mutable_data_ptr<float>();
  const Shape s{n, D, H, O};
  each(B, n * D * H, BLOCK * H + D * H, [&](int64_t i, float* scratch) {
    backward_one(s, x[i], w2[i], h[i], g[i], p1 + i * H * D, pb + i * H, p2 + i * O * H, pc + i * O, scratch);
  });
  return {dw1, db1, dw2, db2};
}

Tensor lowrank_displace(const Tensor& basis_, const Tensor& back_, const Tensor& add_, const Tensor& rate_,
                        const Tensor& amplitude_, const Tensor& gradient_, const Tensor& own_, const Tensor& shared_) {
  const int64_t k = basis_.size(-2), d = basis_.size(-1), B = leading(basis_, 2);
  const Part basis(basis_, B, {k, d}), back(back_, B, {k, k}), add(add_, B, {k, k}), rate(rate_, B, {d});
  const Part amplitude(amplitude_, B, {d}), gradient(gradient_, B, {d}), own(own_, B, {d}), shared(shared_, B, {k});
  TORCH_CHECK(d >= LANES, "lowrank: at least ", LANES, " parameters");
  Tensor out = at::empty(gradient_.sizes(), gradient_.options());
  float* found = out.mutable_data_ptr<float>();
  each(B, d * k, d + 3 * k, [&](int64_t i, float* scratch) {
    displace_one(d, k, basis[i], back[i], add[i], rate[i], amplitude[i], gradient[i], own[i], shared[i], found + i * d,
                 scratch);
  });
  return out;
}

}  // namespace
}  // namespace isosgd

TORCH_LIBRARY_FRAGMENT(isosgd, m) {
  m.def("perceptron(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> (Tensor, Tensor)");
  m.def("perceptron_backward(Tensor x, Tensor w2, Tensor hidden, Tensor slope) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lowrank_displace(Tensor basis, Tensor back, Tensor add, Tensor rate, Tensor amplitude, Tensor gradient, Tensor own, "
      "Tensor shared) -> Tensor");
}
TORCH_LIBRARY_IMPL(isosgd, CPU, m) {
  m.impl("perceptron", &isosgd::perceptron);
  m.impl("perceptron_backward", &isosgd::perceptron_backward);
  m.impl("lowrank_displace", &isosgd::lowrank_displace);
}
