"""Runs by the command line: fit, predict, diagnose, report, sample, resume; and Ctrl-C."""

import _thread
import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import isosgd
from isosgd import sklearn
from isosgd.cli import main
from isosgd.cli.folders import open_run, run_of_script
from isosgd.diagnostics.verdict import OFF_CENTRE, RUN_LONGER, TOO_HOT, UNEVEN
from isosgd.tables.network import Network
from isosgd.warmup.reports import drifting
from isosgd.warmup.windows import LATE
from tests.crashes import stored_draws

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # so few steps cannot settle

PENGUINS = Path(__file__).parents[1] / "data" / "penguins.csv"
SHORT = ["--effort", "0.05", "--chains", "2", "--hidden", "8"]
SCRIPT = """
import torch
from isosgd import Target, priors

x = torch.linspace(-1, 1, 80).unsqueeze(1)
rows = (x, 2 * x + 0.2 * torch.randn(80, 1))
target = Target.from_module(torch.nn.Linear(1, 1), "gaussian")
heldout = (x[::4], 2 * x[::4])

def data():
    return rows

def made():
    return Target.from_module(torch.nn.Linear(1, 1), "gaussian", priors.Normal(1.0))
"""


def strict(text):
    """JSON as the standard has it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def run(argv, capsys, code=0):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == code
    return capsys.readouterr()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A short run on real measures, and what it printed as JSON."""
    folder = tmp_path_factory.mktemp("runs") / "penguins"
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("isosgd.cli.runs.print_json", printed.append)
        assert main(["fit", str(PENGUINS), "--target", "body_mass_g", "--out", str(folder), "--json", *SHORT]) == 0
    return folder, printed[0]


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """A short run on their kinds, and what it printed in words."""
    folder = tmp_path_factory.mktemp("runs") / "species"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["fit", str(PENGUINS), "--target", "species", "--out", str(folder), *SHORT]) == 0
    return folder, printed.getvalue()


def test_fit_says_what_it_did_and_leaves_a_whole_run(fitted):
    folder, told = fitted
    assert told["counts"] == {"rows": 344, "train": 308, "heldout": 34, "dropped": 2}
    assert {"rmse", "mnll", "coverage95", "rows"} == set(told["scores"])
    assert told["verdict"]["summary"] in ("trust it", "run longer", "it samples something else")
    assert (told["draws"], told["chains"]) == (10, 2)
    for name in ("manifest.json", "model.json", "table.json", "data.safetensors", "report.html"):
        assert (folder / name).is_file()
    posterior = open_run(folder).posterior()
    assert posterior.info["complete"] and len(posterior) == 20
    strict((folder / "model.json").read_text())
    strict((folder / "table.json").read_text())


def test_fit_prints_words(classified):
    folder, printed = classified
    assert "3 classes of 'species'" in printed and "held-out rows: accuracy" in printed
    assert f"isosgd predict {folder} NEW.csv" in printed


def test_held_out_rows_were_not_learnt_from(fitted):
    run_ = open_run(fitted[0])
    assert run_.data[0].mean(0).abs().max() < 1e-4, "training rows are centred"
    assert run_.heldout[0].mean(0).abs().max() > 1e-3, "held-out rows are not: they were not looked at"


@pytest.mark.parametrize("kind", ["fitted", pytest.param("classified", marks=pytest.mark.slow)])
def test_scores_are_those_of_the_functions_that_users_have(kind, request):
    from isosgd import metrics
    from isosgd.cli import runs as judgement

    found = request.getfixturevalue(kind)
    run_ = open_run(found[0])
    posterior, y = run_.posterior(), run_.heldout[1]
    whole = judgement.scores_of(run_, posterior)
    if kind == "classified":
        mean = posterior.predict(run_.heldout[0]).mean.double()
        mean = (mean.log() / run_.model.softmax_temperature_).softmax(-1)  # as `predict_proba` does
        wanted = {"accuracy": metrics.accuracy, "mnll": metrics.categorical_mnll, "ece": metrics.ece}
        wanted |= {"brier": metrics.brier}
        wanted = {name: float(score(mean, y)) for name, score in wanted.items()}
    else:
        model, y = run_.model, y.flatten().double() * run_.subject.y_scale + run_.subject.y_mean
        predicted = posterior.predict(run_.heldout[0], return_draws=True, levels=(0.025, 0.975))
        low, high = (q.flatten() * run_.subject.y_scale + run_.subject.y_mean for q in predicted.quantiles)
        density = posterior.log_predictive(run_.heldout).double() - math.log(run_.subject.y_scale)
        wanted = {
            "rmse": float(metrics.rmse(model.y_center_[0] + model.y_scale_[0] * predicted.mean.flatten(), y)),
            "coverage95": float(((y >= low) & (y <= high)).double().mean()),
            "mnll": -float(density.mean()),
        }
    assert whole == pytest.approx({"rows": len(y), **wanted}, rel=1e-4)


