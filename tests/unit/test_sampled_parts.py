"""Which parameters are sampled: patterns, heads whose features are computed once, parameters in bfloat16."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks import decoder
from isosgd import SGHMC, SGLD, Sampler, Target, likelihoods, priors, sample
from isosgd.samplers.half import HalfParameters, halves, step_halves_, wide

SHORT = {"draws": 8, "keep_every": 3, "warmup": 100, "structure": "layer", "progress": False, "compile": False}
pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # runs this short do not settle


class Body(nn.Module):
    """A body and a head; `outside` puts something after the head."""

    def __init__(self, outside: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.outside = nn.Linear(3, 5), nn.Linear(5, 2), outside

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).tanh())
        return 2 * found if self.outside else found


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    x = torch.randn(300, 3, generator=generator)
    return x, (x[:, 0] + torch.randn(300, generator=generator) > 0).long()


@pytest.mark.parametrize(
    ("sampled", "names"),
    [
        ("requires_grad", ["body.weight", "body.bias", "head.weight", "head.bias"]),
        ("last_layer", ["head.weight", "head.bias"]),
        ("*.bias", ["body.bias", "head.bias"]),
        (["head.*", "body.weight"], ["body.weight", "head.weight", "head.bias"]),
        (lambda name, p: p.ndim == 1, ["body.bias", "head.bias"]),
    ],
)
def test_parameters_are_chosen_by_word_pattern_or_predicate(sampled, names, data):
    model = Body()
    target = Target.from_module(model, "categorical", sampled=sampled)
    assert list(target.initial()) == names
    posterior = sample(target, data, batch_size=20, **SHORT)
    assert list(posterior.draws) == names
    fixed = {name: p for name, p in model.named_parameters() if name not in names}
    assert all(torch.equal(target.frozen[name], p) for name, p in fixed.items())


def test_patterns_that_fit_nothing_are_refused():
    with pytest.raises(ValueError, match=r"'lora_\*' fits none of \['body.weight'"):
        Target.from_module(Body(), "categorical", sampled=["head.*", "lora_*"])
    with pytest.raises(ValueError, match="choose 'all', 'requires_grad'"):
        Target.from_module(Body(), "categorical", sampled=3)


def test_features_are_computed_once_where_the_head_gives_the_output(data):
    model = Body()
    target = Target.from_module(model, "categorical", sampled="last_layer")
    found = sample(target, data, batch_size=20, **SHORT)
    assert found.info["engine"].endswith("features of the head computed once")
    whole = Target.from_module(Body(outside=True), "categorical", sampled="last_layer")
    assert "features" not in sample(whole, data, batch_size=20, **SHORT).info["engine"]


def test_convergence_under_a_head_is_watched_at_held_out_inputs(data):
    target = Target.from_module(Body(), "categorical", sampled="last_layer")
    settings = {**SHORT, "draws": "auto", "budget": 20, "held_out": data[0][:10], "batch_size": 20}
    once = sample(target, data, **settings)
    each = sample(target, data, transform=lambda batch, generator: batch, **settings)
    assert "features" in once.info["engine"] and "features" not in each.info["engine"]
    assert once.info["stopped"] == each.info["stopped"]


def test_a_transform_keeps_features_from_being_reused_and_leaves_the_draws(data):
    target = Target.from_module(Body(), "categorical", sampled="last_layer")
    once = sample(target, data, batch_size=20, **SHORT)
    each = sample(target, data, batch_size=20, transform=lambda batch, generator: batch, **SHORT)
    assert "features" not in each.info["engine"]
    for name in once.draws:
        torch.testing.assert_close(once.draws[name], each.draws[name], rtol=1e-3, atol=1e-4)


def test_batchnorm_in_training_mode_keeps_features_from_being_reused(data):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        target = Target.from_module(model, "categorical", sampled="last_layer")
    assert "features" not in sample(target, data, batch_size=20, **SHORT).info["engine"]
    frozen = Target.from_module(model.eval(), "categorical", sampled="last_layer")
    assert "features" in sample(frozen, data, batch_size=20, **SHORT).info["engine"]


def test_a_stored_run_of_a_head_is_resumed_with_the_whole_network(tmp_path, data):
    target = Target.from_module(Body(), "categorical", sampled="last_layer")
    settings = {**SHORT, "batch_size": 20, "store": tmp_path / "run"}
    sample(target, data, **settings)
    again = sample(target, data, resume=True, **settings)
    longer = sample(target, data, resume=True, **{**settings, "draws": 10})
    assert again.predict(data[0]).mean.shape == (300, 2) and longer.num_draws == 10


def test_predictions_of_a_head_go_through_the_body_once_and_are_those_of_the_network(data):
    model, calls = Body(), []
    model.body.register_forward_hook(lambda *_: calls.append(1))
    target = Target.from_module(model, "categorical", sampled="last_layer")
    posterior = sample(target, data, batch_size=20, **SHORT)
    calls.clear()
    found = posterior.predict(data[0])
    assert len(calls) == 3  # two rows to check them, the trial, and all examples
    each = posterior.predict(data[0], function=lambda network, params, x: network(x).softmax(1))
    torch.testing.assert_close(found.mean, each.mean)
    torch.testing.assert_close(posterior.log_predictive(data), _by_hand(model, posterior, data))


def _by_hand(model: nn.Module, posterior, data) -> Tensor:
    each = []
    for draw in posterior:
        model.load_state_dict(draw, strict=False)
        each.append(model(data[0]).log_softmax(1)[torch.arange(len(data[1])), data[1]].detach())
    return torch.stack(each).logsumexp(0) - math.log(len(each))


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


class Level(nn.Module):
    """So many means, each a parameter."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((count,), 3.0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + x


