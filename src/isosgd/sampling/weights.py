"""How to predict with draws around trained networks, as held-out examples say: a stored run keeps it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isosgd.data.sources import Tensors
from isosgd.errors import warn_caller
from isosgd.posterior import Posterior
from isosgd.posterior.starts import STARTS, State, stacked
from isosgd.sampling.request import fingerprint
from isosgd.store import Manifest, StoreError
from isosgd.store.writer import lock
from isosgd.target import Target
from isosgd.target.batches import tensors_of

KEPT = (
    "complete",
    "seconds",
    "gradients",
    "engine",
    "store",
    "lengths",
    "starts",
    "start_scales",
    "temperature_choice",
)
"""What ``info`` says of a run also where the draws are the starts alone."""

_EARLIER = {"softmax_temperature": "width"}  # names that stores of an unreleased version have

_as_drawn: ContextVar[bool] = ContextVar("as_drawn", default=False)


@contextmanager
def as_drawn() -> Iterator[None]:
    """Within it `weighted` leaves draws as they are."""
    token = _as_drawn.set(True)
    try:
        yield
    finally:
        _as_drawn.reset(token)


@dataclass(frozen=True)
class Weights:
    """What held-out examples say of the draws of a run, and of the networks at which it started.

    Attributes:
        share: weight of the starts in predictions; 1 if the draws do not help, so that the starts predict alone.
        width: of predictions: softmax temperature, or factor of the noise scale.
        draws: how many first draws of each chain predict; None for all.
        of: draws of each chain when the examples were asked.
        choice: how the temperature was chosen, and what the examples said.
        examples: SHA-256 of the tensors of the held-out examples.
    """

    share: float
    width: float
    draws: int | None
    of: int
    choice: Mapping[str, Any]
    examples: Sequence[str] = ()

    def __post_init__(self) -> None:
        whole = [n for n in (self.draws, self.of) if n is not None]
        right = 0 < self.share <= 1 and self.width > 0 and all(type(n) is int and n > 0 for n in whole)
        if not (right and isinstance(self.choice, Mapping)):
            raise ValueError(f"share = {self.share}, width = {self.width}, draws = {whole}")

    def write(self, folder: Path) -> None:
        """Keep them in the manifest of a run."""
        handle = lock(folder)
        try:
            manifest = Manifest.read(folder)
            manifest.weights = asdict(self)
            manifest.write(folder)
        finally:
            if handle is not None:
                os.close(handle)

    @classmethod
    def read(cls, manifest: Manifest) -> Weights | None:
        """Those of a stored run; None if it has none."""
        if not manifest.weights:
            return None
        known = {_EARLIER.get(name, name): value for name, value in manifest.weights.items() if name != "scales"}
        try:
            return cls(**known)
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"the manifest's weights of draws cannot be read ({error}): isosgd.load(..., as_drawn=True) leaves "
                "them out"
            ) from error

    def applied(self, drawn: Posterior) -> Posterior:
        """Draws with the starts among them, calibrated."""
        target, starts, info = drawn.target, drawn.starts, {"temperature_choice": dict(self.choice)}
        assert target is not None and starts is not None
        if self.share == 1:
            kept = {name: drawn.info[name] for name in KEPT if name in drawn.info}
            states = with_scales(starts, drawn.info.get("start_scales"), target)
            found = starts_alone(start_posterior(target, states), {**kept, **info}, drawn.data, self.width)
            found.starts = list(starts)
            return found
        part = drawn if self.draws is None else drawn.select(draws=slice(self.draws))
        found = part.with_starts(self.share)
        if self.width != 1:
            found = found.at_width(self.width)
        found.info |= info
        return found


def start_posterior(target: Target, starts: Sequence[State]) -> Posterior:
    """A posterior whose draws are the starts, one per chain."""
    draws, buffers = stacked(starts, target, {})
    return Posterior(target, draws, {"method": STARTS, "temperature": 0.0}, buffers=buffers)


def scales_of(starts: Sequence[State], target: Target) -> list[dict[str, Any]]:
    """The noise scales of starts as plain numbers; networks have none of their own."""
    names = target.noise_scales()
    return [{name: torch.as_tensor(start[name]).tolist() for name in names if name in start} for start in starts]


def with_scales(starts: Sequence[State], scales: Sequence[Mapping[str, Any]] | None, target: Target) -> Sequence[State]:
    """Starts with their `scales_of`; as they are if there are none, or as many as other starts have."""
    if scales is None or len(scales) != len(starts):
        return starts
    own = [{name: torch.as_tensor(x, dtype=target.dtype) for name, x in one.items()} for one in scales]
    return [{**start, **scale} for start, scale in zip(starts, own, strict=True)]


def starts_alone(found: Posterior, info: Mapping[str, Any], data: Any, width: float) -> Posterior:
    """Trained networks as draws, one per chain, where no others help to predict."""
    about = {**info, "method": STARTS, "temperature": 0.0, "chains": found.num_chains, "draws": 1}
    about["density"] = "none: no run was better, and the draws are the trained networks"
    alone = Posterior(found.target, found.draws, about, data, found.buffers)
    return alone if width == 1 else alone.at_width(width)


def examples_identity(held_out: Tensors) -> list[str]:
    """SHA-256 of each tensor."""
    return [fingerprint(t)["sha256"] for t in tensors_of(held_out)]


def weighted(drawn: Posterior, weights: Weights | None) -> Posterior:
    """The draws of a stored run as held-out examples weight them, if they did and the draws can predict."""
    if _as_drawn.get() or drawn.target is None:
        return drawn
    if not drawn.starts:
        if weights is not None:
            warn_caller("without the trained networks the draws predict as drawn, and may predict worse than these did")
        return drawn
    if weights is None:
        if drawn.num_draws and drawn.info.get("temperature_choice", {}).get("held_out"):
            warn_caller(
                "held-out examples chose the temperature, but have not judged these draws, which may predict worse "
                "than the networks: sample(..., store=, resume=True) with held_out= judges them"
            )
        return drawn
    if drawn.num_draws > weights.of:
        warn_caller(
            f"held-out examples weighted {weights.of} draws of each chain, and there are {drawn.num_draws} now: "
            "sample(..., store=, resume=True) with held_out= weights them anew"
        )
    return weights.applied(drawn) if drawn.num_draws or weights.share == 1 else drawn
