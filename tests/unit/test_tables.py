"""Tables: files as frames, columns as inputs, and estimators that are kept in folders."""

import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from isosgd import sklearn
from isosgd.cli.reading import as_they_stand, numbers_rows, read_table, why_useless
from isosgd.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from isosgd.tables.columns import Columns

PENGUINS = Path(__file__).parents[1] / "data" / "penguins.csv"
SHORT: dict[str, Any] = {"hidden_layers": (4,), "effort": 0.02, "chains": 2, "random_state": 0}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def example(n: int = 80, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "size": np.where(rng.uniform(size=n) < 0.1, np.nan, rng.normal(size=n)),
        "empty": np.full(n, np.nan),
        "town": pd.Series(np.where(rng.uniform(size=n) < 0.1, None, rng.choice(["a", "b", "c"], n)), dtype=object),
        "name": [f"p{k}" for k in range(n)],
        "built": pd.Timestamp("2001-01-01") + pd.to_timedelta(rng.integers(0, 5000, n), unit="D"),
        "old": rng.uniform(size=n) < 0.5,
    })  # fmt: skip
    frame.loc[3, "built"] = pd.NaT
    frame.loc[0, "town"] = "z"  # a level of one row
    return frame


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_are_found(tmp_path: Path, separator: str) -> None:
    rows = [["a", "b"], ["1", "x y"], ["2", "z"]]
    found, _ = read_table(write(tmp_path / "t.csv", "\n".join(separator.join(row) for row in rows)))
    assert found.to_dict("list") == {"a": [1, 2], "b": ["x y", "z"]}


def test_a_decimal_comma_goes_with_semicolons_only(tmp_path: Path) -> None:
    assert read_table(write(tmp_path / "t.csv", "a;b\n1,5;x\n"))[0]["a"].tolist() == [1.5]
    assert read_table(write(tmp_path / "u.csv", 'a,b\n"1,5",x\n'))[0]["a"].tolist() == ["1,5"]


def test_quotes_byte_order_marks_empty_lines_and_missing_values(tmp_path: Path) -> None:
    found, _ = read_table(write(tmp_path / "t.csv", '\ufeffname,"a ""b"", c"\n"x, y",NA\n\n z ,n/a\nNone,?\n'))
    assert found["name"].tolist()[:2] == ["x, y", "z"] and list(found.columns) == ["name", 'a "b", c']
    assert found["name"].isna().sum() == 1 and found['a "b", c'].isna().all()


def test_columns_that_are_mostly_numbers_or_dates_are_that(tmp_path: Path) -> None:
    lines = [f"{k / 7},2024-01-{1 + k % 28:02d} 12:00,w{k % 3}" for k in range(97)]
    lines += ["big,2024-02-01T14:00+02:00,w0", "n.a.,2023-02-29,w1", "-,2024-03-01,w2"]
    found, remarks = read_table(write(tmp_path / "t.csv", "\n".join(["size,when,what", *lines])))
    assert found["size"].isna().sum() == 3 and "3 values of 'size' are no numbers and count as missing" in remarks
    assert found["when"].isna().sum() == 1 and found["when"][97] == pd.Timestamp("2024-02-01 12:00", tz="UTC")
    assert not any("what" in remark for remark in remarks)


def test_a_stray_word_costs_one_value_of_a_decimal_comma_or_a_truth(tmp_path: Path) -> None:
    values = [f"{k / 8:.3f}".replace(".", ",") for k in range(59)]
    path = write(
        tmp_path / "t.csv", "\n".join(["x;z", *(f"{v};{k % 7}" for k, v in enumerate([*values, "unbekannt"]))])
    )
    found, remarks = read_table(path)
    assert found["x"].tolist()[:59] == [k / 8 for k in range(59)] and remarks == [
        "1 values of 'x' are no numbers and count as missing"
    ]
    columns, _ = Columns.learn(pd.DataFrame({"x": [0.5, 1.5], "old": [True, False]}))
    new = write(tmp_path / "new.csv", "x;old\n0,5;True\nunbekannt;false\n1,25;unknown\n-2;TRUE\n")
    found, _ = read_table(new, columns)
    assert found.fillna(-1).to_dict("list") == {"x": [0.5, -1, 1.25, -2], "old": [1, 0, -1, 1]}
    # A point may stand for the comma in all of a column, not in a part of it: 1,234 is then no 1.234.
    mixed = write(tmp_path / "mixed.csv", "x;old\n0.5;True\n1.25;True\n1,234;True\n")
    assert read_table(mixed, columns)[0]["x"].fillna(-1).tolist() == [0.5, 1.25, -1]


def test_new_rows_may_have_a_single_column(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "x\n0.5\n1.5\n")
    columns, _ = Columns.learn(pd.DataFrame({"x": [0.5, 1.5]}))
    assert read_table(path, columns)[0]["x"].tolist() == [0.5, 1.5]
    with pytest.raises(ValueError, match="single column 'x'; a target and at least one input are needed"):
        read_table(path)