@pytest.mark.slow
def test_without_held_out_rows(tmp_path, capsys):
    argv = ["fit", PENGUINS, "--target", "body_mass_g", "--out", tmp_path / "run", "--holdout", "0", *SHORT]
    assert "training rows (no rows were held out)" in run(argv, capsys).out
    assert "scores are optimistic" in (tmp_path / "run" / "report.html").read_text()


def test_predictions_match_the_posterior(fitted, tmp_path, capsys):
    folder, _ = fitted
    out = tmp_path / "predictions.csv"
    printed = run(["predict", folder, PENGUINS, "--out", out, "--keep", "species", "--level", "0.8"], capsys)
    assert "344 predictions in" in printed.out
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["row", "species", "mean", "sd", "model_sd", "low", "high", "unlike", "why"]
    frame = pd.read_csv(PENGUINS)
    assert [row["species"] for row in rows] == list(frame["species"])
    model = sklearn.load(folder)
    expected = model.predict(frame[list(model.feature_names_in_)])
    assert np.allclose([float(row["mean"]) for row in rows], expected, rtol=1e-4)
    assert all(
        float(r["low"]) < float(r["mean"]) < float(r["high"]) and 0 < float(r["model_sd"]) < float(r["sd"])
        for r in rows
    )


def test_what_is_unlike_is_flagged_with_the_reason(fitted, tmp_path, capsys):
    head, first = PENGUINS.read_text().splitlines()[:2]
    assert head.split(",")[:4] == ["species", "island", "bill_length_mm", "bill_depth_mm"]
    lines = [
        first,
        first.replace("Torgersen", "Bouvet"),
        first.replace("39.1", "391"),
        first.replace("39.1", "NA").replace("18.7", "25"),
    ]
    new = tmp_path / "new.csv"
    new.write_text("\n".join([head, *lines]))
    rows = strict(run(["predict", fitted[0], new, "--json"], capsys).out)
    assert [row["unlike"] for row in rows] == [False, True, True, True]
    assert "island 'Bouvet' is new" in rows[1]["why"]
    assert "bill_length_mm 391 is outside" in rows[2]["why"] and "far from all training rows" in rows[2]["why"]
    assert "bill_length_mm is missing" in rows[3]["why"] and "bill_depth_mm 25 is outside" in rows[3]["why"]


def test_probabilities_of_classes(classified, capsys):
    folder, _ = classified
    printed = run(["predict", folder, PENGUINS], capsys)
    rows = list(csv.DictReader(printed.out.splitlines()))
    assert "rows are unlike" in printed.err, "standard output holds nothing but the table"
    names = ["p(Adelie)", "p(Chinstrap)", "p(Gentoo)"]
    assert all(abs(sum(float(row[n]) for n in names) - 1) < 1e-4 for row in rows)
    for row in rows[:50]:
        assert row["predicted"] == max(names, key=lambda n: float(row[n]))[2:-1]
    assert "Confusion of classes" in (folder / "report.html").read_text()


