"""Hamiltonian Monte Carlo on all data, with I-SGD's Lambda as its mass.

Gradients of all data have no noise (B = 0, so that any Lambda is large enough), and energies are exact. A trajectory
begins with a new velocity of covariance ``2 (T / N) P``, ``P = (T / N) Lambda^-1``, goes on with leapfrog steps without
friction, and is accepted or rejected by the change of energy (Metropolis), which removes the discretisation bias.

With the squared step size ``tau`` of a chain, in units of Lambda's metric, a leapfrog step is

    v -= tau P g,    theta += v,    v -= tau P g at the new place,

and half a kick from a velocity v changes the kinetic energy over T by ``(N / 2 T) (tau g . P g / 2 - v . g)``.

References:
    Duane, Kennedy, Pendleton, Roweth (1987), Hybrid Monte Carlo. Neal (2011), MCMC using Hamiltonian dynamics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.geometry.base import Geometry, load_into, state_of
from isosgd.geometry.choice import StructureName, choose, make_structure
from isosgd.geometry.layer import Number
from isosgd.geometry.rule import Rule
from isosgd.noise.model import dot, split_like
from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import ParamsLike
from isosgd.samplers.isgd import bind_geometry, check_sets, parameter_shapes, report_rates
from isosgd.samplers.program import StepProgram

JITTER = 0.3  # of step sizes: a fixed trajectory may return to its start in some direction
FIRST_STEP_SIZE = 1e-3


class HMC(Sampler):
    """HMC on all data. Targets ``exp(-f / T)`` without a bias.

    Before every step, ``energy`` must be set to the energy ``f / T`` of each chain, as `isosgd.sample` does.

    Departures: the mass is Lambda, estimated from differences of gradients between random halves of the data; step
    sizes are jittered by up to 30% between trajectories; chains that run together have trajectories of one length.

    Args:
        structure: the form of the mass: ``auto``, ``diagonal``, ``lowrank``, ``kronecker``, ``full``, or a `Geometry`.
        sets: with ``chains=K``, the number of data sets. Chains of one data set share the estimate of a full matrix.
        settings: those of every `Sampler`; ``batch_size`` is the number of examples in a gradient.

    Attributes:
        step_size: the squared step size tau of each chain.
        jittered: that of the current trajectory.
        length: leapfrog steps in a trajectory.
        place: steps taken of the current trajectory.
        acceptance: acceptance probability of each chain's last trajectory.
        ended: whether the last step ended a trajectory.
        error: change of energy since the start of the trajectory, before the last step.
        home: flat parameters at the start of the current trajectories; None before the first step.
        recycles: whether draws are also taken along trajectories that are longer than the spacing of draws.
        drawn: the last of these, or `home` if a trajectory that ended there would have been rejected.
        growth: squared distance covered by each chain's last trajectory, and its derivative by the log length.
    """

    family = "metropolis"
    paper = "Duane et al. 1987; Neal 2011"
    departures = (
        "all data in every gradient; the mass is I-SGD's Lambda; step sizes jittered, one length for all chains"
    )
    has_lr = False
    kept = (
        *("step_size", "jittered", "velocities", "home", "home_gradient", "home_pull", "home_energy"),
        *("gained", "acceptance", "place", "length", "drawn"),
    )
    geometry: Geometry
    averaged = False  # innovations

    def __init__(
        self,
        params: ParamsLike,
        *,
        structure: StructureName | Geometry = "auto",
        sets: int = 1,
        **settings: Any,
    ) -> None:
        # The kinetic energy assumes normal velocities: with counted bits there would be a bias.
        if settings.get("innovations", "auto") == "bits":
            raise ValueError("innovations = 'bits' goes with minibatches: with method='hmc' leave it out")
        check_sets(sets, settings.get("chains") or 1)
        super().__init__(params, extra={"lam": None}, **{**settings, "innovations": "normal"})
        if not self.paired:
            raise ValueError(f"HMC takes its mass from centred noise: use noise='paired', not {self.estimator}")
        if structure == "auto":
            structure = choose(parameter_shapes(self), None, self.chains or 1, measured=False)
        chosen = make_structure(structure)
        if not isinstance(chosen, Geometry):
            raise ValueError(
                f"structure = {chosen.name!r} knows no directions: HMC needs 'auto', 'diagonal', 'lowrank', "
                "'kronecker' or 'full'"
            )
        bind_geometry(self, chosen, sets)
        self.structure = self.geometry = chosen
        self.injector.extra = chosen.extra_innovations
        chosen.noise_weight = 0.0
        self.energy: Tensor | None = None
        self.step_size = chosen.full(FIRST_STEP_SIZE)
        self.length, self.place, self.ended = 1, 0, False
        self.error = self.jittered = self.velocities = self.gained = self.acceptance = chosen.full(0.0)
        self.home: Tensor | None = None
        self.recycles, self.drawn = False, chosen.full(0.0)
        self.growth = chosen.full(0.0), chosen.full(0.0)
        self.home_gradient = self.home_pull = self.home_energy = chosen.full(0.0)

    def rule(self) -> Rule:
        """The rule for the size of the geometry."""
        group = self.param_groups[0]
        assert self.batch_size is not None
        return Rule(
            group["num_data"], self.batch_size, group["temperature"], self.bias, averaged=False, full_batch=True
        )

    def adapt(
        self,
        curvature: Sequence[Number] | None = None,
        rise: float = 2.0,
        prior: Sequence[Tensor] | None = None,
    ) -> None:
        """Set the mass; the arguments are those of `isosgd.samplers.isgd.ISGD.adapt`."""
        self.geometry.resize(self.rule(), curvature, rise, prior)
        report_rates(self)

    def restart(self) -> None:
        """Return to the start of the current trajectory; the next step begins another with the present mass."""
        if self.home is not None:
            self.put(self.home)
        self.home, self.place = None, 0

    def _update(self) -> None:
        geometry, energy = self.geometry, self.energy
        if not geometry.known:
            raise RuntimeError("Lambda is not known yet: let isosgd.sample warm up")
        if energy is None:
            raise RuntimeError("HMC needs the energy of each chain before a step: let isosgd.sample take them")
        params = self.all_params("HMC")
        here = geometry.flatten([p.detach() for p in params])
        gradient = geometry.flatten([p.grad for p in params])  # type: ignore[misc]
        pull = geometry.direction(gradient).to(geometry.dtype)
        energy, self.ended = energy.to(geometry.dtype), False
        self.error = torch.zeros_like(energy)
        if self.place:
            self._half_kick(gradient, pull)
            self.error = torch.nan_to_num(energy - self.home_energy + self.gained, nan=torch.inf, neginf=torch.inf)
        if self.place == self.length:
            here, gradient, pull, energy = self._accept_or_reject(here, gradient, pull, energy)
        elif self.recycles and self.home is not None:
            # A shorter trajectory, accepted or rejected on its own, has the same stationary distribution.
            self.drawn = torch.where(self._happens(self._acceptance()).unsqueeze(-1), here, self.home)
        if self.place == 0:
            self._begin(here, gradient, pull, energy)
        self._half_kick(gradient, pull)
        self.put(here + self.velocities)
        self.place += 1

    def _begin(self, here: Tensor, gradient: Tensor, pull: Tensor, energy: Tensor) -> None:
        """Begin a trajectory with a new velocity and step size."""
        self.home, self.home_gradient, self.home_pull, self.home_energy = here, gradient, pull, energy
        self.drawn = here
        geometry = self.geometry
        xi = self.injector.source.fill().view(geometry.chains, -1)
        drawn = torch.rand(geometry.chains, generator=self.generator, device=geometry.device, dtype=geometry.dtype)
        self.jittered = self.step_size * (1.0 + JITTER * (2.0 * drawn - 1.0)).square()
        fresh = geometry.displace(geometry.tensors(), torch.zeros_like(gradient), xi)
        self.velocities = self.jittered.sqrt().unsqueeze(-1) * fresh.to(geometry.dtype)
        self.gained = torch.zeros_like(energy)

    def _half_kick(self, gradient: Tensor, pull: Tensor) -> None:
        """Half a kick to the velocity; its change of the kinetic energy is added to ``gained``."""
        pull = self.jittered.unsqueeze(-1) * pull
        work = 0.5 * dot(gradient, pull) - dot(gradient, self.velocities)
        self.gained = self.gained + work / (2.0 * self.geometry.scale)
        self.velocities = self.velocities - pull

    def _accept_or_reject(
        self, here: Tensor, gradient: Tensor, pull: Tensor, energy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Accept or reject the trajectory; returns the chains' position, gradient, pull and energy then."""
        assert self.home is not None
        moved = here - self.home
        self.growth = dot(moved, moved), 2.0 * self.length * dot(moved, self.velocities)
        self.acceptance = self._acceptance()
        accepted = self._happens(self.acceptance)
        self.place, self.ended = 0, True
        wide = accepted.unsqueeze(-1)
        return (
            torch.where(wide, here, self.home),
            torch.where(wide, gradient, self.home_gradient),
            torch.where(wide, pull, self.home_pull),
            torch.where(accepted, energy, self.home_energy),
        )

    def _acceptance(self) -> Tensor:
        return (-self.error).exp().clamp_max(1.0)

    def _happens(self, p: Tensor) -> Tensor:
        return torch.rand(len(p), generator=self.generator, device=p.device, dtype=p.dtype) < p

    @torch.no_grad()
    def put(self, flat: Tensor) -> None:
        """Write flat parameters."""
        params = [p for group in self.param_groups for p in group["params"]]
        torch._foreach_copy_(params, split_like(flat, params, self.geometry.chains))

    def _program(self) -> StepProgram | str:
        return "HMC accepts or rejects where a trajectory ends"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "trajectory": state_of(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("trajectory")
        if saved is None:
            raise ValueError("the state has no trajectory: it was not saved by HMC")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "trajectory"})
        load_into(self, saved, self.geometry.device)
