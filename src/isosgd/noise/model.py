"""The gradient noise of a sampler, in the optimizer's state, with which it is saved.

For each parameter it is the variance of its noise (see `isosgd.noise.estimators`); for each group, in the state of its
first parameter, the top eigenvector of the noise, its last few noise vectors (the *ring*), and recent top eigenvalues
of the ring.

A *summary* of a group's noise is one number that bounds lambda, in units of ``b = v / 2``, the diagonal of the paper's
B. With ``chains=K`` every tensor has a leading chain dimension, and a summary is ``[K]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.noise.estimators import NoiseEstimator

CLIPPED = 0.01  # share of steps at which noise may exceed lambda
LENGTHS_KEPT = 256  # recent top eigenvalues of each group's ring, for a quantile
MOST_VECTORS = 16  # noise vectors in a group's ring ...
VECTOR_MEMORY = 1 << 15  # ... if they have at most so many numbers for each chain; large groups keep one

Group = dict[str, Any]
Summary = Literal["max", "sum", "mean", "top"]
Total = Callable[[Tensor], Tensor]


class Uses(NamedTuple):
    """The noise estimates that a step depends on; others are updated only until rates are frozen."""

    variances: bool = False  # of each parameter
    vectors: bool = False  # of each group


class Whole:
    """Sums over all elements of parameters that are not sharded; `isosgd.samplers.shards.Shards` is for others."""

    sharded = False
    rank, ranks = 0, 1

    def together(self, call: Callable[[], Any]) -> list[Any]:
        """Make a call on every rank; returns all results."""
        return [call()]

    def align(self, generator: torch.Generator) -> None:
        """Seed the generators of all ranks alike."""

    def take_gradients(self) -> None:
        """Pass gradients on to the shards."""

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the sharded parameters."""

    def total(self, x: Tensor) -> Tensor:
        """Sums over all elements, from sums over those on this rank."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Maxima over all elements, likewise."""
        return x

    def norm(self, x: Tensor) -> Tensor:
        """Length of a vector."""
        found: Tensor = x.norm()
        return found

    def size(self, width: int, params: Sequence[Tensor]) -> int:
        """Number of elements for each chain; ``width`` of them are on this rank."""
        return width

    def mean(self, x: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Mean over all elements, from those on this rank."""
        return x.mean()

    def normal_(self, out: Tensor, params: Sequence[Tensor], generator: torch.Generator) -> None:
        """Fill a vector of the parameters' layout with normal numbers."""
        out.normal_(generator=generator)


class NoiseModel:
    """The gradient noise of a sampler, kept in its groups and state.

    ``uses`` are the estimates that steps depend on; the generator is for start vectors. A group's ring and top
    eigenvector are updated with every ``vectors_every``-th noise vector.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        estimator: NoiseEstimator,
        generator: torch.Generator,
        batched: bool,
        whole: Whole | None = None,
    ) -> None:
        self.optimizer, self.estimator, self.generator, self.batched = optimizer, estimator, generator, batched
        self.whole = whole or Whole()
        self.uses, self.vectors_every = Uses(), 1
        self.reset()

    def reset(self) -> None:
        """Drop what was computed from the state."""
        self._spectra: dict[int, tuple[Tensor, Tensor]] = {}  # of each group's ring, by the identity of the group

    @property
    def groups(self) -> list[Group]:
        return self.optimizer.param_groups

    # -- taking in ----------------------------------------------------------------------------------------------------

    def update(self, noise: Sequence[Tensor | None] | None = None) -> None:
        """Update with a noise vector, in the order of the parameters; None takes the gradients."""
        if noise is not None:
            self.check(noise)
        followed: dict[int, list[tuple[dict[str, Any], Tensor]]] = {}  # by the number of earlier vectors
        turned: list[tuple[Group, dict[str, Any]]] = []  # groups with a new vector in their ring
        for group, seen_now in self.by_group(noise):
            if not seen_now:
                continue
            states = [self.state_of(p) for p, _ in seen_now]
            vectors = [d.to(s["variance"].dtype) for s, (_, d) in zip(states, seen_now, strict=True)]
            variances, vectors_too = self.uses if group["frozen"] else (True, group["seen"] % self.vectors_every == 0)
            if variances:
                followed.setdefault(group["seen"], []).extend(zip(states, vectors, strict=True))
            if vectors_too:
                self._take_group(group, [p for p, _ in seen_now], states[0], vectors)
                turned.append((group, states[0]))
            group["seen"] += 1
        self._take_lengths(turned)
        for seen, pairs in followed.items():
            self.estimator.update([state for state, _ in pairs], [d for _, d in pairs], seen)

    def by_group(self, noise: Sequence[Tensor | None] | None) -> Iterator[tuple[Group, list[tuple[Tensor, Tensor]]]]:
        """Every group, with pairs of its parameters and their noise vectors, if any."""
        given = iter(noise if noise is not None else [p.grad for group in self.groups for p in group["params"]])
        for group in self.groups:
            yield group, [(p, d) for p, d in zip(group["params"], given, strict=False) if d is not None]

    def check(self, noise: Sequence[Tensor | None]) -> None:
        """Raise if noise vectors do not fit the parameters."""
        needed = [tuple(p.shape) for group in self.groups for p in group["params"]]
        found = [None if d is None else tuple(d.shape) for d in noise]
        if len(found) != len(needed) or any(f is not None and f != n for f, n in zip(found, needed, strict=True)):
            raise ValueError(
                f"noise has vectors of shapes {found}, the parameters have {needed}: give one for each, in their order"
            )

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter; initialises the estimate."""
        state = self.optimizer.state[p]
        if "variance" not in state:
            state.update(self.estimator.init(p))
        return cast(dict[str, Any], state)

    def _take_group(self, group: Group, params: list[Tensor], state: dict[str, Any], vectors: list[Tensor]) -> None:
        """Update a group's top eigenvector and ring."""
        if "top" not in state:
            vector = join(vectors, self.batched)
            slots = min(MOST_VECTORS, max(1, VECTOR_MEMORY // self.whole.size(vector.shape[-1], params)))
            state["top"] = torch.empty_like(vector)
            self.whole.normal_(state["top"], params, self.generator)
            state["ring"] = vector.new_zeros((*vector.shape[:-1], slots, vector.shape[-1]))
            state["longest"] = vector.new_zeros((LENGTHS_KEPT, *vector.shape[:-1]))
        ring: Tensor = state["ring"]
        slots = ring.shape[-2]
        row = ring[..., group["vectors"] % slots, :]
        torch.cat([flat(v, self.batched) for v in vectors], dim=-1, out=row)
        if not group["frozen"]:
            weight = max(1.0 - self.estimator.momentum, 1.0 / (group["seen"] + 1), 0.01)
            power_step(state["top"], row, weight, self.whole.total)
        group["vectors"] += 1

    def _take_lengths(self, turned: Sequence[tuple[Group, dict[str, Any]]]) -> None:
        """Store the top eigenvalues of the rings."""
        spectra = ring_spectra([s["ring"] for _, s in turned], self.whole.total)
        for (group, state), spectrum in zip(turned, spectra, strict=True):
            self._spectra[id(group)] = spectrum
            slots = state["ring"].shape[-2]
            # Those of a ring that is not full, or has vectors of an older window, are soon overwritten.
            index = max((group["seen"] - 1) // self.vectors_every - slots, 0) % LENGTHS_KEPT
            state["longest"][index] = spectrum[0].amax(-1) / min(group["vectors"], slots)

    def freeze(self) -> None:
        """From now on, update only the estimates that a step depends on."""
        for group in self.groups:
            group["frozen"] = True

    def forget(self) -> None:
        """Restart the estimates; the old ones are used until the first new vector."""
        for group in self.groups:
            group["seen"] = 0

    # -- the estimates ------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether every group has a first estimate."""
        return all(self.estimator.ready(group["seen"]) for group in self.groups)

    @property
    def begun(self) -> bool:
        """Whether every group has seen a noise vector."""
        return all(self.of_group(group) is not None for group in self.groups)

    def of_group(self, group: Group) -> dict[str, Any] | None:
        """The state with a group's ring and top eigenvector, or None before the first noise vector."""
        return next((self.optimizer.state[p] for p in group["params"] if self._knows(p, "top")), None)

    def seen_of_group(self, group: Group) -> dict[str, Any]:
        """`of_group`; raises before the first noise vector."""
        state = self.of_group(group)
        if state is None:
            raise RuntimeError(
                f"no gradient noise was seen for group {group['name']!r}: pass "
                "step(noise=isosgd.noise.paired_backward(...)), or choose noise='gaussian'"
            )
        return state

    def _knows(self, p: Tensor, name: str) -> bool:
        return name in self.optimizer.state.get(p, {})

    def variances(self, group: Group) -> list[Tensor]:
        """Var(g) of each of `seen_params`."""
        self.seen_of_group(group)
        return self.estimator.variance([self.optimizer.state[p] for p in self.seen_params(group)])

    def seen_params(self, group: Group) -> list[Tensor]:
        """The parameters of a group that have an estimate."""
        return [p for p in group["params"] if self._knows(p, "variance")]

    def summary(self, group: Group, how: Summary) -> Tensor:
        """One number for a group's noise, in units of ``b = v / 2``."""
        if how == "top":
            return top_eigenvalue(self.seen_of_group(group)["top"], self.whole.total)
        return summarise(self.variances(group), how, self.batched, self.whole, self.seen_params(group))

    def recent_lengths(self, group: Group) -> Tensor:
        """Top eigenvalues of the ring's second moment at recent steps, ``[seen]`` or ``[seen, chains]``.

        Only those of full rings since the last `forget`; without any, the last one.
        """
        state = self.seen_of_group(group)
        longest: Tensor = state["longest"]
        taken = -(-int(group["seen"]) // self.vectors_every)
        return longest[: min(max(taken - state["ring"].shape[-2], 1), LENGTHS_KEPT)]

    def longest(self, group: Group) -> Tensor:
        """The least lambda for which `isosgd.geometry.layer.subtract_outer_` is exact, but for a share `CLIPPED`."""
        return 0.5 * torch.quantile(self.recent_lengths(group), 1.0 - CLIPPED, dim=0)

    def spectrum(self, group: Group) -> tuple[Tensor, Tensor, Tensor, int]:
        """A group's ring of noise vectors, its eigenvalues and eigenvectors, and the number of vectors in it."""
        ring = self.seen_of_group(group)["ring"]
        if id(group) not in self._spectra:
            (self._spectra[id(group)],) = ring_spectra([ring], self.whole.total)
        return ring, *self._spectra[id(group)], min(group["vectors"], ring.shape[-2])


def here(x: Tensor) -> Tensor:
    """`Whole.total` of parameters that are not sharded."""
    return x


def ring_spectra(rings: Sequence[Tensor], total: Total = here) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues ``[(chains,) m]`` and eigenvectors of the Gram matrices of m noise vectors ``[(chains,) m, d]`` each.

    Matrices of one shape are decomposed in one call: on a GPU it takes as long as for one of them.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    alike: dict[Any, list[tuple[int, Tensor]]] = {}
    for i, ring in enumerate(rings):
        if ring.shape[-2] == 1:
            length = total(torch.linalg.vector_norm(ring, dim=-1).square())
            found[i] = length, torch.ones_like(length).unsqueeze(-1)
        else:
            gram = total(ring @ ring.mT)
            alike.setdefault((gram.shape, gram.dtype, gram.device), []).append((i, gram))
    for same in alike.values():
        grams = torch.stack([gram for _, gram in same])
        # In float64, since float32 may not converge; finite, so that one diverged chain does not stop the others.
        values, vectors = torch.linalg.eigh(torch.nan_to_num(grams.double(), posinf=0.0))
        pairs = zip(values.clamp_min(0.0).to(grams.dtype), vectors.to(grams.dtype), strict=True)
        found |= {i: pair for (i, _), pair in zip(same, pairs, strict=True)}
    return [found[i] for i in range(len(rings))]


def flat(tensor: Tensor, batched: bool) -> Tensor:
    """A tensor as ``[d]``, or ``[chains, d]``."""
    return tensor.reshape(tensor.shape[0], -1) if batched else tensor.reshape(-1)


def join(tensors: Sequence[Tensor], batched: bool = False) -> Tensor:
    """A group's tensors as one flat vector ``[d]``, or ``[chains, d]``."""
    return flat(tensors[0], batched) if len(tensors) == 1 else torch.cat([flat(t, batched) for t in tensors], dim=-1)


def split_like(joined: Tensor, tensors: Sequence[Tensor], chains: int | None = None) -> list[Tensor]:
    """The inverse of `join`: views of a flat vector ``[d]``, or ``[chains, d]``, in the shapes of the tensors."""
    parts = torch.split(joined, [t.numel() // (chains or 1) for t in tensors], dim=-1)
    return [part.reshape(t.shape) for part, t in zip(parts, tensors, strict=True)]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of flat vectors, for each chain."""
    return (a * b).sum(-1)  # torch.dot starts threads: 30 times slower on two busy cores


def summarise(
    variances: Sequence[Tensor],
    how: Summary,
    batched: bool = False,
    whole: Whole | None = None,
    params: Sequence[Tensor] = (),
) -> Tensor:
    """Max, sum or mean of ``b = v / 2`` over the parameters of a group.

    ``max`` is the paper's, for independent components; ``sum`` bounds the top eigenvalue of any such covariance.
    """
    whole = whole or Whole()
    parts = [flat(v, batched) for v in variances]
    if how == "max":
        found = [p.amax(-1) if p.shape[-1] else p.new_zeros(p.shape[:-1]) for p in parts]  # a rank may have no rows
        return 0.5 * whole.largest(torch.stack(found).amax(0))
    total = 0.5 * whole.total(torch.stack([p.sum(-1) for p in parts]).sum(0))
    if how == "sum":
        return total
    if how == "mean":
        return total / whole.size(sum(p.shape[-1] for p in parts), params)
    raise ValueError(f"summary = {how!r} is unknown; choose 'max', 'sum', 'mean' or 'top'")


def power_step(image: Tensor, noise: Tensor, weight: float, total: Total = here) -> None:
    """One step of stochastic power iteration on flat noise vectors ``d``, in place on ``image``.

    ``image`` tracks ``V u`` for the unit vector ``u = image / |image|``: ``image <- (1 - w) image + w d (d . u)``, so
    that its length tends to the largest eigenvalue of ``V = E[d d^T]`` and its direction to that eigenvector.
    """
    norm = total(dot(image, image)).sqrt().clamp_min(torch.finfo(image.dtype).tiny)
    along = (total(dot(image, noise)) / norm).unsqueeze(-1)
    image.lerp_(noise * along, weight)


def top_eigenvalue(image: Tensor, total: Total = here) -> Tensor:
    """Largest eigenvalue of ``B = V / 2``, from the image of `power_step`."""
    return 0.5 * total(dot(image, image)).sqrt()