def test_scores_of_classes_are_those_of_what_is_predicted(classified, tmp_path, capsys):
    """Also after a run went on: averages are as sure as the draws say that there are now."""
    folder = tmp_path / "run"
    shutil.copytree(classified[0], folder)
    before = sklearn.load(folder)
    told = strict(run(["resume", folder, "--draws", 3 * before.posterior_.num_draws, "--json"], capsys).out)
    model = sklearn.load(folder)
    (x, y), scale = model.held_out_, model.softmax_temperature_
    power = model.posterior_.predict(x).mean.double() ** (1 / scale)
    wanted = -(power / power.sum(1, keepdim=True))[torch.arange(len(y)), y].log().mean()
    assert told["scores"]["mnll"] == pytest.approx(float(wanted), rel=1e-4)
    assert f"averages at softmax temperature {scale:.2g}" in (folder / "report.html").read_text()


def test_running_longer_extends_the_run(fitted, tmp_path, capsys):
    """The command that is proposed goes on with the run; it does not begin another one."""
    folder = tmp_path / "run"
    shutil.copytree(fitted[0], folder)
    found = open_run(folder)
    before = found.posterior()
    assert len(found.commands()) == 1
    settled = {**before.info, "warmup": [{**report, "settled": True} for report in before.info["warmup"]]}
    command = found.longer(isosgd.Posterior(before.target, before.draws, settled))
    assert command == f"isosgd resume {folder} --draws {4 * before.num_draws}"
    more = before.num_draws + 2
    weights = before.draws["hidden.0.weight"]
    told = strict(run(["resume", folder, "--draws", more, "--json", "--no-report"], capsys).out)
    after = found.posterior()
    assert told["draws"] == after.num_draws == more
    assert torch.equal(after.draws["hidden.0.weight"][:, :-2], weights)
    assert found.commands()[1] == f"isosgd resume {folder} --draws {more}"


