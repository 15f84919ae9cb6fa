"""The page on many chains shows what the benchmark found."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "chains").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_is_made_from_the_results(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("chains_tables", ROOT / "benchmarks" / "chains_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table(json.loads(path.read_text())) in (ROOT / "docs" / "chains.md").read_text()
