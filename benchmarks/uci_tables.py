"""Tables of the UCI regressions, from their JSON into the documentation.

    python benchmarks/uci_tables.py --data-root DIR [--results results/uci] [--docs docs/uci.md]

The data root has the published results of MC-dropout that ours are paired with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pages import put

from isosgd.experiments.uci_tables import markdown, mc_dropout, read


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder with uci/ (default: ISOSGD_DATA)")
    parser.add_argument("--results", type=Path, default=Path("results/uci"))
    parser.add_argument("--docs", type=Path, default=Path("docs/uci.md"))
    args = parser.parse_args()
    ours = [read(path) for path in sorted(args.results.glob("*.json"))]
    if not ours:
        raise SystemExit(f"{args.results} holds no results: run `isosgd bench uci` first")
    whole = "I-SGD, ours, all data"
    order = (
        *(whole, f"{whole}, Gaussian noise", f"{whole}, noise by input"),
        *("I-SGD, ours, minibatches", "I-SGD, the paper's setting"),
    )
    ours.sort(key=lambda result: order.index(result.label) if result.label in order else len(order))
    published = [mc_dropout(name, args.data_root) for name in sorted({result.set for result in ours})]
    args.docs.write_text(put(args.docs.read_text(), "tables", markdown([*ours, *published])))


if __name__ == "__main__":
    main()
