"""What goes wrong on the command line: one line that names the value and the fix, and no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import isosgd
from isosgd.cli import main
from isosgd.cli.common import gathered_warnings
from isosgd.cli.folders import open_run

pytestmark = pytest.mark.filterwarnings("ignore::isosgd.SamplingWarning")  # so few steps cannot settle

PENGUINS = Path(__file__).parents[1] / "data" / "penguins.csv"
SHORT = ["--effort", "0.02", "--chains", "2", "--hidden", "4", "--no-report"]
NUMBERS = "\n".join(f"{k * 37 % 60},{k % 3},{k * 11 % 7}.5" for k in range(60)) + "\n"
LINE = """
import torch
from isosgd import Target
x = torch.linspace(-1, 1, 60).unsqueeze(1)
target = Target.from_module(torch.nn.Linear(1, 1), "gaussian")
data = (x, 2 * x + 0.3 * torch.randn(60, 1))
"""


def refused(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 1) -> str:
    """What a command says that ends with an error, on standard error alone: one line, or one for each difference."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == code
    printed = capsys.readouterr()
    line = printed.err.strip()
    assert line.startswith("isosgd: ") and "[Errno" not in line and "Traceback" not in line
    assert "\n" not in line or "was drawn from:\n" in line
    assert printed.out == ""
    return line


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "penguins"
    assert main(["fit", str(PENGUINS), "--target", "body_mass_g", "--out", str(folder), *SHORT]) == 0
    return folder


