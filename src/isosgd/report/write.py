"""Builds the report page of a posterior."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from isosgd.diagnostics.summary import PosteriorSummary
from isosgd.diagnostics.verdict import RHAT, Verdict
from isosgd.posterior import Posterior
from isosgd.report import chains, page, predictions
from isosgd.report.page import Figure, Subject, Tile
from isosgd.report.plot import number

MOST_LISTED = 9  # in a table
LABELS = {
    "num_data": "rows of data", "batch_size": "rows of a batch", "draws": "draws of each chain",
    "keep_every": "steps between draws", "engine": "chains ran", "gradients": "gradients of all chains",
}  # fmt: skip
METHODS = {"isgd": "I-SGD", "sgld": "SGLD", "sghmc": "SGHMC", "hmc": "HMC"}  # capitalised names


def write_report(posterior: Posterior, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write `report_html`, which takes the options, to a file, replacing it atomically."""
    path = Path(path)
    text = report_html(posterior, **options)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        return part.replace(path)
    except BaseException:  # such as a full disk
        part.unlink(missing_ok=True)
        raise


def report_html(
    posterior: Posterior, *, data: Any = None, heldout: Any = None, outside: Any = None, subject: Subject | None = None
) -> str:
    """The report of a posterior as one HTML page.

    Args:
        posterior: the draws, with their target.
        data: the training data, a tuple of tensors that ends with the targets; those of the posterior by default. The
            verdict needs them, to measure the temperature.
        heldout: rows that were not trained on, in the same form; by default training rows are shown.
        outside: out-of-distribution inputs, whose entropies are compared; for classifications.
        subject: names and units.

    Example:
        >>> import torch
        >>> from isosgd import Target
        >>> x = torch.linspace(-1, 1, 60).unsqueeze(1)
        >>> target = Target.from_module(torch.nn.Linear(1, 1), "gaussian")
        >>> draws = {name: torch.rand(2, 20, *value.shape) for name, value in target.initial().items()}
        >>> html = report_html(Posterior(target, draws, {}), data=(x, 0.5 + 0.5 * x), subject=Subject("A line"))
        >>> html.startswith("<!doctype html>"), "<script" in html
        (True, False)
    """
    subject = subject or Subject()
    data = posterior.data if data is None else data
    rows = predictions.some(heldout if heldout is not None else data)
    seen = "held-out rows" if heldout is not None else "training rows"
    if isinstance(outside, Tensor) and outside.ndim:
        (outside,) = predictions.some((outside,))
    found = _evaluated(posterior, rows, outside, subject)
    verdict, reason = _judged(posterior, data, rows, subject)
    summary = None
    with suppress(ValueError):  # too few draws, or nothing to diagnose
        summary = posterior.summary(rows)
    band = None
    predicts = posterior.target is not None and posterior.target.predicts
    if predicts and _has_targets(rows) and not isinstance(found, predictions.Classification):
        band = predictions.bands(posterior, predictions.some(data) if _has_targets(data) else rows, subject)
    followed: list[Figure] = []
    if rows is not None and posterior.target is not None:
        log_likelihood = posterior.log_likelihood(rows).double().cpu()
        traces = log_likelihood if found is None else found.traces.cpu()
        own = slice(posterior.info.get("from_start", 0), None)  # without the trained starts
        followed = chains.agreement(traces[:, own].numpy(), log_likelihood[:, own].mean(-1).numpy())
    info = posterior.info
    about_rows = (
        f"{len(rows[-1]):,} rows that the sampler never saw."
        if heldout is not None
        else "No held-out rows were given: these are training rows, so scores are optimistic."
    )
    reports = [r for r in info.get("warmup", []) if isinstance(r, Mapping)]
    body = [
        f'<p class="kicker">isosgd report</p>\n<h1>{escape(subject.title)}</h1>',
        f'<p class="lead">{escape(_lead(posterior, subject))}</p>',
        _against_start(posterior, rows, seen, subject),
        page.verdict_card(verdict, reason, subject.longer),
        page.tiles([*(found.tiles() if found is not None else []), *_chain_tiles(verdict, summary, info)]),
        page.section(
            f"Predictions on {seen}" if rows is not None else "Predictions",
            about_rows if rows is not None else "",
            page.figures([band, *(found.figures(subject) if found is not None else [])]),
        ),
        page.section(
            "Do the chains agree?",
            "Judged on functions of the draws: networks with different weights can compute the same function.",
            _summary_table(summary),
            page.figures(followed),
        ),
        page.section(
            "Temperature and rates",
            "Whether the draws are as spread out as the posterior, and the rates that the warm-up set.",
            page.figures([chains.temperatures(verdict, subject) if verdict else None, chains.rates(reports, subject)]),
            _layer_table(reports, subject),
        ),
        page.section("How the data were read", "", page.bullets(subject.notes, "notes")),
        page.section(
            "Settings and versions",
            "The same seed and settings give the same draws on the same machine.",
            page.facts(_settings(info)),
        ),
        page.section("Reproduce", "Commands that made the draws and this page.", page.code(list(subject.commands))),
        f"<footer>Written by isosgd {escape(str((info.get('versions') or {}).get('isosgd', '')))}. This page holds "
        "everything it shows and fetches nothing.</footer>",
    ]
    return page.page(subject.title, [part for part in body if part])


