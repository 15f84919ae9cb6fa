"""Faults of an optimizer that show when it is run: noise used twice, wrong counters, state that is not saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isosgd.diagnostics.auditing.breaches import Breach, breaches
from isosgd.diagnostics.auditing.conjugate import Factory, vectors_needed
from isosgd.diagnostics.auditing.loop import Loop
from isosgd.samplers import Sampler

SIZE = 256  # of a probe's tensors: chance correlations are of the order of 1 / 16
STEPS = 12
TENSORS = 3
ALIKE = 0.5  # correlation above which noise is shared
NEW = 1e-6  # share of a displacement that fresh noise exceeds by far


def probe(make: Factory, loop: Loop) -> tuple[Loop, list[Breach]]:
    """Run an optimizer on tensors of its own and look for faults.

    Args:
        make: makes the optimizer from a list of tensors.
        loop: what is known of it.

    Returns:
        The description with what was found, and the breaches.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = _displacements(make, loop.burn_in), _displacements(make, loop.burn_in)
        found: list[Breach] = []
        if bool((first != 0).any()):
            if _alike(first.flatten(), second.flatten()):
                found += _named(loop, shared_noise="chains")
            if _alike(first[:, 0].flatten(), first[:, 1].flatten()):
                found += _named(loop, shared_noise="tensors")
            repeats = _repeats(first.flatten(1))
            if repeats > 1:
                found += _named(loop, shared_noise="steps", reused=repeats)
                loop = replace(loop, shared_noise="steps", reused=repeats)
        return loop, found + _state(make, loop)


def _named(loop: Loop, **changes: Any) -> list[Breach]:
    """The breaches that a loop has with these changes and has not without."""
    before = {breach.name for breach in breaches(loop)}
    return [breach for breach in breaches(replace(loop, **changes)) if breach.name not in before]


def build(make: Factory, tensors: list[Tensor]) -> Optimizer:
    """An optimizer over several tensors: as a list, or one group each where it asks for that."""
    try:
        optimizer = make(tensors)
    except (ValueError, TypeError):
        if len(tensors) == 1:
            raise
        optimizer = make([{"params": [t]} for t in tensors])  # type: ignore[misc]
    if isinstance(optimizer, Sampler) and optimizer.param_groups[0].get("rate") is None:
        for _ in range(vectors_needed(optimizer)):
            optimizer.observe([torch.randn_like(t) for t in tensors])
        optimizer.adapt([1.0] * len(optimizer.param_groups))
        optimizer.freeze()
    return optimizer


def _tensors(count: int) -> list[Tensor]:
    return [torch.zeros(SIZE, dtype=torch.float64).requires_grad_() for _ in range(count)]


def _displacements(make: Factory, burn_in: int) -> Tensor:
    """How far each step moves without any gradient, ``[steps, tensors, size]``."""
    tensors = _tensors(2)
    optimizer = build(make, tensors)
    found = []
    for step in range(burn_in + STEPS):
        before = torch.stack([t.detach().clone() for t in tensors])
        for t in tensors:
            t.grad = torch.zeros_like(t)
        optimizer.step()
        if step >= burn_in:
            found.append(torch.stack([t.detach() for t in tensors]) - before)
    return torch.stack(found)


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(torch.corrcoef(torch.stack([a, b]))[0, 1].abs() > ALIKE)


def _repeats(moves: Tensor) -> int:
    """Steps that share noise. Momentum mixes earlier noise in, but fresh noise leaves the span of what was before."""
    basis: list[Tensor] = []
    for move in moves:
        rest = move.clone()
        for _ in range(2):  # once more for rounding
            for direction in basis:
                rest -= (rest @ direction) * direction
        if rest.norm() > NEW * move.norm():
            basis.append(rest / rest.norm())
    return round(len(moves) / max(len(basis), 1))


def _state(make: Factory, loop: Loop) -> list[Breach]:
    """Counters that go too fast, and what does not survive saving and loading."""
    tensors = _tensors(TENSORS)
    optimizer = build(make, tensors)
    _step(optimizer, tensors)
    before = _counters(optimizer)
    _step(optimizer, tensors)
    after = _counters(optimizer)
    found: list[Breach] = []
    steps = max(loop.burn_in, 1)
    fast = sorted(name for name, value in after.items() if value - before.get(name, value) == TENSORS)
    if fast:
        for breach in _named(loop, burn_in=steps, counter="tensor", num_tensors=max(loop.num_tensors, 2)):
            found.append(breach._replace(explanation=f"{fast[0]} grows by {TENSORS} in a step of {TENSORS} tensors"))
    saved = optimizer.state_dict()
    loaded = [_loaded(make, tensors, saved) for _ in range(2)]
    counts = _counters(loaded[0][0])
    # What state_dict() saves is found again after loading; counters elsewhere are not.
    lost = sorted(n for n, value in after.items() if value != before.get(n) and counts.get(n) != value)
    if lost:
        for breach in _named(loop, counter_saved=False):
            found.append(breach._replace(explanation=f"{', '.join(lost)}: {breach.explanation}"))
        return found
    moved = [_seeded_step(*pair) for pair in ((optimizer, tensors), *loaded)]
    if torch.equal(moved[1], moved[2]) and not torch.equal(moved[0], moved[1]):
        found.append(
            Breach(
                "state not saved",
                "a chain that is resumed from state_dict() does not go on as it would have: some of its state, or its "
                "generator, is not in it",
                "keep all state in optimizer.state and param_groups, and save the generator",
            )
        )
    return found


def _loaded(make: Factory, tensors: list[Tensor], saved: dict[str, Any]) -> tuple[Optimizer, list[Tensor]]:
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    torch.manual_seed(2)  # what an optimizer makes up when it is made is then the same for both copies
    optimizer = build(make, copies)
    optimizer.load_state_dict(saved)
    return optimizer, copies


def _step(optimizer: Optimizer, tensors: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for t in tensors:
        t.grad = torch.randn(t.shape, generator=generator, dtype=t.dtype)
    optimizer.step()


def _seeded_step(optimizer: Optimizer, tensors: list[Tensor]) -> Tensor:
    torch.manual_seed(1)
    _step(optimizer, tensors)
    return torch.cat([t.detach().flatten() for t in tensors])


def _counters(optimizer: Optimizer) -> dict[str, int]:
    """Every whole number that an optimizer keeps, by where it keeps it."""
    found: dict[str, int] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() == 0 and float(value).is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            found[name] = value

    places: list[tuple[str, Callable[[], dict[str, Any]]]] = [("", lambda: vars(optimizer))]
    places += [(f"param_groups[{i}].", lambda g=g: g) for i, g in enumerate(optimizer.param_groups)]  # type: ignore[misc]
    every = [p for group in optimizer.param_groups for p in group["params"]]
    places += [(f"state[{i}].", lambda p=p: optimizer.state.get(p, {})) for i, p in enumerate(every)]  # type: ignore[misc]
    for prefix, place in places:
        for name, value in place().items():
            note(f"{prefix}{name}", value)
    return found