def test_words_for_missing_values_are_classes_of_a_target(tmp_path: Path) -> None:
    words = ["None", "Insomnia", "", "NA", " Apnea"]
    path = write(tmp_path / "t.csv", "\n".join(["x,y,z", *(f"{k},{word},{word}" for k, word in enumerate(words * 8))]))
    found, remarks = read_table(path, target="y")
    assert found["y"].value_counts().to_dict() == {"None": 8, "Insomnia": 8, "NA": 8, "Apnea": 8}
    assert found["z"].value_counts().to_dict() == {"Insomnia": 8, "Apnea": 8}
    assert remarks == [
        "of the target 'y', 'NA' (8 rows) is taken as a class; only empty cells are missing there",
        "of the target 'y', 'None' (8 rows) is taken as a class; only empty cells are missing there",
    ]
    truths = write(tmp_path / "u.csv", "x,y\n1,True\n2,False\n3,None\n4,\n")
    assert read_table(truths, target="y")[0]["y"].fillna("?").tolist() == ["True", "False", "None", "?"]
    numbers = write(tmp_path / "v.csv", "x;y\n1;0,5\n2;NA\n3;None\n4;-1,5\n")
    assert read_table(numbers, target="y")[0]["y"].fillna(-9).tolist() == [0.5, -9, -9, -1.5]


def test_columns_as_they_stand_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "zip ,when,price,note\n07922,2024-01-05,1.50,NA\n\n00123,2024-01-06,,x\n")
    found = as_they_stand(path, ["when", "zip", "price", "note"])
    assert list(found.columns) == ["when", "zip", "price", "note"]
    assert found.fillna("-").to_numpy().tolist() == [
        ["2024-01-05", "07922", "1.50", "NA"], ["2024-01-06", "00123", "-", "x"],
    ]  # fmt: skip


def test_parquet_reads_as_the_same_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: it reads Parquet")
    frame = pd.DataFrame({
        "size": [1.5, None, 3.0],
        "town": pd.Categorical(["Rome", "Oslo", None]),
        "when": [datetime.date(2024, 1, 31), None, datetime.date(2024, 2, 1)],
    })  # fmt: skip
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    one, two = (Columns.learn(read_table(tmp_path / name)[0]) for name in ("t.parquet", "t.csv"))
    assert one[0].as_dict() == two[0].as_dict() and (one[1] == two[1]).all()
    write(tmp_path / "no.parquet", "a,b\n1,2\n")
    with pytest.raises(ValueError, match="no Parquet file"):
        read_table(tmp_path / "no.parquet")


def test_a_file_that_memory_does_not_hold_is_refused(tmp_path: Path) -> None:
    """A file with a hole: it has a length, and takes no room."""
    path = write(tmp_path / "t.csv", "a,b\n1,2\n")
    os.truncate(path, 1 << 42)
    with pytest.raises(ValueError, match="more than memory holds: fit fewer rows"):
        read_table(path)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([7.0] * 20, "always 7"),
        (["x"] * 20, "always 'x'"),
        ([np.nan] * 20, "empty"),
        ([f"person {k}" for k in range(20)], "one row alone (20 of 20)"),
        ([k / 3 for k in range(20)], ""),
        (["a", "b"] * 10, ""),
    ],
)
def test_columns_that_say_nothing_are_known(values: list[Any], why: str) -> None:
    found = why_useless(pd.Series(values))
    assert why in found and bool(found) == bool(why)


def test_row_numbers_are_known() -> None:
    squares = pd.Series([k * k for k in range(20)])
    assert numbers_rows("a", pd.Series(range(20))) and numbers_rows("a", pd.Series(range(1, 21)))
    assert all(numbers_rows(name, squares) for name in ("customer_id", "row", "Row_Number", "index", "Unnamed: 0"))
    assert not numbers_rows("income", squares) and not numbers_rows("a", pd.Series([1, 1, 2]))
    # Years, one a row, and ranks of another order say something.
    assert not numbers_rows("year", pd.Series(range(1960, 2020))) and not numbers_rows("rank", pd.Series([2, 1, 3]))


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_are_in_standard_units() -> None:
    columns, x = Columns.learn(example())
    indicator = [k for k in range(x.shape[1]) if len(x[:, k].unique()) == 2]
    numbers = [k for k in range(x.shape[1]) if len(x[:, k].unique()) > 2]
    assert x.mean(0).abs().max() < 1e-9 and (x[:, numbers].std(0, correction=0) - 1).abs().max() < 1e-9
    gaps = x[:, indicator].amax(0) - x[:, indicator].amin(0)
    assert (gaps - 2).abs().max() < 1e-9, "an indicator is two units from off to on, however rare"
    assert "missing values in 'size', 'empty', 'built', 'town'" in columns.describe()[1]