def test_diagnose_and_report(fitted, tmp_path, capsys):
    folder, told = fitted
    found = strict(run(["diagnose", folder, "--json"], capsys).out)
    assert found["complete"] and found["verdict"]["summary"] == told["verdict"]["summary"]
    assert found["summary"]["chains"] == 2
    words = run(["diagnose", folder], capsys).out
    assert words.startswith("Against the start: NLL ")  # the trained networks, which the store holds
    assert f"\n{told['verdict']['summary'].capitalize()}." in words and "R-hat" in words
    assert "\n  hidden layer: " in words and "\n  hidden.0: " not in words
    trusted = told["verdict"]["summary"] == "trust it"
    assert main(["diagnose", str(folder), "--check"]) == (0 if trusted else 1)
    page = tmp_path / "page.html"
    assert str(page) in run(["report", folder, "--out", page], capsys).out
    text = page.read_text()
    assert "body_mass_g, predicted from penguins.csv" in text and "hidden layer" in text
    assert "isosgd fit" in text, "it says how to do it again"
    assert strict(run(["report", folder, "--json"], capsys).out)["report"] == str(folder / "report.html")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fit", "none.csv", "--target", "y"], "none.csv"),
        (["fit", PENGUINS, "--target", "weight"], "no column 'weight'"),
        (["fit", PENGUINS, "--target", "species", "--task", "regression"], "are no numbers"),
        (["fit", PENGUINS, "--target", "species", "--holdout", "1"], "--holdout 1"),
        (["fit", PENGUINS, "--target", "species", "--effort", "0"], "--effort 0"),
        (["fit", PENGUINS, "--target", "species", "--chains", "0"], "--chains 0"),
        (["fit", PENGUINS, "--target", "species", "--seed", "-1"], "--seed -1"),
        (["fit", PENGUINS, "--target", "species", "--hidden", "8,x"], "--hidden 8,x: give the units of each"),
        (["fit", PENGUINS, "--target", "species", "--minutes", "0"], "--minutes 0 must be positive"),
        (["fit", PENGUINS, "--target", "species", "--likelihood", "gaussian"], "is for regressions"),
        (["predict", "none", PENGUINS], "no folder of a run"),
        (["predict", "RUN", PENGUINS, "--level", "1"], "--level 1"),
        (["predict", "RUN", PENGUINS, "--keep", "age"], "--keep age"),
        (["predict", "RUN", "other.csv"], "lacks the column"),
        (["diagnose", "none"], "no folder of a run"),
        (["report", "."], "--script"),
        (["resume", "none"], "no folder of a run"),
        (["sample", "none.py:target"], "no script none.py"),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(PENGUINS), "CSV") if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_named_and_ends_with_1(fitted, tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    printed = run([fitted[0] if word == "RUN" else word for word in argv], capsys, code=1)
    assert printed.err.startswith("isosgd: ") and words in printed.err and printed.out == ""


def test_a_folder_with_a_run_is_not_written_over(fitted, capsys):
    folder, _ = fitted
    before = (folder / "table.json").read_bytes()
    printed = run(["fit", PENGUINS, "--target", "species", "--out", folder, *SHORT], capsys, code=1)
    assert "holds a run already" in printed.err and f"isosgd resume {folder}" in printed.err
    assert (folder / "table.json").read_bytes() == before


@pytest.mark.parametrize("part", ["network", "target", "columns", "estimator", "version"])
def test_a_table_of_another_model_is_refused(fitted, tmp_path, capsys, part):
    folder = tmp_path / "run"
    shutil.copytree(fitted[0], folder)
    found = json.loads((folder / "model.json").read_text())
    hurt = {"network": {**found["network"], "inputs": 3}, "target": {"center": [0.0], "scale": [0.0], "flat": True}}
    hurt |= {"columns": {**found["columns"], "gaps": [0]}, "estimator": "Pipeline", "version": 9}
    (folder / "model.json").write_text(json.dumps({**found, part: hurt[part]}))
    error = run(["predict", folder, PENGUINS], capsys, code=1).err
    assert "model.json cannot be used" in error and "fit the table again" in error


# Scripts


@pytest.fixture
def script(tmp_path):
    (tmp_path / "line.py").write_text(SCRIPT)
    return tmp_path / "line.py"


def test_a_script_is_sampled_diagnosed_and_reported(script, tmp_path, capsys):
    argv = [
        "sample",
        f"{script}:target",
        "--out",
        tmp_path / "run",
        "--draws",
        "20",
        "--chains",
        "2",
        "--warmup",
        "150",
    ]
    argv += ["--keep-every", "2", "--option", "structure=layer", "--json"]
    told = strict(run(argv, capsys).out)
    assert (told["draws"], told["chains"]) == (20, 2)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "target of line.py" in text and "Prediction of y over x" in text and "20 rows that the sampler" in text
    assert isosgd.load(tmp_path / "run").info["options"] == {"structure": "layer"}
    assert strict(run(["diagnose", tmp_path / "run", "--json"], capsys).out)["verdict"]["temperature"] == 1.0
    assert "is complete" in run(["resume", tmp_path / "run", "--no-report"], capsys).out
    assert "--out" in run(argv, capsys, code=1).err, "it is not sampled over"


def test_a_script_s_report_says_how_to_do_it_again_and_not_where_it_lay(script, tmp_path, capsys):
    settings = ["--draws", "10", "--chains", "1", "--warmup", "150", "--keep-every", "2", "--seed", "3"]
    settings += ["--store-dtype", "bfloat16", "--option", "structure=layer", "--option", "bias=0.05"]
    run(["sample", f"{script}:target", "--out", tmp_path / "run", *settings], capsys)
    page = (tmp_path / "run" / "report.html").read_text()
    assert str(tmp_path) not in page
    again = re.search(r"isosgd sample line.py:target --out run [^<\n]*", page)[0].replace("&#x27;", "'")
    assert set(settings) <= set(again.split()) and again.count("--option") == 2
    monkeyed = again.split()
    monkeyed[2], monkeyed[4] = f"{script}:target", str(tmp_path / "again")
    run(monkeyed[1:], capsys)
    for name, x in isosgd.load(tmp_path / "run").draws.items():
        assert torch.equal(x, isosgd.load(tmp_path / "again").draws[name])


def test_a_table_s_report_names_no_folders_of_this_machine(fitted, tmp_path, capsys):
    page = tmp_path / "page.html"
    run(["report", fitted[0], "--out", page], capsys)
    assert f"isosgd fit {PENGUINS.name} --target body_mass_g --out {fitted[0].name}" in page.read_text()
    assert str(PENGUINS.parent) not in page.read_text() and str(fitted[0].parent) not in page.read_text()


def test_a_function_may_make_the_target(script, tmp_path, capsys):
    argv = ["sample", f"{script}:made", "--out", tmp_path / "run", "--draws", "10", "--chains", "1"]
    run([*argv, "--warmup", "150", "--keep-every", "2", "--no-report"], capsys)
    script.rename(tmp_path / "moved.py")
    assert "no script" in run(["report", tmp_path / "run"], capsys, code=1).err
    run(["report", tmp_path / "run", "--script", f"{tmp_path / 'moved.py'}:made"], capsys)


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("data = 3", "target", "no isosgd.Target named 'target'"),
        (SCRIPT, "goal", "it has target"),
        (SCRIPT.replace("def data", "def rows_of"), "target", "nothing named 'data'"),
    ],
)
def test_scripts_without_what_is_needed_are_told(tmp_path, capsys, text, name, words):
    (tmp_path / "s.py").write_text(text)
    assert words in run(["sample", f"{tmp_path / 's.py'}:{name}", "--out", tmp_path / "run"], capsys, code=1).err


