"""Tables: files as columns, columns as inputs, and what is unlike the training data."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isosgd.tables.columns import days, numbers, read_columns
from isosgd.tables.encoding import learn_column
from isosgd.tables.tables import learn_table, load_table
from isosgd.tables.unlike import Familiar

PENGUINS = Path(__file__).parents[1] / "data" / "penguins.csv"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


# Files


def test_a_real_csv():
    columns = read_columns(PENGUINS)
    assert {len(values) for values in columns.values()} == {344}
    assert columns["sex"].count(None) == 11
    assert columns["body_mass_g"].count(None) == 2
    assert set(columns["species"]) == {"Adelie", "Gentoo", "Chinstrap"}


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_are_found(tmp_path, separator):
    rows = [["a", "b"], ["1", "x y"], ["2", "z"]]
    path = write(tmp_path / "t.csv", "\n".join(separator.join(row) for row in rows))
    assert read_columns(path) == {"a": ["1", "2"], "b": ["x y", "z"]}


def test_a_decimal_comma_goes_with_semicolons_only(tmp_path):
    assert read_columns(write(tmp_path / "t.csv", "a;b\n1,5;x\n"))["a"] == ["1.5"]
    assert read_columns(write(tmp_path / "u.csv", 'a,b\n"1,5",x\n'))["a"] == ["1,5"]


def test_quotes_byte_order_marks_empty_lines_and_missing_values(tmp_path):
    text = '\ufeffname,"a ""b"", c"\n"x, y",NA\n\n z ,n/a\nNone,?\n'
    found = read_columns(write(tmp_path / "t.csv", text))
    assert found == {"name": ["x, y", "z", None], 'a "b", c': [None, None, None]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty; the first line must name the columns"),
        ("\n1,2\n", "first line is empty"),
        ("a,b\n", "no rows"),
        ("a\n1\n", "single column 'a'"),
        ("a,b\n1\n", "line 2: 1 values for 2 columns"),
        ("a,b,a\n1,2,3\n", "columns 1 and 3 are both named 'a'"),
        ("a,,c\n1,2,3\n", "column 2 has no name"),
        ("1.5,2\n3,4\n", "must name the columns"),
        ('a,b\n"1,2\n', "line"),
    ],
)
def test_bad_csv_is_named(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_columns(write(tmp_path / "bad.csv", text))


def test_other_encodings_and_folders_are_refused(tmp_path):
    (tmp_path / "latin.csv").write_bytes("größe,b\n1,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_columns(tmp_path / "latin.csv")
    with pytest.raises(ValueError, match="is a folder"):
        read_columns(tmp_path)
    with pytest.raises(OSError, match=r"none\.csv is not there; name a CSV"):
        read_columns(tmp_path / "none.csv")


def test_parquet_reads_as_the_same_csv(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: it reads Parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    import datetime

    table = arrow.table({
        "size": [1.5, None, 3.0],
        "count": arrow.array([1, 2, 3], arrow.int64()),
        "town": arrow.array(["Rome", "Oslo", None]).dictionary_encode(),
        "when": [datetime.date(2024, 1, 31), None, datetime.date(2024, 2, 1)],
        "old": [True, False, None],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "t.parquet")
    assert read_columns(tmp_path / "t.parquet") == {
        "size": ["1.5", None, "3.0"],
        "count": ["1", "2", "3"],
        "town": ["Rome", "Oslo", None],
        "when": ["2024-01-31", None, "2024-02-01"],
        "old": ["True", "False", None],
    }
    write(tmp_path / "no.parquet", "a,b\n1,2\n")
    with pytest.raises(ValueError, match="no Parquet file"):
        read_columns(tmp_path / "no.parquet")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_is_read_back(value):
    found, bad = numbers([repr(value)])
    assert found[0] == value and bad == 0


@given(st.text(max_size=12))
def test_any_text_is_a_number_or_counted_as_none(text):
    found, bad = numbers([text])
    assert bad == int(not np.isfinite(found[0]))


def test_times_of_one_instant_are_one_whatever_their_offset():
    texts = ["2024-03-10T12:00Z", "2024-03-10 14:00+02:00", "2024-03-10T06:30:00-05:30", "2024-03-10 13:00+01"]
    texts += ["2024-03-10T12:00", "2024-03-11 01:00:00.000+1300"]
    found, bad = days(texts)
    assert bad == 0 and len(set(found.tolist())) == 1
    assert days(["0001-01-01T00:00+06:00"])[1] == 0, "before all that a calendar of UTC has"


def test_dates_that_do_not_exist_are_none():
    found, bad = days(["2024-02-29", "2023-02-29", "2024-13-01", "24-01-01"])
    assert found[0] == 19782 and np.isnan(found[1:]).all() and bad == 3


# Columns


def test_a_missing_number_takes_the_median_and_says_so():
    column, remark = learn_column("age", ["1", "2", None, "9", None])
    assert remark == "" and column.inputs == ["age", "age is missing"]
    found, words = column.encode(["4", None])
    assert found.tolist() == [[4, 0], [2, 1]] and words == ["", ""]


def test_a_missing_value_that_training_never_lacked_is_unusual():
    column, _ = learn_column("age", ["1", "2", "9"])
    found, words = column.encode([None])
    assert found.tolist() == [[2]] and words == ["age is missing"]


def test_levels_rare_levels_new_levels_and_missing_ones():
    values = ["a"] * 60 + ["b"] * 30 + ["c"] * 4 + [None] * 6
    column, _ = learn_column("k", values)
    assert (column.levels, column.rare) == (("a", "b"), ("c",))
    assert column.inputs == ["k = a", "k = b", "k = (other)", "k is missing"]
    found, words = column.encode(["b", "c", "new", None])
    assert found.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert words == ["", "", "k 'new' is new", ""]


def test_a_new_level_without_rare_ones_has_no_input_on():
    column, _ = learn_column("k", ["a"] * 10 + ["b"] * 10)
    found, words = column.encode(["new"])
    assert found.tolist() == [[0, 0]] and words == ["k 'new' is new"]


def test_a_date_has_a_day_and_a_season():
    column, _ = learn_column("when", ["2020-01-01", "2021-07-01", "2022-03-01"])
    assert column.kind == "date" and len(column.inputs) == 3 and column.indicators == [False] * 3
    found, words = column.encode(["2021-01-01", "2030-01-01"])
    year = 365.2425
    assert found[0, 1] == pytest.approx(math.sin(2 * math.pi * found[0, 0] / year))
    assert words == ["", "when 2030-01-01 is outside 2020-01-01 to 2022-03-01"]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("a", ["7", "7.0"] * 10, "always 7"),
        ("a", ["x"] * 20, "always 'x'"),
        ("a", [None] * 20, "empty"),
        ("a", [str(k + 5) for k in range(20)], "numbers the rows"),
        ("customer_id", [str(k * k) for k in range(20)], "numbers the rows"),
        ("name", [f"person {k}" for k in range(20)], "no level has 5 rows"),
        ("zip", ["a"] * 8 + [f"z{k}" for k in range(20)], "most of its 21 levels are rare"),
    ],
)
def test_columns_that_say_nothing_are_dropped(name, values, why):
    column, reason = learn_column(name, values)
    assert column is None and why in reason


def test_income_is_no_identifier():
    assert learn_column("income", [str(k * k) for k in range(20)])[0] is not None


def test_few_words_among_numbers_count_as_missing():
    column, remark = learn_column("size", [str(k / 7) for k in range(97)] + ["big", "n.a.", "-"])
    assert column.kind == "number" and column.missing and "3 values of 'size'" in remark
    assert learn_column("size", ["1.5", "2.5"] * 20 + ["big"] * 10)[0].kind == "category"


# Tables


@pytest.fixture(scope="module")
def penguins():
    return read_columns(PENGUINS)


def test_real_inputs_are_in_standard_units(penguins):
    table = learn_table(penguins, "body_mass_g")
    assert table.task == "regression"
    there = table.encode_target(penguins)[1]
    x, unusual = table.encode({name: [v for v, t in zip(c, there, strict=True) if t] for name, c in penguins.items()})
    assert x.shape == (342, len(table.inputs)) and not any(unusual)
    indicator = torch.tensor([flag for c in table.columns for flag in c.indicators])
    assert x.mean(0).abs().max() < 1e-5
    assert (x[:, ~indicator].std(0, correction=0) - 1).abs().max() < 1e-5
    gaps = x[:, indicator].amax(0) - x[:, indicator].amin(0)
    assert (gaps - 2).abs().max() < 1e-5, "an indicator is two units from off to on, however rare"
    y, _ = table.encode_target(penguins)
    assert y.shape == (342, 1) and abs(float(y.mean())) < 1e-5 and abs(float(y.std(correction=0)) - 1) < 1e-5


def test_text_and_few_whole_numbers_are_classes(penguins):
    table = learn_table(penguins, "species")
    assert table.task == "classification" and table.classes == ("Adelie", "Chinstrap", "Gentoo")
    by_year = learn_table(penguins, "year")
    assert by_year.task == "classification" and by_year.classes == ("2007", "2008", "2009")
    assert any("--task" in line for line in by_year.describe())
    assert learn_table(penguins, "year", "regression").task == "regression"


def test_labels_that_are_numbers_are_sorted_as_such_and_1_is_1_0():
    rows = {"x": [str(k / 3) for k in range(30)], "y": ["10", "9.0", "2"] * 10}
    table = learn_table(rows, "y")
    assert table.classes == ("2", "9", "10")
    labels, there = table.encode_target({"y": ["2.0", "9", "10.0", "11", None]})
    assert labels.tolist() == [0, 1, 2] and there.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("target", "task", "words"),
    [
        ("weight", None, "no column 'weight'"),
        ("species", "regression", "are no numbers"),
        ("species", "banana", "task = 'banana'"),
        ("gone", None, "no value in any row"),
        ("same", None, "always '3'"),
        ("same", "regression", "always 3"),
        ("when", None, "is a date"),
        ("name", None, "342 different values"),
    ],
)
def test_targets_that_cannot_be_predicted_are_named(penguins, target, task, words):
    size = 344
    more = {"gone": [None] * size, "same": ["3"] * size, "when": ["2024-01-01", "2024-01-02"] * (size // 2)}
    more["name"] = [f"bird {k}" if k < 342 else None for k in range(size)]
    with pytest.raises(ValueError, match=words):
        learn_table(penguins | more, target, task)


def test_a_table_without_inputs_is_refused():
    with pytest.raises(ValueError, match="no column is left"):
        learn_table({"a": ["1"] * 10, "y": [str(k * 0.5) for k in range(10)]}, "y")


def test_a_column_that_lacks_is_named(penguins):
    table = learn_table(penguins, "species")
    with pytest.raises(ValueError, match="lacks the column 'island'"):
        table.encode({name: v for name, v in penguins.items() if name != "island"})
    with pytest.raises(ValueError, match="lacks the target 'species'"):
        table.encode_target({"island": []})


def test_saved_and_loaded_it_encodes_the_same(penguins, tmp_path):
    for target in ("species", "body_mass_g"):
        table = learn_table(penguins, target)
        table.save(tmp_path / "table.json", note="kept")
        again, more = load_table(tmp_path / "table.json")
        assert again == table and more == {"note": "kept"}
        assert torch.equal(again.encode(penguins)[0], table.encode(penguins)[0])


def _hurt(table: dict, key: str, value: object) -> None:
    *path, last = key.split(".")
    for part in path:
        table = table[int(part) if part.isdigit() else part]
    if value is None:
        del table[last]
    else:
        table[last] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 99),
        ("table", []),
        ("table.task", "guess"),
        ("table.columns", []),
        ("table.columns.0.kind", "picture"),
        ("table.columns.0.name", 3),
        ("table.columns.0.extra", 3),
        ("table.columns.0.levels", ["a"] * 9),
        ("table.x_scale", [0.0]),
        ("table.x_scale", ["1"]),
        ("table.y_scale", -1.0),
        ("table.y_mean", None),
        ("table.target", None),
        ("table.classes", ["a", "b"]),
    ],
)
def test_a_hostile_table_is_refused(penguins, tmp_path, key, value):
    learn_table(penguins, "body_mass_g").save(tmp_path / "table.json")
    found = json.loads((tmp_path / "table.json").read_text())
    _hurt(found, key, value)
    (tmp_path / "table.json").write_text(json.dumps(found))
    if key == "table.y_mean":  # the one that has a default
        assert load_table(tmp_path / "table.json")[0].y_mean == 0.0
        return
    with pytest.raises(ValueError, match=r"table.json"):
        load_table(tmp_path / "table.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"version": 1, "table": NaN}', "\x00", "null"])
def test_what_is_no_json_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"table.json"):
        load_table(write(tmp_path / "table.json", text))


# What is unlike


def test_about_one_in_a_hundred_like_rows_is_far(generator):
    x, new = torch.randn(2, 2000, 5, generator=generator)
    familiar = Familiar.learn(x)
    share = float((familiar.distance(new) > familiar.limit).double().mean())
    # The limit is a quantile of 2000 distances: its own error and that of the share add up.
    assert abs(share - 0.01) < 4 * math.sqrt(2 * 0.01 * 0.99 / 2000)


def test_a_gap_between_clusters_is_far(generator):
    x = torch.randn(400, 2, generator=generator) * 0.3 + torch.tensor([[4.0, 0.0], [-4.0, 0.0]]).repeat(200, 1)
    familiar = Familiar.learn(x)
    assert (familiar.distance(torch.tensor([[0.0, 0.0], [4.0, 0.0]])) > familiar.limit).tolist() == [True, False]


def test_the_same_rows_and_limit_give_the_same_distances(generator):
    x = torch.randn(6000, 3, generator=generator)
    familiar = Familiar.learn(x)
    assert len(familiar.rows) == 5000
    again = Familiar.among(x, familiar.limit)
    assert torch.equal(again.distance(x[:50]), familiar.distance(x[:50]))
    assert again.distance(x[:0]).shape == (0,)


def test_single_rows_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        Familiar.learn(torch.zeros(1, 3))


def test_large_class_labels_stay_apart() -> None:
    columns = {"x": [str(k * k) for k in range(40)], "y": ["1234567", "1234568"] * 20}
    table = learn_table(columns, "y", "classification")
    assert table.classes == ("1234567", "1234568")
