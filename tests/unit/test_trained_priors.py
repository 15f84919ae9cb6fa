"""Priors of trained networks: the training's weight decay, and the scales of the trained layers."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import isosgd
from isosgd import DataSets, Target, priors

DECAY = 1e-2
QUICK: dict[str, Any] = {"method": "sgld", "lr": 1e-4, "warmup": 0, "keep_every": 2, "progress": False}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def data(n: int = 50) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, x[:, :1].sin()


def prior_part(target: Target, n: int) -> dict[str, Tensor]:
    """What the prior adds to the gradient of the mean loss."""
    free = target.initial()
    whole = target.gradient(free, data(n), n)[1]
    alone = target.gradient(free, data(n), n, prior_weight=0.0)[1]
    return {name: a - b for name, a, b in zip(free, whole, alone, strict=True)}


@pytest.mark.parametrize("given", [None, 50])
def test_weight_decay_adds_what_sgd_adds(given: int | None) -> None:
    model = network()
    target = Target.from_module(model, "gaussian", weight_decay=DECAY, num_data=given)
    assert target.resolve_num_data(data()) == 50
    found = prior_part(target, 50)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], DECAY * p.detach(), rtol=1e-4, atol=1e-6)
    own = Target.from_module(model, "gaussian", priors.Normal(1.0))  # likelihood.scale keeps its own hyperprior
    torch.testing.assert_close(found["likelihood.scale"], prior_part(own, 50)["likelihood.scale"])
    assert target.prior_curvature(target.initial())[0].flatten()[0] == pytest.approx(DECAY * 50)


def test_the_precision_follows_the_data_that_are_sampled() -> None:
    target = Target.from_module(network(), isosgd.likelihoods.Gaussian(0.1), weight_decay=DECAY)
    free = target.initial()
    with pytest.raises(ValueError, match=r"N is not known yet: pass num_data="):
        target.log_prior(free)
    for n in (50, 20):
        target.resolve_num_data(data(n))
        assert target.prior_precisions(free) == pytest.approx([DECAY * n] * 4)
    about = target.describe()["prior"]
    assert about == {"name": "WeightDecay", "decay": DECAY, "num_data": None}


def test_groups_of_an_optimizer() -> None:
    model = network()
    groups = [{"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
              {"params": [model[0].bias, model[2].bias]}]  # fmt: skip
    for optimizer in (optim.SGD(groups, lr=0.1), optim.Adam(groups)):
        target = Target.from_module(model, "gaussian", optimizer=optimizer)
        found = prior_part(target, 50)
        torch.testing.assert_close(found["0.weight"], 0.1 * model[0].weight.detach(), rtol=1e-4, atol=1e-6)
        assert not found["0.bias"].any()
        assert not found["2.bias"].any()
    known = Target.from_module(model, isosgd.likelihoods.Gaussian(0.1), optimizer=optimizer, num_data=50)
    assert known.prior_precisions(known.initial()) == pytest.approx([5.0, 0.0, 5.0, 0.0])
    none = Target.from_module(model, "gaussian", optimizer=optim.AdamW(model.parameters(), weight_decay=0.0))
    assert not prior_part(none, 50)["0.weight"].any()
    last = Target.from_module(model, "gaussian", optimizer=optim.SGD(model[2].parameters()), sampled="last_layer")
    assert not prior_part(last, 50)["2.weight"].any()


class Own(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"weight_decay": 0.1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p), r"decay of AdamW is not the gradient of a penalty.*prior='empirical'"),
        (lambda p: optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True), "decay of Adam is not the gradient"),
        (Own, "decay of Own is not the gradient"),
        (lambda p: optim.SGD(list(p)[:3]), r"the parameter '2\.bias' not"),
        (lambda p: optim.SGD(copy.deepcopy(list(p))), "none of the parameters"),
    ],
)
def test_optimizers_that_name_no_prior(make: Any, message: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=message):
        Target.from_module(model, "gaussian", optimizer=make(model.parameters()))


def test_bad_settings() -> None:
    model = network()
    with pytest.raises(ValueError, match="prior= and weight_decay= both say"):
        Target.from_module(model, "gaussian", "empirical", weight_decay=0.1)
    with pytest.raises(ValueError, match="weight_decay= and optimizer= both say"):
        Target.from_module(model, "gaussian", weight_decay=0.1, optimizer=optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"at least 0, got -0\.1"):
        Target.from_module(model, "gaussian", weight_decay=-0.1)
    with pytest.raises(TypeError, match="must be a number, got 'a'"):
        Target.from_module(model, "gaussian", weight_decay="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got float"):
        Target.from_module(model, "gaussian", optimizer=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prior = 'emprical' is unknown"):
        Target.from_module(model, "gaussian", "emprical")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass init= to Target"):
        Target(lambda p, b: -(p["w"] - b[0]).square(), priors.Empirical()).initial({"w": 0.0})


def test_decay_in_a_mapping_and_with_several_data_sets() -> None:
    model = network()
    target = Target.from_module(model, "gaussian", {"*.bias": priors.Flat(), "*": priors.WeightDecay(DECAY)})
    x, y = data()
    sets = DataSets((x, y), torch.stack([torch.arange(40), torch.arange(10, 50)]))
    posterior = isosgd.sample(target, sets, draws=4, batch_size=10, **QUICK)
    assert posterior.num_chains == 2
    assert target.prior_curvature(target.initial())[0].flatten()[0] == pytest.approx(DECAY * 40)


def test_scales_of_the_empirical_prior_are_those_of_the_layers() -> None:
    model = network()
    with torch.no_grad():
        model[2].bias.zero_()
    target = Target.from_module(model, isosgd.likelihoods.Gaussian(0.1), "empirical")
    about = target.describe()["prior"]
    sizes = {name: float(p.detach().square().mean().sqrt()) for name, p in model.named_parameters()}
    assert about["name"] == "Empirical"
    assert about["scale"] == pytest.approx(sizes | {"2.bias": 1e-2}, rel=1e-3)
    precisions = target.prior_precisions(target.initial())
    assert precisions == pytest.approx([scale**-2 for scale in about["scale"].values()])
    elsewhere = target.initial({"0.weight": torch.zeros(4, 3)})  # the prior stays that of the module
    assert target.log_prior(elsewhere).isfinite()
    assert target.describe()["prior"] == about
    assert (
        Target.from_module(model.double(), isosgd.likelihoods.Gaussian(0.1), "empirical").describe()["prior"] == about
    )


def test_the_empirical_prior_in_a_mapping_is_of_its_own_tensors() -> None:
    one = priors.Empirical(least=0.5)
    target = Target.from_module(network(), "gaussian", {"0.*": one, "2.weight": one, "*": priors.Flat()})
    table = target.describe()["prior"]["table"]
    assert list(table["0.*"]["scale"]) == ["0.weight", "0.bias"]
    assert list(table["2.weight"]["scale"]) == ["2.weight"]
    assert bool(target.log_prior(target.initial()).isfinite())


@pytest.mark.parametrize("prior", [{"prior": "empirical"}, {"weight_decay": DECAY}], ids=["empirical", "weight decay"])
def test_a_stored_run_knows_its_prior(prior: dict[str, Any], tmp_path: Path) -> None:
    model, path = network(), tmp_path / "run"
    run = isosgd.sample(Target.from_module(model, "gaussian", **prior), data(), draws=12, store=path, **QUICK)
    again = isosgd.load(path, target=Target.from_module(model, "gaussian", **prior))
    x = data()[0]
    torch.testing.assert_close(again.predict(x).mean, run.predict(x).mean)
    assert again.trust(data()).summary
    other = {"weight_decay": 2 * DECAY} if "weight_decay" in prior else prior
    if "prior" in prior:
        with torch.no_grad():
            model[0].weight.mul_(2)
    with pytest.raises(ValueError, match="the target is not the one"):
        isosgd.load(path, target=Target.from_module(model, "gaussian", **other))


def test_mcdropout_takes_rates_from_a_network_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 1))
    with pytest.warns(UserWarning, match="dropout is off"):
        target = Target.from_module(model, "gaussian")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = isosgd.sample(target, data(), method="mcdropout", draws=200, warmup=20, progress=False)
    dropped = (posterior.draws["3.weight"] == 0).float().mean()
    assert float(dropped) == pytest.approx(0.4, abs=0.08)  # 1600 masks, 6 standard errors
    assert not (posterior.draws["0.weight"] == 0).any()
