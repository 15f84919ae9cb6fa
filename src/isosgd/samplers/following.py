"""What a sampler knows of its gradient noise, kept in the optimizer's state so that saving the one saves the other.

For each parameter the variance of its noise (see `isosgd.noise`). For each group, in the state of its first parameter,
the top eigenvector of the noise, its last few noise vectors, and how long their outer products were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.noise import NoiseEstimator, Summary, flat, join, power_step, summarise, top_eigenvalue
from isosgd.samplers.groups import Group
from isosgd.samplers.last_vectors import LastVectors
from isosgd.samplers.structure import ring_spectrum

CLIPPED = 0.01  # share of noise vectors that may be longer than lambda covers
LENGTHS_KEPT = 256  # recent lengths of each group's noise, of which the noise bound takes a quantile
MOST_VECTORS = 16  # noise vectors kept for a group ...
VECTOR_MEMORY = 1 << 15  # ... as long as a chain's hold at most so many numbers, so that large groups keep one


class NoiseFollower(Optimizer, ABC):
    """The part of a sampler that follows gradient noise."""

    estimator: NoiseEstimator
    generator: torch.Generator
    batched: bool
    _spectra: dict[int, tuple[Tensor, Tensor]]  # of each group's ring, by the identity of the group
    _last_vectors: LastVectors | None = None

    @abstractmethod
    def _noise_changed(self) -> None:
        """Called when the estimate has changed."""

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        """Take in one noise vector, in the order of the parameters; the gradients themselves when None."""
        if noise is not None:
            self._check_noise(noise)
        given = iter(noise if noise is not None else [p.grad for group in self.param_groups for p in group["params"]])
        done = {} if noise is None else self._renew_last(noise)
        self._spectra.update(done)
        followed: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}  # by the number of vectors seen before
        for group in self.param_groups:
            seen_now = [(p, d) for p, d in zip(group["params"], given, strict=False) if d is not None]
            if not seen_now or id(group) in done:
                continue
            states = [self._noise_state(p) for p, _ in seen_now]
            vectors = [d.to(s["variance"].dtype) for s, (_, d) in zip(states, seen_now, strict=True)]
            variance, vectors_too = self._follows if group["frozen"] else (True, True)
            if variance:
                followed.setdefault(group["seen"], []).extend(zip(states, vectors, strict=True))
            if vectors_too:
                self._observe_group(group, states[0], vectors)
            group["seen"] += 1
        for seen, pairs in followed.items():
            self.estimator.update([state for state, _ in pairs], [d for _, d in pairs], seen)
        self._noise_changed()

    @property
    def _follows(self) -> tuple[bool, bool]:
        """Whether a step depends on the variance of each parameter's noise, and on the noise vectors."""
        return False, False

    def freeze(self) -> None:
        """Rates stay as they are from now on; only the noise that a step depends on is still followed."""
        for group in self.param_groups:
            group["frozen"] = True
        self._last_vectors = None

    def _check_noise(self, noise: Sequence[Tensor | None]) -> None:
        wanted = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        found = [None if d is None else tuple(d.shape) for d in noise]
        if len(found) != len(wanted) or any(f is not None and f != w for f, w in zip(found, wanted, strict=True)):
            raise ValueError(
                f"noise has vectors of shapes {found}, the parameters have {wanted}: give one for each, in their order"
            )

    def _noise_state(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if "variance" not in state:
            state.update(self.estimator.init(p))
        return cast(dict[str, Any], state)

    def _observe_group(self, group: Group, state: dict[str, Any], vectors: list[Tensor]) -> None:
        """What is known of a group's noise as a whole, kept in the state of its first parameter.

        The top eigenvector; the last few noise vectors; and how long their outer products were.
        """
        if "top" not in state:
            vector = join(vectors, self.batched)
            slots = min(MOST_VECTORS, max(1, VECTOR_MEMORY // vector.shape[-1]))
            state["top"] = torch.empty_like(vector).normal_(generator=self.generator)
            state["ring"] = vector.new_zeros((*vector.shape[:-1], slots, vector.shape[-1]))
            state["longest"] = vector.new_zeros((LENGTHS_KEPT, *vector.shape[:-1]))
        ring: Tensor = state["ring"]
        slots = ring.shape[-2]
        row = ring[..., group["vectors"] % slots, :]
        torch.cat([flat(v, self.batched) for v in vectors], dim=-1, out=row)
        if not group["frozen"]:
            power_step(state["top"], row, max(1.0 - self.estimator.momentum, 1.0 / (group["seen"] + 1), 0.01))
        group["vectors"] += 1
        self._spectra[id(group)] = spectrum = ring_spectrum(ring)
        # A ring that is not full, or holds vectors of an older window, says little: such lengths are soon written over.
        index = max(group["seen"] - slots, 0) % LENGTHS_KEPT
        state["longest"][index] = spectrum[0].amax(-1) / min(group["vectors"], slots)

    def _renew_last(self, noise: Sequence[Tensor | None]) -> dict[int, tuple[Tensor, Tensor]]:
        """`observe` in few calls for large groups, of which only the last vector is followed.

        Returns:
            The spectra of their rings, by the identities of the groups that were served.
        """
        if self.batched or self._follows != (False, True) or any(d is None for d in noise):
            return {}
        if self._last_vectors is None:
            frozen = [(group, self.group_noise(group) if group["frozen"] else None) for group in self.param_groups]
            self._last_vectors = LastVectors(frozen)
        return self._last_vectors.renew(cast(Sequence[Tensor], noise))

    @staticmethod
    def _lengths(group: Group, slots: int) -> int:
        """How many lengths count: those of full rings since the noise was last forgotten, or the last one."""
        return min(max(int(group["seen"]) - slots, 1), LENGTHS_KEPT)

    def forget_noise(self, void: bool = False) -> None:
        """Start the noise estimate anew where the chain now is; the old one serves until the first new vector.

        Args:
            void: the old one is worth nothing: it was not measured on the posterior.
        """
        for group in self.param_groups:
            group["seen"] = 0

    def noise_ready(self) -> bool:
        """Whether every group has a first noise estimate."""
        return all(self.estimator.ready(group["seen"]) for group in self.param_groups)

    def group_noise(self, group: Group) -> dict[str, Any] | None:
        """What is known of a group's noise as a whole (see `_observe_group`), or None before any was seen."""
        return next((self.state[p] for p in group["params"] if "top" in self.state.get(p, {})), None)

    def noise_summary(self, group: Group, how: Summary) -> Tensor:
        """One number for a group's noise, in units of ``b = v / 2``."""
        if how == "top":
            return top_eigenvalue(self._seen_noise(group)["top"])
        return summarise(self._variances(group), how, self.batched)

    def _seen_noise(self, group: Group) -> dict[str, Any]:
        state = self.group_noise(group)
        if state is None:
            raise RuntimeError(
                f"no gradient noise was seen for group {group['name']!r}: pass "
                "step(noise=isosgd.noise.paired_backward(...)), "
                "or choose noise='gaussian'"
            )
        return state

    def _variances(self, group: Group) -> list[Tensor]:
        self._seen_noise(group)
        return self.estimator.variance([self.state[p] for p in group["params"] if "variance" in self.state.get(p, {})])

    def recent_lengths(self, group: Group) -> Tensor:
        """Top eigenvalue of the outer products of the noise vectors kept, at recent steps: ``[seen]`` or ``[seen,
        chains]``.
        """
        state = self._seen_noise(group)
        longest: Tensor = state["longest"]
        return longest[: self._lengths(group, state["ring"].shape[-2])]

    def longest_noise(self, group: Group) -> Tensor:
        """What lambda must cover for `take_out_` to be exact.

        A quantile, not the maximum: one outlier must not slow the chain for ever. What it clips is measured.
        """
        return 0.5 * torch.quantile(self.recent_lengths(group), 1.0 - CLIPPED, dim=0)

    def spectrum(self, group: Group) -> tuple[Tensor, Tensor, Tensor, int]:
        """A group's ring of noise vectors, its eigenvalues and eigenvectors, and how many vectors are in it."""
        ring = self._seen_noise(group)["ring"]
        if id(group) not in self._spectra:
            self._spectra[id(group)] = ring_spectrum(ring)
        return ring, *self._spectra[id(group)], min(group["vectors"], ring.shape[-2])
