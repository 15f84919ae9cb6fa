"""What an audit says of descriptions, samplers and optimizers; tests/statistics/test_audit.py shows that it is true."""

import math

import pytest
import torch

import isosgd
from isosgd.diagnostics.audit import Loop, audit
from isosgd.geometry.rule import variance_inflation

N, LR, A = 60000, 1e-3, 0.1
SGLD = math.sqrt(2 * LR / N)
RIGHT = {"num_data": N, "lr": LR, "noise": SGLD, "weight_decay": 5e-4}


def named(**description):
    return [finding.name for finding in audit(**{**RIGHT, **description}).findings]


# -- temperatures -----------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation():
    found = audit(noise=math.sqrt(2 * LR), lr=LR, loss_reduction="mean", num_data=N, weight_decay=5e-4)
    first = str(found).splitlines()[0]
    assert first == "noise 0.0447 on a mean loss, N=60000: temperature 60,000, prior precision 30"
    assert found.temperature == pytest.approx(60000)
    assert found.prior_precision == pytest.approx(30.0)
    assert "N(0, 2,000)" in str(found)
    assert [b.name for b in found.findings] == ["N missing in noise"]


@pytest.mark.parametrize(
    ("description", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.1, "noise": SGLD * math.sqrt(0.1)}, 0.1),
        ({"noise": math.sqrt(2 * LR), "loss_reduction": "full"}, 1.0),
        ({"noise": SGLD * math.sqrt(32), "loss_reduction": "sum", "batch_size": 32}, 1.0),
        ({"noise": SGLD * math.sqrt(A), "momentum": 1 - A}, 1.0),
        ({"noise": SGLD / math.sqrt(A), "momentum": 1 - A, "noise_on": "parameters"}, 1.0),
        ({"temperature": 1 / N}, 1.0),  # 1/N as a way to say that the loss is a mean
    ],
)
def test_right_rules_are_clean(description, temperature):
    found = audit(**{**RIGHT, **description})
    assert found.temperature == pytest.approx(temperature)
    assert found.clean, found
    assert "no findings" in str(found)


@pytest.mark.parametrize(
    ("description", "temperature", "name"),
    [
        ({"noise": math.sqrt(2 * LR)}, N, "N missing in noise"),
        ({"loss_reduction": "full"}, 1 / N, "N applied twice"),
        ({"noise": SGLD / math.sqrt(N), "temperature": 1 / N}, 1 / N, "N applied twice"),
        ({"temperature": 0.1}, 1.0, "T missing in noise"),
        ({"noise": SGLD * 0.1, "temperature": 0.1}, 0.01, "T applied twice"),
        ({"loss_reduction": "sum", "batch_size": 50}, 0.02, "n missing in noise"),
        ({"momentum": 1 - A}, 10.0, "friction missing in noise"),
        ({"momentum": 1 - A, "noise_on": "parameters"}, 0.1, "momentum speeds up the gradient alone"),
        ({"noise": 0.123}, N * 0.123**2 / (2 * LR), "temperature"),
        ({"noise": 0}, None, "no noise"),
        ({"reused": 3}, 3.0, "one random key used twice"),
        ({"replicas": 4}, 0.25, "replicas draw their own noise"),
        ({"assumed_num_data": 600, "noise": math.sqrt(2 * LR / 600)}, 100.0, "wrong N"),
        ({"assumed_num_data": 600, "noise": math.sqrt(2 * LR), "loss_reduction": "full"}, 100.0, "wrong N"),
    ],
)
def test_a_wrong_temperature_is_stated_and_named(description, temperature, name):
    found = audit(**{**RIGHT, **description})
    assert [b.name for b in found.findings] == [name]
    assert found.temperature == (None if temperature is None else pytest.approx(temperature))
    assert all(b.explanation and b.fix for b in found.findings)


