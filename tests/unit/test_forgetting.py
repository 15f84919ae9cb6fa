"""How fast directions forget, and what another batch size would do, against what is known exactly."""

import math
from dataclasses import replace

import pytest
import torch

from isosgd import Target, priors, sample
from isosgd.geometry.base import Geometry
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.full import Full
from isosgd.geometry.lowrank import LowRank
from isosgd.geometry.rule import Rule
from isosgd.warmup.reports import batch_sizes, directions

RULE = Rule(num_data=1000, batch_size=32, temperature=1.0, bias=0.02, averaged=True)


@pytest.mark.parametrize("structure", [Full(), Diagonal(), LowRank(2)], ids=["full", "diagonal", "lowrank"])
def test_rates_along_directions_are_those_of_lambda(structure: Geometry, generator: torch.Generator) -> None:
    """Eigenvalues of the matrix that a step multiplies gradients with, for a diagonal noise with one strong axis."""
    scale = torch.tensor([10.0, 1.0, 1.0, 0.5])
    structure.bind([{"params": [torch.zeros(4)]}])
    for _ in range(2000):
        structure.observe([scale * torch.randn(4, generator=generator)])
    structure.settle(RULE, torch.zeros(1, 4), 2.0)
    (found,) = directions(structure, RULE)
    matrix = torch.stack([structure.direction(axis.unsqueeze(0)).squeeze(0) for axis in torch.eye(4)])
    known = torch.linalg.eigvalsh(matrix.double())
    assert found["count"] >= 4 and found["rates"] == sorted(found["rates"], reverse=True)
    # The diagonal of a matrix, which low rank shows besides its directions, lies within its eigenvalues.
    assert found["rates"][0] == pytest.approx(float(known.max()), rel=0.05)
    assert found["rates"][-1] == pytest.approx(float(known.min()), rel=0.05)


@pytest.mark.long
def test_epochs_to_forget_follow_the_curvature_that_was_measured() -> None:
    """A quadratic potential whose examples say nothing of its curvature: the Hessian decides."""
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean(0)
    h = torch.tensor([2.0, 0.02], dtype=torch.float64)

    def log_likelihood(params, batch):
        theta = params["theta"]
        return batch[0] @ theta - 0.5 * (h * theta.square()).sum()

    target = Target(log_likelihood, priors.Flat(), init={"theta": torch.zeros(2, dtype=torch.float64)})
    found = sample(target, (x,), draws=1, chains=2, batch_size=20, progress=False, compile=False)
    for report in found.info["warmup"]:
        fast, slow = report["directions"]["epochs_to_forget"]
        rates = report["directions"]["rates"]
        # All noise is alike, and so are the rates but where the curvature asks for less.
        exact = sorted(20 / (400 * rate * curvature) for rate, curvature in zip(sorted(rates), h.tolist(), strict=True))
        assert fast == pytest.approx(exact[0], rel=0.2)
        assert slow == pytest.approx(exact[1], rel=0.2)
        assert len(report["batch_sizes"]) >= 5


def test_batch_sizes_are_the_rule_at_each_size() -> None:
    rows = batch_sizes(RULE, torch.tensor(1.5))
    assert [row["batch_size"] for row in rows] == [4, 8, 16, 32, 64, 128, 256]
    for row in rows:
        other = replace(RULE, batch_size=int(row["batch_size"]))
        q = float(other.factor(torch.tensor(1.5)))
        assert row["rate_curvature"] == pytest.approx(1 / (1000 * q))
        assert row["epochs_to_forget"] == pytest.approx(row["batch_size"] * q)
        assert row["examples_per_draw"] == pytest.approx(row["batch_size"] * row["gradients_per_draw"])
        assert row["noise_share"] == pytest.approx(0.5 / (row["batch_size"] * q)) and row["noise_share"] <= 0.5
    # Small batches are bound by their noise: half as many examples take twice as many gradients. Large ones are not.
    costs = [row["examples_per_draw"] for row in rows]
    assert costs[0] == pytest.approx(costs[1]) and costs == sorted(costs) and costs[-1] > 2 * costs[0]


def test_batch_sizes_stay_within_the_data() -> None:
    few = replace(RULE, num_data=40, batch_size=32)
    assert [row["batch_size"] for row in batch_sizes(few, torch.ones(()))] == [4, 8, 16, 32, 40]
    assert all(math.isfinite(value) for row in batch_sizes(few, torch.ones(())) for value in row.values())


def test_a_very_large_model_has_a_last_rate() -> None:
    """Places in more than 2^24 rates are not numbers of float32."""

    class Huge(Diagonal):
        def principal_rates(self) -> torch.Tensor:
            return torch.arange(2**24 + 4, 0, -1, dtype=torch.float64).unsqueeze(0)

    huge = Huge()
    huge.bind([{"params": [torch.zeros(2)]}])
    for _ in range(60):
        huge.observe([torch.randn(2)])
    huge.settle(RULE, torch.zeros(1, 2), 2.0)
    (found,) = directions(huge, RULE)
    assert found["rates"][0] == 2**24 + 4 and found["rates"][-1] == 1.0