@pytest.fixture
def run(fitted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fitted, tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ tables

TABLES: dict[str, tuple[bytes | None, str]] = {
    "not there": (None, "is not there; name a CSV or Parquet file"),
    "empty": (b"", "it is empty; the first line must name the columns"),
    "an empty first line": (b"\na,b\n1,2\n", "the first line is empty"),
    "names alone": (b"a,b,y\n", "no rows below it"),
    "one row": (b"a,b,y\n1,2,3\n", "too few rows, 1: 20 at least"),
    "one column": (b"y\n1\n2\n", "has the single column 'y'"),
    "numbers for names": (b"1,2\n" * 30, "it must name the columns"),
    "one name twice": (b"a,a,y\n" + NUMBERS.encode(), "both named 'a'; rename one"),
    "lines of other lengths": (b"a,b,y\n" + NUMBERS.encode() + b"1,2,3,4\n", "Expected 3 fields in line 62, saw 4"),
    "more values than names": (b"a,y\n" + NUMBERS.encode(), "put values that hold ',' in double quotes"),
    "an infinite target": (b"a,b,y\n" + NUMBERS.encode() + b"1,2,inf\n", "'y' has infinite values; make them missing"),
    "an infinite value": (b"b,a,y\n" + NUMBERS.encode() + b"inf,2,3\n", "column 'b' has infinite values; make them"),
    "an open quote": (b'a,b,y\n1,"2,3\n4,5,6\n', "a double quote is opened and not closed"),
    "not UTF-8": ("a,stra\u00dfe,y\n".encode("latin-1") + NUMBERS.encode(), "save it as CSV in UTF-8"),
    "a target that is always the same": (b"a,y\n" + b"1,5\n2,5\n" * 20, "'y' is always 5; choose another column"),
    "a single class": (b"a,y\n" + b"1,yes\n2,yes\n" * 20, "'y' is always 'yes'; choose another column"),
    "no target in any row": (b"a,y\n" + b"1,\n2,NA\n" * 20, "'y' has no value in any row; choose another column"),
    "nothing to predict from": (
        b"a,y\n" + b"".join(b",%d.5\n" % (k % 23) for k in range(60)), "'a': it is empty); add others",
    ),
    "too many classes": (
        b"a,y\n" + b"".join(b"%d,c%d\n" % (k % 7, k) for k in range(300)), "300 different values, too many for classes",
    ),
    "numbers with separators": (
        b"a,y\n" + b"".join(b'%d,"%d,%03d"\n' % (k % 7, 100 + k, k * 37 % 1000) for k in range(60)),
        "'y' has 60 different values that look like numbers with separators ('100,000'): leave out",
    ),
    "numbers with a currency, often the same": (
        b"a,y\n" + b"".join(f"{k % 7},€ {k % 20}.50\n".encode() for k in range(60)),
        "20 different values that look like numbers with separators ('€ 0.50')",
    ),
    "classes of one row": (
        b"a,y\n" + b"".join(b"%d,c%d\n" % (k % 7, k) for k in range(60)),
        "'y' has 60 classes, most with one row; take rare ones together",
    ),
    "a date to predict": (
        b"a,y\n" + b"".join(b"%d,2020-01-%02d\n" % (k % 7, 1 + k % 28) for k in range(60)), "'y' is a date; make a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["words", "json"])
def test_tables_that_cannot_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, more: list[str]
) -> None:
    content, words = TABLES[case]
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content)
    assert words in refused(capsys, "fit", path, "--target", "y", "--out", tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("body_mas_g", "no column 'body_mas_g' to predict; did you mean 'body_mass_g'?"),
        ("Species", "did you mean 'species'?"),
        ("nonesuch", "the table has 'species', 'island'"),
    ],
)
def test_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    assert words in refused(capsys, "fit", PENGUINS, "--target", name, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["fit", PENGUINS, "--target", "species", "--out", "file"], "--out file is a file; name a folder"),
        (["fit", PENGUINS, "--target", "species", "--hidden", 10**8], "weights; 134,217,728 at most"),
        (
            ["fit", PENGUINS, "--target", "species", "--use", "yaer"],
            "--use yaer: there is no such column; did you mean 'year'",
        ),
        (["fit", PENGUINS, "--target", "species", "--use", "species"], "--use species: it is the target"),
        (
            ["fit", "prices.csv", "--target", "y", "--task", "regression"],
            "2 different values that look like numbers with separators ('$1,200')",
        ),
        (["fit", "folder", "--target", "species"], "folder is a folder; name a CSV or Parquet file"),
        (["sample", "line.py:target", "--out", "file"], "--out file is a file; name a folder"),
        (["sample", "line.py:target", "--seed", "-4"], "--seed -4 must not be negative"),
        (["predict", "RUN", PENGUINS, "--out", "folder"], "--out folder is a folder; name a file"),
        (["predict", "RUN", PENGUINS, "--out", "no/such/p.csv"], "there is no folder no/such; make it first"),
        (["predict", "RUN", "none.csv"], "none.csv is not there"),
        (["predict", "folder", PENGUINS], "folder was not made by `isosgd fit`"),
        (["predict", "file", PENGUINS], "file is no folder of a run"),
        (["report", "RUN", "--out", "folder"], "--out folder is a folder; name a file"),
        (["report", "RUN", "--out", "no/such/p.html"], "there is no folder no/such; make it first"),
        (["diagnose", "file"], "file is no folder of a run"),
        (["diagnose", "folder"], "name the script: --script SCRIPT.py:target"),
        (["resume", "folder", "--script", "none.py:target"], "there is no script none.py"),
        (["diagnose", "RUN", "--script", "line.py:target"], "is not the one that"),
        (["demo", "--out", "file"], "file: that is a file; name a folder"),
    ],
    ids=lambda value: " ".join(map(str, value)).replace(str(PENGUINS), "CSV") if isinstance(value, list) else "",
)
def test_files_and_folders_that_are_not_what_is_meant(
    fitted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[object],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "line.py").write_text(LINE)
    (tmp_path / "prices.csv").write_text("a,y\n" + '1,"$1,200"\n2,"$1,300"\n' * 20)
    assert words in refused(capsys, *(fitted if word == "RUN" else word for word in argv))


# ------------------------------------------------------------------------------------------------ new rows


def test_columns_that_new_rows_lack_are_all_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PENGUINS.read_text().splitlines()[:4]
    new = tmp_path / "new.csv"
    new.write_text("\n".join(line.rsplit(",", 2)[0] for line in lines))
    assert "lacks the columns 'sex', 'year', with which the model was fitted" in refused(capsys, "predict", run, new)
    new.write_text("\n".join([lines[0].replace("species", "Species"), *lines[1:]]))
    assert "lacks the column 'species', with which the model was fitted; did you mean 'Species'?" in refused(
        capsys, "predict", run, new
    )


