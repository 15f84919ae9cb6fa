"""I-SGD with a Lambda that knows directions: how a `Shaped` Lambda is fed, stepped with and saved.

The shape itself keeps the noise and turns it into Lambda; how large that must be is up to `isosgd.samplers.sizing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isosgd.samplers.groups import Group
from isosgd.samplers.lambdas import GroupLambdas
from isosgd.samplers.rule import Rule
from isosgd.samplers.shaped import Shaped
from isosgd.samplers.sizing import cool, relax, resize
from isosgd.samplers.steppers import Number


class ShapedLambda(GroupLambdas):
    """The part of I-SGD that a shape takes over, where there is one; else lambdas are those of `GroupLambdas`."""

    shaped: Shaped | None
    averaged: bool  # whether innovations are averaged over two steps
    sets: int
    _kept: Tensor | None = None  # innovations of the last step, unless the source keeps them

    def _bind(self, shaped: Shaped, paired: bool, lam: float | None) -> None:
        """Refuse settings that do not go with a shape, and tell it of the parameters."""
        if lam is not None:
            raise ValueError(f"lam = {lam} is one number, structure {shaped.name!r} has many: leave one of them out")
        if not paired or self.scheme != "windowed":
            raise ValueError(
                f"structure {shaped.name!r} is estimated from centred noise in windows: it needs noise='paired' and "
                f"scheme='windowed', not {type(self.estimator).__name__} and {self.scheme!r}"
            )
        if self.batch_size is None or self.batch_size < 2:
            raise ValueError(
                f"structure {shaped.name!r} takes the curvature from n Var(g): pass batch_size=n, not {self.batch_size}"
            )
        for name in ("temperature", "num_data"):
            found = {group[name] for group in self.param_groups}
            if len(found) > 1:
                raise ValueError(f"groups with {name} = {sorted(found)}: structure {shaped.name!r} needs one for all")
        shaped.bind(self.param_groups, self.chains, self.sets)

    # -- the noise ----------------------------------------------------------------------------------------------------

    @property
    def _follows(self) -> tuple[bool, bool]:
        return super()._follows if self.shaped is None else (False, False)

    @torch.no_grad()
    def observe(self, noise: Sequence[Tensor] | None = None) -> None:
        if self.shaped is None:
            super().observe(noise)
            return
        if noise is not None:  # what the base keeps, number by number, a shape knows better
            self._check_noise(noise)
            self.shaped.observe(noise)
            for group in self.param_groups:
                group["seen"] += 1
        if self.shaped.seen >= self.shaped.least:
            self._estimate()

    def forget_noise(self, void: bool = False) -> None:
        super().forget_noise(void)
        if self.shaped is not None:
            self.shaped.forget(void)

    def clipped_share(self, group: Group) -> Tensor:
        if self.shaped is None:
            return super().clipped_share(group)
        clipped = self.shaped.clipped()
        return clipped if self.batched else clipped.squeeze(0)

    # -- Lambda -------------------------------------------------------------------------------------------------------

    def rule(self) -> Rule:
        """How large a shape must be."""
        group = self.param_groups[0]
        assert self.batch_size is not None and self.shaped is not None
        n, t = self.batch_size, group["temperature"]
        return Rule(group["num_data"], n, t, self.bias, self.averaged, self.shaped.kappa)

    def adapt(
        self,
        curvature: Sequence[Number] | None = None,
        rise: float = 2.0,
        prior: Sequence[Tensor] | None = None,
    ) -> None:
        """Lambda from the noise seen and the curvature; it grows at once and shrinks by at most ``rise``.

        Args:
            curvature: the top curvature of ``f / N`` in each group.
            rise: how much rates may rise. With 1 a shape only slows down where the curvature asks for it.
            prior: curvature of the negative log prior for each parameter, which shapes need.
        """
        if self.shaped is None:
            super().adapt(curvature, rise)
            return
        resize(self.shaped, self.rule(), curvature, rise, prior)
        self._report_rates(self.shaped)

    def relax(self, stretch: Tensor) -> None:
        """Take back what a new Lambda was stretched too much: it was measured against the old one.

        Args:
            stretch: the true curvature over the new H in the direction where the old one was too small by most.
        """
        assert self.shaped is not None
        relax(self.shaped, self.rule(), stretch)
        self.cool()

    def cool(self) -> None:
        """Slow down where noise that the shape does not express would raise the temperature."""
        assert self.shaped is not None
        cool(self.shaped)
        self._report_rates(self.shaped)

    def _report_rates(self, shaped: Shaped) -> None:
        rule = self.rule()
        for group, rate in zip(self.param_groups, shaped.group_rates().unbind(-1), strict=True):
            group["rate"] = self.number(rate if self.batched else rate.squeeze(0))
            # Without a temperature nothing moves: whatever Lambda is, its rate is zero, and its inverse infinite.
            group["lam"] = self.number(rule.scale / torch.as_tensor(group["rate"]))

    # -- the step -----------------------------------------------------------------------------------------------------

    @property
    def _extra(self) -> int:
        return 0 if self.shaped is None else self.shaped.extra

    def _update(self) -> None:
        if self.shaped is None:
            super()._update()
            return
        if not self.shaped.known and self.warming:
            return  # no estimate, no step
        if not self.shaped.known:
            raise RuntimeError("Lambda is not known yet: let isosgd.sample warm up, or call adapt() after observe()")
        params = [p for laid in self._laid for p in laid.params]
        if len(params) != sum(len(group["params"]) for group in self.param_groups):
            raise RuntimeError("a parameter has no gradient: shapes of Lambda that know the geometry need all of them")
        xi = self._averaged() if self.averaged and not self._source.averaged else self._source.fill()
        gradient = self.shaped.flatten([p.grad for p in params])  # type: ignore[misc]
        moved = self.shaped.displace_(self.shaped.tensors(), gradient, xi.view(self.shaped.chains, -1))
        parts = torch.split(moved.to(xi.dtype), self.shaped.sizes, -1)
        torch._foreach_sub_(params, [part.reshape(p.shape) for part, p in zip(parts, params, strict=True)])

    @property
    def _last(self) -> Tensor | None:
        """Innovations of the last step."""
        return self._source.last if self._laid_key is not None and self._source.averaged else self._kept

    @_last.setter
    def _last(self, value: Tensor | None) -> None:
        if self._laid_key is not None and self._source.averaged:
            self._source.last = value
        else:
            self._kept = value

    def _lay_out(self) -> None:
        before, source = self._laid_key, None if self._laid_key is None else self._source
        super()._lay_out()
        if self.shaped is not None and self._laid_key != before:
            last = source.last if source is not None and source.averaged else self._kept
            self._source.averaged = self._source.bits and self.rule().averaged
            self._last = last

    def _averaged(self) -> Tensor:
        """The mean of fresh innovations and those of the last step."""
        xi = self._source.fill()
        last = xi.clone() if self._kept is None else self._kept  # the first step has no other
        if self.capturable:  # a captured step knows tensors by their place
            mean = torch.lerp(last, xi, 0.5)
            self._kept = last.copy_(xi)
            return mean
        self._kept, self._source.out = xi, last  # they change places, so that nothing is copied
        return last.lerp_(xi, 0.5)

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.shaped is not None:
            state["structure"] = {"name": self.shaped.name, "shape": self.shaped.state(), "last": self._last}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("structure")
        if (saved or {}).get("name") != (self.shaped.name if self.shaped is not None else None):
            raise ValueError("the state was saved with another structure: make the sampler with the same one")
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "structure"})
        if self.shaped is not None and saved is not None:
            self.shaped.load(saved["shape"])
            self._last = None if saved["last"] is None else saved["last"].clone()
