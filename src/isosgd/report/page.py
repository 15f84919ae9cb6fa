"""HTML of a report: one self-contained page, in the user's names and units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from isosgd.diagnostics.verdict import Verdict

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
KINDS = {"trust it": "good", "run longer": "wait", "it samples something else": "bad"}
HEADLINES = {
    "trust it": "Trust it.",
    "run longer": "Run longer before you rely on it.",
    "it samples something else": "Do not trust it: it samples something else.",
}
MOST_REMARKS = 3
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # forbids a page to load anything


@dataclass(frozen=True)
class Subject:
    """Names and units for a report; everything has a default.

    Attributes:
        title: of the page.
        target: name of the predicted quantity.
        inputs: names of the inputs.
        classes: names of the classes, in the order of their numbers.
        y_mean: in the units of the data, predictions are ``y_mean + y_scale * prediction``.
        x_mean: the same for a single input.
        x_scale: of a single input.
        softmax_temperature: divisor of the logarithms of averages over draws, for classes.
        layers: names of layers, such as ``{"0": "hidden layer"}``.
        network: the model in words.
        notes: further sentences for the reader, for instance how the table was read.
        commands: commands that make the draws and this report.
        outside: what the out-of-distribution inputs are.
        longer: a command that samples for longer, shown if the verdict asks for it.
        advice: Python arguments in advice, and what to write instead, such as command-line options; in this order.
    """

    title: str = "Posterior report"
    target: str = "y"
    inputs: Sequence[str] = ()
    classes: Sequence[str] = ()
    y_mean: float = 0.0
    y_scale: float = 1.0
    x_mean: float = 0.0
    x_scale: float = 1.0
    softmax_temperature: float = 1.0
    layers: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()
    outside: str = "inputs out of distribution"
    longer: str = ""
    advice: Mapping[str, str] = field(default_factory=dict)

    def layer(self, name: str) -> str:
        """The name of a layer."""
        return self.layers.get(name, name)

    def named(self, text: str) -> str:
        r"""A text with the user's names of layers, where they are quoted or begin a line, and replaced ``advice``.

        Example:
            >>> print(Subject(layers={"0": "hidden layer"}).named("Temperature 1.\n  0: 1.01 ± 0.02"))
            Temperature 1.
              hidden layer: 1.01 ± 0.02
        """
        for name, word in self.layers.items():
            text = text.replace(f"{name!r}", f"'{word}'").replace(f"\n  {name}: ", f"\n  {word}: ")
        for argument, instead in self.advice.items():
            text = text.replace(argument, instead)
        return text


@dataclass(frozen=True)
class Figure:
    """A plot with title and caption."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Tile:
    """A number with a name and a note."""

    label: str
    value: str
    note: str = ""


def page(title: str, body: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def verdict_card(verdict: Verdict | None, reason: str = "", longer: str = "") -> str:
    """The verdict, or the reason why there is none. ``longer`` is a command that samples for longer."""
    if verdict is None:
        return f'<div class="verdict"><strong>No verdict.</strong>{escape(reason)}</div>'
    parts = [f'<div class="verdict {KINDS[verdict.summary]}"><strong>{HEADLINES[verdict.summary]}</strong>']
    parts.append(bullets(verdict.reasons))
    if longer and verdict.summary == "run longer":
        parts.append(f'<p class="fix">To run longer:</p>{code([longer])}')
    elif verdict.fixes:
        parts.append(f'<p class="fix">Fix: {escape("; ".join(verdict.fixes))}.</p>')
    shown = list(verdict.remarks[:MOST_REMARKS])
    if len(verdict.remarks) > MOST_REMARKS:
        shown.append(f"and {len(verdict.remarks) - MOST_REMARKS} more remarks")
    if shown:
        parts.append(f'<div class="remarks">From the warm-up:{bullets(shown)}</div>')
    return "".join(parts) + "</div>"


def tiles(found: Sequence[Tile]) -> str:
    """A row of numbers."""
    cells = "".join(
        f"<div><dt>{escape(t.label)}</dt><dd>{escape(t.value)}<small>{escape(t.note)}</small></dd></div>" for t in found
    )
    return f'<dl class="tiles">{cells}</dl>' if found else ""


def section(title: str, words: str, *parts: str) -> str:
    """A heading, a sentence and parts; empty if there are no parts."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(words)}</p>\n{body}\n</section>" if body else ""


def figures(found: Iterable[Figure | None]) -> str:
    """Plots side by side if there is room."""
    cells = "\n".join(
        f"<figure><h3>{escape(f.title)}</h3>{f.svg}<figcaption>{escape(f.caption)}</figcaption></figure>"
        for f in found
        if f is not None
    )
    return f'<div class="figures">\n{cells}\n</div>' if cells else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table that scrolls if the screen is narrow."""
    top = "".join(f"<th scope=col>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    whole = f"<table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{whole}</div>' if body else ""


def facts(found: Mapping[str, Any]) -> str:
    """Names and values."""
    rows = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in found.items() if v not in ("", None)
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""


def bullets(items: Iterable[str], style: str = "") -> str:
    """A list of sentences."""
    found = "".join(f"<li>{escape(_sentence(item))}</li>" for item in items)
    return f'<ul class="{style}">{found}</ul>' if found else ""


def code(lines: Sequence[str]) -> str:
    """Commands to copy."""
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>" if lines else ""


def _sentence(text: str) -> str:
    text = text.strip()
    text = text if text.endswith((".", "!", "?")) else text + "."
    return text[:1].upper() + text[1:]