def test_new_levels_and_further_columns_are_no_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = PENGUINS.read_text().splitlines()[0]
    new = tmp_path / "new.csv"
    new.write_text(f"{head},colour\nEmperor,Mars,,,,,,2009,blue\n")
    assert main(["predict", str(run), str(new), "--json", "--keep", "colour"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["colour"] == "blue" and row["unlike"]
    assert "species 'Emperor' is new" in row["why"] and "bill_length_mm is missing" in row["why"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "name"),
    [("body_mass_g", "mean"), ("species", "p(Gentoo)")],
)
def test_a_column_that_is_kept_has_no_name_of_the_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, name: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(PENGUINS.read_text().replace("year", name, 1))
    folder = tmp_path / "run"
    assert main(["fit", str(table), "--target", target, "--out", str(folder), *SHORT]) == 0
    words = refused(capsys, "predict", folder, table, "--keep", name)
    assert f"--keep {name}: a column of the predictions has that name; rename it in {table}" in words


@pytest.mark.parametrize("name", ["predicted", "entropy", "p(Gentoo)"])
def test_names_of_another_task_may_be_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    table = tmp_path / "table.csv"
    lines = [f"{line},{k}" for k, line in enumerate(PENGUINS.read_text().splitlines()[:3])]
    table.write_text("\n".join([lines[0].rsplit(",", 1)[0] + f",{name}", *lines[1:]]))
    assert main(["predict", str(run), str(table), "--json", "--keep", name]) == 0
    assert [row[name] for row in json.loads(capsys.readouterr().out)] == ["1", "2"]


def test_columns_are_kept_as_they_stand_in_the_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PENGUINS.read_text().splitlines()[:4]
    new = tmp_path / "new.csv"
    added = ["zip,when,price", "07922,2024-01-05,1.50", "00123,2024-01-06,NA", "00124,2024-01-07,"]
    new.write_text("\n".join(f"{line},{more}" for line, more in zip(lines, added, strict=True)))
    assert main(["predict", str(run), str(new), "--keep", "zip", "when", "price"]) == 0
    found = [line.split(",")[1:4] for line in capsys.readouterr().out.splitlines()]
    assert found == [more.split(",") for more in added]
    assert main(["predict", str(run), str(new), "--keep", "price", "--json"]) == 0
    assert [row["price"] for row in json.loads(capsys.readouterr().out)] == ["1.50", "NA", None]


# ------------------------------------------------------------------------------------------------ runs that are damaged


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest.json garbled": (lambda run: (run / "manifest.json").write_text("garbage"), "put back a copy of it"),
    "manifest.json changed": (
        lambda run: (run / "manifest.json").write_text((run / "manifest.json").read_text().replace("hmc", "sgld")),
        "its own SHA-256 is another); put back a copy of it",
    ),
    "manifest.json gone": (lambda run: (run / "manifest.json").unlink(), "manifest.json"),
    "manifest.json a folder": (lambda run: as_folder(run / "manifest.json"), "that is a folder"),
    "a shard flipped": (lambda run: flip(run / "draws-000000.safetensors"), "draws-000000.safetensors is damaged"),
    "a shard gone": (lambda run: (run / "draws-000000.safetensors").unlink(), "draws-000000.safetensors is damaged"),
    "model.json another": (lambda run: (run / "model.json").write_text("{}"), "fit the table again"),
    "model.json a folder": (lambda run: as_folder(run / "model.json"), "model.json"),
    "table.json another": (lambda run: (run / "table.json").write_text("[]"), "fit the table again"),
    "data.safetensors cut": (lambda run: (run / "data.safetensors").write_bytes(b"cut"), "fit the table again"),
    "data.safetensors a folder": (lambda run: as_folder(run / "data.safetensors"), "fit the table again"),
}


