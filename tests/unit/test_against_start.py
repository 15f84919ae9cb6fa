"""The average over draws against the trained networks that it began with."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isosgd
from isosgd import Comparison, Posterior, SamplingWarning, Target, likelihoods, priors
from isosgd.metrics import accuracy, brier, ece, rmse
from isosgd.posterior.comparison import ensemble_curve
from isosgd.store import DamagedError


def networks(count: int, outputs: int = 3) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)) for _ in range(count)]


def around(networks: list[Any], likelihood: Any = "categorical", spread: float = 0.1, **options: Any) -> Posterior:
    """A chain of five draws around each network."""
    made, states = torch.Generator().manual_seed(1), [network.state_dict() for network in networks]
    draws = {
        name: torch.stack([s[name] + spread * torch.randn(5, *x.shape, generator=made) for s in states])
        for name, x in networks[0].named_parameters()
    }
    return Posterior(Target.from_module(networks[0], likelihood), draws, {}, **options)


def examples(n: int = 40) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    x = torch.randn(n, 2, generator=made)
    return x, torch.randint(0, 3, (n,), generator=made)


def test_a_chain_that_was_dropped_takes_its_network_with_it() -> None:
    starts = networks(3)
    whole = around(starts, spread=0.0, starts=starts)
    whole.info["chain_indices"] = [0, 1, 2]  # as `sample` has it
    part = whole.select(chains=[0, 2]).with_starts(0.5)
    for chain, number in ((0, 0), (1, 2)):
        assert torch.equal(part.draw(chain, 0)["0.weight"], starts[number].state_dict()["0.weight"])


def test_scores_are_those_of_the_start_and_of_the_average() -> None:
    (model,), (x, y) = networks(1), examples()
    posterior = around([model])
    found = posterior.against_start(x, y, starts=model, batch_size=7)
    with torch.no_grad():
        logits = model(x)
    before, after = nn.functional.cross_entropy(logits, y, reduction="none"), -posterior.log_predictive((x, y))
    assert found.start.nll == pytest.approx(float(before.mean()), rel=1e-5)
    assert found.average.nll == pytest.approx(float(after.mean()), rel=1e-5)
    assert found.difference == pytest.approx(float((after - before).mean()), abs=1e-6)
    assert found.standard_error == pytest.approx(float((after - before).std() / math.sqrt(40)), rel=1e-3)
    assert found.ratio == pytest.approx(float(after.mean() / before.mean()), rel=1e-5)
    for name, score in {"accuracy": accuracy, "brier": brier, "ece": ece}.items():
        assert getattr(found.start, name) == pytest.approx(float(score(logits.softmax(1), y)), abs=1e-5)
        assert getattr(found.average, name) == pytest.approx(float(score(posterior.predict(x).mean, y)), abs=1e-5)
    assert (found.single, found.worth, found.curve, found.start.rmse) == (None, None, (), None)
    assert (found.starts, found.draws, found.examples) == (1, 5, 40)
    assert json.loads(json.dumps(found.as_dict()))["average"]["nll"] == found.average.nll


def test_draws_at_the_start_make_no_difference_and_better_ones_help() -> None:
    (model,), (x, _) = networks(1), examples(200)
    y = model(x).argmax(1)
    same = around([model], spread=0.0).against_start(x, y, starts=[model])
    assert same.difference == pytest.approx(0.0, abs=1e-6)
    assert same.ratio == pytest.approx(1.0, rel=1e-5)
    assert not same.helps
    assert "no difference" in str(same)
    wrong = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    better = around([model]).against_start(x, y, starts=[wrong.state_dict()])
    assert better.helps
    assert better.ratio < 1
    assert "better in the mean of 200 examples" in str(better)
    worse = around([wrong]).against_start(x, y, starts=[model])
    assert not worse.helps
    assert "worse in the mean of 200 examples" in str(worse)


def test_several_starts_are_an_ensemble_and_a_measure() -> None:
    starts, (x, y) = networks(3), examples()
    posterior = around(starts, starts=[start.state_dict() for start in starts])
    found = posterior.against_start(x, y)
    with torch.no_grad():
        each = torch.stack([start(x).softmax(1) for start in starts])
    nll = -each[:, torch.arange(40), y].log()
    assert found.single is not None
    assert found.single.nll == pytest.approx(float(nll.mean()), rel=1e-5)
    assert found.start.nll == pytest.approx(float(-each.mean(0)[torch.arange(40), y].log().mean()), rel=1e-5)
    assert found.start.brier == pytest.approx(float(brier(each.mean(0), y)), rel=1e-5)
    assert found.curve[0] == pytest.approx(found.single.nll)
    assert found.curve[-1] == pytest.approx(found.start.nll)
    assert list(found.curve) == sorted(found.curve, reverse=True)
    assert found.worth is not None
    assert 0 <= found.worth <= 3
    lines = str(found).splitlines()
    assert [line[:17].strip() for line in lines[:4]] == ["", "one of the starts", "ensemble of 3", "average of draws"]
    assert lines[-1].startswith("worth ")
    exactly = around(starts, spread=0.0, starts=starts).against_start(x, y)
    assert exactly.worth == pytest.approx(3.0, abs=0.01)
    for part in (
        posterior.select(chains=[1]),
        posterior.select(chains=[0, 1]).select(draws=slice(2)),
        posterior.of_set(0),
    ):
        assert part.starts is not None
        assert len(part.starts) == 3


def test_ensembles_of_many_networks_go_on_falling() -> None:
    each = torch.randn(9, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    curve = ensemble_curve(each)
    assert len(curve) == 9
    assert curve == sorted(curve, reverse=True)


def test_a_regression_with_a_sampled_noise_scale() -> None:
    (model,), (x, _) = networks(1, 1), examples()
    y = model(x).detach() + 0.3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(5))
    posterior = around([model], "gaussian")
    draws = {**posterior.draws, "likelihood.scale": torch.tensor([[0.2, 0.4, 0.2, 0.4, math.sqrt(0.08)]])}
    found = Posterior(posterior.target, draws, {}).against_start(x, y, starts=model)
    best = (model(x).detach() - y).square().mean().sqrt()  # of these examples: a reference that no run can move
    normal = torch.distributions.Normal(model(x).detach(), best)
    assert found.start.nll == pytest.approx(float(-normal.log_prob(y).mean()), rel=1e-4)
    assert found.start.rmse == pytest.approx(float(rmse(model(x).detach()[:, 0], y[:, 0])), rel=1e-4)
    assert found.ratio == pytest.approx(math.exp(found.difference))
    assert found.start.accuracy is None
    own = Posterior(posterior.target, draws, {}).against_start(
        x, y, starts=[{**model.state_dict(), "likelihood.scale": torch.tensor(0.3)}]
    )
    normal = torch.distributions.Normal(model(x).detach(), 0.3)
    assert own.start.nll == pytest.approx(float(-normal.log_prob(y).mean()), rel=1e-4)


def test_yes_or_no_and_a_target_of_ones_own() -> None:
    (model,), (x, _) = networks(1, 1), examples()
    y = (x[:, :1] > 0).float()
    found = around([model], "bernoulli").against_start(x, y, starts=model)
    assert found.start.accuracy == pytest.approx(float(((model(x) > 0) == (y > 0)).float().mean()))
    target = Target(lambda p, b: -0.5 * (b[1] - p["w"] * b[0]).square(), priors.Normal(1.0), init={"w": 0.0})
    plain = Posterior(target, {"w": torch.tensor([[1.0, 2.0]])}, {})
    alone = plain.against_start(torch.ones(3), torch.ones(3), starts=[{"w": 0.0}])
    assert alone.start.nll == pytest.approx(0.5)
    assert (alone.start.rmse, alone.start.accuracy) == (None, None)


def test_batch_norm_of_the_start_uses_its_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x, y = examples()
    model(x)
    with pytest.warns(UserWarning, match="statistics of the minibatch"):
        posterior = around([model])
    model.eval()
    buffers = {name: b[None, None].expand(1, 5, *b.shape) for name, b in model.named_buffers()}
    posterior = Posterior(posterior.target, posterior.draws, {}, None, buffers, starts=[model])
    found = posterior.refreshed([x]).against_start(x[:9], y[:9])
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x[:9]), y[:9])
    assert found.start.nll == pytest.approx(float(expected), rel=1e-4)


def test_starts_of_a_run_that_was_stored_without_them_have_to_be_given(tmp_path: Any) -> None:
    (model,), (x, y) = networks(1), examples()
    target = Target.from_module(model, "categorical")
    isosgd.sample(
        target, (x, y), method="sgld", lr=1e-4, warmup=0, draws=4, keep_every=1, store=tmp_path / "run", progress=False
    )
    posterior = isosgd.load(tmp_path / "run", target=target)
    with pytest.raises(ValueError, match=r"not at hand: pass them, starts=\[model\]"):
        posterior.against_start(x, y)
    assert isinstance(posterior.against_start(x.numpy(), y.numpy(), starts=[model]), Comparison)


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        ([], TypeError, "a list of trained networks"),
        ([3], TypeError, r"starts\[0\] is a int"),
        ([{}], ValueError, r"starts\[0\] lacks '0\.weight'"),
        ([nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))], ValueError, r"starts\[0\] is not of the archi"),
    ],
)
def test_starts_that_are_none(starts: Any, error: type[Exception], message: str) -> None:
    (model,), (x, y) = networks(1), examples()
    with pytest.raises(error, match=message):
        around([model]).against_start(x, y, starts=starts)
    with pytest.raises(ValueError, match="label"):
        around([model], likelihoods.Categorical()).against_start(x, y + 1, starts=[model])


class Counted(nn.Module):
    """Counts its forward passes; filters of convolutions are not mapped over draws, so that each takes one."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, (1, 2)), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        Counted.passes += 1
        found: Tensor = self.last(self.norm(self.first(x.reshape(-1, 1, 1, 2)).flatten(1)).tanh())
        return found


