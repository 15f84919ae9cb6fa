"""Results on the UCI splits: published ones, files, paired differences, and tables."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from experiments.uci import choice
from experiments.uci import runs as uci
from experiments.uci.tables import (
    MC_DROPOUT,
    PAPER,
    SETS,
    Result,
    Split,
    markdown,
    mc_dropout,
    paired,
    read,
    write,
)

ROOT = Path(__file__).resolve().parents[2]

# Mean RMSE and MNLL of tuned MC-dropout over the published splits.
PUBLISHED = {
    "bostonHousing": (20, 2.90, 2.402),
    "concrete": (20, 4.83, 2.937),
    "protein-tertiary-structure": (5, 4.27, 2.871),
    "wine-quality-red": (20, 0.622, 0.928),
    "yacht": (20, 0.666, 1.250),
}


def result(label: str = "I-SGD, ours", name: str = "yacht", shift: float = 0.0, splits: int = 4) -> Result:
    rows = [
        Split(k, 0.5 + 0.1 * k + shift, 0.8 + 0.05 * k**2 + shift, 0.95, 0.2, 1.004 + 0.001 * k, 500.0, 20_000, 1.5)
        for k in range(splits)
    ]
    return Result(name, "isgd", label, rows, {"draws": 100}, "isosgd bench uci", {"torch": "2.13"}, "2 cores")


def theirs(name: str = "yacht", splits: int = 4) -> Result:
    return Result(name, "mc_dropout", MC_DROPOUT, [Split(k, 0.6 + 0.1 * k, 1.0 + 0.05 * k**2) for k in range(splits)])


# ---------------------------------------------------------------- published figures


@pytest.fixture(scope="module")
def root() -> Path:
    folder = Path(os.environ.get("ISOSGD_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
    if not (folder / "uci").is_dir():
        pytest.skip("no uci in the data root: set ISOSGD_DATA (there is no shared data beside the checkout)")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mc_dropout(root: Path, name: str) -> None:
    splits, rmse, mnll = PUBLISHED[name]
    found = mc_dropout(name, root)
    assert found.set == name
    assert [split.split for split in found.splits] == list(range(splits))
    assert found.mean_and_error("rmse")[0] == pytest.approx(rmse, abs=5.1e-3 if rmse > 1 else 5.1e-4)
    assert found.mean_and_error("mnll")[0] == pytest.approx(mnll, abs=5.1e-4)
    assert found.values("crps") == {}


def test_a_set_without_published_results(tmp_path: Path) -> None:
    folder = tmp_path / "uci" / "mine"
    folder.mkdir(parents=True)
    files = {"data": "1 2\n3 4\n5 7", "index_features": "0", "index_target": "1"}
    for name, text in (files | {"index_train_0": "0\n1", "index_test_0": "2"}).items():
        (folder / f"{name}.txt").write_text(text + "\n")
    with pytest.raises(ValueError, match="'mine' has no gal_results"):
        mc_dropout("mine", tmp_path)


def test_the_papers_figures() -> None:
    assert {label: list(rows) for label, rows in PAPER.items()} == {label: list(SETS) for label in PAPER}
    means = [(rmse, mnll) for rmse, _, mnll, _ in PAPER["I-SGD (paper)"].values()]
    assert means == [(3.26, 3.46), (5.47, 12.33), (4.77, 4.20), (0.63, 1.03), (0.69, 4.19)]
    assert PAPER["SGHMC (paper)"]["yacht"] == (0.49, 0.17, 3.53, 8.22)
    assert PAPER["MC-dropout (paper)"]["concrete"] == (5.01, 0.43, 6.77, 1.80)


# ---------------------------------------------------------------- results and their files


def test_a_result_comes_back_from_its_file(tmp_path: Path) -> None:
    lost = Split(9, dropped=("chain 3: the loss was not finite at step 812",))
    ours = replace(result(), splits=[*result().splits, lost])
    path = tmp_path / "deep" / "yacht-isgd.json"
    write(ours, path)
    assert read(path) == ours
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["splits"][4]["rmse"] is None
    assert set(content) == {"format", *asdict(ours)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format=2), "not a result of format 1"),
        (lambda c: c.pop("splits"), "splits.*a result has"),
        (lambda c: c.pop("label"), "label.*a result has"),
        (lambda c: c.update(colour="red"), "colour.*a result has"),
        (lambda c: c["splits"][0].update(mnl=1.0), "mnl.*a split"),
        (lambda c: c["splits"][1].update(mnll="low"), "mnll = 'low' of split 1"),
        (lambda c: c["splits"][1].update(mnll=math.nan), "mnll = nan of split 1"),
        (lambda c: c["splits"][1].update(rmse=True), "rmse = True"),
        (lambda c: c["splits"][1].update(split=None), "split = None"),
        (lambda c: c["splits"][1].update(split=0), "a split twice"),
        (lambda c: c.update(splits=[1]), "a result has"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_name(tmp_path: Path, change, words: str) -> None:
    path = tmp_path / "x.json"
    write(result(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert "x.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_file_that_is_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        read(path)


@pytest.mark.parametrize("value", [math.inf, math.nan, "1", True])
def test_a_split_keeps_finite_numbers_only(value) -> None:
    with pytest.raises(ValueError, match=r"mnll = .* of split 3 must be a finite number, or None"):
        Split(3, mnll=value)


def test_means_over_the_splits_that_have_the_measure() -> None:
    ours = Result("yacht", "isgd", "x", [Split(0, rmse=1.0), Split(1, rmse=3.0), Split(2)])
    assert ours.mean_and_error("rmse") == (2.0, 1.0)
    assert all(math.isnan(x) for x in ours.mean_and_error("mnll"))
    with pytest.raises(ValueError, match="measure = 'mae'"):
        ours.values("mae")


# ---------------------------------------------------------------- paired differences


def test_paired_differences_take_out_what_splits_share() -> None:
    """Splits differ a lot, the methods by the same little on each: the paired error is small."""
    rng = np.random.default_rng(0)
    level, gain = rng.normal(3, 1, 20), rng.normal(0.1, 0.01, 20)
    ours = Result("yacht", "a", "A", [Split(k, mnll=float(level[k] - gain[k])) for k in range(20)])
    other = Result("yacht", "b", "B", [Split(k, mnll=float(level[k])) for k in range(20)])
    found = paired(ours, other)
    assert found.mean == pytest.approx(-gain.mean())
    assert found.error == pytest.approx(gain.std(ddof=1) / math.sqrt(20))
    assert ours.mean_and_error("mnll")[1] > 10 * found.error


def test_pairs_are_matched_by_number_not_by_place() -> None:
    ours = Result("yacht", "a", "A", [Split(5, rmse=1.0), Split(2, rmse=2.0), Split(7)])
    other = Result("yacht", "b", "B", [Split(2, rmse=2.5), Split(5, rmse=1.25), Split(7, rmse=1.0), Split(0, rmse=0.0)])
    assert paired(ours, other, "rmse").differences == {2: -0.5, 5: -0.25}


def test_one_common_split_has_no_error() -> None:
    assert math.isnan(paired(result(splits=1), theirs(), "rmse").error)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (theirs("concrete"), "pair one set"),
        (Result("yacht", "b", "B", [Split(9, mnll=1.0)]), "no split of 'yacht' with mnll in common"),
    ],
)
def test_what_cannot_be_paired_is_refused(other: Result, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired(result(), other)


# ---------------------------------------------------------------- tables and figure


def tables(text: str) -> dict[str, dict[str, list[str]]]:
    """Cells by title and row, the header as row ""."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in text.split("**")[1:]:
        if not part.startswith("\n"):
            title = part
            continue
        lines = [line for line in part.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert len({len(row) for row in cells}) == 1
        found[title] = {row[0]: row[1:] for row in cells if row[0] != "---"}
    return found


def test_markdown() -> None:
    runs = [result(), result(name="mine"), theirs(), result("SGHMC", shift=0.3), result("SGHMC", "bostonHousing")]
    text = markdown(runs)
    found = tables(text)
    rmse = found["RMSE: mean over splits ± standard error"]
    assert rmse[""] == ["Boston", "Yacht", "mine"]
    assert rmse["I-SGD, ours"] == ["–", "0.650 ± 0.065", "0.650 ± 0.065"]
    assert rmse["I-SGD (paper)"] == ["3.26 ± 1.14", "0.69 ± 0.33", "–"]
    assert list(rmse) == ["", "I-SGD, ours", MC_DROPOUT, "SGHMC", *PAPER]
    less = found[f"MNLL less that of {MC_DROPOUT}, on the same splits ± standard error"]
    assert less["I-SGD, ours"] == ["–", "-0.200 ± 0.000", "–"]
    assert less["SGHMC"] == ["–", "+0.100 ± 0.000", "–"]
    assert MC_DROPOUT not in less
    assert found["R-hat of held-out predictions: the median over splits, the largest"]["SGHMC"][1] == "1.006, 1.007"
    assert found["Targets within their 95% interval, in %"]["SGHMC"][1] == "95.0 ± 0.0"
    assert found["Gradients spent on a split"]["SGHMC"][0] == "20,000"
    assert found["Seconds for all splits"]["SGHMC"][0] == "6"
    assert text.count("`isosgd bench uci`") == 1
    assert "Franzese" in text


def test_markdown_without_what_is_missing() -> None:
    bare = Result("yacht", "a", "a|b", [Split(0, rmse=1.0), Split(1, dropped=("chain 0: gone",))])
    text = markdown([bare], paper=False)
    assert list(tables(text)) == ["RMSE: mean over splits ± standard error"]
    assert "| a/b | 1.000 (1 of 2 splits) |" in text
    assert "paper" not in text


@pytest.mark.parametrize(
    ("runs", "words"), [([], "no results"), ([result(), result()], "two results of 'I-SGD, ours'")]
)
def test_markdown_refuses(runs: list[Result], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        markdown(runs)


def test_the_page_says_how_the_model_was_chosen():
    content = json.loads((ROOT / "results" / "uci" / "choice" / "candidates.json").read_text())
    assert choice.table(content) in (ROOT / "docs" / "uci.md").read_text()
    assert {row["candidate"] for row in content["rows"]} == set(choice.CANDIDATES)
    for row in content["rows"]:
        assert choice.CANDIDATES[row["candidate"]].describe().items() <= row["settings"].items()
    assert next(iter(choice.CANDIDATES.values())) == uci.SETTINGS["isgd-all"].model


def test_copies_are_rows_with_the_same_target(tmp_path):
    folder = tmp_path / "uci" / "mine"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", [[1, 5], [2, 6], [1, 5], [2, 7]])  # the fourth row has another target
    for name, text in (("features", "0"), ("target", "1"), ("train_0", "0\n1"), ("test_0", "2\n3")):
        (folder / f"index_{name}.txt").write_text(text + "\n")
    assert choice.copies("mine", tmp_path) == 0.5