def _evaluated(
    posterior: Posterior, rows: Any, outside: Any, subject: Subject
) -> predictions.Regression | predictions.Classification | None:
    if posterior.target is None or not _has_targets(rows):
        return None
    try:
        return predictions.evaluate(posterior, rows, subject, outside)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, NotImplementedError):
        return None  # a user's own target may have data without targets; its log likelihood is shown


def _against_start(posterior: Posterior, rows: Any, seen: str, subject: Subject) -> str:
    """The section that compares the average with the trained networks; empty without networks."""
    if posterior.starts is None or not _has_targets(rows):
        return ""
    found = posterior.against_start(*rows)
    words = found.summary().replace("\n", "; ") + f": {seen}."
    if subject.softmax_temperature != 1:
        words += " Averages are taken here as they are, without their softmax temperature."
    return page.section("Better than the trained network?", words, page.table(*found.table()))


def _judged(posterior: Posterior, data: Any, rows: Any, subject: Subject) -> tuple[Verdict | None, str]:
    if posterior.target is None:
        return None, "The draws came without their target."
    if data is None:
        return None, "The training data, from which the temperature is read, were not given."
    try:
        found = posterior.trust(data, held_out=rows)
        reasons, fixes, remarks = (
            tuple(subject.named(text) for text in words) for words in (found.reasons, found.fixes, found.remarks)
        )
        return replace(found, reasons=reasons, fixes=fixes, remarks=remarks), ""
    except ValueError as error:
        return None, f"{error}."


def _has_targets(rows: Any) -> bool:
    return isinstance(rows, tuple) and len(rows) > 1 and all(isinstance(x, Tensor) for x in rows)


def _lead(posterior: Posterior, subject: Subject) -> str:
    info = posterior.info
    size = sum(math.prod(shape) for shape in posterior.shapes.values())
    target = info.get("target") or {}
    likelihood = target.get("likelihood")
    named = likelihood.get("name") if isinstance(likelihood, Mapping) and not likelihood.get("callable") else None
    what = subject.network or (target.get("model") if isinstance(target.get("model"), str) else None) or "a model"
    chains = "chain" if posterior.num_chains == 1 else "chains"
    count, first = len(posterior), posterior.num_chains * info.get("from_start", 0)
    words = [f"{count - first:,} draws from {posterior.num_chains:,} {chains} of the posterior of {what}"]
    if first:
        words.append(f" beside its trained network, which has a weight of {first / count:.2g},")
    words.append(f" with {size:,} parameters" + (f" and a {named} likelihood" if named and not subject.network else ""))
    if info.get("num_data"):
        words.append(f", given {info['num_data']:,} rows")
    if info.get("method"):
        words.append(f"; by {METHODS.get(info['method'], info['method'])}")
    if info.get("temperature") is not None:
        words.append(f" at temperature {info['temperature']:g}")
    for scale, what in (
        (posterior.softmax_temperature, "predictions at softmax temperature"),
        (posterior.noise_factor, "predictions at noise factor"),
        (subject.softmax_temperature, "averages at softmax temperature"),
    ):
        if scale != 1:
            words.append(f", {what} {scale:.2g}")
    if info.get("seconds"):
        words.append(f", in {_duration(info['seconds'])}")
    return "".join(words) + "."


