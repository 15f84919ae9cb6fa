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
from isosgd.diagnostics.audit.description import epoch_noise_share, evaluate
from isosgd.geometry.rule import variance_inflation

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
    assert loop.exact_temperature(1.0) == pytest.approx(variance_inflation(step, 1 - momentum))


LOOPS = st.fixed_dictionaries(
    {
        "num_data": st.integers(2, 10**5),
        "lr": st.floats(1e-4, 1e-1),
        "noise": st.floats(0.1, 2.0),
        "momentum": st.sampled_from([0.0, 0.3, 0.9]),
        "noise_on": st.sampled_from(["velocity", "parameters"]),
        "loss_reduction": st.sampled_from(["mean", "full"]),
        "refresh": st.sampled_from([None, 3, 8]),
        "order": st.sampled_from(["kick", "move"]),
        "shared_noise": st.sampled_from([None, "steps"]),
        "reused": st.sampled_from([1, 2, 4]),
        "gradient_noise": st.floats(0.0, 5.0),
    }
)


@given(LOOPS)
def test_stated_temperatures_are_the_limit_of_the_recursion(settings):
    """The closed form and the recursion agree as curvature vanishes, whatever the loop."""
    refresh = settings.pop("refresh")
    if refresh is not None:
        # A draw is kept at the end of a trajectory, where blocks of shared noise end too.
        settings |= {"refresh_every": refresh, "momentum_noise": 0.7}
        if settings["shared_noise"] and refresh % settings["reused"]:
            settings["shared_noise"] = None
    loop = Loop(**settings)
    small = 1e-6 / (loop.lr * loop.scale * loop.response.mean() * loop.period)
    stated = loop.noise_temperature() + loop.gradient_temperature()
    assert loop.exact_temperature(small, loop.gradient_noise) == pytest.approx(stated, rel=1e-3)


@pytest.mark.parametrize("forgets", [0.003, 0.1, 0.7])
@pytest.mark.parametrize("steps", [2, 7, 30])
def test_the_share_of_an_epoch_by_brute_force(forgets, steps):
    """Covariance of the noise of many epochs, weighed and added up."""
    epochs = math.ceil(40 / (forgets * steps)) + 1
    block = (np.eye(steps) * steps - 1) / (steps - 1)
    total = epochs * steps
    shares = []
    for done in range(1, steps + 1):  # steps of the last epoch that are done
        weights = np.zeros(total)
        age = np.arange(total - steps + done)[::-1]
        weights[: total - steps + done] = (1 - forgets) ** age
        rows = weights.reshape(epochs, steps)
        shares.append(np.einsum("ei,ij,ej->", rows, block, rows) / (weights**2).sum())
    assert epoch_noise_share(forgets, steps) == pytest.approx(np.mean(shares), rel=1e-6)


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
    argv += ["--replicas", "2", "--burn-in", "10", "--counter", "tensor", "--num-tensors", "3", "--counter-not-saved"]
    argv += ["--gradient-noise", "0.1", "--curvature", "1"]
    assert run(*argv, *COMMON, "--json") == 3
    found = strict(capsys.readouterr().out)
    unsaid = {"corrected", "assumed_num_data", "averaged"}  # of samplers of ours, and what goes without momentum
    assert set(found["description"]) == set(Loop.__dataclass_fields__) - unsaid
