"""Draws of a loop of one's own, as a `Posterior`."""

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isosgd
from isosgd import Collector, SamplingWarning, likelihoods
from isosgd.store import StoreError

N, SIZE = 200, 40


@pytest.fixture(autouse=True)
def unsettled_is_no_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the warm-up of .* steps did not settle", SamplingWarning)
        yield


class Loop:
    def __init__(self, seed: int = 0, model: nn.Module | None = None, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.x = torch.randn(N, 2)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(N, 1)
        self.model = nn.Linear(2, 1) if model is None else model
        given = {"num_data": N, "batch_size": SIZE, **settings}
        self.optimizer = isosgd.SGLD(self.model.parameters(), **given)

    def steps(self, count: int) -> None:
        for _ in range(count):
            rows = torch.randint(N, (SIZE,))
            self.optimizer.zero_grad()
            (0.5 * (self.model(self.x[rows]) - self.y[rows]).square().mean()).backward()
            self.optimizer.step()


GAUSSIAN = likelihoods.Gaussian(1.0)


def test_draws_are_those_of_the_loop_and_predict() -> None:
    loop = Loop(warmup=200, weight_decay=0.01)
    collector = Collector(loop.optimizer, loop.model, likelihood=GAUSSIAN, keep_every=2)
    loop.steps(200)
    assert len(collector) <= 1
    loop.steps(60)
    posterior = collector.posterior((loop.x, loop.y))
    assert posterior.num_chains == 1 and posterior.num_draws == len(collector) in (30, 31)
    assert posterior.info["method"] == "sgld" and posterior.info["warmup"][0]["steps"] == 200
    assert posterior.predict(loop.x[:5]).mean.shape == (5, 1)
    assert posterior.summary().rows and posterior.trust().summary
    prior = posterior.target.prior_precisions(posterior.target.initial())
    assert prior == pytest.approx([0.01 * N, 0.01 * N])  # what weight decay stands for


def test_a_rate_of_ones_own_collects_from_the_first_step_on_or_after_a_warmup_that_is_given() -> None:
    for warmup, draws in ((None, 20), (15, 5)):
        loop = Loop(lr=1e-3, warmup=warmup)
        collector = Collector(loop.optimizer, loop.model, keep_every=1)
        loop.steps(20)
        assert len(collector) in (draws, draws + 1)
        assert "weight" in collector.posterior().draws


@pytest.mark.parametrize("draws", [7, 8])
def test_memory_holds_as_many_draws_as_are_asked_for_equally_far_apart(draws: int) -> None:
    loop = Loop(lr=1e-3)
    collector, seen = Collector(loop.optimizer, loop.model, draws=draws), []
    for _ in range(50):
        loop.steps(1)
        seen.append(loop.model.bias.detach().clone())
    kept = collector.posterior().draws["bias"][0]
    assert 4 <= len(kept) <= draws
    places = [next(i for i, b in enumerate(seen) if torch.equal(b, draw)) for draw in kept]
    assert len({b - a for a, b in pairwise(places)}) == 1


def test_chains_of_several_loops() -> None:
    loops = [Loop(seed, lr=1e-2) for seed in range(3)]
    collectors = [Collector(loop.optimizer, loop.model, keep_every=2) for loop in loops]
    for i, loop in enumerate(loops):
        loop.steps(40 + 2 * i)
    posterior = collectors[0].posterior(chains=collectors[1:])
    assert posterior.num_chains == 3 and posterior.num_draws == 20 and len(posterior.info["rates"]) == 3
    assert torch.equal(posterior.draws["bias"][1, -1], collectors[1].posterior().draws["bias"][0, -1])


def test_a_store_is_read_again(tmp_path: Path) -> None:
    loop = Loop(lr=1e-3)
    collector = Collector(loop.optimizer, loop.model, likelihood=GAUSSIAN, keep_every=5, store=tmp_path / "run")
    loop.steps(40)
    posterior = collector.posterior()
    again = isosgd.load(tmp_path / "run", collector.target)
    assert posterior.num_draws == again.num_draws == 8 and again.info["complete"]
    assert torch.equal(posterior.draws["weight"], again.draws["weight"])
    loop.steps(10)  # goes on, and is collected
    more = collector.posterior()
    assert len(collector) == more.num_draws == more.info["draws"] == 10 and posterior.num_draws == 8
    assert torch.equal(more.draws["weight"][:, :8], posterior.draws["weight"])
    collector.close()
    loop.steps(10)
    collector.close()  # again, which does nothing
    assert collector.posterior().num_draws == isosgd.load(tmp_path / "run").num_draws == 10


def test_statistics_of_batch_norm_go_with_a_draw() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    loop = Loop(model=model, lr=1e-3)
    collector = Collector(loop.optimizer, model, keep_every=5)
    loop.steps(20)
    assert collector.posterior().buffers["1.running_mean"].shape == (1, 4, 3)


def test_a_chain_that_is_not_finite_is_said_so() -> None:
    loop = Loop(lr=1e-3)
    Collector(loop.optimizer, loop.model, keep_every=1)
    loop.steps(3)
    loop.optimizer.param_groups[0]["lr"] = 1e30
    with pytest.raises(isosgd.DivergedError, match="is not finite any more") as caught:
        loop.steps(20)
    assert len(caught.value.draws["bias"]) >= 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_every": 0}, "keep_every = 0 must be an integer of at least 1"),
        ({"draws": 1}, "draws = 1 must be an integer of at least 2"),
        ({"store_dtype": "float32"}, "store_dtype goes with store="),
        ({"likelihood": "gaussian"}, r"differ in 'likelihood.scale'.*likelihoods.Gaussian\(0.5\)"),
        ({"model": nn.Linear(2, 1)}, "0 of them are parameters of this model"),
    ],
)
def test_bad_input(settings: dict[str, Any], words: str) -> None:
    loop = Loop(lr=1e-3)
    with pytest.raises(ValueError, match=words):
        Collector(**{"optimizer": loop.optimizer, "model": loop.model, **settings})


