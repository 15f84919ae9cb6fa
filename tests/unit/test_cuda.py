"""What only a GPU shows: sampling there, and a whole step in a CUDA graph. Skipped where there is none.

Also runs without pytest: ``python tests/unit/test_cuda.py``.
"""

import torch

import isosgd
from isosgd.demo.toy import Toy, compare


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


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed")
else:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