def test_a_date_has_a_day_and_a_season() -> None:
    frame = pd.DataFrame({"when": pd.to_datetime(["2020-01-01", "2021-07-01", "2022-03-01", "2021-01-01"])})
    columns, x = Columns.learn(frame)
    raw = x[3].numpy() * columns.scale + columns.center
    angle = 2 * math.pi * raw[0] / 365.2425
    assert raw[1:] == pytest.approx([math.sin(angle), math.cos(angle)])
    late = pd.DataFrame({"when": [pd.Timestamp("2030-01-01")]})
    assert columns.unusual(late) == [["when 2030-01-01 is outside 2020-01-01 to 2022-03-01"]]


def test_what_is_unusual_is_named() -> None:
    columns, _ = Columns.learn(example())
    new = example(4, 1)
    new.loc[0, ["town", "size"]] = ["q", 99.0]
    new["built"] = pd.Timestamp("2005-01-01")
    new["name"] = ["p1", "p2", "p3", None]
    found = columns.unusual(new)
    assert found[0][0].startswith("size 99 is outside") and found[0][1] == "town 'q' is new"
    assert found[1] == [] and found[3] == ["name is missing"], "others were missing in training rows too"


def test_what_was_learnt_is_plain_and_comes_back() -> None:
    many = pd.DataFrame({"k": [f"q{k % 80}" for k in range(400)]})  # more levels than have inputs of their own
    for rows in (example(), many, np.random.default_rng(0).normal(size=(10, 3))):
        columns, x = Columns.learn(rows)
        again = Columns.from_dict(json.loads(json.dumps(columns.as_dict(), allow_nan=False)))
        assert (again.inputs(rows) == x).all() and again.unusual(rows) == columns.unusual(rows)


# -- estimators in folders --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[BayesianMLPRegressor, Path]:
    folder, frame = tmp_path_factory.mktemp("runs") / "run", example()
    y = frame["size"].fillna(0).to_numpy() * 10 + 3
    model = BayesianMLPRegressor(**SHORT).fit(frame[:60], y[:60], store=folder, held_out=(frame[60:], y[60:]))
    return model, folder


def test_an_estimator_comes_back_from_its_folder(kept: tuple[BayesianMLPRegressor, Path]) -> None:
    model, folder = kept
    again, frame = sklearn.load(folder), example(20, 1)
    assert np.array_equal(again.predict(frame), model.predict(frame)) and again.unlike(frame) == model.unlike(frame)
    assert again.trust_.rhat == model.trust_.rhat and again.held_out_ is not None and len(again.held_out_[0]) == 20
    assert again.get_params() == {**model.get_params(), "hidden_layers": [4]}
    files = {path.suffix for path in folder.iterdir()}
    assert files <= {".json", ".safetensors"}, "nothing that could be a pickle"


def test_a_folder_with_a_run_is_not_written_over(kept: tuple[BayesianMLPRegressor, Path]) -> None:
    before = (kept[1] / "model.json").read_bytes()
    with pytest.raises(ValueError, match="holds a run already: choose another folder"):
        BayesianMLPRegressor(**SHORT).fit(np.eye(9), np.arange(9), store=kept[1])
    assert (kept[1] / "model.json").read_bytes() == before


@pytest.mark.parametrize("labels", [["no", "yes"], [3, 7], [False, True]])
def test_classes_keep_their_type(tmp_path: Path, labels: list[Any]) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = np.array(labels)[(X[:, 0] > 0).astype(int)]
    BayesianMLPClassifier(**SHORT).fit(X, y, store=tmp_path / "run")
    again = sklearn.load(tmp_path / "run")
    assert again.classes_.tolist() == labels and again.predict(X).dtype == y.dtype
    assert sklearn.resume(tmp_path / "run", draws=12).posterior_.num_draws == 12


def test_rows_far_from_all_training_rows_are_unlike() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)) * 0.3 + np.array([[4.0, 0.0], [-4.0, 0.0]]).repeat(200, 0)
    model = BayesianMLPRegressor(**SHORT).fit(X, X[:, 0])
    assert model.unlike([[0.0, 0.0], [4.0, 0.0]]) == [["far from all training rows"], []]
    like = rng.normal(size=(2_000, 2)) * 0.3 + [4.0, 0.0]
    share = np.mean([any("far" in why for why in row) for row in model.unlike(like)])
    # The limit is the 99% quantile of 400 distances: its own error and that of the share.
    assert abs(share - 0.01) < 4 * math.sqrt(0.01 * 0.99 * (1 / 400 + 1 / 2_000))


def test_a_folder_without_an_estimator_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no estimator"):
        sklearn.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"version": 1}', "\x00", "null"])
def test_what_is_no_model_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "model.json", text)
    with pytest.raises(ValueError, match=r"model.json cannot be used .*fit the table again"):
        sklearn.load(tmp_path)
