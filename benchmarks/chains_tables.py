"""Tables of `benchmarks.chains`, from its JSON into the documentation.

python -m benchmarks.chains_tables [--results results/chains] [--docs docs/chains.md]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.pages import put


def table(found: dict[str, Any]) -> str:
    """Microseconds a chain-step by method and number of chains, with ratios where there are peers."""
    times, memory = found["microseconds a chain-step"], found["megabytes of I-SGD"]
    counts = list(times)
    names = list(dict.fromkeys(name for each in times.values() for name in each))
    best = {
        k: min((t["microseconds"] for name, t in times[k].items() if name.startswith("blackjax")), default=None)
        for k in counts
    }

    def entry(name: str, k: str) -> str:
        if name not in times[k]:
            return ""
        time, peer = times[k][name]["microseconds"], best[k]
        return f"{time:.1f}" if peer is None or name.startswith("blackjax") else f"{time:.1f} ({peer / time:.2f})"

    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "machine")
    lines = [
        f"{found['versions']['machine']}; {versions}; medians over {found['rounds']} rounds.",
        "",
        "| µs a step of one chain, with | " + " | ".join(f"{k} chain{'s' * (k != '1')}" for k in counts) + " |",
        "| --- |" + " --- |" * len(counts),
        *("| " + " | ".join([name, *(entry(name, k) for k in counts)]) + " |" for name in names),
        "| memory of I-SGD, MB | " + " | ".join(f"{memory[k]:.0f}" if k in memory else "" for k in counts) + " |",
        "",
        f"Made by `{found['command']}`." + (f" {found['note']}" if "note" in found else ""),
    ]
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chains_tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=Path("results/chains"))
    parser.add_argument("--docs", type=Path, default=Path("docs/chains.md"))
    args = parser.parse_args()
    text = args.docs.read_text()
    for path in sorted(args.results.glob("*.json")):
        text = put(text, path.stem, table(json.loads(path.read_text())))
    args.docs.write_text(text)


if __name__ == "__main__":
    main()