def test_other_optimizers_and_no_draws_are_said_so() -> None:
    loop = Loop()
    with pytest.raises(TypeError, match="optimizer of type SGD: pass a sampler of isosgd"):
        Collector(torch.optim.SGD(loop.model.parameters(), 0.1), loop.model)  # type: ignore[arg-type]
    collector = Collector(loop.optimizer, loop.model)
    loop.steps(3)
    with pytest.raises(ValueError, match="no draw yet: after 3 steps the optimizer is 'optimising'"):
        collector.posterior()


def test_a_grad_scaler_and_autocast_drive_it() -> None:
    loop = Loop(warmup=200)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(230):
        rows = torch.randint(N, (SIZE,))
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = 0.5 * (loop.model(loop.x[rows]) - loop.y[rows]).square().mean()
        scaler.scale(loss * (float("inf") if step == 100 else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
    # The step with infinite gradients was left out, and nothing remembers it.
    assert loop.optimizer.param_groups[0]["step"] == 229 and loop.optimizer.phase == "sampling"
    assert all(bool(torch.isfinite(p).all()) for p in loop.model.parameters())


def test_schemes_that_measure_no_spacing_keep_every_draw_and_their_state() -> None:
    loop = Loop()
    loop.optimizer = isosgd.ISGD(loop.model.parameters(), num_data=N, lam=5.0)
    collector = Collector(loop.optimizer, loop.model, likelihood=GAUSSIAN)
    loop.steps(20)
    assert len(collector) > 0
    saved = loop.optimizer.state_dict()
    again = isosgd.ISGD(loop.model.parameters(), num_data=N, lam=5.0)
    again.load_state_dict(saved)
    assert again.own_warmup is None or again.own_warmup.by_scheme


def test_chains_of_other_temperatures_are_not_one_posterior() -> None:
    loops = [Loop(warmup=200, temperature=t) for t in (1.0, 0.1)]
    collectors = [Collector(loop.optimizer, loop.model, likelihood=GAUSSIAN, keep_every=2) for loop in loops]
    for loop in loops:
        loop.steps(230)
    with pytest.raises(ValueError, match="one temperature"):
        collectors[0].posterior(chains=collectors[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it imports its compiler
def test_a_model_in_ddp_or_compiled_has_the_names_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # DDP needs a process group, which a quick test does not start: its wrapper is what is seen here.
    ddp, compiled = nn.parallel.DistributedDataParallel, partial(torch.compile, backend="eager")

    def hold(self: Any, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    monkeypatch.setattr(ddp, "__init__", hold)
    for wrap in (ddp, compiled, lambda model: compiled(ddp(model))):
        loop = Loop(lr=1e-3)
        collector = Collector(loop.optimizer, wrap(loop.model), likelihood=GAUSSIAN, keep_every=1)
        loop.steps(4)
        posterior = collector.posterior()
        assert list(posterior.draws) == ["weight", "bias"]
        assert posterior.predict(loop.x[:5]).mean.shape == (5, 1)


def test_an_optimizer_that_is_rolled_back_takes_its_later_draws_along(tmp_path: Path) -> None:
    loop = Loop(lr=1e-3)
    collector = Collector(loop.optimizer, loop.model, keep_every=10)
    stored = Collector(loop.optimizer, loop.model, keep_every=10, store=tmp_path / "run")
    loop.steps(3)
    loop.optimizer.state_dict()  # which ends a file of the store
    loop.steps(22)
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    before = collector.posterior().draws["weight"]
    loop.steps(50)
    assert len(collector) == 8
    loop.model.load_state_dict(saved[0])
    loop.optimizer.load_state_dict(saved[1])
    with pytest.warns(SamplingWarning, match="5 draws of .* are dropped: they are of steps after 25"):
        loop.steps(1)
    loop.steps(38)
    draws = collector.posterior().draws["weight"]
    assert draws.shape[1] == before.shape[1] + 4 == 7  # of steps 1, 11, 21, and then 31 to 61
    assert torch.equal(draws[:, :3], before)
    assert torch.equal(stored.posterior().draws["weight"], draws)


def resumed(folder: Path, saved: Any, steps: int, resume: bool = True, **settings: Any) -> Loop:
    """A loop, in another process as it were, that goes on from a state."""
    loop = Loop(warmup=200)
    collector = Collector(loop.optimizer, loop.model, store=folder, resume=resume, **settings)
    if saved is not None:
        loop.model.load_state_dict(saved[0])
        loop.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
    try:
        loop.steps(steps)
    finally:
        collector.close()
    return loop


@pytest.mark.parametrize(
    ("keep_every", "stops"),
    [(10, (190, 225, 260, 340)), pytest.param("auto", (190, 1000, 1500, 2500), marks=pytest.mark.long)],
)
def test_a_loop_that_was_stopped_goes_on_with_its_store(
    tmp_path: Path, keep_every: Any, stops: tuple[int, ...]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    resumed(whole, None, stops[-1], keep_every=keep_every)
    expected = isosgd.load(whole).draws["weight"]
    loop, saved = Loop(warmup=200), []
    collector = Collector(loop.optimizer, loop.model, store=cut, resume=True, keep_every=keep_every)
    for first, last in pairwise((0, *stops)):
        loop.steps(last - first)
        saved.append(copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state())))
    collector.close()
    assert expected.shape[1] > 3 and torch.equal(isosgd.load(cut).draws["weight"], expected)
    with pytest.raises(ValueError, match="is at its beginning: call restore"):
        resumed(cut, None, 1, keep_every=keep_every)
    for stop, state in zip(stops[-2::-1], saved[-2::-1], strict=True):  # the last state first
        with pytest.warns(SamplingWarning, match=f"are dropped: they are of steps after {stop}"):
            resumed(cut, state, stops[-1] - stop, keep_every=keep_every)
        assert torch.equal(isosgd.load(cut, verify=True).draws["weight"], expected)
    with pytest.raises(ValueError, match=r"draws of another loop:\n  tensors.weight.stored was 'float32'"):
        resumed(cut, saved[0], 1, store_dtype="bfloat16")
    with pytest.raises(StoreError, match=r"was written by a loop: go on with it there, Collector\("):
        isosgd.resume(cut, isosgd.Target.from_module(loop.model, GAUSSIAN), (loop.x, loop.y))
    with pytest.raises(FileExistsError, match="pass resume=True"):
        resumed(cut, saved[0], 1, resume=False)
    with pytest.raises(ValueError, match="resume=True goes with store="):
        Collector(loop.optimizer, loop.model, resume=True)


def test_a_checkpoint_brings_back_model_optimizer_and_what_was_added(tmp_path: Path) -> None:
    def run(folder: Path, steps: int) -> Collector:
        torch.manual_seed(1)
        loop = Loop(model=nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), warmup=200)
        collector = Collector(loop.optimizer, loop.model, keep_every=10, store=folder, resume=True)
        if (state := collector.restore()) is not None:
            torch.set_rng_state(state["random"])
        while (at := loop.optimizer.param_groups[0]["step"]) < steps:
            if at % 35 == 34:
                collector.checkpoint({"random": torch.get_rng_state()})
            loop.steps(1)
        collector.close()
        return collector

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = run(whole, 300).posterior()
    for steps in (10, 150, 240, 300):  # the first is begun again, before any checkpoint
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* are dropped", SamplingWarning)
            found = run(cut, steps)
    for kind in ("draws", "buffers"):
        for name, x in getattr(expected, kind).items():
            assert torch.equal(getattr(found.posterior(), kind)[name], x), name
    assert expected.num_draws > 5 and len(list(cut.glob("checkpoint-*"))) == 1  # the last
    with pytest.raises(ValueError, match="this collector is closed"):
        found.checkpoint()
    in_memory = Collector(found.optimizer, found.model, keep_every=10)
    for call in (in_memory.checkpoint, in_memory.restore):
        with pytest.raises(ValueError, match="give store="):
            call()


def test_a_state_whose_draws_the_store_lacks_is_refused(tmp_path: Path) -> None:
    loop = Loop(lr=1e-3)
    collector = Collector(loop.optimizer, loop.model, keep_every=10, store=tmp_path / "run")
    loop.steps(15)
    collector.close()
    loop.steps(20)
    saved = loop.model.state_dict(), loop.optimizer.state_dict()
    other = Loop(lr=1e-3)
    Collector(other.optimizer, other.model, keep_every=10, store=tmp_path / "run", resume=True)
    other.optimizer.load_state_dict(saved[1])
    with pytest.raises(ValueError, match="ends at step 11 and the optimizer goes on at step 35: the draws between are"):
        other.steps(1)


def test_a_draw_is_given_to_a_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    loop = Loop(model=model, lr=1e-3)
    collector = Collector(loop.optimizer, model, keep_every=5)
    loop.steps(20)
    posterior, other = collector.posterior(), copy.deepcopy(model)
    assert not torch.equal(other[1].running_mean, posterior.buffers["1.running_mean"][0, 1])
    posterior.load_into(torch.compile(other, backend="eager"), index=1)
    assert all(torch.equal(p, posterior.draws[name][0, 1]) for name, p in other.named_parameters())
    assert torch.equal(other[1].running_mean, posterior.buffers["1.running_mean"][0, 1])
    with pytest.raises(ValueError, match=r"the draws have '0.weight', which the model has not"):
        posterior.load_into(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"'0.weight' has the shape \(4, 2\) in the model, and \(3, 2\) in the draws"):
        posterior.load_into(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def test_draws_of_bfloat16_are_the_float32_of_the_sampler(tmp_path: Path) -> None:
    loop = Loop(model=nn.Linear(2, 1).bfloat16(), lr=1e-4)  # steps of 0.001; at 1.5 numbers are 0.008 apart
    nn.init.constant_(loop.model.weight, 1.5)
    loop.x, loop.y = loop.x.bfloat16(), loop.y.bfloat16()
    collector = Collector(loop.optimizer, loop.model, keep_every=1)
    stored = Collector(loop.optimizer, loop.model, keep_every=1, store=tmp_path / "run")
    loop.steps(200)
    with loop.optimizer.half.widened():
        held = loop.model.weight.detach().clone()
    for posterior in (collector.posterior(), stored.posterior()):
        weight = posterior.draws["weight"]
        assert weight.dtype == torch.float32 and torch.equal(weight[0, -1], held)
        assert len(weight.unique()) > 5 * len(weight.bfloat16().unique())


def stored_loop(folder: Path, seed: int, **more: Any) -> Path:
    """A loop whose draws are in a folder."""
    given: dict[str, Any] = {"likelihood": GAUSSIAN, "lr": 1e-3, **more}
    likelihood = given.pop("likelihood")
    loop = Loop(seed, **given)
    collector = Collector(loop.optimizer, loop.model, likelihood=likelihood, keep_every=2, store=folder)
    loop.steps(20)
    collector.close()
    return folder


def test_stores_of_loops_are_one_run(tmp_path: Path) -> None:
    runs = [stored_loop(tmp_path / str(seed), seed) for seed in range(2)]
    together = isosgd.load(runs)
    assert (together.num_chains, together.num_draws) == (2, 10)
    for chain, folder in enumerate(runs):
        assert torch.equal(together.draws["weight"][chain], isosgd.load(folder).draws["weight"][0])
    merged = isosgd.merge(runs, tmp_path / "all")
    assert torch.equal(merged.draws["weight"], together.draws["weight"]) and merged.info["complete"]
    assert len(set(merged.info["seed"])) == 2
    with pytest.raises(StoreError, match="written by a loop"):
        isosgd.resume(tmp_path / "all", merged.target, None)
    with pytest.raises(ValueError, match="holds merged runs"):
        resumed(tmp_path / "all", {}, 1)
    again = stored_loop(tmp_path / "again", 0)
    with pytest.raises(ValueError, match="same seed = "):
        isosgd.load([runs[0], again])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.5}, "settings.temperature was 1.0 and is 0.5"),
        ({"num_data": 150}, "settings.num_data was 200 and is 150"),
        ({"weight_decay": 0.1}, "settings.weight_decay was 0.0 and is 0.1"),
        ({"likelihood": likelihoods.Gaussian(2.0)}, "target.describes.likelihood"),
    ],
)
def test_loops_of_something_else_are_not_one_run(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    first, other = stored_loop(tmp_path / "0", 0), stored_loop(tmp_path / "1", 1, **change)
    with pytest.raises(ValueError, match=words):
        isosgd.load([first, other])
