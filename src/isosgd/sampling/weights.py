"""How to predict with draws around trained networks, as held-out examples say: a stored run keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isosgd.errors import warn_caller
from isosgd.posterior import Posterior
from isosgd.posterior.comparison import STARTS
from isosgd.sampling.ladder import State
from isosgd.store import Manifest, StoreError

KEPT = ("complete", "seconds", "gradients", "engine", "store", "lengths", "starts", "temperature_choice")
"""What ``info`` says of a run also where the draws are the starts alone."""


@dataclass(frozen=True)
class Weights:
    """What held-out examples say of the draws of a run, and of the networks at which it started.

    Attributes:
        share: weight of the starts in predictions; 1 if the draws do not help, so that the starts predict alone.
        softmax_temperature: of predictions.
        draws: how many first draws of each chain predict; None for all.
        of: draws of each chain when the examples were asked.
        choice: how the temperature was chosen, and what the examples said.
    """

    share: float
    softmax_temperature: float
    draws: int | None
    of: int
    choice: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return asdict(self)

    @classmethod
    def read(cls, manifest: Manifest) -> Weights | None:
        """Those of a stored run; None if it has none."""
        if not manifest.weights:
            return None
        try:
            return cls(**manifest.weights)
        except TypeError as error:
            raise StoreError(
                f"the manifest's weights of draws cannot be read ({error}): isosgd.load(..., as_drawn=True) leaves "
                "them out"
            ) from error

    def applied(self, drawn: Posterior) -> Posterior:
        """Draws with the starts among them, calibrated."""
        starts, info = drawn.starts, {"temperature_choice": dict(self.choice)}
        assert starts is not None
        if self.share >= 1:
            kept = {name: drawn.info[name] for name in KEPT if name in drawn.info}
            return starts_alone(drawn.start_draws(), starts, {**kept, **info}, drawn.data, self.softmax_temperature)
        part = drawn if self.draws is None else drawn.select(draws=slice(self.draws))
        found = part.with_starts(self.share)
        if self.softmax_temperature != 1:
            found = found.at_softmax_temperature(self.softmax_temperature)
        found.info |= info
        return found


def starts_alone(
    found: Posterior, starts: Sequence[State], info: Mapping[str, Any], data: Any, softmax_temperature: float
) -> Posterior:
    """Trained networks as draws, one per chain, where no others help to predict."""
    about = {**info, "method": STARTS, "temperature": 0.0, "chains": len(starts), "draws": 1}
    about["density"] = "none: no run was better, and the draws are the trained networks"
    if softmax_temperature != 1:
        about["softmax_temperature"] = softmax_temperature
    return Posterior(found.target, found.draws, about, data, found.buffers, list(starts))


def weighted(drawn: Posterior, weights: Weights | None) -> Posterior:
    """The draws of a stored run as held-out examples weight them, if they did and the draws can predict."""
    if weights is None or drawn.target is None or not drawn.starts or not drawn.num_draws:
        return drawn
    if drawn.num_draws > weights.of:
        warn_caller(
            f"held-out examples weighted {weights.of} draws of each chain, and there are {drawn.num_draws} now: "
            "sample(..., store=, resume=True) with held_out= weights them anew"
        )
    return weights.applied(drawn)
