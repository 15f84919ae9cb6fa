"""One chain on a GPU runs as CUDA graphs, and samples what it should."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from isosgd import Target, priors, sample
from isosgd.engine import leapfrog
from isosgd.engine.compiled import Captured
from isosgd.engine.fused import FlatParameters, FusedStep
from isosgd.engine.schedule import Schedule
from isosgd.samplers.program import Directions, Elementwise
from isosgd.tables.network import Network

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning"),  # warm-ups are short
]

N, SIGMA = 2_000, 0.5


def regression() -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A linear model of known noise, its data, and the exact mean and covariance of its slopes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator) * torch.tensor([1.0, 0.7, 1.3, 1.0])
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + SIGMA * torch.randn(N, generator=generator)
    precision = x.T @ x / SIGMA**2 + torch.eye(4)
    covariance = torch.linalg.inv(precision)
    model = nn.Linear(4, 1, bias=False).cuda()

    def likelihood(output: Tensor, y: Tensor) -> Tensor:
        return -0.5 * ((y - output.squeeze(-1)) / SIGMA).square()

    target = Target.from_module(model, likelihood, priors.Normal(1.0))
    return target, (x.cuda(), y.cuda()), covariance @ (x.T @ y) / SIGMA**2, covariance


@pytest.mark.parametrize(
    ("more", "temperature"),
    [
        ({"structure": "diagonal"}, 1.0),
        ({"structure": "diagonal"}, 0.1),
        ({"structure": "layer", "correction": "diagonal", "summary": "sum"}, 1.0),
        ({"structure": "layer"}, 0.1),
        ({"structure": "lowrank"}, 1.0),
        ({"structure": "kronecker"}, 0.1),
        ({"method": "sgld"}, 1.0),
        ({"method": "sghmc"}, 1.0),  # colder its rate, which nothing corrects, is so low that it does not mix here
    ],
)
def test_the_graph_samples_the_known_posterior(more: dict[str, Any], temperature: float) -> None:
    target, data, mean, covariance = regression()
    posterior = sample(
        target, data, draws=1_200, keep_every=100, batch_size=64, temperature=temperature, progress=False, **more
    )
    assert "CUDA graph of whole steps" in posterior.info["engine"]
    off = (posterior.draws["weight"][0, :, 0].double() - mean) / (temperature * covariance.diagonal()).sqrt()
    for found, wanted in ((off, 0.0), (off.square(), 1.0)):
        parts = found.unflatten(0, (20, 60)).mean(1)  # far longer than draws are correlated
        error = parts.std(0) / 20**0.5
        assert float(((parts.mean(0) - wanted) / (error + 0.01)).abs().max()) < 5  # .01: the bias of a finite rate


def test_cycles_are_captured_with_the_rates_of_every_step() -> None:
    """All examples are the same, and there is next to no noise: where a chain goes does not depend on the engine."""
    target, _, _, _ = regression()
    data = torch.ones(200, 4, device="cuda"), torch.full((200,), 2.0, device="cuda")
    settings: dict[str, Any] = {"method": "csghmc", "lr": 0.01, "cycle": 40, "exploration": 0.5, "temperature": 1e-14}
    settings |= {"warmup": 0, "draws": 20, "keep_every": 1, "batch_size": 50, "progress": False}
    captured, plain = sample(target, data, **settings), sample(target, data, compile=False, **settings)
    assert "CUDA graph of whole steps" in captured.info["engine"] and "graph" not in plain.info["engine"]
    torch.testing.assert_close(captured.draws["weight"], plain.draws["weight"], rtol=1e-4, atol=1e-5)
    assert float(plain.draws["weight"][0].std(0).max()) > 1e-4  # it moves


def test_batches_of_a_loader_are_copied_into_fixed_places_and_a_short_one_is_taken_without_a_graph() -> None:
    target, (x, y), mean, _ = regression()
    loader = DataLoader(TensorDataset(x.cpu()[:1_950], y.cpu()[:1_950]), batch_size=100, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = sample(
            target, loader, device="cuda", draws=50, keep_every=25, structure="diagonal", warmup=800, progress=False
        )
    assert "CUDA graph of whole steps" in posterior.info["engine"]
    assert float((posterior.draws["weight"][0, :, 0].mean(0) - mean).abs().max()) < 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).cuda()


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randint(0, 256, (600, 1, 8, 8), dtype=torch.uint8, device="cuda")
    return x, (x.float().mean((1, 2, 3)) / 256 * 3).long().clamp(0, 2)


def floats(batch: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = batch[0].float() / 128 - 1
    return x + 0.01 * torch.randn(x.shape, generator=generator, device=x.device), batch[1]


def run(**more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = Target.from_module(network(), "categorical", autocast="bfloat16", channels_last=True)
        return sample(
            target, images(), batch_size=50, warmup=600, keep_every=20, temperature=0.01, structure="diagonal",
            transform=floats, progress=False, **more,
        )  # fmt: skip


def test_networks_with_batchnorm_in_bfloat16_have_statistics_of_every_draw() -> None:
    posterior = run(draws=6)
    assert "CUDA graph of whole steps" in posterior.info["engine"]
    assert posterior.buffers["1.running_mean"].shape == (1, 6, 8)
    x, _ = images()
    logits = posterior.predict(x.float() / 128 - 1).mean
    assert logits.shape == (600, 3) and bool(logits.isfinite().all())


def several(count: int, **more: Any) -> Any:
    """Chains around several networks, whose statistics of BatchNorm differ."""
    x, y = images()
    nets = [network() for _ in range(count)]
    for k, net in enumerate(nets):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).cuda())
            net(floats((x[100 * k : 100 * k + 200], y), torch.Generator("cuda").manual_seed(k))[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = Target.from_module(network(), "categorical")
        settings: dict[str, Any] = {"method": "sghmc", "lr": 1e-4, "warmup": 0, "temperature": 0.01, "draws": 5}
        settings |= {"keep_every": 150, "batch_size": 50, "transform": floats, "progress": False}
        return sample(target, (x, y), starts=nets, **settings | more)


def test_several_starts_run_side_by_side_and_give_the_draws_that_they_give_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = several(3)
    assert found.info["engine"].startswith("3 side by side") and "CUDA graph of whole steps" in found.info["engine"]
    stored = several(3, store=tmp_path / "run")
    monkeypatch.setattr(Schedule, "most_side_by_side", 1)  # as on a GPU whose memory is full: no setting asks for it
    in_turn = several(3)
    assert in_turn.info["engine"].startswith("in turn")
    for name, x in found.draws.items():
        torch.testing.assert_close(x, in_turn.draws[name], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(stored.draws[name], in_turn.draws[name], rtol=1e-3, atol=1e-4)
        assert float((x[0] - x[1]).abs().max()) > 1e-2
    for name, x in found.buffers.items():
        torch.testing.assert_close(x, in_turn.buffers[name], rtol=1e-3, atol=1e-3)


def test_side_by_side_chains_end_in_time_with_as_many_draws_of_each() -> None:
    several(3, draws=1)  # compiles kernels
    found = several(3, draws=5_000, max_seconds=8.0)
    assert found.info["stopped"].startswith("max_seconds") and 1 <= found.num_draws < 5_000
    assert found.num_chains == 3


@pytest.mark.parametrize("exact", [False, True])
def test_the_kernels_move_along_directions_as_the_geometry_does(exact: bool) -> None:
    """Without noise exactly; with noise the steps have the covariance that the tensors say."""
    torch.manual_seed(0)
    shapes, k = ((3, 5), (1_100,), (2, 3, 2, 2)), 5
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    sizes = [p.numel() for p in params]
    d = sum(sizes)

    def split(v: Tensor) -> list[Tensor]:
        return [x.view(p.shape) for x, p in zip(torch.split(v, sizes), params, strict=True)]

    def joined(tensors: Any) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    basis = torch.randn(k, d, device="cuda") / d**0.5
    back, add, undo = 0.1 * torch.randn(k, k, device="cuda"), *torch.randn(2, k, k, device="cuda")
    rate, amplitude, reach = torch.rand(3, d, device="cuda") + 0.1
    zero = torch.zeros(k, k, device="cuda")
    taken = (undo, reach) if exact else ()
    quiet = Directions(basis, back, zero, *((undo, 0 * reach) if exact else ()))
    flat, decays = FlatParameters(params), [0.5, 0.1, 0.0]
    fused = FusedStep(
        flat, Elementwise(split(rate), split(0 * rate), True, directions=quiet), decays, torch.Generator("cuda")
    )
    g, gradient = torch.randn(d, device="cuda"), torch.zeros_like(flat.values)
    flat.join(split(g), gradient)
    before = joined(params)
    fused.step(gradient)
    force = g + joined(torch.full(p.shape, c, device="cuda") for p, c in zip(params, decays, strict=True)) * before
    torch.testing.assert_close(
        joined(params), before - rate * force - basis.T @ (back @ (basis @ force)), rtol=1e-4, atol=1e-4
    )

    assert fused.set(
        Elementwise(split(rate), split(rate * amplitude), True, directions=Directions(basis, back, add, *taken))
    )
    gradient.zero_(), fused.decays.zero_()
    n, seen = 20_000, torch.cat([basis, torch.randn(3, d, device="cuda")])
    places = []
    for _ in range(n + 1):
        places.append(seen @ joined(params))
        fused.step(gradient)
    moves = torch.stack(places).diff(dim=0).double()

    def moved(own: Tensor, shared: Tensor) -> Tensor:
        along = (amplitude * own) @ basis.T @ back.T + shared @ add.T
        if exact:
            along = along + (reach * own) @ basis.T @ undo.T
        return (rate * amplitude * own + along @ basis) @ seen.T

    each = moved(torch.eye(d, device="cuda"), torch.zeros(d, k, device="cuda"))
    both = moved(torch.zeros(k, d, device="cuda"), torch.eye(k, device="cuda"))
    variance = 0.5 * (each.square().sum(0) + both.square().sum(0)).double()  # innovations are means of two
    error = (3 / n) ** 0.5  # of a variance whose neighbours have a correlation of a half
    assert float((moves.square().mean(0) / variance - 1).abs().max()) < 5 * error
    assert float(((moves[1:] * moves[:-1]).mean(0) / variance - 0.5).abs().max()) < 5 * error


def test_the_same_seed_gives_the_same_draws() -> None:
    one, two = run(draws=6), run(draws=6)
    for name, x in one.draws.items():
        assert torch.allclose(x, two.draws[name], atol=1e-3)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Stopped in the middle by a transform that counts its calls on the host, which captured steps do not make."""
    target, data, _, _ = regression()
    settings = {"keep_every": 10, "batch_size": 64, "structure": "diagonal", "warmup": 800, "progress": False}
    whole = sample(target, data, draws=8, **settings)
    stored = sample(target, data, draws=8, store=tmp_path / "run", **settings)
    assert torch.equal(whole.draws["weight"], stored.draws["weight"])