def stochastically_rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    bits = x.view(torch.int32) + torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32)


def langevin(rounding, count: int, variance: float, rate: float, steps: int) -> float:
    """Variance over the posterior's, of steps of ``rate`` standard deviations squared, each rounded."""
    generator = torch.Generator().manual_seed(0)
    x, total, seen = torch.full((count,), 3.0), 0.0, 0
    for step in range(steps):
        x = x - rate * (x - 3.0) + math.sqrt(2 * rate * variance) * torch.randn(count, generator=generator)
        x = rounding(x, generator)
        if step > steps // 3:
            total, seen = total + float((x - 3.0).square().mean()), seen + 1
    return total / seen / variance


def test_small_steps_are_lost_in_bfloat16_and_too_large_by_stochastic_rounding():
    # Between two numbers of bfloat16 near 3 there are 0.0156; the posterior's standard deviation is 0.05.
    settings = {"count": 400, "variance": 0.05**2, "rate": 0.005, "steps": 3_000}
    exact = langevin(lambda x, g: x, **settings)
    lost = langevin(lambda x, g: x.bfloat16().float(), **settings)
    noisy = langevin(stochastically_rounded, **settings)
    assert exact == pytest.approx(1.0, abs=0.05)
    assert abs(lost - 1) > 0.3
    assert noisy > 1.5  # rounding adds a variance of its own at every step


@pytest.mark.long
def test_parameters_in_bfloat16_have_the_posteriors_variance():
    count, n, sd = 300, 400, 0.05  # as above
    y = 3.0 + sd * math.sqrt(n) * torch.randn(n, count, generator=torch.Generator().manual_seed(0))
    model = Level(count, torch.bfloat16)
    target = Target.from_module(model, likelihoods.Gaussian(sd * math.sqrt(n)), priors.Flat())
    posterior = sample(
        target, (torch.zeros(n, 1), y), batch_size=40, draws=60, keep_every=60, warmup=1500, structure="layer",
        progress=False,
    )  # fmt: skip
    draws = posterior.draws["mean"]
    assert draws.dtype == torch.float32 and model.mean.dtype == torch.bfloat16
    ratios = (draws[0] - y.mean(0)).square().mean(0) / sd**2  # of each mean, around what it should be
    assert float(ratios.mean()) == pytest.approx(1.0, abs=0.03 + 4 * float(ratios.std()) / math.sqrt(count))
    assert posterior.predict(torch.zeros(2, 1)).mean.shape == (2, count)


def levels(sampler: type[Sampler], dtype: torch.dtype, **settings) -> tuple[float, list[Tensor]]:
    """Variance over the posterior's of many means in a plain loop with exact gradients, and the last parameters."""
    count, n, sd = 400, 400, 0.05
    model = Level(count, dtype)
    optimizer = sampler(
        model.parameters(), num_data=n, generator=torch.Generator().manual_seed(0), noise="gaussian", **settings
    )
    total, seen = 0.0, 0
    for step in range(2_500):
        # The gradient at the float32 that the sampler holds, so that rounding in the model does not count here.
        low = optimizer.state[model.mean].get("low")
        mean = model.mean.detach() if low is None else wide(model.mean.detach().view(torch.int16), low)
        model.mean.grad = ((mean.float() - 3.0) / (n * sd**2)).to(dtype)
        optimizer.step()
        if step > 800:
            total, seen = total + float((mean.float() - 3.0).square().mean()), seen + 1
    return total / seen / sd**2, [model.mean.detach(), optimizer.state_dict()]


