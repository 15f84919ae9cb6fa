"""What every sampler shares: its settings, the step, and the state that is saved.

What it knows of its gradient noise comes from `isosgd.samplers.following`, the noise that it injects from
`isosgd.samplers.planning`, and its rates from `isosgd.samplers.rates`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from isosgd.noise import NoiseEstimator, NoiseName, make_estimator
from isosgd.samplers.groups import ParamsLike, check_groups, check_units, layer_groups, trained_groups
from isosgd.samplers.innovations import Innovations, make_generator
from isosgd.samplers.rates import Rated
from isosgd.samplers.steppers import Number, langevin_


class Sampler(Rated):
    """A `torch.optim.Optimizer` whose steps draw from a posterior.

    The gradients it finds in ``.grad`` must be those of ``mean negative log likelihood + (negative log prior) / N``.

    Args:
        params: named parameters (one group a layer), or groups.
        num_data: N, the number of examples in the data set. Never guessed.
        temperature: T; the target is ``exp(-f / T)`` with f the negative log joint density.
        bias: the relative error of the posterior variance that the step size may cause, when rates are set by `adapt`.
        noise: how gradient noise is estimated: ``gaussian``, ``paired``, ``alpha`` or a `NoiseEstimator`.
        momentum: momentum of that estimate.
        track_every: with an uncentred estimate, take in the gradient of every so many steps.
        generator: where all randomness comes from; saved with the state. Made from torch's seed when not given.
        chains: K when every parameter carries a leading dimension of K independent chains; rates are then ``[K]``.
        foreach: update all tensors of a group in one call.
        capturable: keep rates in tensors on the device, so that a step can be captured in a CUDA graph.
        innovations: ``normal``, ``bits`` (moment-matched, see `isosgd.samplers.innovations`) or ``auto``.
        extra: further settings of a group, from the subclass.
    """

    targets: ClassVar[str] = "exp(-f / T)"

    def __init__(
        self,
        params: ParamsLike,
        *,
        num_data: int,
        temperature: float = 1.0,
        bias: float = 0.02,
        noise: NoiseName | NoiseEstimator = "paired",
        momentum: float | None = None,
        track_every: int = 50,
        generator: torch.Generator | None = None,
        chains: int | None = None,
        foreach: bool = True,
        capturable: bool = False,
        innovations: Innovations = "auto",
        extra: dict[str, Any] | None = None,
    ) -> None:
        check_units(num_data, temperature)
        if not 0 < bias < 1:
            raise ValueError(f"bias = {bias} must lie in (0, 1): the relative error allowed in the posterior variance")
        if innovations not in ("auto", "normal", "bits"):
            raise ValueError(f"innovations = {innovations!r} is unknown; choose 'auto', 'normal' or 'bits'")
        if track_every < 1:
            raise ValueError(f"track_every = {track_every} must be at least 1")
        self.estimator = make_estimator(noise, momentum)
        self.bias, self.track_every, self.chains = bias, track_every, chains
        self.foreach, self.capturable, self.innovations = foreach, capturable, innovations
        counters = {"step": 0, "seen": 0, "vectors": 0, "frozen": False}
        defaults = {"num_data": num_data, "temperature": temperature, **counters, **(extra or {})}
        super().__init__(layer_groups(params), defaults)
        check_groups(self.param_groups, chains)
        self.param_groups = trained_groups(self.param_groups)
        self.generator = make_generator(generator, self.param_groups[0]["params"][0].device)
        self._start_plan()

    @property
    def batched(self) -> bool:  # type: ignore[override]
        """Whether parameters carry a leading chain dimension."""
        return self.chains is not None

    # -- the step -----------------------------------------------------------------------------------------------------

    # Not compiled: a step is host work and random numbers, with buffers that change places.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Tensor] | None = None, *, noise: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        """One step of the chain.

        Args:
            closure: re-evaluates the loss and its gradients.
            noise: the noise vector of this step's minibatch (paired halves), where there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if noise is not None or self._takes_gradient():
            self.observe(noise)
        self._lay_out()
        self._update()
        for group in self.param_groups:
            group["step"] += 1
        if not self._silent:
            self._source.go_ahead()
        return loss

    def _update(self) -> None:
        """Draw the kicks and move the parameters."""
        self._make_plan()
        if not self._silent:
            self._source.fill()
        for params, rate, kicks in self._plan:
            grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
            kick = None if self._silent else kicks
            if self.foreach:
                self._advance(params, grads, rate, kick)
                continue
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                own = rate[i] if isinstance(rate, list) else rate
                self._advance([p], [g], own, None if kick is None else [kick[i]])

    def _takes_gradient(self) -> bool:
        """Whether this step's gradient serves as an (uncentred) noise vector."""
        return not self.estimator.centred and self.param_groups[0]["step"] % self.track_every == 0

    def _advance(
        self, params: list[Tensor], grads: list[Tensor], rate: Number | list[float], kick: list[Tensor] | None
    ) -> None:
        """Move the parameters, by Theorem 1 unless a sampler says otherwise."""
        langevin_(params, grads, rate, kick)

    @property
    def sampling(self) -> bool:
        """Whether the last step makes a draw that counts."""
        return True

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the generator."""
        state = self.generator.get_state() if self._laid_key is None else self._source.state()
        return {**super().state_dict(), "generator": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Estimates keep their own dtype (torch would cast them to the parameter's)."""
        if "generator" not in state_dict:
            raise ValueError(
                "this state has no 'generator': it was not saved by an isosgd sampler and cannot resume a chain"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "generator"})
        order = [p for group in self.param_groups for p in group["params"]]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for p, index in zip(order, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
        self.generator.set_state(state_dict["generator"].cpu())
        self._laid_key = self._last_vectors = None
        self._spectra.clear()
        self._moves = []