@pytest.mark.parametrize("reduction", ["mean", "sum", "full"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("noise_on", ["velocity", "parameters"])
def test_the_fix_fixes(reduction, momentum, noise_on):
    common = {"loss_reduction": reduction, "momentum": momentum, "noise_on": noise_on, "batch_size": 50}
    rule = Loop(**{**RIGHT, **common, "noise": 1.0}).right_noise
    noise = eval(rule, {"sqrt": math.sqrt, "lr": LR, "T": 0.3, "N": N, "n": 50, "a": 1 - momentum})
    assert audit(**{**RIGHT, **common, "noise": noise, "temperature": 0.3}).temperature == pytest.approx(0.3)


def test_gradient_noise_adds_its_heat():
    quiet, loud = (audit(**RIGHT, gradient_noise=v) for v in (1e-4, 1e-2))
    assert quiet.clean and quiet.from_gradients == pytest.approx(60000 * 1e-3 * 1e-4 / 2)
    assert loud.temperature == pytest.approx(1.3)
    assert [b.name for b in loud.findings] == ["gradient noise not accounted for"]
    assert audit(**RIGHT).from_gradients is None
    assert "adds 30 v" in str(audit(**RIGHT))


def test_a_corrected_loop_has_gradient_noise_in_it():
    found = audit(**RIGHT, gradient_noise=1e-2, corrected=True)
    assert found.clean and found.temperature == pytest.approx(1.0)
    epoch = audit(**RIGHT, gradient_noise=1e-2, corrected=True, minibatches="epoch")
    assert epoch.temperature == pytest.approx(0.7)  # it makes room for noise that cancels
    assert "minibatches without replacement" in [b.name for b in epoch.findings]


def test_curvature_brings_the_error_of_discrete_steps():
    found = audit(**{**RIGHT, "lr": 0.5, "noise": math.sqrt(1 / N)}, curvature=1.0)
    assert found.temperature == pytest.approx(variance_inflation(0.5))
    assert [b.name for b in found.findings] == ["steps too long"]
    lower = float(found.findings[0].fix.split()[-1])
    assert not audit(**{**RIGHT, "lr": 0.95 * lower, "noise": math.sqrt(1.9 * lower / N)}, curvature=1.0).findings
    burst = audit(**{**RIGHT, "lr": 3.0, "noise": math.sqrt(6 / N)}, curvature=1.0)
    assert [b.name for b in burst.findings] == ["unstable"]
    assert burst.as_dict()["temperature"] is None


# -- findings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ({"weight_decay": 0.0}, "prior dropped"),
        ({"weight_decay": 0.0, "prior": 1.0}, "prior tempered"),
        ({"prior_precision": 1.0}, "prior tempered"),
        ({"minibatches": "epoch"}, "minibatches without replacement"),
    ],
)
def test_findings_are_named(description, name):
    assert named(**description) == [name]


@pytest.mark.parametrize(
    ("description", "strength"),
    [
        ({"weight_decay": 0.0, "prior": 1 / N}, 1.0),
        ({"weight_decay": 0.0, "prior": 1.0}, 60000.0),
        ({"prior_precision": 30.0}, 1.0),
        ({"prior_precision": 1.0}, 30.0),
        ({"loss_reduction": "sum", "batch_size": 100, "weight_decay": 0.0, "prior": 100 / N}, 1.0),
        ({"loss_reduction": "full", "weight_decay": 0.0, "prior": 1.0}, 1.0),
    ],
)
def test_how_often_the_prior_counts(description, strength):
    loop = Loop(**{**RIGHT, **description})
    assert loop.prior_strength() == pytest.approx(strength)
    found = audit(**{**RIGHT, **description})
    assert found.prior_temperature == pytest.approx(found.temperature / strength)


def test_decoupled_decay_is_weaker_by_the_friction():
    with_momentum = {"momentum": 0.9, "noise": SGLD * math.sqrt(0.1)}
    assert audit(**{**RIGHT, **with_momentum}).prior_precision == pytest.approx(30.0)
    assert audit(**{**RIGHT, **with_momentum}, decoupled=True).prior_precision == pytest.approx(3.0)
    assert audit(**RIGHT, decoupled=True).prior_precision == pytest.approx(30.0)


