"""What only a GPU shows: sampling there, and a whole step in a CUDA graph. Skipped where there is none.

Also runs without pytest: ``python tests/unit/test_cuda.py``.
"""

import copy

import torch

import isosgd
from experiments.images.captured import Chain, descend, one_cycle
from experiments.images.images import Images
from experiments.models import lenet5
from isosgd.demo.toy import Toy, compare
from isosgd.samplers.flat import Flat
from isosgd.samplers.fused import FusedStep


def test_sample_on_the_gpu():
    toy = Toy.make(0)
    posterior = isosgd.sample(
        toy.target, toy.data, batch_size=32, draws=600, keep_every=10, warmup=3000, device="cuda", progress=False
    )
    found = compare(posterior.draws["w"], toy)
    assert abs(found["trace_ratio"] - 1) < 0.15, found
    assert found["w2"] < 0.05, found


def test_a_captured_step_draws_fresh_noise_of_the_right_size():
    """Replays of one captured step with no gradient are a random walk with variance 2 rate T / N a step."""
    theta = torch.zeros(4096, device="cuda", requires_grad=True)
    theta.grad = torch.zeros_like(theta)
    generator = torch.Generator(device="cuda").manual_seed(0)
    sampler = isosgd.ISGD(
        [("theta", theta)], num_data=100, lam=2.0, noise="gaussian", capturable=True, generator=generator
    )
    sampler.observe()
    sampler.freeze()
    sampler.track_every = 10**9
    for group in sampler.param_groups:
        group["step"] = 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            sampler.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        sampler.step()
    with torch.no_grad():
        theta.zero_()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    expected = 100 * 2 * (1 / (100 * 2.0)) / 100
    ratio = float(theta.detach().var()) / expected
    assert abs(ratio - 1) < 4 * (2 / 4096) ** 0.5, ratio
    # A change of rate reaches the captured step, since it lives in a tensor.
    sampler.param_groups[0]["rate"].zero_()
    sampler.refresh()
    before = theta.detach().clone()
    graph.replay()
    assert torch.equal(before, theta.detach())


def test_gpu_and_cpu_take_the_same_step_but_for_the_noise():
    moved = []
    for device in ("cpu", "cuda"):
        theta = torch.ones(10, device=device, requires_grad=True)
        theta.grad = torch.linspace(0, 1, 10, device=device)
        sampler = isosgd.SGLD([("theta", theta)], num_data=100, lr=0.1, temperature=0.0)
        sampler.step()
        moved.append(theta.detach().cpu())
    torch.testing.assert_close(*moved)


def net_and_gradients():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 17, 3), torch.nn.Linear(5001, 7))
    net = net.to("cuda", memory_format=torch.channels_last)
    return net, [torch.randn_like(p) for p in net.parameters()]


def test_the_kernel_moves_parameters_as_the_plain_step_does():
    for friction in (1.0, 0.1):
        found = []
        for kernel in (False, True):
            net, grads = net_and_gradients()
            flat = Flat(list(net.parameters()))
            step = FusedStep(flat, [[0, 1], [2, 3]], decay=0.1, friction=friction)
            assert step.kernel is not None
            step.set([torch.tensor(0.1, device="cuda"), torch.tensor(0.2, device="cuda")])
            step.pace[0] = 0.5
            if not kernel:
                step.kernel = None
            for _ in range(3):
                step.step(grads, torch.zeros(1, dtype=torch.int64, device="cuda"))
            found.append(flat.values)
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_the_kernels_noise_has_the_moments_asked_for():
    size = 400_003
    p = torch.zeros(2, size, device="cuda")
    flat = Flat([p[0], p[1].clone()])
    step = FusedStep(flat, [[0], [1]])
    rates = [torch.tensor(0.1, device="cuda"), torch.tensor(0.3, device="cuda")]
    lams = [torch.tensor(2.0, device="cuda"), torch.tensor(0.75, device="cuda")]
    variance = torch.ones_like(flat.values)
    variance[:1000] = 10.0  # more than 2 lam: nothing is injected there
    step.set(rates, lams, variance)
    grads = [torch.zeros(size, device="cuda") for _ in range(2)]
    seen = []
    for key in (1, 2, 1):
        flat.values.zero_()
        step.step(grads, torch.tensor([key], device="cuda"))
        seen.append(flat.values.clone())
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert float(seen[0][:1000].abs().max()) == 0.0
    for group, first in ((0, 1000), (1, 0)):
        a, b = (flat.parts(x, [group])[0][first:].double() for x in seen[:2])
        n, expected = len(a), float(rates[group]) * (2 * float(lams[group]) - 1.0) ** 0.5
        z, w = a / expected, b / expected
        assert abs(float(z.mean())) < 4.5 / n**0.5
        assert abs(float(z.square().mean()) - 1) < 4.5 * (2 / n) ** 0.5 + 1e-3
        assert abs(float(z.pow(4).mean()) - 3) < 4.5 * (96 / n) ** 0.5 + 6e-3
        for other in (w, z.roll(1), z.roll(2), z.roll(1024)):  # neither keys nor neighbours go together
            assert abs(float((z * other).mean())) < 4.5 / n**0.5


def test_a_captured_chain_trains_and_a_copy_of_it_differs_by_its_seed_alone():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (2000,), generator=generator)
    pixels = torch.randint(60, (2000, 28, 28), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(2000), :, labels] = 255  # a bright column says which class it is
    images = Images.make(pixels, labels, 0.1, 0.3, "none", "cuda")
    torch.manual_seed(0)
    first = lenet5().to("cuda", memory_format=torch.channels_last)
    ends = []
    for seed in (3, 3, 4):
        chain = Chain(copy.deepcopy(first), images, 64, decay=1e-4, friction=0.1, noise=False, seed=seed)
        before = chain.flat.values.clone()
        chain.step(0)
        assert torch.equal(before, chain.flat.values)  # nothing moved while it was captured
        descend([chain], one_cycle(300, 0.02))
        ends.append(chain.flat.values.clone())
        assert float(chain.loss) < 0.1, float(chain.loss)
    torch.testing.assert_close(ends[0], ends[1], rtol=0.1, atol=0.05)
    assert float((ends[0] - ends[2]).abs().max()) > 1e-3


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed")
else:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
