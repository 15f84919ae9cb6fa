"""I-SGD where a batch is all of the data.

Gradients then have no noise: B = 0, every Lambda is large enough, and all of the noise is injected. That leaves the
step size free, and energies are known exactly. So noise is injected only now and then, as fresh velocities of
covariance ``2 (T / N) P``, ``P = (T / N) Lambda^-1``. In between the chain glides along a trajectory of the momentum
form without friction, and at its end the trajectory is accepted or refused by what it gained in energy (Metropolis).
Nothing is left of the discretisation bias: this is Hamiltonian Monte Carlo whose mass is Lambda.

With the pace ``tau`` of a chain (its step is ``sqrt(tau)`` in units of Lambda's metric) a step is

    v -= tau P g,    theta += v,    v -= tau P g at the new place,

and half a kick from a velocity v changes the kinetic energy over T by ``(N / 2 T) (tau g . P g / 2 - v . g)``.

References:
    Duane, Kennedy, Pendleton, Roweth (1987), Hybrid Monte Carlo. Neal (2011), MCMC using Hamiltonian dynamics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.noise import dot
from isosgd.samplers.isgd import ISGD
from isosgd.samplers.rule import Rule
from isosgd.samplers.shaped import Shaped

JITTER = 0.3  # paces differ from trajectory to trajectory, so that none returns to its start for every direction
FIRST_PACE = 1e-3
KEPT = (
    *("pace", "own", "velocity", "home", "home_gradient", "home_pull", "home_energy"),
    *("gained", "acceptance", "place", "length"),
)


class Gliding(ISGD):
    """Trajectories on all data, of which each is accepted or refused. Targets ``exp(-f / T)`` without a bias.

    It must be told the energy ``f / T`` of each chain before every step (``energy``).

    Attributes:
        pace: tau of each chain.
        length: steps of a trajectory.
        acceptance: probability with which each chain's last trajectory was accepted.
        ended: whether the last step ended a trajectory.
        error: energy gained on the way to where the last step was taken from: how far the trajectory has strayed.
        home: where the chains are, flat: the ends of the last trajectories that were accepted. None before the first
            step.
    """

    measures = False

    def _bind(self, shaped: Shaped, paired: bool, lam: float | None) -> None:
        super()._bind(shaped, paired, lam)
        shaped.weight = 0.0
        # A velocity is kept for a whole trajectory, and its energy is reckoned as that of a normal one: counted bits,
        # good enough where a chain adds up many small steps, would leave a bias here.
        if self.innovations == "bits":
            raise ValueError("innovations = 'bits' goes with minibatches: with batch_size='all' leave it out")
        self.innovations = "normal"
        self.energy: Tensor | None = None
        self.pace = shaped.full(FIRST_PACE)
        self.length, self.place, self.ended = 1, 0, False
        self.error = self.own = self.velocity = self.gained = self.acceptance = self.home_energy = shaped.full(0.0)
        self.home: Tensor | None = None
        self.home_gradient = self.home_pull = self.home_energy

    def rule(self) -> Rule:
        """How large a shape must be: whatever is wanted is done by the pace."""
        group = self.param_groups[0]
        assert self.batch_size is not None
        return Rule(group["num_data"], self.batch_size, group["temperature"], self.bias, averaged=False, whole=True)

    def restart(self) -> None:
        """Begin a new trajectory where the chains are, in the metric there is now."""
        assert self.shaped is not None
        if self.home is not None:
            self._put(self.shaped, self.home)
        self.home, self.place = None, 0

    def report_pace(self) -> None:
        """Let every group's rate be that of a step."""
        assert self.shaped is not None
        for group, rate in zip(self.param_groups, self.shaped.group_rates().unbind(-1), strict=True):
            group["rate"] = self.number(self.pace * rate if self.batched else (self.pace * rate).squeeze(0))
            group["lam"] = self.number(self.shaped.scale / torch.as_tensor(group["rate"]))

    def _update(self) -> None:
        shaped, energy = self.shaped, self.energy
        if shaped is None or not shaped.known:
            raise RuntimeError("Lambda is not known yet: let isosgd.sample warm up")
        if energy is None:
            raise RuntimeError("trajectories need the energy of each chain before a step: let isosgd.sample take them")
        params = [p for laid in self._laid for p in laid.params]
        here = shaped.flatten([p.detach() for p in params])
        gradient = shaped.flatten([p.grad for p in params])  # type: ignore[misc]
        pull = shaped.direction(gradient).to(shaped.dtype)
        energy, self.ended = energy.to(shaped.dtype), False
        self.error = torch.zeros_like(energy)
        if self.place:
            self._kick(shaped, gradient, pull)
            self.error = torch.nan_to_num(energy - self.home_energy + self.gained, nan=torch.inf, neginf=torch.inf)
        if self.place == self.length:
            here, gradient, pull, energy = self._decide(here, gradient, pull, energy)
        if self.place == 0:
            self._begin(shaped, here, gradient, pull, energy)
        self._kick(shaped, gradient, pull)
        self._put(shaped, here + self.velocity)
        self.place += 1

    def _begin(self, shaped: Shaped, here: Tensor, gradient: Tensor, pull: Tensor, energy: Tensor) -> None:
        """Begin a trajectory: a fresh velocity, and a pace of its own."""
        self.home, self.home_gradient, self.home_pull, self.home_energy = here, gradient, pull, energy
        xi = self._source.fill().view(shaped.chains, -1)
        stir = torch.rand(shaped.chains, generator=self.generator, device=shaped.device, dtype=shaped.dtype)
        self.own = self.pace * (1.0 + JITTER * (2.0 * stir - 1.0)).square()
        fresh = shaped.displace(shaped.tensors(), torch.zeros_like(gradient), xi)
        self.velocity = self.own.sqrt().unsqueeze(-1) * fresh.to(shaped.dtype)
        self.gained = torch.zeros_like(energy)

    def _kick(self, shaped: Shaped, gradient: Tensor, pull: Tensor) -> None:
        """Half a kick, and what it does to the kinetic energy."""
        pull = self.own.unsqueeze(-1) * pull
        work = 0.5 * dot(gradient, pull) - dot(gradient, self.velocity)
        self.gained = self.gained + work / (2.0 * shaped.scale)
        self.velocity = self.velocity - pull

    def _decide(
        self, here: Tensor, gradient: Tensor, pull: Tensor, energy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Accept or refuse the trajectory; returns where the chains are then, and what is known there."""
        assert self.home is not None
        self.acceptance = (-self.error).exp().clamp_max(1.0)
        drawn = torch.rand(len(energy), generator=self.generator, device=energy.device, dtype=energy.dtype)
        accepted = drawn < self.acceptance
        self.place, self.ended = 0, True
        wide = accepted.unsqueeze(-1)
        return (
            torch.where(wide, here, self.home),
            torch.where(wide, gradient, self.home_gradient),
            torch.where(wide, pull, self.home_pull),
            torch.where(accepted, energy, self.home_energy),
        )

    @torch.no_grad()
    def _put(self, shaped: Shaped, flat: Tensor) -> None:
        """Write flat parameters."""
        params = [p for group in self.param_groups for p in group["params"]]
        parts = torch.split(flat, shaped.sizes, -1)
        torch._foreach_copy_(params, [part.reshape(p.shape) for part, p in zip(parts, params, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["trajectory"] = {name: getattr(self, name) for name in KEPT}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("trajectory")
        if saved is None:
            raise ValueError("the state has no trajectory: it was saved by a sampler of minibatches")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "trajectory"})
        for name in KEPT:
            setattr(self, name, saved[name])
