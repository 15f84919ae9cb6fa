"""Pages of the documentation whose tables are made: what stands between two marks is written anew."""

from __future__ import annotations

BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->"


def put(text: str, name: str, new: str) -> str:
    """Replace what stands between the marks of this name."""
    begin, end = BEGIN.format(name), END.format(name)
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no marks {begin.strip()!r} and {end!r}: put them where the tables belong")
    return head + begin + new.rstrip() + "\n" + end + rest.partition(end)[2]
