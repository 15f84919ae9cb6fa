"""The demo: a posterior that is known exactly, then a regression and a classification on real data.

Run it with ``python -m isosgd.demo --out demo-output``. It needs ``pip install "isosgd[demo]"``, no network, and about
a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from isosgd import Target, __version__, priors, sample
from isosgd.demo.figures import draw_toy
from isosgd.demo.jobs import ISGD, QUICK, Found, Sizes, diabetes_job, digits_job, toy_job
from isosgd.demo.toy import NOISE_VARIANCE, NUM_FEATURES, Toy, ToyLikelihood, compare, features, predict_y
from isosgd.report import Subject, report_html

METHODS = {"isgd": "I-SGD", "sgld": "SGLD", "vsgd": "V-SGD", "sghmc": "SGHMC"}
EXTRAS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def run_job(job: Callable[..., Found], *args: Any) -> Found:
    """Run a job on one thread with a fixed seed, and keep its warnings."""
    torch.set_num_threads(1)
    torch.manual_seed(args[-2])
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports much of torch, which is not the time of a method
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = job(*args)
    found.numbers["warnings"] = sorted({str(w.message) for w in caught})
    return found


def _executor(jobs: int) -> Executor:
    if jobs == 1:
        return ThreadPoolExecutor(1)
    # Read when torch is imported: threads of two processes would compete for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table; the first column is left-aligned.

    Example:
        >>> print(table(["method", "W2"], [["I-SGD", "0.01"]]))
          method    W2
          I-SGD   0.01
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    pad = [str.ljust] + [str.rjust] * (len(head) - 1)
    return "\n".join(
        "  " + "  ".join(p(c, w) for p, c, w in zip(pad, row, widths, strict=True)) for row in (head, *rows)
    )


def run(out: Path, *, seed: int = 0, quick: bool = False, jobs: int = 2, say: Callable[[str], None] = print) -> Any:
    """Run everything, write figures and ``results.json`` into a folder, and return what was written."""
    started, sizes = time.monotonic(), QUICK if quick else Sizes()
    out.mkdir(parents=True, exist_ok=True)
    versions = {"isosgd": __version__, "torch": torch.__version__, "python": platform.python_version()}
    results: dict[str, Any] = {"seed": seed, "quick": quick, "versions": versions}
    with _executor(jobs) as pool:
        digits = pool.submit(run_job, digits_job, seed, sizes)
        toys = {method: pool.submit(run_job, toy_job, method, seed, sizes) for method in METHODS}
        diabetes = pool.submit(run_job, diabetes_job, seed, sizes)
        page = pool.submit(run_job, report_job, seed, sizes)

        say("1. A posterior known exactly: 200 data, 20 weights, minibatches of 32. No rate is given to any method.")
        toy = {method: future.result() for method, future in toys.items()}
        reference = compare(Toy.make(seed).draw(sizes.toy.draws, seed + 1), Toy.make(seed))
        results["toy"] = {"exact": reference} | {method: found.numbers for method, found in toy.items()}
        say(_toy_table(results["toy"]))
        _say_warnings(say, {METHODS[m]: found for m, found in toy.items()})

        say("\n2. Regression: progression of diabetes (scikit-learn), test scores in the units of the data.")
        say(f"   A net of one hidden layer, by Adam: {sizes.adam_steps:,} steps, or up to where held-out rows")
        say("   are predicted best. I-SGD draws others around the first, and held-out rows say what weight they get.")
        say("   ± is one standard error over test rows.")
        results["diabetes"] = diabetes.result().numbers
        say(_score_table(results["diabetes"], {"rmse": "RMSE", "coverage95": "in 95% interval"}))
        say(_verdict(results["diabetes"]["rows"]))
        _say_warnings(say, {ISGD: diabetes.result()})

        say("\n3. Classification: handwritten digits (scikit-learn), in the same three ways.")
        results["digits"] = digits.result().numbers
        say(_score_table(results["digits"], {"accuracy": "accuracy", "confidence": "mean confidence"}))
        say(_verdict(results["digits"]["rows"]))
        _say_warnings(say, {ISGD: digits.result()})

    labels = {METHODS[m]: (results["toy"][m], found.arrays) for m, found in toy.items()}
    draw_toy(labels, out / "toy.png")
    (out / "report.html").write_text(page.result().arrays["html"], encoding="utf-8")
    results["seconds"] = round(time.monotonic() - started, 1)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    say(f"\nDone in {results['seconds']:.0f} s. Written: " + ", ".join(str(p) for p in written(out)))
    return results


def written(out: Path) -> list[Path]:
    """The files that a run writes."""
    return [out / name for name in ("toy.png", "report.html", "results.json")]


def report_job(seed: int, sizes: Sizes) -> Found:
    """Sample the toy with four chains and write a report of the draws."""
    toy, other, chains, likelihood = Toy.make(seed), Toy.make(seed + 1), 4, ToyLikelihood()
    target = Target(  # of inputs rather than features, so that the page shows the curve
        lambda params, batch: likelihood(params, (features(batch[0]), batch[1])),
        priors.Normal(1.0),
        init={"w": torch.zeros(NUM_FEATURES)},
        predict=predict_y,
    )
    data = toy.x.float(), toy.data[1]
    new = features(other.x) @ toy.weights + NOISE_VARIANCE**0.5 * torch.randn(len(other.x), dtype=torch.float64)
    length = sizes.toy
    posterior = sample(
        target, data, chains=chains, draws=max(length.draws // chains, 20), keep_every=length.keep_every,
        warmup=length.warmup, batch_size=32, seed=seed, progress=False,
    )  # fmt: skip
    subject = Subject(
        "A regression whose posterior is known exactly",
        inputs=["x"],
        network="a curve, y = w · cos(ωx − π/4) + noise, ω = 1 to 20,",
        commands=["isosgd demo" if seed == 0 else f"isosgd demo --seed {seed}"],
    )
    html = report_html(posterior, data=data, heldout=(other.x.float(), new.float()), subject=subject)
    return Found({}, {"html": html})


def _toy_table(toy: dict[str, dict[str, Any]]) -> str:
    head = ["method", "mean error (sd)", "covariance error", "W2", "variance / exact", "gradients", "seconds"]
    rows = []
    for key, label in {"exact": "independent exact draws", **METHODS}.items():
        r = toy[key]
        errors = [f"{r['mean_error_sd']:.3f}", f"{r['covariance_error']:.3f}", f"{r['w2']:.4f}"]
        costs = [f"{r['gradients']:,}", f"{r['seconds']:.1f}"] if "gradients" in r else ["", ""]
        rows.append([label, *errors, f"{r['trace_ratio']:.3f}", *costs])
    return table(head, rows)


def _score_table(found: dict[str, Any], scores: dict[str, str]) -> str:
    split = "{train} to train, {held_out} held out, {test} to test".format(**found)
    head = [split, *scores.values(), "MNLL", "above I-SGD", "gradients", "seconds"]
    rows = []
    for label, r in found["rows"].items():
        values = [f"{r[s]:.2f}" if s == "rmse" else f"{100 * r[s]:.1f}%" for s in scores]
        mnll = f"{r['mnll']:.3f} ± {r['mnll_error']:.3f}"
        excess = "" if label == ISGD else f"{r['excess']:+.3f} ± {r['excess_error']:.3f}"
        rows.append([label, *values, mnll, excess, f"{r['gradients']:,}", f"{r['seconds']:.1f}"])
    return table(head, rows)


def _verdict(rows: dict[str, dict[str, Any]]) -> str:
    """Compare the scores in words; a difference of two standard errors counts."""
    words = []
    for label, r in rows.items():
        if label != ISGD:
            sure = abs(r["excess"]) > 2 * r["excess_error"]
            words.append(
                f"{'better' if r['excess'] > 0 else 'worse'} than {label!r}" if sure else f"level with {label!r}"
            )
    return f"  By MNLL (lower is better) I-SGD is {' and '.join(words)}."


def _say_warnings(say: Callable[[str], None], found: dict[str, Found]) -> None:
    for label, job in found.items():
        for message in job.numbers["warnings"]:
            say(f"  warning, {label}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m isosgd.demo",
        description="Sample a posterior that is known exactly, then two data sets that come with scikit-learn.",
        epilog="example: python -m isosgd.demo --out demo-output --seed 1",
    )
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder to write to (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs; the draws are poor")
    parser.add_argument("--seed", type=int, default=0, help="of data, splits and chains (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes; 1 stays in this one (2, or 1 with --quick)")
    parser.add_argument("--json", action="store_true", help="results on standard output, the story on standard error")
    args = parser.parse_args(argv)
    jobs = args.jobs if args.jobs is not None else 1 if args.quick else 2  # starting a process takes seconds
    if jobs < 1:
        parser.error(f"--jobs {jobs} must be at least 1")
    if args.seed < 0:
        parser.error(f"--seed {args.seed} must not be negative")
    missing = [name for module, name in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f'the demo needs {" and ".join(missing)}: pip install "isosgd[demo]"', file=sys.stderr)
        return 2
    stream = sys.stderr if args.json else sys.stdout

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    results = run(args.out, seed=args.seed, quick=args.quick, jobs=jobs, say=say)
    if args.json:
        print(json.dumps(results, indent=2))
    return 0
