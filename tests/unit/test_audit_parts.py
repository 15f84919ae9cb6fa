"""The parts of an audit: the evaluator of rules, the recursion against closed forms, and the command."""

import argparse
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isosgd.cli import audit as command
from isosgd.diagnostics.audit import Loop
from isosgd.diagnostics.audit.loop import evaluate
from isosgd.samplers.steppers import variance_inflation

# -- expressions ------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(0.5, 10).map(lambda x: repr(round(x, 3)))
TERMS = st.recursive(
    NUMBERS | st.sampled_from(["lr", "N"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda t: f"-{t}")
        | inner.map(lambda t: f"{t}**2")
    ),
    max_leaves=6,
)


@given(TERMS)
def test_arithmetic_is_pythons(text):
    names = {"lr": 0.1, "N": 1000.0}
    try:
        wanted = eval(text, {"__builtins__": {}}, dict(names))
    except (ZeroDivisionError, OverflowError):
        with pytest.raises(ValueError):
            evaluate(text, names)
        return
    if math.isfinite(wanted):
        assert evaluate(text, names) == wanted


def test_functions_and_numbers():
    assert evaluate("sqrt(2*lr)*0.01", {"lr": 0.02}) == math.sqrt(0.04) * 0.01
    assert evaluate("exp(log(3))", {}) == pytest.approx(3)
    assert evaluate(2, {}) == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "lr.real",
        "[1][0]",
        "lambda: 1",
        "2 if lr else 3",
        "'a'",
        "True",
        "open(1)",
        "sqrt(1, 2)",
        "sqrt(x=1)",
        "2^lr",
        "lr = 2",
        "sqrt(2*lr",
        "",
        "1 < 2",
        "M",
        "N*2",
        "1/0",
        "9.0**9**9",
        "sqrt(-1)",
        "(-1)**0.5",
        "log(0)",
        "1e999",
        "2" * 300,
        "(" * 90 + "1" + ")" * 90 + "+",
    ],
)
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError, match=r"noise"):
        evaluate(text, {"lr": 0.1, "N": None}, "noise")


@pytest.mark.parametrize("value", [None, True, "nan", float("nan"), float("inf"), [1], {}])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="rule"):
        evaluate(value, {}, "rule")


# -- the recursion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("step", [0.01, 0.3])
def test_the_recursion_knows_the_inflation_of_both_steppers(momentum, step):
    loop = Loop(num_data=100, lr=step, noise="sqrt(2*a*lr/N)", momentum=momentum)
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
        momentum_noise=0.7, shared_noise="steps", reused=reused, gradient_noise=5.0,
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
    assert run("--noise", "sqrt(2*lr)*0.01", "--loss", "mean", *COMMON) == 3
    assert "N=60000: temperature 6.0, prior precision 30" in capsys.readouterr().out


def test_the_command_ends_with_0_when_all_is_well(capsys):
    assert run("--noise", "sqrt(2*lr*T/N)", *COMMON, "--json") == 0
    found = strict(capsys.readouterr().out)
    assert found["clean"] and found["temperature"] == pytest.approx(1.0)
    assert found["description"]["noise"] == "sqrt(2*lr*T/N)"


def test_the_command_ends_with_2_when_asked_wrongly(capsys):
    assert run("--noise", "sqrt(2*Q)", *COMMON) == 2
    printed = capsys.readouterr()
    assert not printed.out and "Q is not allowed" in printed.err
    with pytest.raises(SystemExit) as ended:
        run("--noise", "1")
    assert ended.value.code == 2


def test_a_temperature_that_is_a_number_is_the_one_that_is_meant(capsys):
    """One that is worked out from N is what a script does; 0.01 is not."""
    argv = ["--num-data", "100", "--lr", "1e-5", "--noise", "sqrt(2*a*lr*T)", "--temperature", "0.01", "--loss", "full"]
    argv += ["--momentum", "0.9", "--prior", "1", "--momentum-noise", "sqrt(lr)", "--refresh-every", "10"]
    assert run(*argv, "--order", "move", "--json") == 3
    found = strict(capsys.readouterr().out)
    assert [finding["name"] for finding in found["findings"]] == ["momentum refreshed at the wrong variance"]


def test_every_flag_reaches_the_description(capsys):
    argv = ["--noise", "0.1", "--loss", "sum", "--batch-size", "10", "--temperature", "0.5", "--decoupled"]
    argv += ["--prior", "1/N", "--prior-precision", "2", "--momentum", "0.5", "--noise-on", "parameters"]
    argv += ["--momentum-noise", "0.1", "--refresh-every", "4", "--order", "move", "--clipping", "3", "--augmentation"]
    argv += ["--batchnorm", "--dropout", "--minibatches", "epoch", "--shared-noise", "steps", "--reused", "4"]
    argv += ["--replicas", "2", "--gradient-noise", "0.1", "--curvature", "1"]
    assert run(*argv, *COMMON, "--json") == 3
    found = strict(capsys.readouterr().out)
    unsaid = {"corrected", "assumed_num_data", "averaged"}  # of samplers of ours, and what goes without momentum
    assert set(found["description"]) == set(Loop.__dataclass_fields__) - unsaid