def test_a_velocity_refreshed_at_unit_variance():
    """The rule of a peer: T = 0.01 is asked for, and what comes out is between it and 1."""
    sd = math.sqrt(2 * 0.1 * 1e-3 * 0.01)
    rule = {"noise": sd, "loss_reduction": "full", "lr": 1e-3, "num_data": 100, "temperature": 0.01}
    rule |= {"momentum": 0.9, "refresh_every": 10, "order": "move", "weight_decay": 1.0}
    found = audit(**rule, momentum_noise=math.sqrt(1e-3))
    assert [b.name for b in found.findings] == ["momentum refreshed at the wrong variance"]
    assert 0.55 < found.temperature < 0.65
    right = audit(**rule | {"refresh_every": 400}, momentum_noise=math.sqrt(1e-5))
    assert right.clean and right.temperature == pytest.approx(0.01, rel=0.01)
    short = audit(**rule, momentum_noise=math.sqrt(1e-5))
    assert [b.name for b in short.findings] == ["few steps between refreshes"]


# -- optimizers -------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))


def backward(module):
    x = torch.randn(20, 3)
    module.zero_grad()
    (module(x) - x.sum(1, keepdim=True)).square().mean().backward()


SETTINGS = {"isgd": {"batch_size": 20}, "csgld": {"cycle": 10}, "csghmc": {"cycle": 10}}


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("name", sorted(set(isosgd.samplers.METHODS) - {"vsgd", "hmc"}))
def test_our_samplers_are_clean(name, temperature):
    kind, settings = isosgd.samplers.METHODS[name], SETTINGS.get(name, {})
    found = audit(lambda params: kind(params, num_data=500, temperature=temperature, **settings))
    assert found.clean, found
    assert found.temperature == pytest.approx(temperature, rel=0.05)
    fresh = audit(kind(net().named_parameters(), num_data=500, temperature=temperature, **settings))  # not warmed up
    assert fresh.clean and fresh.temperature == pytest.approx(temperature)


@pytest.mark.parametrize("name", ["isgd", "sgld", "sghmc", "isgd-momentum", "psgld"])
def test_a_wrong_n_is_found_from_the_data(name):
    kind = isosgd.samplers.METHODS[name]
    sampler = kind(net().named_parameters(), num_data=500, **SETTINGS.get(name, {}))
    data = torch.utils.data.TensorDataset(torch.zeros(5000, 3), torch.zeros(5000))
    for examples in (5000, data, torch.utils.data.DataLoader(data, 10), data.tensors, data.tensors[0]):
        found = audit(sampler, num_data=examples)
        assert [b.name for b in found.findings] == ["wrong N"]
        assert found.temperature == pytest.approx(10.0)
    assert audit(sampler, num_data=data.tensors[0][:500]).clean


def test_a_rate_changed_by_hand_shows():
    sampler = isosgd.ISGD(net().named_parameters(), num_data=500, lam=2.0)
    for group in sampler.param_groups:
        group["rate"] *= 3
    found = audit(sampler)
    assert found.temperature == pytest.approx(3.0)
    assert [b.name for b in found.findings] == ["temperature"]


def test_a_summed_loss_under_our_samplers():
    found = audit(isosgd.SGLD(net().named_parameters(), num_data=500, lr=1e-3), loss_reduction="sum", batch_size=50)
    assert found.temperature == pytest.approx(1 / 50)
    assert "n missing in noise" in [b.name for b in found.findings]


def test_vsgd_and_sgd_are_driven_by_gradient_noise():
    module = net()
    sampler = isosgd.VSGD(module.named_parameters(), num_data=500, noise="gaussian")
    for _ in range(20):
        backward(module)
        sampler.observe()
    sampler.adapt()
    found = audit(sampler)
    assert [b.name for b in found.findings] == ["no noise", "groups differ"]  # one rate, and noise of its own each
    sgd = audit(torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), num_data=1000)
    assert [b.name for b in sgd.findings] == ["no noise"]
    assert sgd.temperature is None and sgd.prior_precision == pytest.approx(0.1)
    assert "H S + S H" in str(sgd)
    damped = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9, dampening=0.9, weight_decay=1e-4)
    assert audit(damped, num_data=1000, gradient_noise=0.02).temperature == pytest.approx(1000 * 0.1 * 0.02 / 2)