@pytest.mark.filterwarnings("ignore:.*the statistics of the minibatch:UserWarning")
def test_a_start_with_a_large_weight_is_predicted_once() -> None:
    """What comes out is as if it stood there as often as its weight says."""
    torch.manual_seed(0)
    models, (x, y) = [Counted() for _ in range(2)], examples()
    for model in models:
        model(3 + torch.randn(50, 2))
    made = torch.Generator().manual_seed(1)
    parts: list[dict[str, Tensor]] = [{}, {}]
    for name, first in models[0].state_dict().items():
        noise = 0.1 * torch.rand(2, 12, *first.shape, generator=made)
        both = torch.stack([model.state_dict()[name] for model in models])[:, None] + noise
        parts["norm.r" in name or "num_batches" in name][name] = both.to(first.dtype)
    chains = Posterior(Target.from_module(models[0], "categorical"), parts[0], {}, buffers=parts[1], starts=models)
    found = chains.with_starts(0.9)
    copies = found.info["from_start"]
    assert (copies, found.num_draws) == (54, 60)
    dense = Posterior(found.target, dict(found.draws), found.info, buffers=dict(found.buffers), starts=models)
    assert dense.draws["first.weight"].shape == (2, 60, 4, 1, 1, 2)
    assert torch.equal(dense.draws["first.weight"][1, 17], models[1].first.weight)
    asked: dict[str, Callable[[Posterior], Tensor]] = {
        "predict": lambda p: p.predict(x, batch_size=20).mean,
        "predict draws": lambda p: p.predict(x, return_draws=True).draws,  # type: ignore[return-value]
        "log_likelihood": lambda p: p.log_likelihood((x, y)),
        "log_predictive": lambda p: p.log_predictive((x, y)),
        "simulate": lambda p: p.simulate(x),
        "refreshed": lambda p: p.refreshed([(x, y)]).predict(x).mean,
        "some": lambda p: p.select(chains=[1], draws=slice(50, 57)).predict(x).mean,
        "reversed": lambda p: p.select(draws=slice(None, None, -7)).log_likelihood((x, y)),
        "heads": lambda p: p.select(draws=slice(3)).predict(x).mean,
        "one": lambda p: p.draw(1, -1)["last.bias"] + p.draw(0, 53)["last.bias"],
    }
    for name, ask in asked.items():
        before = Counted.passes
        once = ask(found)
        passes, before = Counted.passes - before, Counted.passes
        torch.testing.assert_close(once, ask(dense), msg=name)
        if name in ("predict", "log_likelihood", "log_predictive", "simulate"):
            assert 6 * passes < Counted.passes - before, name  # 14 networks in the place of 120


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning", "ignore:.*the statistics of the minibatch:UserWarning")
def test_a_stored_run_knows_its_starts_when_it_is_loaded(tmp_path: Path) -> None:
    """With their buffers, each of them once, whatever is merged; and a draw can be read where a start is damaged."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2)]
    for model in models:
        model(10 + torch.randn(50, 2))  # other statistics for each
    target, (x, y) = Target.from_module(models[0], "categorical", priors.Normal(1.0)), examples(60)
    short: dict[str, Any] = {"warmup": 100, "draws": 3, "keep_every": 2, "batch_size": 10, "temperature": 1e-2}
    short |= {"starts": models, "structure": "layer", "compile": False, "progress": False}
    runs = [tmp_path / f"{seed}" for seed in range(2)]
    kept = [isosgd.sample(target, (x, y), seed=seed, store=run, **short) for seed, run in enumerate(runs)]
    found = isosgd.load(runs[0], target)
    assert found.against_start(x, y) == kept[0].against_start(x, y) == found.against_start(x, y, starts=models)
    assert found.with_starts(0.5).info["from_start"] == 3
    together = isosgd.merge(runs, tmp_path / "all", target)
    assert (together.num_chains, together.against_start(x, y).starts) == (4, 2)
    path = tmp_path / "all" / "part-0000" / "start-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    spoiled = isosgd.load(tmp_path / "all", target)
    assert spoiled.predict(x).mean.shape == (60, 3)
    with pytest.raises(DamagedError, match=r"start-000001\.safetensors is damaged"):
        spoiled.against_start(x, y)
    with pytest.raises(DamagedError, match="start-000001"):
        isosgd.load(tmp_path / "all", target, verify=True)
    with pytest.warns(SamplingWarning, match="networks that chains began with are left out: .*start-000001"):
        assert isosgd.load(tmp_path / "all", target, damaged="drop").starts is None


@pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")
def test_a_network_of_several_outputs_has_a_noise_scale_for_each() -> None:
    """Under one scale for both its score would be poor, and any draws would look better."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(400, 2, generator=generator) for _ in range(2))
    y = x + noise * torch.tensor([0.05, 1.0])
    model = torch.nn.Linear(2, 2, bias=False)
    model.load_state_dict({"weight": torch.eye(2)})
    target = Target.from_module(model, likelihoods.Gaussian(outputs=2))
    draws = {"weight": torch.eye(2).expand(1, 2, 2, 2), "likelihood.scale": torch.tensor([0.05, 1.0]).expand(1, 2, 2)}
    found = Posterior(target, draws, {}, starts=[model.state_dict()]).against_start(x, y)
    best = 0.5 * (2 * torch.pi * torch.e * (y - x).square().mean(0)).log().sum()
    assert found.start.nll == pytest.approx(float(best), abs=1e-3)


def test_one_noise_scale_for_columns_that_differ_is_warned_of() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator)
    y = x + torch.randn(400, 2, generator=generator) * torch.tensor([0.05, 1.0])
    model = torch.nn.Linear(2, 2, bias=False)
    model.load_state_dict({"weight": torch.eye(2)})
    for likelihood, wanted in (("gaussian", 1), ("student_t", 1), (likelihoods.Gaussian(outputs=2), 0)):
        target = Target.from_module(model, likelihood)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                target.check(target.initial(), (x, y))
        said = [str(one.message) for one in told if "share one noise scale" in str(one.message)]
        assert len(said) == wanted
        assert all("(outputs=2) samples a scale for each" in text for text in said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the same size
        target = Target.from_module(model, "gaussian")
        target.check(target.initial(), (x, x + 0.1 * y))