def test_an_option_must_have_a_value(script, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["sample", f"{script}:target", "--option", "structure"])
    assert ended.value.code == 2 and "NAME=VALUE" in capsys.readouterr().err


# Ctrl-C


def start(*argv):
    """The command line in a process of its own, as a shell starts it."""
    words = [sys.executable, "-W", "ignore", "-m", "isosgd", *map(str, argv)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}  # to compile takes longer than all else
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def stop_at(process, ready):
    """Ctrl-C once something is there; what was said."""
    deadline = time.monotonic() + 200
    try:
        while not ready():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    return err


@pytest.mark.long
def test_ctrl_c_keeps_what_was_drawn_and_resume_goes_on(tmp_path, capsys):
    """With more draws than anyone waits for, so that it is stopped on the way on any machine."""
    folder = tmp_path / "run"
    argv = ["--effort", 1000, "--chains", 2, "--hidden", 4]
    first = start("fit", PENGUINS, "--target", "body_mass_g", "--out", folder, *argv)
    err = stop_at(first, lambda: (folder / "manifest.json").exists())
    assert f"nothing had been drawn yet. Go on with: isosgd resume {folder}" in err
    shutil.rmtree(folder)
    run(["fit", PENGUINS, "--target", "body_mass_g", "--out", folder, *SHORT], capsys)
    more = start("resume", folder, "--draws", 10**6)
    err = stop_at(more, lambda: isosgd.load(folder).num_draws > 10)
    kept = int(re.search(r"stopped; (\d+) draws of 2 chains are kept", err)[1])
    assert 10 < kept < 10**6 and f"isosgd resume {folder}" in err
    posterior = open_run(folder).posterior()
    assert (posterior.num_draws, posterior.info["complete"]) == (kept, False)
    assert "the run is not complete" in run(["predict", folder, PENGUINS, "--json"], capsys).err
    err = stop_at(start("resume", folder), lambda: isosgd.load(folder).num_draws > kept)
    assert int(re.search(r"stopped; (\d+) draws", err)[1]) > kept


@contextlib.contextmanager
def ctrl_c_when(ready):
    """Ctrl-C once something is there, in this process."""
    over = threading.Event()

    def watch():
        while not over.wait(0.001):
            if ready():
                return _thread.interrupt_main()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


@pytest.mark.long
@pytest.mark.usefixtures("eager_store")
@pytest.mark.parametrize("stage", ["warm-up", "sampling"])
def test_a_run_that_was_stopped_is_resumed_bit_for_bit(tmp_path, fitted, capsys, stage):
    folder, draws = tmp_path / "run", int(stage == "sampling")

    def ready():
        return (folder / "manifest.json").exists() and stored_draws(folder) >= draws

    argv = ["fit", PENGUINS, "--target", "body_mass_g", "--out", folder, *SHORT, "--no-report"]
    with ctrl_c_when(ready):
        assert f"isosgd resume {folder}" in run(argv, capsys, code=130).err
    stopped = isosgd.load(folder)
    assert not stopped.info["complete"] and (stopped.num_draws > 0) == (stage == "sampling")
    assert strict(run(["resume", folder, "--json", "--no-report"], capsys).out)["draws"] == 10
    whole, found = isosgd.load(fitted[0]), isosgd.load(folder)
    assert found.info["complete"] and all(torch.equal(x, found.draws[name]) for name, x in whole.draws.items())


