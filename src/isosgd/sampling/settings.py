"""Checks of the settings of `sample`, and settings derived from them."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from isosgd.baselines import BASELINES
from isosgd.data.sources import ALL, Size
from isosgd.engine.chains import MakeSampler
from isosgd.engine.compiled import COMPILE_AFTER
from isosgd.errors import check_integer, first_line, nearest
from isosgd.native import build
from isosgd.samplers import METHODS, PRESETS, REGISTRY, Method, Sampler
from isosgd.sampling.stopping import MOST_DRAWS
from isosgd.target import Params

P = ParamSpec("P")
T = TypeVar("T")

EVERY: dict[str, Method] = {**REGISTRY, **BASELINES}  # samplers of the posterior, and baselines
OURS = {"batch_size", "warmup", "budget", "sets"}  # settings that `sample` passes to a sampler
# Arguments of `sample` itself, which an unknown option may be meant for.
ARGUMENTS = (
    "init", "starts", "method", "draws", "chains", "batch_size", "keep_every", "warmup", "temperature", "seed",
    "device", "progress", "store", "resume", "store_dtype", "log", "budget", "held_out", "ladder", "max_seconds",
    "transform", "parallel", "rank_timeout", "preset", "noise_every", "tempered", "compile",
)  # fmt: skip
OBJECT = 500  # bytes of a tensor besides its numbers

LEAST_TO_COMPILE = 60.0  # seconds of a limited run from which on compiling on a CPU pays

HEATED = "heated"  # lr="heated" raises the rate until the loss of a trained network rises
CYCLICAL = ("csgld", "csghmc")


def methods() -> list[dict[str, Any]]:
    """Every method with its family, its target density, where it departs from its paper, and its default settings.

    The families ``langevin`` and ``hamiltonian`` are also optimizers, the classes in `isosgd.METHODS`. The family
    ``metropolis``, HMC, takes all data for every gradient and runs through `isosgd.sample`. The family ``baseline``
    does not sample the posterior; its draws are for comparison.

    Example:
        >>> {row["family"] for row in methods()} == {"langevin", "hamiltonian", "metropolis", "baseline"}
        True
        >>> swag = next(row for row in methods() if row["name"] == "swag")
        >>> swag["settings"]["rank"]
        20
    """
    return [method.row(name) for name, method in EVERY.items()]


def takes_numpy_numbers(call: Callable[P, T]) -> Callable[P, T]:
    """Let a function take numpy's numbers as settings, such as a temperature out of ``np.logspace``."""

    @wraps(call)
    def wrapped(*args: P.args, **given: P.kwargs) -> T:
        for name, value in given.items():
            if isinstance(value, np.generic):
                given[name] = value.item()
        return call(*args, **given)

    return wrapped


def compile_after(options: dict[str, Any], deadline: float | None = None) -> int | None:
    """Pop the option ``compile``: after how many gradients to compile, None for never."""
    chosen = options.pop("compile", "auto")
    if chosen not in ("auto", True, False):
        raise ValueError(f"compile = {chosen!r} is unknown; choose 'auto', True or False")
    if chosen == "auto":
        short = deadline is not None and deadline - time.monotonic() < LEAST_TO_COMPILE
        return None if short else COMPILE_AFTER
    return 0 if chosen else None


def noise_every(options: dict[str, Any]) -> int | None:
    """Pop the option ``noise_every``, steps between measurements of the noise while drawing."""
    found: int | None = options.pop("noise_every", None)
    if found is not None:
        check_integer("noise_every", found, 1)
    return found


def is_heated(options: dict[str, Any], method: str, warmup: int | Literal["auto"]) -> bool:
    """Whether cycles find their rates by heating; pops the option ``lr="heated"``."""
    if options.get("lr") != HEATED:
        return False
    if method not in CYCLICAL:
        raise ValueError(f"lr = {HEATED!r} is for methods in cycles, {' and '.join(CYCLICAL)}, not for {method!r}")
    check_heating(warmup)
    del options["lr"]
    return True


def check_heating(warmup: int | Literal["auto"]) -> None:
    """Cycles that find their rate by heating take no length of the warm-up."""
    if warmup != "auto":
        raise ValueError(
            f"warmup = {warmup}: cycles find their rate by heating, which takes as many gradients as it takes; leave "
            "warmup out, use method='isgd', or give method='csghmc' a rate, lr="
        )


def resolve_method(method: str, batch_size: Size) -> tuple[str, Size]:
    """Method and batch size; ``method="hmc"`` and ``batch_size="all"`` imply each other.

    Example:
        >>> resolve_method("isgd", "all"), resolve_method("hmc", None), resolve_method("sgld", 32)
        (('hmc', 'all'), ('hmc', 'all'), ('sgld', 32))
    """
    if method == "hmc" and batch_size not in (None, ALL):
        raise ValueError(
            f"batch_size = {batch_size!r} does not go with method='hmc', which accepts or rejects by the energy of all "
            "data: leave it out, or sample minibatches with method='isgd'"
        )
    if batch_size == ALL and method not in ("isgd", "hmc"):
        raise ValueError(
            f"batch_size = 'all' is HMC, and leaves no gradient noise for method={method!r}: use method='hmc', or give "
            f"{method} a number"
        )
    if method == "hmc" or batch_size == ALL:
        return "hmc", "all"
    return method, batch_size