def _chain_tiles(verdict: Verdict | None, summary: PosteriorSummary | None, info: Mapping[str, Any]) -> list[Tile]:
    found = []
    judged = summary.of("prediction", "log likelihood") if summary is not None else None
    if judged is not None and math.isfinite(judged.rhat):
        found.append(Tile("largest R-hat", f"{judged.rhat:.3f}", f"{RHAT:g} or less is accepted"))
        found.append(Tile("fewest effective draws", number(judged.ess_bulk, 2), "of any prediction"))
    if verdict is not None and verdict.readings:
        whole = verdict.readings[0]
        note = f"± {number(whole.error, 2)}, target {verdict.temperature:g}"
        found.append(Tile("temperature", number(whole.temperature), note))
    if info.get("gradients"):
        found.append(Tile("gradients", f"{info['gradients']:,}", f"in {_duration(info.get('seconds') or 0)}"))
    return found


def _summary_table(summary: PosteriorSummary | None) -> str:
    if summary is None:
        return ""
    ordered = sorted(summary.rows, key=lambda r: (math.isnan(r.rhat), -r.rhat))[:MOST_LISTED]
    rows = [[r.name, number(r.mean), number(r.sd), number(r.rhat, 4), number(r.ess_bulk, 2)] for r in ordered]
    caption = f"The {len(rows)} of {len(summary.rows)} quantities with the largest R-hat, in the model's units"
    return page.table(["quantity", "mean", "sd", "R-hat", "effective draws"], rows, caption)


def _layer_table(reports: list[Mapping[str, Any]], subject: Subject) -> str:
    if not reports:
        return ""
    columns = {"rate": "rate", "lambda": "lam", "curvature": "curvature", "predicted bias": "predicted_bias",
               "clipped noise": "clipped_share", "tail index": "tail_index"}  # fmt: skip
    rows = []
    for k, group in enumerate(reports[0].get("groups", ())[:MOST_LISTED]):
        cells = [subject.layer(str(group["name"]))]
        for label, key in columns.items():
            values = [r["groups"][k].get(key) for r in reports if len(r.get("groups", ())) > k]
            there = [float(v) for v in values if v is not None and math.isfinite(v)]
            middle = float(np.median(there)) if there else math.nan
            percent = label in ("predicted bias", "clipped noise") and math.isfinite(middle)
            cells.append(f"{100 * middle:.1f}%" if percent else number(middle))
        rows.append(cells)
    return page.table(["layer", *columns], rows, "Results of the warm-up, medians over chains")


def _settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Given and chosen settings as text."""
    skipped = {"warmup", "rates", "versions", "target", "dropped", "chain_indices", "sets", "lengths", "store"}
    found: dict[str, Any] = {}
    for name, value in info.items():
        if name in skipped or value is None or value == {}:
            continue
        if isinstance(value, Mapping):
            found |= {f"option {k}": _words(v) for k, v in value.items()}
        elif isinstance(value, list):
            same = sorted({str(v) for v in value}, key=lambda text: (len(text), text))
            found[name] = ", ".join(same) if len(same) <= 6 else f"{same[0]} to {same[-1]}"
        else:
            found[name] = number(value) if isinstance(value, float) else value
    target = info.get("target") or {}
    for part in ("likelihood", "prior"):
        if target.get(part):
            found[part] = _words(target[part])
    if dropped := info.get("dropped"):
        found["dropped chains"] = "; ".join(f"{k}: {why}" for k, why in dropped.items())
    found["versions"] = ", ".join(f"{k} {v}" for k, v in (info.get("versions") or {}).items())
    return {LABELS.get(k, str(k).replace("_", " ")): f"{v:,}" if type(v) is int else v for k, v in found.items()}


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        name = str(value.get("name", "")).rpartition("<locals>.")[2].replace("<lambda>", "a function")
        rest = ", ".join(f"{k} {_words(v)}" for k, v in value.items() if k not in ("name", "callable"))
        return f"{name} ({rest})" if rest and name else str(name or rest)
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return number(value) if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