# The whole thing, as a user has it


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_real_table_in_two_minutes_with_honest_intervals(tmp_path, capsys, seed):
    """No argument but the target; a third is held out here, so that the share in the intervals is known well."""
    started = time.process_time()
    argv = ["fit", PENGUINS, "--target", "body_mass_g", "--out", tmp_path / "run", "--holdout", "0.33", "--seed", seed]
    told = strict(run([*argv, "--json"], capsys).out)
    assert time.process_time() - started < 120
    # 113 rows: a true coverage of 95% is found below 90% with a probability of one in a hundred.
    assert 0.88 <= told["scores"]["coverage95"] <= 0.99
    assert told["scores"]["rmse"] < 400, "the standard deviation of the masses is 802"
    # Trajectories on all rows are right; whether there are enough of them is a matter of degree.
    assert told["verdict"]["summary"] in ("trust it", "run longer")
    argv[argv.index("--out") + 1] = tmp_path / "longer"
    told = strict(run([*argv, "--effort", "4", "--json"], capsys).out)
    assert time.process_time() - started < 120
    assert told["verdict"]["rhat"] < 1.2


@pytest.mark.parametrize("inside", [True, False], ids=["in the run's folder", "by a relative name"])
def test_a_script_that_a_folder_brings_along_is_not_run(tmp_path: Path, inside: bool) -> None:
    """A run may come from someone else: what its note names is code."""
    script = tmp_path / "run" / "evil.py"
    script.parent.mkdir()
    script.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'was-run')!r}).touch()\n")
    named = str(script) if inside else "run/evil.py"
    (tmp_path / "run" / "script.json").write_text(json.dumps({"script": named, "target": "target"}))
    with pytest.raises(ValueError, match=r"pass --script .* if you trust it"):
        open_run(tmp_path / "run")
    assert not (tmp_path / "was-run").exists()


def test_a_folder_cannot_ask_for_a_network_of_any_size() -> None:
    with pytest.raises(ValueError, match=r"weights; 134,217,728 at most"):
        Network(inputs=10, outputs=1, hidden=(2**31 - 1,))


ADVICE = re.compile(r"\b(draws|warmup|init|chains|keep_every|batch_size|bias|structure)=")


def test_advice_names_what_a_command_line_takes(fitted, script, tmp_path, capsys):
    """It named arguments of Python, which `isosgd fit` has no options for."""
    argv = ["fit", PENGUINS, "--target", "body_mass_g", "--out", tmp_path / "run", *SHORT]
    words = run([*argv, "--effort", "0.001"], capsys).out  # far too short
    assert "did not settle" in words and "Run longer." in words and not ADVICE.search(words)
    assert "to run longer: isosgd fit" in words and "Fix:" not in words
    page = (tmp_path / "run" / "report.html").read_text()
    assert not ADVICE.search(page[page.index('class="verdict') :].partition("</div>")[0])
    assert not ADVICE.search(run(["diagnose", tmp_path / "run"], capsys).out)
    advice = [RUN_LONGER, TOO_HOT, OFF_CENTRE, UNEVEN, LATE, drifting(np.arange(100.0))]
    assert all(ADVICE.search(words) for words in advice)
    from_script = run_of_script(tmp_path / "sampled", f"{script}:target")
    for words in (RUN_LONGER, TOO_HOT, OFF_CENTRE, LATE, drifting(np.arange(100.0))):
        assert not ADVICE.search(open_run(fitted[0]).subject.named(words))
    for words in advice:
        assert not re.search(r"(?<!option )" + ADVICE.pattern, from_script.subject.named(words))
