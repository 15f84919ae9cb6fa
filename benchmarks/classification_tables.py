"""Tables and figures of the classification experiments, from their JSON into the documentation.

    python benchmarks/classification_tables.py [--results results/classification] [--step results/gpu/step.json]
        [--docs docs/classification.md]

What stands between the marks in the page, which have the names of the files, is written anew; the words around it stay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pages import put

from isosgd.experiments.image_figures import draw_entropies
from isosgd.experiments.image_tables import TITLES, markdown, read


def speed(path: Path) -> str:
    """Times of updates and steps as tables."""
    found = json.loads(path.read_text())
    copied = found["updates"]["copy_bandwidth"]
    labels = ("I-SGD", "I-SGD, momentum", "SGD fused", "Adam fused")
    lines = [
        f"{found['hardware']}, torch {found['torch']}; a copy moves {copied / 1e12:.2f} TB/s.\n",
        "| parameters | " + " | ".join(f"{label}, µs (× SGD, share of bandwidth)" for label in labels) + " |",
        "| --- " * (len(labels) + 1) + "|",
    ]
    for row in found["updates"]["sizes"].values():
        cells = [
            f"{1e6 * row['seconds'][k]:.1f} ({row['over_sgd'][k]:.2f}, {100 * row['share_of_bandwidth'][k]:.0f}%)"
            for k in labels
        ]
        lines.append(f"| {row['parameters']:,} | " + " | ".join(cells) + " |")
    lines += ["", "| network | n | SGD step, µs | I-SGD step, µs | ratio | images/s | draws/s, 400 steps apart |"]
    lines.append("| --- " * 7 + "|")
    for model, row in found["steps"].items():
        sgd, isgd = (1e6 * row["seconds"][k] for k in ("SGD", "I-SGD"))
        name = TITLES[model].partition(" on ")[0]
        lines.append(
            f"| {name} | {row['batch_size']} | {sgd:.0f} | {isgd:.0f} | {row['ratio']:.3f} | "
            f"{row['images_per_second']:,.0f} | {row['draws_per_second']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/classification"))
    parser.add_argument("--step", type=Path, default=Path("results/gpu/step.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/classification.md"))
    args = parser.parse_args()
    results = {path.stem: read(path) for path in sorted(args.results.glob("*.json"))}
    if not results:
        raise SystemExit(f"{args.results} holds no results: run `isosgd bench mnist` or `isosgd bench cifar10` first")
    text = args.docs.read_text()
    for name, result in results.items():
        text = put(text, name, markdown([result]))
        if any(score.entropies for row in result.rows for score in row.scores):
            draw_entropies(result, args.docs.parent / "img" / f"entropies-{result.model}.png")
    text = put(text, "speed", speed(args.step))
    args.docs.write_text(text)


if __name__ == "__main__":
    main()