RATE = 0.005 * 400 * 0.05**2  # times the curvature: 0.005


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        (SGLD, {"lr": RATE}),
        pytest.param(SGLD, {"lr": RATE, "weight_decay": 1e-9}, marks=pytest.mark.long),  # the same steps: see below
        (SGHMC, {"lr": RATE / 20, "friction": 0.05}),
    ],
)
@pytest.mark.long
def test_samplers_in_a_loop_lose_nothing_in_bfloat16(sampler, settings):
    found, _ = levels(sampler, torch.bfloat16, **settings)
    # 1,700 steps relax 8 times: 400 means give an error of about 0.025; gradients in bfloat16 are off by up to 0.4%.
    assert found == pytest.approx(1.0, abs=0.1)


def test_halves_are_the_nearest_bfloat16_and_what_is_not_a_number_stays_none():
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7F800000], dtype=torch.int32)
    odd = bits.view(torch.float32)
    upper, low = halves(odd)
    assert torch.equal(upper.view(torch.bfloat16).isnan(), odd.isnan())
    assert torch.equal(wide(upper, low).isnan(), odd.isnan()) and float(upper.view(torch.bfloat16)[3]) == math.inf
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    upper, low = halves(x)
    assert torch.equal(wide(upper, low), x)
    assert bool(((upper.view(torch.bfloat16).float() - x).abs() <= (x.bfloat16().float() - x).abs()).all())


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_plain_step_is_the_same_as_one_with_float32_copies(kind, layout):
    """Which a step that may be captured in a graph makes."""

    def parameters(plain: bool) -> Tensor:
        p = nn.Parameter(torch.linspace(-3, 3, 72).view(2, 4, 3, 3).bfloat16().contiguous(memory_format=layout))
        start = p.detach().clone()
        sampler = kind([p], num_data=100, lr=1e-4, weight_decay=0.1, generator=torch.Generator().manual_seed(0),
                       innovations="normal", capturable=not plain)  # fmt: skip
        for step in range(5):
            p.grad = torch.full_like(p, 0.1 * step)
            sampler.step()
        assert not torch.equal(p.detach(), start)
        return wide(p.detach().view(torch.int16), sampler.state[p]["low"])

    torch.testing.assert_close(parameters(True), parameters(False), rtol=1e-6, atol=1e-7)


def test_a_loop_in_bfloat16_goes_on_from_its_state_and_float16_is_refused():
    def run(p: nn.Parameter, sampler: SGLD, steps: int) -> None:
        for _ in range(steps):
            p.grad = p.detach() * 0.5
            sampler.step()

    settings = {"num_data": 100, "lr": 1e-5}
    p = nn.Parameter(torch.linspace(-3, 3, 50).bfloat16())
    sampler = SGLD([p], generator=torch.Generator().manual_seed(0), **settings)
    run(p, sampler, 10)
    q = nn.Parameter(p.detach().clone())
    other = SGLD([q], generator=torch.Generator().manual_seed(5), **settings)
    other.load_state_dict(sampler.state_dict())
    run(p, sampler, 10)
    run(q, other, 10)
    assert torch.equal(p, q) and torch.equal(sampler.state[p]["low"], other.state[q]["low"])
    with pytest.raises(ValueError, match="float16 cannot be sampled in a loop"):
        SGLD([nn.Parameter(torch.zeros(3).half())], **settings)


def test_weights_that_are_set_to_zero_are_zero():
    """A mask knows of no lower halves; with a negative one the bits of zero would be no number."""
    for zero in (0, -(1 << 15)):
        upper, low = torch.tensor([zero] * 3, dtype=torch.int16), torch.tensor([-5, 0, 7], dtype=torch.int16)
        assert float(wide(upper, low).abs().max()) < 1e-37
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False).bfloat16()
    optimizer = SGLD(layer.parameters(), num_data=100, batch_size=10, lr=1e-3)
    mask = torch.arange(8) % 2
    for _ in range(20):
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        layer.weight.data.mul_(mask)
    assert bool(layer.weight.isfinite().all())


def test_a_step_in_bfloat16_without_gradients_is_refused():
    optimizer = SGLD(nn.Linear(2, 2).bfloat16().parameters(), num_data=100, batch_size=10, lr=1e-3)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.step()