def test_adam_is_no_sampler():
    found = audit(torch.optim.Adam(net().parameters(), weight_decay=1e-4), num_data=1000)
    assert found.temperature is None
    assert [b.name for b in found.findings] == ["preconditioner from gradients"]


def test_groups_that_differ():
    one, other = net()
    groups = [{"params": one.parameters(), "temperature": 0.5}, {"params": other.parameters()}]
    found = audit(isosgd.SGLD(groups, num_data=500, lr=1e-3))
    assert "groups differ" in [b.name for b in found.findings]
    assert "group 0: temperature 0.5" in str(found) and "group 1: temperature 1" in str(found)


def test_the_prior_of_weight_decay_is_seen_and_no_rate_is_made_up():
    found = audit(isosgd.ISGD(net().parameters(), num_data=500, batch_size=20, weight_decay=0.01))
    assert found.prior_precision == pytest.approx(5.0) and found.clean
    assert "gradient noise" not in str(audit(isosgd.SGLD(net().parameters(), num_data=500, batch_size=20)))


def test_noise_above_lambda_shows():
    module = net()
    sampler = isosgd.ISGD(module.named_parameters(), num_data=500, lam=1e-6)
    for _ in range(50):
        sampler.observe([torch.randn_like(p) for p in module.parameters()])
    assert "gradient noise above lambda" in [b.name for b in audit(sampler).findings]


def test_an_audit_leaves_a_sampler_as_it_was():
    def run(judged):
        module = net()
        sampler = isosgd.SGLD(
            module.named_parameters(), num_data=500, lr=1e-3, generator=torch.Generator().manual_seed(0)
        )
        for _ in range(3):
            torch.manual_seed(1)
            backward(module)
            if judged:
                audit(sampler)
            sampler.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    assert torch.equal(run(False), run(True))


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_data": 0}, "num_data = 0"),
        ({"num_data": 2.5}, r"num_data of type float"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": math.nan}, "lr = nan"),
        ({"lr": None}, "lr must be given"),
        ({"momentum": 1.0}, "momentum = 1.0"),
        ({"friction": 0.0}, "friction = 0.0"),
        ({"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({"loss_reduction": "median"}, "'mean', 'sum' or 'full'"),
        ({"loss_reduction": "sum"}, "give batch_size"),
        ({"batch_size": 60001}, "larger than num_data"),
        ({"noise": -1.0}, "noise = -1.0"),
        ({"noise": "sqrt(2*lr)"}, "noise = 'sqrt.*must be a number"),
        ({"momentum_noise": 1.0}, "give both or neither"),
        ({"momentum_noise": 1.0, "refresh_every": 1, "order": "move"}, "discards every gradient"),
        ({"averaged": True, "momentum": 0.5}, "without momentum"),
        ({"nosie": 1.0}, "did you mean noise"),
        ({"friction": 0.5, "momentum": 0.5}, "one of them"),
        ({"check": True}, "a function that makes it"),
        ({"optimizer": 3}, "pass an optimizer"),
        ({"optimizer": lambda params: 3}, "not an optimizer"),
    ],
)
def test_bad_descriptions_are_refused(changes, match):
    with pytest.raises((ValueError, TypeError), match=match):
        audit(**{**RIGHT, **changes})


def test_a_foreign_optimizer_needs_its_rate():
    class Mine(torch.optim.Optimizer):
        pass

    with pytest.raises(ValueError, match="num_data and lr must be given"):
        audit(Mine([torch.zeros(1)], {}), noise=0.1)
    found = audit(Mine([torch.zeros(1)], {"lr": 1e-3}), noise=math.sqrt(2e-3 / 100), num_data=100, prior=0.01)
    assert found.clean and found.name == "Mine"
