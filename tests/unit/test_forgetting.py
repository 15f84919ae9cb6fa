"""How fast directions forget, and what another batch size would do, against what is known exactly."""

import pytest
import torch

from isosgd import Target, priors, sample
from isosgd.geometry.diagonal import Diagonal
from isosgd.geometry.rule import Rule
from isosgd.warmup.reports import directions

RULE = Rule(num_data=1000, batch_size=32, temperature=1.0, bias=0.02, averaged=True)


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


def test_a_very_large_model_has_a_last_rate() -> None:
    """Places in more than 2^24 rates are not numbers of float32."""

    class Huge(Diagonal):
        def principal_rates(self) -> torch.Tensor:
            return torch.arange(2**24 + 4, 0, -1, dtype=torch.float64).unsqueeze(0)

    huge = Huge()
    huge.bind([{"params": [torch.zeros(2)]}])
    for _ in range(60):
        huge.observe([torch.randn(2)])
    huge.set_lambda(RULE, torch.zeros(1, 2), 2.0)
    (found,) = directions(huge, RULE)
    assert found["rates"][0] == 2**24 + 4 and found["rates"][-1] == 1.0
