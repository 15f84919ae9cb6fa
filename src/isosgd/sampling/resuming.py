"""`resume`: go on with a run, with the settings it was begun with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isosgd.data.sources import as_tensors
from isosgd.engine.schedule import Start
from isosgd.posterior import Posterior
from isosgd.sampling.sample import sample
from isosgd.sampling.stored import load, settings_of
from isosgd.store import Manifest
from isosgd.target import Target


def resume(
    path: str | Path,
    target: Target,
    data: Any,
    *,
    init: Start = None,
    starts: Any = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    draws: int | None = None,
    budget: int | None = None,
    **options: Any,
) -> Posterior:
    """Go on with a run where it was stopped, or extend it. The settings are those of its manifest.

    Args:
        path: folder of the run, the ``store`` of `sample`; or of merged runs, each of which then goes on.
        target: what is sampled, made as it was then.
        data: as they were then.
        init: as it was then, if it was given.
        starts: as they were then, if they were given.
        device: where to sample; the kind must be the same.
        progress: show a progress line on a terminal.
        draws: of each chain, where more are wanted than the run was begun with. On a CPU they are bit for bit those of
            a run that was asked for so many at once, unless so many make it pay to compile several steps in a call,
            or chains in turn share a loader.
        budget: of a run with ``draws="auto"``, where more draws are wanted at most.
        options: settings of the method that were objects, not numbers or text; a manifest does not hold those.

    Returns:
        The draws, as `sample` gives them; at once when all that are asked for are there.

    Example:
        >>> import tempfile
        >>> from isosgd import Target, priors, resume, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = sample(target, (y,), draws=20, keep_every=5, warmup=400, progress=False, store=folder.name)
        >>> len(resume(folder.name, target, (y,)))
        20
        >>> len(resume(folder.name, target, (y,), draws=30, progress=False))
        30
        >>> folder.cleanup()
    """
    if parts := Manifest.read(Path(path)).parts:
        if options.get("parallel") is not None:
            raise ValueError(
                f"{path} holds {len(parts)} parts, and parallel = {options['parallel']!r}: isosgd.resume goes on with "
                "them in one process; leave parallel out. A run that ranks have begun, not a merged one, goes on over "
                "ranks by sample(..., parallel=..., store=..., resume=True)"
            )
        for part in parts:
            resume(
                Path(path) / part, target, data, init=init, starts=starts, device=device, progress=progress,
                draws=draws, budget=budget, **options,
            )  # fmt: skip
        return load(path, target, data=as_tensors(data, target.dtype))
    settings, opaque = settings_of(path)
    given = settings.pop("options")
    if draws is not None:
        settings = {name: value for name, value in settings.items() if name != "budget"} | {"draws": draws}
    if budget is not None:
        settings |= {"budget": budget}
    missing = [name for name in opaque if name not in options]
    if missing:
        raise ValueError(
            f"the run was begun with {missing[0]}={given[missing[0]]}, an object that a manifest cannot hold: pass "
            f"{missing[0]}= as it was"
        )
    return sample(
        target, data, init=init, starts=starts, device=device, progress=progress, store=path, resume=True,
        **settings, **{**given, **options},
    )  # fmt: skip
