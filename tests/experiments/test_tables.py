"""The grid over settings of the network of tables: a line for each fit, with scores of each row by its own target."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import tables

pytestmark = pytest.mark.long


@pytest.mark.parametrize("likelihood", ["auto", "student_t", "loglinear", "heteroscedastic", "heteroscedastic_t"])
def test_scores_of_a_linear_table(likelihood: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 2))
    (tmp_path / "tabular").mkdir()
    rows = np.column_stack([x, x @ [2.0, -1.0] + 0.5 * rng.normal(size=150)])
    np.savetxt(tmp_path / "tabular" / "airfoil.csv", rows, delimiter=",", header="a,b,y", comments="")
    given = {
        "data": "airfoil", "split": 0, "seed": 0, "hidden": "4", "likelihood": likelihood,
        "scale": None, "out_scale": None, "size": None, "df": 6.0, "chains": 2, "effort": 0.2, "max_seconds": None,
        "rows": None, "validate": True, "device": "cpu", "threads": 1, "data_root": str(tmp_path),
    }  # fmt: skip
    found = tables.run_one(given)
    json.dumps(found)
    # Noise is .5 / 2.3 of the target's deviation. Of rows held against each other the error would be above 1.
    assert found["rmse"] < 0.4 and found["rmse_of_starts"] < 0.6
    assert found["coverage"] > 0.8 and found["nll"] < 0.7
