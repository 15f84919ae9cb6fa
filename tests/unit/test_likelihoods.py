"""Log probabilities against torch.distributions, shapes that must not broadcast, and every refusal."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as D

from isosgd import likelihoods, priors
from isosgd.target import Likelihood

N = 6
SCALE = {"likelihood.scale": torch.tensor(0.7, dtype=torch.float64)}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


CASES = {
    "gaussian": (likelihoods.Gaussian(0.3), lambda o: D.Normal(o, 0.3)),
    "gaussian sampled": (likelihoods.Gaussian(), lambda o: D.Normal(o, SCALE["likelihood.scale"])),
    "student": (likelihoods.StudentT(3.0, scale=0.3), lambda o: D.StudentT(3.0, o, 0.3)),
    "student sampled": (likelihoods.StudentT(5.0), lambda o: D.StudentT(5.0, o, SCALE["likelihood.scale"])),
    "bernoulli": (likelihoods.Bernoulli(), lambda o: D.Bernoulli(logits=o)),
    "poisson": (likelihoods.Poisson(), lambda o: D.Poisson(o.exp())),
}


@pytest.mark.parametrize("shape", [(N,), (N, 3), (N, 2, 3)])
@pytest.mark.parametrize("case", CASES)
def test_log_prob_mean_and_variance_are_those_of_torch_distributions(case: str, shape: tuple[int, ...]) -> None:
    likelihood, reference = CASES[case]
    output = normal(*shape)
    distribution = reference(output)
    y = distribution.sample()
    likelihood.check(output, y)
    expected = distribution.log_prob(y).reshape(N, -1).sum(1)
    torch.testing.assert_close(likelihood.log_prob(output, y, SCALE), expected)
    torch.testing.assert_close(likelihood.mean(output, SCALE), distribution.mean)
    torch.testing.assert_close(likelihood.variance(output, SCALE), distribution.variance)


@pytest.mark.parametrize("df", [None, math.inf, 2.5, 6.0])
@pytest.mark.parametrize("scale", [1.0, 0.3, None])
def test_a_size_by_input_is_that_of_torch_distributions(df: float | None, scale: float | None) -> None:
    for shape in [(N,), (N, 1), (N, 3)]:
        outputs = shape[1] if scale is None and len(shape) > 1 else None
        likelihood = likelihoods.Heteroscedastic(df, scale=scale, outputs=outputs)
        sampled = {name: normal(*extra.value.shape).exp() for name, extra in likelihood.extra().items()}
        assert bool(sampled) == (scale is None)
        output = normal(*shape, 2)
        size = (output[..., 1] / 2).exp() * sampled.get("likelihood.scale", scale)
        tails = math.inf if df is None else df
        distribution = D.StudentT(tails, output[..., 0], size) if tails < math.inf else D.Normal(output[..., 0], size)
        y = distribution.sample()
        likelihood.check(output, y)
        expected = distribution.log_prob(y).reshape(N, -1).sum(1)
        torch.testing.assert_close(likelihood.log_prob(output, y, sampled), expected)
        torch.testing.assert_close(likelihood.predict(output, sampled)["mean"], distribution.mean)
        torch.testing.assert_close(likelihood.predict(output, sampled)["variance"], distribution.variance)
        if shape[1:] in ((), (1,)):  # a last dimension of 1 may be missing on one side
            other = y.squeeze(1) if y.ndim == 2 else y.unsqueeze(1)
            torch.testing.assert_close(likelihood.log_prob(output, other, sampled), expected)


def test_a_size_by_input_of_zero_is_noise_of_one_size() -> None:
    output, y, sampled = normal(N, 1), normal(N, 1), {"likelihood.scale": torch.tensor(0.4, dtype=torch.float64)}
    pairs = torch.stack([output, torch.zeros_like(output)], -1)
    for df, same in ((None, likelihoods.Gaussian()), (5.0, likelihoods.StudentT(5.0))):
        found = likelihoods.Heteroscedastic(df, scale=None)
        torch.testing.assert_close(found.log_prob(pairs, y, sampled), same.log_prob(output, y, sampled))
        torch.testing.assert_close(found.variance(pairs, sampled), same.variance(output, sampled))


@pytest.mark.parametrize("trailing", [(), (5,)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_categorical(trailing: tuple[int, ...], dtype: torch.dtype) -> None:
    likelihood = likelihoods.Categorical()
    output = normal(N, 4, *trailing)
    distribution = D.Categorical(logits=output.movedim(1, -1))
    y = distribution.sample()
    likelihood.check(output, y.to(dtype))
    expected = distribution.log_prob(y).reshape(N, -1).sum(1)
    torch.testing.assert_close(likelihood.log_prob(output, y.to(dtype), {}), expected)
    torch.testing.assert_close(likelihood.log_prob(output, y.to(dtype).unsqueeze(1), {}), expected)
    p = distribution.probs.movedim(-1, 1)
    torch.testing.assert_close(likelihood.mean(output, {}), p)
    torch.testing.assert_close(likelihood.variance(output, {}), p * (1 - p))


@pytest.mark.parametrize("case", CASES)
def test_a_missing_last_dimension_never_broadcasts(case: str) -> None:
    likelihood, _ = CASES[case]
    output, y = normal(N), torch.ones(N)
    expected = likelihood.log_prob(output, y, SCALE)
    for o, t in [(output[:, None], y), (output, y[:, None]), (output[:, None], y[:, None])]:
        torch.testing.assert_close(likelihood.log_prob(o, t, SCALE), expected)
    for shape in [(N, 3), (1,), (1, N), (N + 1,), ()]:
        with pytest.raises(ValueError, match="they must agree"):
            likelihood.log_prob(output, torch.ones(shape), SCALE)


def test_integer_targets_are_welcome_in_regression() -> None:
    likelihood = likelihoods.Gaussian(1.0)
    y = torch.arange(N)
    torch.testing.assert_close(likelihood.log_prob(normal(N) * 0, y, {}), D.Normal(0.0, 1.0).log_prob(y.double()))


def test_a_scale_is_sampled_under_its_prior_and_starts_at_its_median() -> None:
    assert likelihoods.Gaussian(0.1).extra() == {}
    extra = likelihoods.Gaussian(priors.HalfNormal(10.0)).extra()["likelihood.scale"]
    assert extra.prior == priors.HalfNormal(10.0)
    assert extra.value.item() == pytest.approx(6.744897)
    assert likelihoods.StudentT().extra()["likelihood.scale"].prior == priors.HalfCauchy()


def test_variance_of_a_heavy_tail_is_infinite() -> None:
    assert likelihoods.StudentT(2.0, scale=1.0).variance(normal(1), {}).item() == math.inf


@pytest.mark.parametrize(
    ("likelihood", "output", "y", "words"),
    [
        (likelihoods.Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "label 3, but the output has 3 classes"),
        (likelihoods.Categorical(), torch.zeros(2, 3), torch.tensor([-100, 0]), "label -100"),
        (likelihoods.Categorical(), torch.zeros(2, 3), torch.tensor([0.0, 1.0]), r"y\.long\(\)"),
        (likelihoods.Categorical(), torch.zeros(2), torch.tensor([0, 1]), r"output \[n, classes\]"),
        (likelihoods.Categorical(), torch.zeros(2, 3), torch.zeros(2, 3).long(), r"output \[n, classes\]"),
        (likelihoods.Bernoulli(), torch.zeros(2), torch.tensor([0.0, 2.0]), "got 2"),
        (likelihoods.Bernoulli(), torch.zeros(2, 3), torch.zeros(2), "must agree"),
        (likelihoods.Poisson(), torch.zeros(2), torch.tensor([1, -4]), "got -4"),
        (likelihoods.Poisson(), torch.zeros(2), torch.tensor([1.0, 0.5]), r"got 0\.5"),
        (likelihoods.Gaussian(), torch.zeros(2, 2), torch.zeros(2), "must agree"),
        (likelihoods.Heteroscedastic(), torch.zeros(2, 3), torch.zeros(2), "last dimension is 2"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood: Likelihood, output: Tensor, y: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        likelihood.check(output, y)


def test_no_label_is_skipped_silently() -> None:
    with pytest.raises(IndexError):
        likelihoods.Categorical().log_prob(torch.zeros(1, 3), torch.tensor([-100]), {})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_bad_scale_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="Gaussian: scale"):
        likelihoods.Gaussian(scale)
    for kind in (likelihoods.StudentT, likelihoods.Heteroscedastic):
        with pytest.raises(ValueError, match=f"{kind.__name__}: df"):
            kind(scale)
    with pytest.raises(TypeError, match="scale must be a number"):
        likelihoods.Gaussian(priors.Normal())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [likelihoods.Gaussian, likelihoods.StudentT, likelihoods.Heteroscedastic])
def test_noise_scales_are_as_many_as_targets(kind: Any) -> None:
    shape = (4, 2, 2) if kind is likelihoods.Heteroscedastic else (4, 2)
    kind(scale=None, outputs=2).check(torch.zeros(shape), torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"outputs = 3 noise scales, but a row of y has shape \(2,\)"):
        kind(scale=None, outputs=3).check(torch.zeros(shape), torch.zeros(4, 2))
