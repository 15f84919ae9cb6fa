"""Batches of a loader that are smaller than the others: the last one of an epoch, down to a single example."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from isosgd import Target, priors, sample
from isosgd.noise import join_halves

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.errors.SamplingWarning")  # of short warm-ups and loaders


def target(**settings: Any) -> Target:
    def log_likelihood(params: Any, batch: Any) -> Tensor:
        return -0.5 * (batch[0] - params["w"]).square().sum(-1)

    return Target(log_likelihood, priors.Normal(10.0), init={"w": torch.zeros(4)}, **settings)


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


def rate_of_swag(data: Any) -> float:
    """Mandt's rate, which is inversely proportional to the noise that was seen."""
    posterior = sample(target(num_data=500), data, method="swag", draws=2, warmup=100, snapshots=2, progress=False)
    return next(iter(posterior.info["rates"][0].values()))


def test_a_single_example_says_nothing_of_the_noise():
    batches = [(part,) for part in rows(500).split(10)]
    single = [batch for pair in zip(batches, [(r,) for r in rows(50).split(1)], strict=True) for batch in pair]
    assert rate_of_swag(single) == pytest.approx(rate_of_swag(batches), rel=0.3)  # it was a fifth of it


def test_a_last_batch_of_one_example():
    loader = DataLoader(TensorDataset(rows(121)), batch_size=20, shuffle=True, generator=torch.Generator())
    posterior = sample(target(), loader, draws=6, keep_every=3, warmup=600, progress=False)
    assert posterior.info["num_data"] == 121
    assert bool(torch.isfinite(posterior.draws["w"]).all())


@pytest.mark.parametrize("cut", [1, 3, 10, 19])
def test_uneven_halves_have_the_variance_of_the_whole(cut):
    x = torch.randn(40_000, 20, 1, generator=torch.Generator().manual_seed(1)) + 5.0
    (mean,), (noise,) = join_halves([x[:, :cut].mean(1)], [x[:, cut:].mean(1)], (cut, 20 - cut))
    torch.testing.assert_close(mean, x.mean(1))
    error = (2 / len(x)) ** 0.5
    assert abs(float(noise.mean())) < 4 * (1 / 20 / len(x)) ** 0.5  # centred, though the gradient is not
    assert abs(20 * float(noise.var()) - 1) < 4 * error


@pytest.mark.parametrize(("shuffle", "expected"), [(True, 121), (False, 120)])
def test_examples_of_a_loader_that_drops_its_last_batch(shuffle, expected):
    loader = DataLoader(TensorDataset(rows(121)), batch_size=20, shuffle=shuffle, drop_last=True)
    assert target().resolve_num_data(loader) == expected
