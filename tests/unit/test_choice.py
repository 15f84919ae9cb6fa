"""Which structure ``auto`` takes: by the number of parameters, the length of the warm-up, and measured conditioning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isosgd
from isosgd import ISGD, Target, priors
from isosgd.geometry.choice import choose, provisional
from isosgd.geometry.full import condition_numbers
from tests.crashes import MACHINE, Crash, crash_after

WEIGHTS, ROWS = 201, 1200  # so many that a look decides; with one fewer they would be few
QUICK: dict[str, Any] = {
    "draws": 4,
    "chains": 2,
    "batch_size": 60,
    "keep_every": 2,
    "progress": False,
    "compile": False,
}

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # warm-ups are short here


def regression(decades: float) -> tuple[Target, tuple[Tensor, Tensor]]:
    """Linear regression on features whose scales fall by so many decades along axes that cross all of them."""
    generator = torch.Generator().manual_seed(3)
    axes = torch.linalg.qr(torch.randn(WEIGHTS, WEIGHTS, generator=generator))[0]
    scales = torch.logspace(0.0, -decades, WEIGHTS)
    x = (torch.randn(ROWS, WEIGHTS, generator=generator) * scales) @ axes.T
    y = x @ torch.randn(WEIGHTS, generator=generator) + torch.randn(ROWS, generator=generator)

    def log_likelihood(params: dict[str, Tensor], batch: Any) -> Tensor:
        MACHINE.call()
        value: Tensor = -0.5 * (batch[1] - batch[0] @ params["w"]).square()
        return value

    return Target(log_likelihood, priors.Normal(100.0), init={"w": torch.zeros(WEIGHTS)}), (x, y)


WHITE, STEEP = 0.0, 3.0
BUDGET = 40 * WEIGHTS + 260  # gradients; with fewer a full matrix cannot be estimated


def test_sizes() -> None:
    sizes = {200: "full", 201: "full", 500: "full", 501: "lowrank", 1_000_000: "lowrank", 1_000_001: "diagonal"}
    assert {size: choose([(size,)]) for size in sizes} == sizes
    assert [provisional([(size,)], choose([(size,)])) for size in (200, 201, 500, 501)] == [False, True, True, False]
    assert choose([(100,)], budget=3_999) == "lowrank" and choose([(100,)], budget=4_000) == "full"
    assert choose([(10,)], budget=399) == "layer"
    assert choose([(500,)], chains=16) == "full" and choose([(500,)], chains=17) == "lowrank"
    assert choose([(200,)], chains=100_000) == "full" and choose([(201,)], measured=False) == "lowrank"


def test_condition_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))[0]
    strong = torch.cat([torch.full((5,), 1e4), torch.ones(25)]).double()
    h = (axes * strong) @ axes.T
    found = condition_numbers(h.expand(3, -1, -1))
    assert found["single"] == pytest.approx(1e4)
    assert 100 < found["diagonal"] < 1e5  # the directions cross all parameters
    assert found["lowrank"] < 10  # and there are but five of them
    units = torch.logspace(-3, 3, 30, dtype=torch.float64)
    assert condition_numbers((units * torch.eye(30).double() * units).unsqueeze(0))["diagonal"] == pytest.approx(1.0)
    assert condition_numbers(torch.eye(2).unsqueeze(0))["lowrank"] == pytest.approx(1.0)  # fewer than directions


@pytest.mark.long
@pytest.mark.parametrize(("decades", "taken"), [(WHITE, "lowrank"), (STEEP, "full")])
def test_the_first_look_decides(decades: float, taken: str) -> None:
    target, data = regression(decades)
    posterior = isosgd.sample(target, data, **QUICK, warmup=BUDGET)
    reports = posterior.info["warmup"]
    assert [report["structure"] for report in reports] == [taken, taken]
    known = reports[0]["conditioning"]
    assert known is None if taken == "lowrank" else known["lowrank"] > 30
    assert posterior.draws["w"].isfinite().all()


@pytest.mark.slow
def test_what_is_asked_for_is_not_decided_anew() -> None:
    target, data = regression(WHITE)
    posterior = isosgd.sample(target, data, **QUICK, warmup=BUDGET, structure="full")
    assert posterior.info["warmup"][0]["structure"] == "full"
    assert isosgd.sample(target, data, **QUICK, warmup=600).info["warmup"][0]["structure"] == "lowrank"
    whole = QUICK | {"batch_size": "all"}  # there is no look that decides
    assert isosgd.sample(target, data, **whole, warmup=BUDGET).info["warmup"][0]["structure"] == "lowrank"
    for name in ("layer", "single", "diagonal"):
        found = isosgd.sample(target, data, **QUICK, warmup=300, structure=name)
        assert found.info["warmup"][0]["structure"] == name


@pytest.mark.slow
@pytest.mark.usefixtures("eager_store")
@pytest.mark.parametrize(
    ("decades", "after"),
    [(WHITE, 0.8), (WHITE, 2), (STEEP, 0.8)],  # in a window, between draws
)
def test_a_run_that_was_stopped_goes_on_with_what_was_decided(decades: float, after: float, tmp_path: Path) -> None:
    target, data = regression(decades)
    settings = QUICK | {"warmup": BUDGET}
    with crash_after() as machine:
        whole = isosgd.sample(target, data, **settings)
    crash = crash_after(after * machine.calls) if after < 1 else crash_after(after, tmp_path / "run")
    with crash, pytest.raises(Crash):
        isosgd.sample(target, data, **settings, store=tmp_path / "run")
    again = isosgd.sample(target, data, **settings, store=tmp_path / "run", resume=True)
    assert torch.equal(again.draws["w"], whole.draws["w"])
    assert again.info["warmup"][0]["structure"] == whole.info["warmup"][0]["structure"]


def test_a_state_of_another_structure_is_refused_where_nothing_was_left_open() -> None:
    def make(structure: Any) -> ISGD:
        return ISGD([torch.zeros(WEIGHTS, requires_grad=True)], num_data=100, batch_size=10, structure=structure)

    state = make("lowrank").state_dict()
    undecided = make("auto")
    assert undecided.undecided and undecided.structure.name == "full"
    undecided.load_state_dict(state)
    assert undecided.structure.name == "lowrank"
    with pytest.raises(ValueError, match="saved with another structure"):
        make("full").load_state_dict(state)
