"""The posteriors of posteriordb: potentials checked against the draws that came with them.

At draws from a density the gradient of its logarithm is zero on average, so that a wrong column, prior, parameter or
Jacobian shows in the mean gradient over the reference draws.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Beta, HalfCauchy, HalfNormal, Normal
from torch.func import grad, vmap

from experiments.posteriors import posteriordb
from experiments.posteriors.posteriordb import NAMES, REGRESSIONS, Reference, batch_size, load, names
from isosgd import Target, priors

SCHOOLS = "eight_schools-eight_schools_noncentered"
MIXTURE = "low_dim_gauss_mix-low_dim_gauss_mix"
SIGMAS = 5.0


@pytest.fixture(scope="module")
def root() -> Path:
    found = posteriordb.default_root()
    if found is None or not names(found):
        pytest.skip("no data: set ISOSGD_DATA to a folder that holds posteriordb/<name>/data.json and draws.npz")
    return found


def standard_errors(reference: Reference) -> Tensor:
    """Mean gradient of the log posterior over all reference draws, entry by entry, in its standard errors."""
    target, data = reference.target, reference.data
    free = target.unconstrain(reference.sampled(reference.draws))
    free = {name: x.flatten(0, 1) for name, x in free.items()}
    target.check({name: x[0] for name, x in free.items()}, data)
    gradients = vmap(grad(lambda p: target.log_likelihood(p, data).sum() + target.log_prior(p)), chunk_size=1000)(free)
    flat = torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)
    return flat.mean(0) / (flat.std(0) / len(flat) ** 0.5)


def with_prior(reference: Reference, log_likelihood: object, prior: object) -> Reference:
    """The same with another prior."""
    start = reference.target.constrain(reference.target.initial())
    positive = reference.target.describe()["positive"]
    return replace(reference, target=Target(log_likelihood, prior, positive=positive, init=start))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_mean_gradient_at_the_reference_draws_is_zero(name: str, root: Path) -> None:
    assert standard_errors(load(name, root)).abs().max() < SIGMAS


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_complete(name: str, root: Path) -> None:
    reference = load(name, root)
    start = reference.target.initial()
    assert all(x.dtype == torch.float64 for x in (*start.values(), *reference.draws.values(), *reference.data[:2]))
    there = reference.natural({key: x.detach() for key, x in reference.target.constrain(start).items()})
    assert {key: x.shape for key, x in there.items()} == {key: x.shape[2:] for key, x in reference.draws.items()}
    assert reference.batch_size == batch_size(len(reference.data[0]))
    assert reference.target.resolve_num_data(reference.data) == len(reference.data[0])
    back = reference.natural(reference.sampled(reference.draws))
    for key, x in reference.draws.items():
        torch.testing.assert_close(back[key], x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_start_in_the_posterior(name: str, root: Path) -> None:
    """A least-squares fit lies within a few posterior standard deviations in every entry."""
    reference = load(name, root)
    for key, x in reference.target.constrain(reference.target.initial()).items():
        draws = reference.draws[key].flatten(0, 1)
        assert ((x - draws.mean(0)) / draws.std(0)).abs().max() < 1.0, key


def test_batches_are_a_tenth_and_even() -> None:
    assert [batch_size(n) for n in (5, 8, 46, 100, 195, 1000)] == [5, 8, 8, 10, 18, 100]


# Data say little about some priors: these are compared with the densities themselves, Jacobians included.

STATED = {
    "arK-arK": {"alpha": Normal(0, 10), "beta": Normal(0, 10), "sigma": HalfCauchy(2.5)},
    "sblrc-blr": {"beta": Normal(0, 10), "sigma": HalfNormal(10)},
    "sblri-blr": {"beta": Normal(0, 10), "sigma": HalfNormal(10)},
    "kidiq-kidscore_momiq": {"sigma": HalfCauchy(2.5)},
    "earnings-earn_height": {},
    SCHOOLS: {"theta_trans": Normal(0, 1), "mu": Normal(0, 5), "tau": HalfCauchy(5)},
}


@pytest.mark.parametrize("name", STATED)
def test_priors_are_the_stated_ones(name: str, root: Path) -> None:
    target = load(name, root).target
    free = {key: x.detach() for key, x in target.initial().items()}
    natural = target.constrain(free)
    expected = sum(density.log_prob(natural[key]).sum() for key, density in STATED[name].items())
    jacobian = sum(free[key].sum() for key in target.describe()["positive"])
    torch.testing.assert_close(target.log_prior(free), torch.as_tensor(expected + jacobian))


def test_gradient_of_the_mixtures_prior() -> None:
    values = {"low": -1.3, "gap": 2.0, "sigma": [0.7, 1.9], "logit": 0.4}
    params = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    found, known = posteriordb.MixturePrior().grad(params), torch.func.grad(posteriordb.mixture_log_prior)(params)
    assert found.keys() == known.keys()
    for name, value in known.items():
        torch.testing.assert_close(found[name], value)


def test_prior_of_the_mixture_is_the_stated_one(root: Path) -> None:
    """Up to a constant: what is compared is its change over a few reference draws."""
    reference = load(MIXTURE, root)
    draws = {key: x[0, :20] for key, x in reference.draws.items()}
    sampled = reference.sampled(draws)
    ours = torch.stack([posteriordb.mixture_log_prior({key: x[i] for key, x in sampled.items()}) for i in range(20)])
    theta = draws["theta"]
    theirs = Normal(0, 2).log_prob(draws["mu"]).sum(1) + HalfNormal(2).log_prob(draws["sigma"]).sum(1)
    theirs = theirs + Beta(5, 5).log_prob(theta) + (theta * (1 - theta)).log()
    torch.testing.assert_close(ours - ours[0], theirs - theirs[0])


# The check itself: what is wrong is found.


@pytest.mark.long
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_wrong_sigma_is_found(name: str, root: Path) -> None:
    reference = load(name, root)
    # In standard errors the mean gradient in log(sigma) moves by sqrt(draws) sqrt(2 N) times the relative error: >= 9.
    wrong = reference.draws | {"sigma": 1.01 * reference.draws["sigma"]}
    assert standard_errors(replace(reference, draws=wrong)).abs().max() > SIGMAS


@pytest.mark.parametrize("parameter", ["theta_trans", "mu", "tau"])
def test_a_wrong_prior_scale_is_found(parameter: str, root: Path) -> None:
    table = posteriordb.SCHOOLS_PRIOR
    wrong = dict(table) | {parameter: replace(table[parameter], scale=1.3 * table[parameter].scale)}
    mutant = with_prior(load(SCHOOLS, root), posteriordb.schools_log_likelihood, wrong)
    assert standard_errors(mutant).abs().max() > SIGMAS


def test_a_missing_prior_of_a_regression_is_found(root: Path) -> None:
    reference = load("kidiq-kidscore_momhs", root)
    mutant = with_prior(reference, posteriordb.normal_log_likelihood, priors.Flat())
    assert standard_errors(mutant).abs().max() > SIGMAS


def test_swapped_columns_are_found(root: Path) -> None:
    reference = load("mesquite-logmesquite", root)
    x, y = reference.data
    swapped = replace(reference, data=(x[:, [0, 2, 1, 3, 4, 5, 6]], y))
    assert standard_errors(swapped).abs().max() > SIGMAS


# Bad input.


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'arK' is not a posterior known here"):
        load("arK", tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match=r"data\.json: root must be the folder"):
        load("arK-arK", tmp_path)


def test_the_root_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOSGD_DATA", str(tmp_path))
    assert posteriordb.default_root() == tmp_path
