"""The page on many chains shows what the benchmark found."""

import json
from pathlib import Path

import pytest

from benchmarks import chains_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "chains").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_is_made_from_the_results(path):
    assert chains_tables.table(json.loads(path.read_text())) in (ROOT / "docs" / "chains.md").read_text()
