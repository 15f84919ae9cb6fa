"""Every sampler by name: its family, target density, departures from its paper, settings and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from isosgd.samplers.adaptive_sghmc import AdaptiveSGHMC
from isosgd.samplers.base import Sampler
from isosgd.samplers.cyclical import CSGHMC, CSGLD
from isosgd.samplers.hmc import HMC
from isosgd.samplers.isgd import ISGD
from isosgd.samplers.momentum_isgd import MomentumISGD
from isosgd.samplers.psgld import PSGLD
from isosgd.samplers.sgfs import SGFS, FullSGFS
from isosgd.samplers.sghmc import SGHMC
from isosgd.samplers.sgld import SGLD
from isosgd.samplers.sgnht import SGNHT
from isosgd.samplers.sgrhmc import SGRHMC
from isosgd.samplers.sgrld import SGRLD
from isosgd.samplers.vsgd import VSGD

# Arguments that `isosgd.sample` sets.
NOT_SETTINGS = {"num_data", "temperature", "generator", "chains", "warmup", "trained", "weight_decay"}
INNER = {"lr", "friction", "corrected", "schedule", "extra"}  # of `Sampler`, set or redefined by subclasses


@dataclass(frozen=True)
class Method:
    """A method with a name.

    Attributes:
        kind: the class, with attributes ``family``: ``langevin`` (Theorem 1), ``hamiltonian`` (Theorem 2),
            ``metropolis`` (all data, accept/reject) or ``baseline``; ``paper``; ``targets``; and ``departures`` from
            the paper.
        options: settings of `isosgd.sample` that differ from the defaults of ``kind``.
    """

    kind: type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Names and defaults of all settings, the method's own first."""
        found: dict[str, Any] = {"lr": None} if getattr(self.kind, "has_lr", False) else {}
        for kind in self.kind.__mro__:
            if "__init__" in vars(kind) and hasattr(kind, "targets"):
                left_out = NOT_SETTINGS | (INNER if kind is Sampler else set())
                for name, parameter in inspect.signature(vars(kind)["__init__"]).parameters.items():
                    if parameter.kind is parameter.KEYWORD_ONLY and name not in left_out:
                        found.setdefault(name, parameter.default)
        return {**found, **self.options}

    def row(self, name: str) -> dict[str, Any]:
        """The method as the row of a table.

        Example:
            >>> psgld = REGISTRY["psgld"].row("psgld")
            >>> psgld["family"], psgld["settings"]["alpha"]
            ('langevin', 0.99)
        """
        about = {part: getattr(self.kind, part) for part in ("family", "paper", "targets", "departures")}
        return {"name": name, **about, "settings": self.settings}


METHODS: dict[str, type[Sampler]] = {
    "isgd": ISGD,
    "isgd-momentum": MomentumISGD,
    "vsgd": VSGD,
    "sgld": SGLD,
    "psgld": PSGLD,
    "sgfs": SGFS,
    "sgfs-full": FullSGFS,
    "sgrld": SGRLD,
    "sghmc": SGHMC,
    "sgrhmc": SGRHMC,
    "adaptive-sghmc": AdaptiveSGHMC,
    "sgnht": SGNHT,
    "csgld": CSGLD,
    "csghmc": CSGHMC,
    "hmc": HMC,
}
OPTIONS = {"isgd": {"structure": "auto"}}  # the class defaults to the paper's one lambda for each layer

REGISTRY: Mapping[str, Method] = MappingProxyType(
    {name: Method(kind, OPTIONS.get(name, {})) for name, kind in METHODS.items()}
)
