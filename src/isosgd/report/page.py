"""HTML of a report: one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from isosgd.diagnostics.verdict import Verdict
from isosgd.report.subject import Figure, Tile

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
KINDS = {"trust it": "good", "run longer": "wait", "it samples something else": "bad"}
HEADLINES = {
    "trust it": "Trust it.",
    "run longer": "Run longer before you rely on it.",
    "it samples something else": "Do not trust it: it samples something else.",
}
MOST_REMARKS = 3
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a page under this policy can fetch nothing


def page(title: str, body: Iterable[str]) -> str:
    """The whole document.

    Example:
        >>> "<title>Yacht</title>" in page("Yacht", ["<p>words</p>"])
        True
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def header(title: str, lead: str) -> str:
    """Title and what was sampled."""
    return f'<p class="kicker">isosgd report</p>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>'


def verdict_card(verdict: Verdict | None, reason: str = "", longer: str = "") -> str:
    """The verdict, or the reason why there is none. ``longer`` is a command that runs longer."""
    if verdict is None:
        return f'<div class="verdict"><strong>No verdict.</strong>{escape(reason)}</div>'
    parts = [f'<div class="verdict {KINDS[verdict.summary]}"><strong>{HEADLINES[verdict.summary]}</strong>']
    parts.append(_list(_sentence(text) for text in verdict.reasons))
    if longer and verdict.summary == "run longer":
        parts.append(f'<p class="fix">To run longer:</p>{code([longer])}')
    elif verdict.fixes:
        parts.append(f'<p class="fix">Fix: {escape("; ".join(verdict.fixes))}.</p>')
    shown = list(verdict.remarks[:MOST_REMARKS])
    if len(verdict.remarks) > MOST_REMARKS:
        shown.append(f"and {len(verdict.remarks) - MOST_REMARKS} more remarks")
    if shown:
        parts.append(f'<div class="remarks">From the warm-up:{_list(_sentence(r) for r in shown)}</div>')
    return "".join(parts) + "</div>"


def tiles(found: Sequence[Tile]) -> str:
    """Numbers that stand out."""
    cells = "".join(
        f"<div><dt>{escape(t.label)}</dt><dd>{escape(t.value)}<small>{escape(t.note)}</small></dd></div>" for t in found
    )
    return f'<dl class="tiles">{cells}</dl>' if found else ""


def section(title: str, words: str, *parts: str) -> str:
    """A heading, a sentence, and what belongs to it; empty when nothing does."""
    there = [part for part in parts if part]
    return (
        f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(words)}</p>\n" + "\n".join(there) + "\n</section>"
        if there
        else ""
    )


def figures(found: Iterable[Figure | None], beside: str = "") -> str:
    """Plots side by side where there is room; ``beside`` is put into the next place."""
    cells = "\n".join(
        f"<figure{' class=wide' if f.narrow else ''}><h3>{escape(f.title)}</h3>{f.svg}{f.narrow}"
        f"<figcaption>{escape(f.caption)}</figcaption></figure>"
        for f in found
        if f is not None
    )
    return f'<div class="figures">\n{cells}\n{beside}</div>' if cells or beside else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table that scrolls on its own where the screen is narrow."""
    top = "".join(f"<th scope=col>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        if body
        else ""
    )


def facts(found: Mapping[str, Any]) -> str:
    """Names and values."""
    rows = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in found.items() if v not in ("", None)
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""


def notes(found: Sequence[str]) -> str:
    """Sentences as a list."""
    items = "".join(f"<li>{escape(_sentence(n))}</li>" for n in found)
    return f'<ul class="notes">{items}</ul>' if items else ""


def code(lines: Sequence[str]) -> str:
    """Commands to copy."""
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>" if lines else ""


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _sentence(text: str) -> str:
    text = text.strip()
    text = text if text.endswith((".", "!", "?")) else text + "."
    return text[:1].upper() + text[1:]
