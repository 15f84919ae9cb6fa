"""The command line: what it prints and writes, and how it ends when something is wrong."""

import json
import subprocess
import sys

import pytest

import isosgd
from isosgd.cli import main


def strict(text):
    """JSON as the standard has it, without NaN and infinities."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def usage(argv, capsys):
    """What a command that argparse ends prints, and its code."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code, capsys.readouterr()


def test_methods_are_listed(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == [row["name"] for row in isosgd.methods()] and set(isosgd.METHODS) < set(names)


def test_methods_as_json(capsys):
    assert main(["methods", "--json"]) == 0
    rows = strict(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [row["name"] for row in isosgd.methods()]
    assert all(row["family"] and row["targets"] for row in rows)


def test_version(capsys):
    code, printed = usage(["--version"], capsys)
    assert (code, printed.out.strip()) == (0, isosgd.__version__)


@pytest.mark.long  # torch is loaded once more
def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "isosgd", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, isosgd.__version__)


def test_demo_reaches_the_parser_of_the_demo(capsys):
    code, printed = usage(["demo", "--help"], capsys)
    assert code == 0
    assert "--quick" in printed.out and "--jobs" in printed.out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonesuch"],
        ["methods", "--nonesuch"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(argv, capsys):
    code, printed = usage(argv, capsys)
    assert code == 2
    assert printed.err.startswith("usage: isosgd")