def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + float(self.weight.detach().sum()) * 0

    target = Target.from_module(Looks(4, 1).cuda(), "gaussian")
    data = torch.randn(200, 4, device="cuda"), torch.randn(200, 1, device="cuda")
    posterior = sample(target, data, draws=3, warmup=300, keep_every=5, structure="layer", progress=False)
    assert "eager (" in posterior.info["engine"]


def test_a_capture_that_fails_leaves_generators_and_values_as_they_were() -> None:
    torch.cuda.manual_seed(3)
    generator, kept = torch.Generator("cuda").manual_seed(5), torch.zeros(2, device="cuda")
    wanted = torch.randn(4, device="cuda", generator=torch.Generator("cuda").manual_seed(5))

    def waits() -> None:
        kept.add_(torch.rand(2, device="cuda", generator=generator))
        float(torch.rand(2, device="cuda").sum())

    with pytest.raises(RuntimeError):
        Captured(waits, [generator], [kept])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.randn(4, device="cuda", generator=generator), wanted)
    drawn = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(drawn, torch.randn(4, device="cuda")) and float(kept.abs().sum()) == 0

    def adds() -> None:
        kept.add_(1.0)

    Captured(adds, [generator], [kept])()
    assert kept.tolist() == [1.0, 1.0]


def test_leapfrog_steps_are_replayed_and_otherwise_taken_by_the_host() -> None:
    data, curvature = torch.randn(2, 5, 3, device="cuda"), torch.rand(2, 3, device="cuda")

    def loop(
        count: Tensor, theta: Tensor, velocity: Tensor, gained: Tensor, own: Tensor, batch: Any, shape: Any
    ) -> Any:
        for _ in range(int(count)):
            pull = own * shape[0] * (theta - batch[0].mean(1))
            gained = gained + (pull * velocity).sum(-1)
            velocity = velocity - pull
            theta = theta + velocity
        return theta, velocity, gained, theta.square().mean(-1)

    def waits(*args: Any) -> Any:
        float(args[1].sum())  # a capture may not wait for the device
        return loop(*args)

    theta, velocity = torch.randn(2, 2, 3, device="cuda").unbind()
    replayed, plain = leapfrog.GraphLoop(loop), leapfrog.GraphLoop(waits)
    for count, factor in ((3, 1.0), (1, 1.0), (7, 2.0)):  # the step size and Lambda may change from call to call
        args = theta, velocity, velocity[:, 0], torch.full((2, 1), 0.1 * factor, device="cuda")
        given = torch.tensor(count), *args, (data,), (factor * curvature,)
        for found, wanted, other in zip(replayed(*given), loop(*given), plain(*given), strict=True):
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(other, wanted)
    assert replayed.graph is not None and not replayed.failure
    assert plain.graph is None and plain.failure


def test_trajectories_of_a_network_of_tables_are_a_graph() -> None:
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    posterior = sample(
        Network(4, 1, "student_t", (16, 16, 16)).target(), (x, x[:, :1].sin()), method="hmc", chains=4, draws=3,
        keep_every=4, warmup=300, seed=0, device="cuda", compile=False, progress=False,
    )  # fmt: skip
    assert "CUDA graph of leapfrog steps" in posterior.info["engine"]
