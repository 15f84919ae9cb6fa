"""Seconds of a fit of a table with the defaults of `isosgd.sklearn.BayesianMLPRegressor`.

    python -m benchmarks.fit_table [--rows 500] [--columns 10] [--runs 2]

Inputs are normal, the target is smooth and not linear, with noise. Wall time, and the time of all threads.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from isosgd.sklearn import BayesianMLPRegressor


def main(argv: list[str] | None = None) -> int:
    """Fit, and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--columns", type=int, default=10, help="at least 4")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(args.rows, args.columns))
    y = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + x[:, 3] + 0.3 * rng.normal(size=args.rows)
    for _ in range(args.runs):
        wall, all_threads = time.perf_counter(), time.process_time()
        BayesianMLPRegressor(random_state=0).fit(x, y)
        print(f"{time.perf_counter() - wall:.1f} s, {time.process_time() - all_threads:.1f} s of a core", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