def test_a_fit_killed_before_its_first_draw_is_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.json").write_text("{}")
    (folder / "table.json").write_text('{"command": "isosgd fit t.csv --target y"}')
    for command in ("resume", "diagnose"):
        line = refused(capsys, command, folder)
        assert "killed before the first draw" in line and line.endswith("fit again: isosgd fit t.csv --target y")
    (folder / "table.json").unlink()
    assert refused(capsys, "resume", folder).endswith("killed before the first draw: fit again")


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_named_by_every_command(run: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    spoil, words = DAMAGE[damage]
    spoil(run)
    for argv in (
        ["predict", run, PENGUINS],
        ["diagnose", run],
        ["report", run],
        ["resume", run],
        ["report", run, "--json"],
    ):
        if argv[0] == "resume" and damage == "a shard flipped":
            continue  # it says first that the run is complete
        line = refused(capsys, *argv)
        assert words in line and run.name in line


def test_what_is_not_damaged_is_used_where_that_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "draws-000000.safetensors")
    assert f"{run}: draws-000000.safetensors is damaged" in refused(capsys, "predict", run, PENGUINS)
    assert "--drop-damaged does without its draws" in refused(capsys, "diagnose", run)
    manifest = json.loads((run / "manifest.json").read_text())
    left = 10 - manifest["shards"][0]["stop"]
    if left:
        with gathered_warnings() as warned:
            assert len(open_run(run, drop_damaged=True).posterior()) == 2 * left
        assert any("draws are left out" in line for line in warned)
        assert main(["predict", str(run), str(PENGUINS), "--drop-damaged"]) == 0
    else:
        assert "no draws that are whole" in refused(capsys, "predict", run, PENGUINS, "--drop-damaged")


# ------------------------------------------------------------------------------------------------ scripts

SCRIPTS = {
    "raises": ("import torch\nraise RuntimeError('no measurements')", "s.py, line 2: RuntimeError: no measurements"),
    "a wrong key": ("{}['colour']", "s.py, line 1: KeyError: 'colour'; fix the script"),
    "fails in a function": ("def target():\n    return 1 / 0\n", "s.py, line 2: ZeroDivisionError"),
    "no Python": ("def f(:", "SyntaxError: invalid syntax (s.py, line 1)"),
    "ends itself": ("import sys\nsys.exit(5)", "s.py, line 2: SystemExit: 5"),
    "a module that is not there": ("import no_such_module", "line 1: ModuleNotFoundError: No module named 'no_such"),
    "no target": ("data = 3", "no isosgd.Target named 'target'"),
    "data that are text": (LINE.replace("data = (x", "data = 'x' or (x"), "'data' of type str: make it a tuple"),
    "data that are a number": (LINE.replace("data = (x", "data = 3 or (x"), "'data' of type int"),
    "data that do not fit": (
        LINE.replace("data = (x, ", "data = (torch.zeros(60, 5), "),
        "RuntimeError: mat1 and mat2",
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_scripts_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    text, words = SCRIPTS[case]
    (tmp_path / "s.py").write_text(text)
    assert words in refused(capsys, "sample", f"{tmp_path / 's.py'}:target", "--out", tmp_path / "run", "--json")


def test_a_traceback_is_shown_to_those_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").write_text(SCRIPTS["data that do not fit"][0])
    monkeypatch.setenv("ISOSGD_TRACEBACK", "1")
    with pytest.raises(ValueError, match="mat1 and mat2"):
        main(["sample", f"{tmp_path / 's.py'}:target", "--out", str(tmp_path / "run")])


def test_a_script_is_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.py").write_text(LINE + "print('script run')\n")
    argv = ["--draws", "4", "--chains", "1", "--warmup", "200", "--keep-every", "1", "--no-report"]
    assert main(["sample", f"{tmp_path / 's.py'}:target", "--out", str(tmp_path / "run"), *argv]) == 0
    assert capsys.readouterr().out.count("script run") == 1


def test_a_bad_seed_is_named_from_python_too() -> None:
    import torch

    target = isosgd.Target.from_module(torch.nn.Linear(1, 1), "gaussian")
    for seed in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"seed = {seed!r} must be an integer of at least 0"):
            isosgd.sample(target, (torch.zeros(4, 1), torch.zeros(4, 1)), seed=seed)
