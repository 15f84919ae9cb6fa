"""The fused step where there is no GPU; `test_cuda.py` has the kernel."""

import pytest
import torch

import isosgd
from isosgd.samplers.flat import ALIGN, Flat
from isosgd.samplers.fused import FusedStep


def net():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 17, 3), torch.nn.Linear(41, 7))
    return layers.to(memory_format=torch.channels_last)


def test_a_flat_layout_keeps_values_shapes_and_order_of_memory():
    model = net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = Flat(list(model.parameters()))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.stride() == before[name].stride()
    assert all(offset % ALIGN == 0 for offset in flat.offsets)
    flat.values.fill_(2.0)
    assert all(bool((p == 2.0).all()) for p in model.parameters())
    out = flat.join([before[name] for name in before], torch.zeros_like(flat.values))
    for view, x in zip(flat.views(out), before.values(), strict=True):
        assert torch.equal(view, x)
    assert torch.cat(flat.parts(out, [0, 1])).numel() == sum(p.numel() for p in model[0].parameters())
    assert float(out.double().sum()) == pytest.approx(sum(float(x.double().sum()) for x in before.values()))


@pytest.mark.parametrize("friction", [1.0, 0.1])
def test_without_noise_a_step_is_the_formula(friction):
    model = net()
    flat = Flat(list(model.parameters()))
    step = FusedStep(flat, [[0, 1], [2, 3]], decay=0.1, friction=friction, noise=False)
    step.set([torch.tensor(0.1), torch.tensor(0.2)])
    step.pace[0] = 0.5
    rates = [0.05, 0.05, 0.1, 0.1]
    theta = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(x) for x in theta]
    for _ in range(3):
        grads = [torch.randn_like(p) for p in model.parameters()]
        step.step(grads, torch.zeros(1, dtype=torch.int64))
        for i, g in enumerate(grads):
            velocity[i] = (1 - friction) * velocity[i] - rates[i] * (g + 0.1 * theta[i])
            theta[i] = theta[i] + velocity[i]
    for p, x in zip(model.parameters(), theta, strict=True):
        torch.testing.assert_close(p.detach(), x)


def test_noise_makes_up_for_the_gradients_as_isgd_does():
    size, num_data, lam, temperature = 40_000, 50, 2.0, 0.3
    variance = torch.full((size,), 3.0)
    variance[:100] = 5.0  # more than 2 lam
    plain = torch.zeros(size, requires_grad=True)
    plain.grad = torch.ones(size)
    sampler = isosgd.ISGD(
        [("w.weight", plain)], num_data=num_data, temperature=temperature, lam=lam, noise="gaussian", track_every=10**9
    )
    rate = float(sampler.rate(sampler.param_groups[0]))
    assert rate == pytest.approx(temperature / (num_data * lam))
    flat = Flat([torch.zeros(size)])
    step = FusedStep(flat, [[0]])
    step.set([torch.tensor(rate)], [torch.tensor(lam)], variance)
    step.step([torch.ones(size)], torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(0))
    moved = flat.values + rate
    assert float(moved[:100].abs().max()) < 1e-7
    ratio = float(moved[100:].double().var()) / (2 * rate**2 * (lam - 3.0 / 2))
    assert abs(ratio - 1) < 4.5 * (2 / size) ** 0.5 + 1e-3
    assert abs(float(moved[100:].double().mean())) < 4.5 * rate / size**0.5
    step.pace[1] = 0.0
    flat.values.zero_()
    step.step([torch.ones(size)], torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(flat.values, torch.full((size,), -rate))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="params is empty"):
        Flat([])
    with pytest.raises(ValueError, match=r"torch\.float64"):
        Flat([torch.zeros(2, dtype=torch.float64)])
    flat = Flat([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ValueError, match="friction = 0"):
        FusedStep(flat, [[0], [1]], friction=0.0)
    with pytest.raises(ValueError, match="decay = -1"):
        FusedStep(flat, [[0], [1]], decay=-1.0)
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        FusedStep(flat, [[0]])
    step = FusedStep(flat, [[0], [1]])
    with pytest.raises(ValueError, match="must be float32 with those of its"):
        step._addresses_of([torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
