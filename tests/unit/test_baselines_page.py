"""The page of methods shows the registry as it is."""

from pathlib import Path

import pytest

import isosgd
from experiments.methods import PAGE, renewed, tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert renewed(page) == page, f"write {PAGE.name} anew: python -m experiments.methods"


def test_the_tables_name_every_method_and_setting() -> None:
    text = tables()
    for row in isosgd.methods():
        assert f"| `{row['name']}` | {row['family']} | {row['targets']} |" in text
        for name in set(row["settings"]) - {"batch_size", "budget", "sets"}:
            assert f"`{name}=" in text, (row["name"], name)


def test_the_page_is_in_the_menu() -> None:
    assert "methods.md" in (ROOT / "mkdocs.yml").read_text()


def test_a_page_without_a_place_for_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        renewed("# Methods\n")