def sampler_factory(
    method: str, num_data: int, temperature: float, batch_size: int, sets: int, options: dict[str, Any]
) -> MakeSampler:
    """A function that makes the sampler of chains; checks all options."""
    kind: type[Sampler] = METHODS[method]
    preset = options.pop("preset", None)
    if preset is not None:
        if method == "hmc":
            raise ValueError(
                f"preset = {preset!r} is a row of I-SGD, which needs gradient noise: give a number as batch_size, or "
                "leave preset out"
            )
        if method != "isgd" or preset not in PRESETS:
            raise ValueError(
                f"preset = {preset!r} is not one of the I-SGD rows {sorted(PRESETS)}{nearest(preset, PRESETS)}"
            )
        options = {**PRESETS[preset], **options}
    known = REGISTRY[method].settings
    unknown = sorted(set(options) - set(known))
    if unknown:
        names = [name for name in known if name not in OURS]
        close = nearest(unknown[0], [*names, *ARGUMENTS])
        raise TypeError(f"method {method!r} has no option {unknown[0]!r}; it takes {', '.join(names)}{close}")
    ours = {"batch_size": batch_size, "sets": sets}
    options = {**{name: value for name, value in ours.items() if name in known}, **REGISTRY[method].options, **options}

    def make(groups: list[dict[str, Any]], generator: torch.Generator, chains: int | None) -> Sampler:
        return kind(groups, num_data=num_data, temperature=temperature, generator=generator, chains=chains, **options)

    return make


def check_settings(method: str, draws: Any, chains: int, keep_every: Any, warmup: Any, temperature: float) -> None:
    """Check the method, and the range of numbers."""
    if method not in EVERY:
        raise ValueError(f"method = {method!r} is unknown; choose one of {sorted(EVERY)}{nearest(method, EVERY)}")
    for name, value, least in (
        ("draws", draws, 1),
        ("chains", chains, 1),
        ("keep_every", keep_every, 1),
        ("warmup", warmup, 0),
    ):
        if value != "auto" or name == "chains":
            check_integer(name, value, least, "" if name == "chains" else " or 'auto'")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (number and math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature = {temperature!r} must be positive and finite, or 'auto'; 1 is the Bayesian posterior"
        )


def check_seconds(seconds: Any) -> float:
    """``max_seconds`` as a number, checked."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"max_seconds = {seconds!r} must be a positive number of seconds")
    return float(seconds)


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that there is not."""
    if device is None:
        return
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device = {device!r} cannot be used ({first_line(error)}): leave it out, or choose one that torch has, "
            f"such as 'cpu'{' or' if torch.cuda.is_available() else ', not'} 'cuda'"
        ) from error
    if found.type == "meta":
        raise ValueError("device = 'meta' holds no numbers: choose another one")


def most_draws(draws: int | Literal["auto"], budget: int | None, held_out: Any, method: str) -> int:
    """The most draws of each chain."""
    if draws != "auto":
        if budget is not None or held_out is not None:
            name = "budget" if budget is not None else "held_out"
            more = (
                ", or with starts=, trained networks that they choose a temperature for" if name == "held_out" else ""
            )
            raise ValueError(
                f"{name}= goes with draws='auto', which may end before it{more}; draws = {draws} says how many"
            )
        return draws
    if method not in METHODS:
        raise ValueError(f"draws = 'auto' asks whether chains have converged; {method} has none: give it a number")
    if budget is not None:
        check_integer("budget", budget, 1, ": draws of each chain, at most")
    return MOST_DRAWS if budget is None else budget


def versions() -> dict[str, str]:
    """Versions of all software that draws depend on."""
    try:
        ours = version("isosgd")
    except PackageNotFoundError:
        ours = "not installed (run from its sources)"
    return {
        **{"isosgd": ours, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "native": "no" if build.switched_off() else "yes",  # native operations round differently
    }


def memory() -> int | None:
    """Bytes of memory of this machine; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no such function
        return None


def check_room(start: Params, chains: int, draws: int) -> None:
    """Raise an error if chains, or the draws of each that stay in memory, need more memory than this machine has.

    Args:
        start: parameters of a chain.
        chains: number of chains.
        draws: of each chain, kept in memory.

    Example:
        >>> import torch
        >>> check_room({"w": torch.zeros(50, 13)}, chains=4, draws=100)
    """
    room = memory()
    if room is None:
        return
    numbers = sum(x.numel() * x.element_size() for x in start.values())
    on_cpu = all(x.device.type == "cpu" for x in start.values())
    needed = chains * (OBJECT * len(start) + numbers * on_cpu)
    if needed > room:
        raise ValueError(
            f"chains = {chains:,} need {_gib(needed)} of memory at least, and this machine has {_gib(room)}: take fewer"
        )
    if (needed := chains * draws * numbers) > room:
        raise ValueError(
            f"draws = {draws:,} of {chains:,} chains take up {_gib(needed)} of memory, and this machine has "
            f"{_gib(room)}: take fewer, or have them written to the disk as they come (store=)"
        )


def _gib(size: float) -> str:
    """A number of bytes as text.

    Example:
        >>> _gib(3.2e12)
        '2,980 GiB'
    """
    return f"{size / (1 << 30):,.0f} GiB"