def test_steps_with_and_without_copies_take_different_noise_and_can_be_resumed():
    """Noise that was prefetched for a step with float32 copies is not taken again by later steps without."""

    def made() -> tuple[nn.Linear, SGLD]:
        layer = nn.Linear(128, 128, bias=False).bfloat16()  # so many weights that noise is prefetched
        return layer, SGLD(layer.parameters(), num_data=1000, batch_size=10, lr=1e-3, noise="gaussian")

    def moved(layer: nn.Linear, optimizer: SGLD) -> Tensor:
        before = wide(layer.weight.detach().view(torch.int16), optimizer.half.low(layer.weight))
        layer.weight.grad = torch.zeros_like(layer.weight)
        optimizer.step()
        after = wide(layer.weight.detach().view(torch.int16), optimizer.half.low(layer.weight))
        return (after - before).flatten()

    torch.manual_seed(0)
    layer, optimizer = made()
    moves = torch.stack([moved(layer, optimizer) for _ in range(60)])
    for shift in range(12):
        both = torch.cat([moves[50:, : 16_384 - 16], moves[:10, shift : shift + 16_384 - 16]])
        assert float(both.corrcoef()[:10, 10:].abs().max()) < 6 / math.sqrt(16_368)
    state, weights = copy.deepcopy((optimizer.state_dict(), layer.state_dict()))
    wanted = [moved(layer, optimizer) for _ in range(3)]
    layer, optimizer = made()
    layer.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert all(torch.equal(moved(layer, optimizer), one) for one in wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kind", "lr"), [(SGLD, 0.02), (SGHMC, 1e-3)])
def test_the_kernel_has_the_posteriors_variance(kind, lr):
    """Of f / N = |theta - 1|^2 / 2 at T = .25 it is T / N, but for a hundredth by the step size."""
    count, n, temperature = 100_000, 1_000, 0.25
    p = nn.Parameter(torch.ones(count, device="cuda", dtype=torch.bfloat16))
    optimizer = kind([p], num_data=n, batch_size=50, lr=lr, temperature=temperature)
    found = []
    for step in range(3_000):
        p.grad = p.detach() - 1.0
        optimizer.step()
        if step > 1_000 and step % 50 == 0:
            found.append(wide(p.detach().view(torch.int16), optimizer.state[p]["low"]) - 1.0)
    assert float(torch.stack(found).square().mean()) * n / temperature == pytest.approx(1.0, abs=0.03)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(0,), (1,), (1023,), (1025,), (3, 4, 5, 6)])
def test_the_kernel_takes_the_steps_of_the_plain_code(shape):
    torch.manual_seed(0)
    for layout in (torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])):
        p = nn.Parameter(torch.randn(shape, device="cuda").to(torch.bfloat16, memory_format=layout))
        p.grad = torch.randn_like(p)
        half, generator = HalfParameters({p: {}}, [p]), torch.Generator("cuda").manual_seed(0)
        velocity, numbers = torch.randn_like(p, dtype=torch.float32), (0.01, 0.0, 0.1, 0.3)
        upper, low, own = p.detach().view(torch.int16).clone(), half.low(p).clone(), velocity.clone()
        step_halves_(upper, low, p.grad, torch.zeros_like(own), numbers, own)
        half.begin_step(generator)
        half.step_(p, numbers, generator, velocity)
        assert not half.unsupported_reason
        found = wide(p.detach().view(torch.int16), half.low(p))
        torch.testing.assert_close(found, wide(upper, low), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(velocity, own, rtol=1e-6, atol=1e-6)
        half.begin_step(generator)
        half.step_(p, (0.0, 1.0, 0.0, 1.0), generator)
        moves = wide(p.detach().view(torch.int16), half.low(p)) - found
        if p.numel() > 1_000:
            assert abs(float(moves.std()) - 1) < 4.5 / math.sqrt(2 * p.numel())


def test_modules_in_bfloat16_with_buffers_and_a_store(tmp_path, data):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).bfloat16().eval()
    target = Target.from_module(model, "categorical")
    posterior = sample(target, data, starts=[model], temperature=0.1, batch_size=20, store=tmp_path / "run", **SHORT)
    assert {x.dtype for x in posterior.draws.values()} == {torch.float32}
    found = posterior.predict(data[0]).mean
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    assert posterior.against_start(*data).start.nll > 0


def test_densities_that_start_in_bfloat16_are_sampled_in_float32():
    start = {"mu": torch.zeros(3, dtype=torch.bfloat16)}
    target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]).square().sum(-1), priors.Normal(10.0), init=start)
    posterior = sample(target, (torch.randn(100, 3, generator=torch.Generator().manual_seed(0)),), **SHORT)
    assert posterior.draws["mu"].dtype == torch.float32


@pytest.mark.long
def test_the_benchmark_of_a_decoder_runs():
    found = decoder.main(["--size", "tiny", "--rounds", "1", "--cases", "sgld"])
    assert set(found["cases"]) == {"adamw", "sgld"} and found["cases"]["sgld"]["ratio"] > 0
