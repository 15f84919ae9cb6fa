"""The parts of an audit: the evaluator of rules, the recursion against closed forms, and the command."""

import argparse
import json
import math

import numpy as np
import pytest

from isosgd.cli import audit as command
from isosgd.diagnostics.audit import Loop
from isosgd.geometry.rule import variance_inflation

# -- the recursion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("step", [0.01, 0.3])
def test_the_recursion_knows_the_inflation_of_both_steppers(momentum, step):
    loop = Loop(num_data=100, lr=step, noise=math.sqrt(2 * (1 - momentum) * step / 100), momentum=momentum)
    assert loop.noise_temperature(1.0) == pytest.approx(variance_inflation(step, 1 - momentum))


@pytest.mark.parametrize("order", ["kick", "move"])
@pytest.mark.parametrize("noise_on", ["velocity", "parameters"])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("reused", [1, 4])
def test_the_limit_of_the_recursion_is_the_drift_and_variance_of_a_trajectory(order, noise_on, momentum, reused):
    """Over ``l`` steps a kick in step i moves theta by ``c_i``: T is N times the variance over 2 lr s sum(c)."""
    steps, lr, count = 8, 1e-3, 100
    loop = Loop(
        num_data=count, lr=lr, noise=0.4, momentum=momentum, noise_on=noise_on, order=order, refresh_every=steps,
        momentum_noise=0.7, reused=reused, gradient_noise=5.0,
    )  # fmt: skip
    c = np.cumsum(momentum ** np.arange(steps))[::-1]
    start = c[0] * momentum
    if order == "move":
        start, c = c[0], np.append(c[1:], 0.0)
    same = c if noise_on == "velocity" else np.ones(steps)
    injected = sum(same[k : k + reused].sum() ** 2 for k in range(0, steps, reused)) * 0.4**2
    for found, variance in [
        (loop.noise_temperature(), injected + start**2 * 0.7**2),
        (loop.gradient_temperature(), (c**2).sum() * lr**2 * 5.0),
    ]:
        assert found == pytest.approx(count * variance / (2 * lr * c.sum()), rel=1e-5)


# -- the command ------------------------------------------------------------------------------------------------------


def run(*argv):
    parser = argparse.ArgumentParser(prog="isosgd audit")
    command.add_audit(parser)
    return command.run_audit(parser.parse_args(argv))


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


COMMON = ("--lr", "1e-3", "--num-data", "60000", "--weight-decay", "5e-4")


def test_the_command_states_and_ends_with_3(capsys):
    assert run("--noise", "0.0447214", "--loss", "mean", *COMMON) == 3
    assert "N=60000: temperature 60,000, prior precision 30" in capsys.readouterr().out


def test_the_command_ends_with_0_when_all_is_well(capsys):
    assert run("--noise", str(math.sqrt(2e-3 / 60000)), *COMMON, "--json") == 0
    found = strict(capsys.readouterr().out)
    assert found["clean"] and found["temperature"] == pytest.approx(1.0)
    assert found["description"]["weight_decay"] == 5e-4


def test_the_command_ends_with_2_when_asked_wrongly(capsys):
    assert run("--noise", "1", "--batch-size", "70000", *COMMON) == 2
    printed = capsys.readouterr()
    assert not printed.out and "batch_size = 70000 is larger" in printed.err
    with pytest.raises(SystemExit) as ended:
        run("--noise", "1")
    assert ended.value.code == 2


def test_a_velocity_at_the_wrong_variance_is_named(capsys):
    argv = ["--num-data", "100", "--lr", "1e-5", "--noise", "1.41e-4", "--temperature", "0.01", "--loss", "full"]
    argv += ["--momentum", "0.9", "--prior", "1", "--momentum-noise", "3.16e-3", "--refresh-every", "10"]
    assert run(*argv, "--order", "move", "--json") == 3
    found = strict(capsys.readouterr().out)
    assert [finding["name"] for finding in found["findings"]] == ["momentum refreshed at the wrong variance"]


def test_every_field_is_a_flag(capsys):
    values = {"loss_reduction": "sum", "batch_size": 10, "noise_on": "parameters", "order": "move", "momentum": 0.5}
    values |= {"minibatches": "epoch", "refresh_every": 4, "momentum_noise": 0.1, "reused": 4, "replicas": 2}
    values |= {"noise": 0.1, "temperature": 0.5, "prior": 0.1, "prior_precision": 2.0, "assumed_num_data": 50}
    values |= {"gradient_noise": 0.1, "curvature": 1.0}
    argv = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(*argv, *COMMON, "--decoupled", "--corrected", "--json") == 3
    found = strict(capsys.readouterr().out)
    assert set(found["description"]) == set(Loop.__dataclass_fields__) - {"averaged"}  # which goes without momentum
