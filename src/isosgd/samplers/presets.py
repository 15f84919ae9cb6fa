"""The paper's own variants of I-SGD by name: ``alpha-a``, ``alpha-c``, ``G-b``, ``G-c``, each also with ``-slr``.

The letter before the dash says how gradient noise is estimated, the one after it when (see `ISGD`); SLR is one lambda
for all layers.
"""

from __future__ import annotations

from typing import Any

from isosgd.noise import AlphaStable, MovingAverage


def _paper(noise: str, scheme: str, structure: str) -> dict[str, Any]:
    common = {"scheme": scheme, "structure": structure, "correction": "diagonal", "track_every": 1}
    if noise == "alpha":
        return {"noise": AlphaStable(momentum=0.5, centred=False), "summary": "max", **common}
    return {"noise": MovingAverage(0.9, centred=False), "summary": "sum", **common}


PRESETS: dict[str, dict[str, Any]] = {
    name + suffix: _paper(noise, scheme, structure)
    for name, noise, scheme in (
        ("alpha-a", "alpha", "a"),
        ("alpha-c", "alpha", "c"),
        ("G-b", "G", "b"),
        ("G-c", "G", "c"),
    )
    for suffix, structure in (("", "layer"), ("-slr", "single"))
}
