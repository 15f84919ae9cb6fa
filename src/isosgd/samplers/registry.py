"""Every sampler by name: its family, what it targets, where it departs from its paper, its settings and defaults."""

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

NOT_SETTINGS = {"num_data", "temperature", "generator", "chains", "extra"}  # given by the loop, or inner


@dataclass(frozen=True)
class Method:
    """A method that can be asked for by name.

    Attributes:
        kind: the class, with what it ``targets``.
        family: ``langevin`` (Theorem 1), ``hamiltonian`` (Theorem 2), ``metropolis`` (all data, accept or reject), or
            ``baseline``.
        paper: where it comes from.
        departures: where our code departs from it, in a line; the docstring of ``kind`` says more.
        options: settings of `isosgd.sample` that differ from the defaults of ``kind``.
    """

    kind: type[Any]
    family: str
    paper: str
    departures: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def targets(self) -> str:
        """The density it draws from, and the condition."""
        return str(self.kind.targets)

    @property
    def settings(self) -> dict[str, Any]:
        """Names and defaults of all that can be set, its own first."""
        found: dict[str, Any] = {}
        for kind in self.kind.__mro__:
            if "__init__" in vars(kind) and hasattr(kind, "targets"):
                for name, parameter in inspect.signature(vars(kind)["__init__"]).parameters.items():
                    inner = name in NOT_SETTINGS or (kind is Sampler and name in ("lr", "schedule"))  # some have none
                    if parameter.kind is parameter.KEYWORD_ONLY and not inner:
                        found.setdefault(name, parameter.default)
        return {**found, **self.options}

    def row(self, name: str) -> dict[str, Any]:
        """All that is known of it, for a table.

        Example:
            >>> psgld = REGISTRY["psgld"].row("psgld")
            >>> psgld["family"], psgld["settings"]["alpha"]
            ('langevin', 0.99)
        """
        return {
            "name": name,
            "family": self.family,
            "paper": self.paper,
            "targets": self.targets,
            "departures": self.departures,
            "settings": self.settings,
        }


REGISTRY: Mapping[str, Method] = MappingProxyType(
    {
        "isgd": Method(
            ISGD,
            "langevin",
            "Franzese et al. 2020",
            "centred noise, correlations corrected, curvature guard, windowed warm-up, shapes of Lambda; all optional",
            options={"structure": "auto"},  # the class alone has one lambda a layer, as the paper has
        ),
        "isgd-momentum": Method(
            MomentumISGD,
            "hamiltonian",
            "Franzese et al. 2020, outlook",
            "those of isgd; one lambda a group only",
        ),
        "vsgd": Method(VSGD, "langevin", "Mandt, Hoffman, Blei 2017", "none"),
        "sgld": Method(SGLD, "langevin", "Welling, Teh 2011", "the rate is fixed by default, and set by `adapt`"),
        "psgld": Method(
            PSGLD, "langevin", "Li et al. 2016", "V starts as a plain average; the prior is part of its gradient"
        ),
        "sgfs": Method(
            SGFS,
            "langevin",
            "Ahn, Korattikara, Welling 2012",
            "P from noise vectors, with a floor, constant once frozen; B a multiple of Var(g); T",
        ),
        "sgfs-full": Method(
            FullSGFS,
            "langevin",
            "Ahn, Korattikara, Welling 2012",
            "those of sgfs; shrunk towards its diagonal; made anew only when rates are set",
        ),
        "sgrld": Method(SGRLD, "langevin", "Patterson, Teh 2013", "any diagonal metric; the identity by default"),
        "sghmc": Method(
            SGHMC, "hamiltonian", "Chen, Fox, Guestrin 2014", "the correction is measured, correlations included"
        ),
        "sgrhmc": Method(
            SGRHMC, "hamiltonian", "Ma, Chen, Fox 2015", "any diagonal metric; free friction, cut at 1"
        ),
        "adaptive-sghmc": Method(
            AdaptiveSGHMC,
            "hamiltonian",
            "Springenberg et al. 2016",
            "the noise that is subtracted is measured where it can be; the burn-in ends with the warm-up",
        ),
        "sgnht": Method(
            SGNHT,
            "hamiltonian",
            "Ding et al. 2014",
            "a thermostat for each group; the set point of the discrete recursion; a free thermal mass",
        ),
        "csgld": Method(
            CSGLD, "langevin", "Zhang et al. 2020", "lr is that of the sampling stage; cycles begin after the warm-up"
        ),
        "csghmc": Method(
            CSGHMC,
            "hamiltonian",
            "Zhang et al. 2020",
            "lr is that of the sampling stage; cycles begin after the warm-up",
        ),
        "hmc": Method(
            HMC,
            "metropolis",
            "Duane et al. 1987; Neal 2011",
            "all data in every gradient; the mass is I-SGD's Lambda; step sizes jittered, one length for all chains",
        ),
    }
)  # fmt: skip
