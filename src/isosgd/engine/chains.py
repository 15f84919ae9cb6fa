"""Chains: a target, parameters, a sampler, and a stream of minibatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from isosgd.data.sources import Batches, TensorBatches
from isosgd.engine.compiled import bytes_of
from isosgd.engine.curvature import Curvature, Stiffness
from isosgd.engine.gradients import Found, Layout, Many, Parted, Single, stacked
from isosgd.engine.ranks import Ranks
from isosgd.errors import DivergedError, OutOfTimeError, RankError
from isosgd.geometry import Full, Geometry
from isosgd.samplers import ISGD, Sampler
from isosgd.samplers.hmc import HMC
from isosgd.target import Params, Target
from isosgd.target.batches import batch_length, finite_values

if TYPE_CHECKING:
    from isosgd.engine.graph import GraphGradients

REFRESH_BATCHES, REFRESH_SIZE = 5, 500  # minibatches over which BatchNorm statistics of a draw are averaged
TOGETHER = 20  # noise vectors that are measured at one place by one call ...
MOST_TOGETHER = 1 << 28  # ... whose minibatches have so many bytes at most
SCALE = 0.5  # lower bound of an example's information about the logarithm of a noise scale

MakeSampler = Callable[[list[dict[str, Any]], torch.Generator, int | None], Sampler]
"""Makes the sampler of chains from parameter groups, a generator, and the number of chains."""


@dataclass(frozen=True)
class Heat:
    """Cycles that find their rates by heating.

    Attributes:
        draws: to take.
        end: when to end, by `time.monotonic`.
        reached: what heating has come to: its ``rates``, at which the loss has risen, its ``speed`` in steps a second,
            and the ``reason`` if it went wrong; empty before.
    """

    draws: int
    end: float
    reached: dict[str, Any]


class Chains:
    """Chains that run side by side: their state, and the steps they take.

    Numbers are tensors ``[chains]`` or ``[chains, groups]``. A chain whose loss or gradient is not finite stays where
    it is and is dropped (`failures`); the others go on.

    Args:
        starts: free parameters of each chain, leaves that require gradients.
        batches: the minibatches; with a leading chain dimension if chains run together.
        seed: of the sampler and of the curvature probes.
        together: whether they run in one batched computation. Otherwise there is one chain, whose parameters have no
            chain dimension, so that any model will do.
        compile_after: number of gradients after which those of chains together are compiled; None for never.
        buffers: the network's buffers, shared by these chains; copies that belong to them.
        given_buffers: names of the buffers that the user gave for any chain of the run.
        ranks: processes that share the minibatches of this one chain; None for this process alone.
    """

    def __init__(
        self,
        target: Target,
        starts: Sequence[Params],
        batches: Batches,
        num_data: int,
        make_sampler: MakeSampler,
        seed: int,
        together: bool = False,
        compile_after: int | None = None,
        buffers: Params | None = None,
        given_buffers: Collection[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        if not together and len(starts) > 1:
            raise ValueError(f"{len(starts)} chains that are not together: make one Chains for each")
        self.target, self.batches, self.num_data = target, batches, num_data
        self.count = len(starts)
        self.many = self.count if together else None
        self.ranks = ranks
        labels = target.layers(starts[0])
        names: dict[str, list[str]] = {}
        for name in starts[0]:
            names.setdefault(labels[name], []).append(name)
        # Parameters in the order of the groups, which may interleave in the model.
        one = {name: starts[0][name] for members in names.values() for name in members}
        self.layout = Layout(one)
        if self.many is None:
            self.params = one
        else:
            self.params = stacked([{name: start[name] for name in one} for start in starts])
        self.leaves = list(self.params.values())
        self.labels = [labels[name] for name in one]
        groups = [{"name": label, "params": [self.params[m] for m in members]} for label, members in names.items()]
        device = self.leaves[0].device
        self.sampler = make_sampler(groups, torch.Generator(device=device).manual_seed(seed), self.many)
        self.sampler.driven = True
        self.prior_weight = target.prior_weight(one, self.temperature)
        self.differentiate: Single | Many | Parted
        if self.many is None:
            single = Single(target, num_data, self.prior_weight)
            cut = isinstance(batches, TensorBatches)
            self.differentiate = single if ranks is None else Parted(single, ranks, cut)
        else:
            self.differentiate = Many(target, num_data, self.layout, compile_after, self.prior_weight)
        sizes = (sum(p.numel() for p in group["params"]) // self.count for group in self.sampler.param_groups)
        self.slots = [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(sizes, initial=0))]
        flat = self.flat(self.leaves)
        self.curvature = Curvature(flat, self.slots, self.temperature, num_data, seed + 1)
        self.stiffness = Stiffness(flat, seed + 2)
        self.scaled = self.curvature  # until `enter_metric`
        self._seed = seed
        self.gradients = self.probes = 0  # of each chain
        self.loss = torch.full((self.count,), torch.nan, device=device)
        self.alive = torch.ones(self.count, dtype=torch.bool, device=device)
        if isinstance(self.sampler, ISGD):
            self.sampler.independent_batches = batches.independent  # otherwise noise cancels between batches
        if self.geometry is not None:
            self.geometry.alive = self.alive
        self.failures: dict[int, DivergedError] = {}
        self.batch: Any = None
        self.buffers: Params = {} if buffers is None else buffers
        self.given_buffers = frozenset(given_buffers)
        self.own_buffers: list[str] | None = None  # names of those kept with draws, once there was a draw
        self.trained = False  # whether they start at a trained network, which needs no initial optimisation
        self.warmed = False  # whether they continue from chains whose noise and curvature were measured
        self.deadline = self.latest = math.inf  # of the warm-up, by `time.monotonic`: to end early, and to give up
        self.heating: Heat | None = None
        self._before: list[Tensor] | None = None  # the last gradient, if noise is the difference of two
        self.graph: GraphGradients | None = None  # minibatches and gradients as CUDA graphs
        self.graph_unsupported = ""
        self.keys: Tensor | None = None  # of the fused step's random numbers, kept for resuming
        self._suspect = torch.zeros(1, dtype=torch.bool, device=device)  # a gradient was not finite; not yet handled

    def log_to(self, log: Callable[[str], None]) -> None:
        """Send the compiler's log lines there."""
        if isinstance(self.differentiate, Many):
            self.differentiate.evaluate.log = log

    @property
    def compiled(self) -> str:
        """Suffix of the engine's name: whether gradients were compiled."""
        if not isinstance(self.differentiate, Many):
            return ""
        evaluate = self.differentiate.evaluate
        if evaluate.unsupported_reason:
            return f", not compiled ({evaluate.unsupported_reason})"
        return ", compiled" if evaluate.is_due else ""

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors like the parameters as one ``[chains, d]``, detached."""
        return torch.cat([t.detach().reshape(self.count, -1) for t in tensors], dim=-1)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """``[chains, d]`` as tensors like the parameters."""
        return list(self.layout.views(flat if self.many is not None else flat[0]).values())

    # -- gradients and steps ------------------------------------------------------------------------------------------

    def evaluate(self, split: bool = False, forgiving: bool | None = None, batch: Any = None) -> list[Tensor] | None:
        """Put gradients on the next minibatch into ``.grad``; with ``split`` return the noise vector.

        Args:
            split: whether to measure the noise.
            forgiving: keep a chain whose gradient is not finite: its loss becomes infinite, its gradient zero. The
                default of HMC, which then rejects the trajectory.
            batch: minibatch to use instead of the next one.
        """
        forgiving = self.hmc is not None if forgiving is None else forgiving
        if self.successive:
            loss, gradients, noise, finite = self._successive(split, batch)
        else:
            self.batch = self.batches.next(mixed=split) if batch is None else batch
            loss, gradients, noise = self._differentiated(split)
            finite = self._finite(loss, gradients)
        if self.graph is not None:  # do not wait for the device here: `check_finite` does so later
            if not forgiving:
                self._suspect |= ~finite
        elif not bool(finite.all()):
            if not forgiving and bool((self.alive & ~finite).any()):
                self.drop(self.alive & ~finite, loss, gradients)
            loss = torch.where(finite, loss, torch.inf)
            gradients = self._mask(gradients, finite)
            noise = None if noise is None else self._mask(noise, finite)
        self.loss = loss
        self.gradients += 1
        for leaf, g in zip(self.leaves, gradients, strict=True):
            leaf.grad = g
        return noise

    @property
    def successive(self) -> bool:
        """Whether noise vectors are differences of successive gradients, and not of halves of a minibatch."""
        return self.graph is not None or self.target.ties_examples

    def forget_gradient(self) -> None:
        """Make no noise vector of the last gradient, since the chains have moved or will move."""
        self._before = None

    def _next_batch(self) -> Any:
        return self.batches.next() if self.graph is None else self.graph.next()

    def _at_batch(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """Loss, gradients, and whether they are finite, at the last minibatch."""
        if self.graph is not None and self.batch is self.graph.batch:
            return self.graph()
        loss, gradients, _ = self._differentiated()
        return loss, gradients, self._finite(loss, gradients)

    def _differentiated(self, split: bool = False) -> Found:
        """Gradients at the last minibatch."""
        with self._naming_errors([self.batch]):
            return self.differentiate(self.params, self.batch, split)

    @contextmanager
    def _naming_errors(self, batches: Sequence[Any]) -> Iterator[None]:
        """What a loader yields later may be wrong: an error then says what is."""
        try:
            yield
        except (torch.OutOfMemoryError, RankError):
            raise
        except (RuntimeError, IndexError, ValueError):
            if self.many is None and self.target.module is not None:
                for batch in batches:
                    self.target.check(self.params, batch)
            raise

    def check_finite(self) -> None:
        """Drop a chain whose gradients were not finite since the last check; check that ranks of a chain agree."""
        if self.ranks is not None:
            self.ranks.check_equal(self.leaves)
        if self.graph is not None and bool(self._suspect):
            self.diverged()

    def diverged(self) -> None:
        """Drop the only chain, whose loss or gradient is not finite."""
        self._suspect.zero_()
        self.drop(torch.ones_like(self.alive), torch.full_like(self.loss, math.nan), [])

    def _successive(self, split: bool, batch: Any) -> tuple[Tensor, list[Tensor], list[Tensor] | None, Tensor]:
        """Loss, gradients, the difference of two successive gradients over sqrt(2), and whether all is finite.

        Used where a minibatch cannot be halved: BatchNorm in training mode has another potential on the halves, and
        CUDA graphs have steps of one shape. The step in between adds a share of order ``(rate * curvature)^2`` to the
        noise vector. If there is no previous gradient, a second minibatch is taken.
        """
        if split and self._before is None:
            self.batch = self._next_batch()
            self._before = self._at_batch()[1]
            self.gradients += 1
        size = batch_length(self.batch)
        self.batch = self._next_batch() if batch is None else batch
        loss, gradients, finite = self._at_batch()
        noise = None
        if split and self._before is not None and size == batch_length(self.batch):  # a short batch is noisier
            noise = list(torch._foreach_sub(gradients, self._before))
            torch._foreach_mul_(noise, math.sqrt(0.5))
        self._before = gradients
        return loss, gradients, noise, finite

    def observe_noise(self) -> bool:
        """Show the sampler the noise of the next minibatch, without a step; returns whether there was any.

        A batch of one example cannot be split: its gradient is no centred noise vector, and is skipped.
        """
        noise, centred = self.evaluate(split=True), self.sampler.estimator.centred
        if centred and noise is None:
            return False
        self.sampler.observe(noise if centred else None)
        return True

    @torch.no_grad()
    def noise_vectors(self, count: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Losses and noise of so many minibatches where the chains are, by few calls of the library if it can."""
        one = self.differentiate.one if isinstance(self.differentiate, Single) else None
        while count > 0:
            batches = [self.batches.next(mixed=True)]
            if one is not None and one.fits(self.flat(self.leaves), tuple(t.unsqueeze(0) for t in batches[0])):
                most = MOST_TOGETHER // bytes_of(batches[0]) if len(batches[0][0]) > 1 else 1
                batches += [self.batches.next(mixed=True) for _ in range(min(count, TOGETHER, most) - 1)]
            together = None if one is None else self._noise_together(one, batches)
            yield from self._noise_in_turn(batches) if together is None else together
            count -= len(batches)

    def _noise_together(self, one: Many, batches: list[Any]) -> list[tuple[Tensor, list[Tensor]]] | None:
        """Losses and noise by one call; None if minibatches differ in shape, or something is not finite."""
        if len(batches) == 1 or len({tuple((t.shape, t.dtype) for t in batch) for batch in batches}) > 1:
            return None
        theta = self.flat(self.leaves).expand(len(batches), -1)
        with self._naming_errors(batches):
            losses, _, noise = one.flat(theta, tuple(torch.stack(parts) for parts in zip(*batches, strict=True)), True)
        assert noise is not None
        if not bool(torch.isfinite(losses + noise.sum(-1)).all()):
            return None
        self.gradients += len(batches)
        return [(losses[k : k + 1], self.parts(noise[k : k + 1])) for k in range(len(batches))]

    def _noise_in_turn(self, batches: list[Any]) -> list[tuple[Tensor, list[Tensor]]]:
        """The same by one call each; a batch of one example gives none."""
        found = [(self.evaluate(split=True, batch=batch), self.loss) for batch in batches]
        return [(loss, noise) for noise, loss in found if noise is not None]

    def step(self, split: bool = False) -> None:
        """One gradient and one step of the sampler; with ``split`` the noise is measured too."""
        tracking = self.tracking
        noise = self.evaluate(split or tracking is not None)
        if noise is not None and not split and tracking is not None:
            tracking.track_level(tracking.flatten(noise))
        self.advance(noise if split else None)

    @property
    def tracking(self) -> Full | None:
        """The sampler's Lambda, where it follows the level of the noise from step to step."""
        return self.geometry if isinstance(self.geometry, Full) and self.geometry.tracks_level else None

    def advance(self, noise: list[Tensor] | None) -> None:
        """One step of the sampler, from the gradients just evaluated."""
        saved = self.snapshot() if self.failures else None
        if self.hmc is not None:
            self.hmc.energy = self.energy()
        self.sampler.step(noise=noise)
        if saved is not None:  # dropped chains stay where they were
            self.restore(saved, ~self.alive)

    @torch.no_grad()
    def likelihood_gradients(self) -> list[Tensor]:
        """The gradients just evaluated without the prior's part."""
        score = self.target.prior_score if self.many is None else vmap(self.target.prior_score)
        scores = score(self.params)
        grads: list[Tensor] = [leaf.grad for leaf in self.leaves]  # type: ignore[misc]
        known = self._mask([scores[name] for name in self.params], torch.isfinite(self.loss))  # else there are none
        return list(torch._foreach_add(grads, known, alpha=self.prior_weight / self.num_data))

    @torch.no_grad()
    def change(self, move: Tensor) -> Tensor:
        """Change of the gradients on the last minibatch when the parameters move, all flat."""
        before = self.flat([leaf.grad for leaf in self.leaves])  # type: ignore[misc]
        here, last = self.snapshot(), self._before
        self.shift(move)
        after = self.flat(self._at_batch()[1])
        self.restore(here)
        self._before = last
        return torch.nan_to_num(after - before, posinf=0.0, neginf=0.0)

    def probe_curvature(self) -> None:
        """One power iteration on the last minibatch; costs one gradient."""
        geometry = self.geometry
        if self.in_metric:
            self.scaled.probe(
                self.whiten(self.flat(self.leaves), -0.5), lambda x: self.whiten(self.change(self.whiten(x)))
            )
        elif geometry is None or not geometry.known:
            self.curvature.probe(self.flat(self.leaves), self.change)
        elif geometry.axes and self.probes % 2:
            self.stiffness.probe_axis(geometry, self.change)
        else:
            self.stiffness.probe(geometry, self.change)
        self.gradients += 1
        self.probes += 1

    # -- rates --------------------------------------------------------------------------------------------------------

    @property
    def in_metric(self) -> bool:
        """Whether curvature is measured in the metric of a sampler that has one."""
        return self.sampler.whitening is not None and self.sampler.whitening.entered

    def enter_metric(self) -> bool:
        """Measure curvature in the sampler's metric from now on, if it has one. It must have seen noise."""
        if self.sampler.whitening is not None:
            self.sampler.whitening.entered = True
            like = self.flat(self.leaves)
            self.scaled = Curvature(like, self.slots, self.temperature, self.num_data, self._seed + 3)
        return self.in_metric

    def whiten(self, x: Tensor, power: float = 0.5) -> Tensor:
        """``P^power`` times flat vectors."""
        assert self.sampler.whitening is not None
        return self.flat(self.sampler.whitening.whiten(self.parts(x), power))

    @property
    def temperature(self) -> float:
        """The temperature that is sampled at."""
        temperature: float = self.sampler.param_groups[0]["temperature"]
        return temperature

    @property
    def geometry(self) -> Geometry | None:
        """The sampler's Lambda, where it knows directions."""
        return self.sampler.geometry

    @property
    def hmc(self) -> HMC | None:
        """The sampler, where it is HMC on all of the data."""
        return self.sampler if isinstance(self.sampler, HMC) else None

    @property
    def follows_noise(self) -> bool:
        """Whether there is gradient noise for the sampler to follow."""
        return self.sampler.estimator.centred and self.hmc is None

    @property
    def has_seen_noise(self) -> bool:
        """Whether the sampler knows the noise that its next step takes into account; without a warm-up it may not."""
        noise = self.sampler.noise
        return not (self.follows_noise and any(noise.uses)) or self.geometry is not None or noise.begun

    def energy(self) -> Tensor:
        """Negative log density of each chain from the last loss, which must be that of all data."""
        return (self.num_data * self.loss - self.log_prior()) / self.temperature

    @property
    def level(self) -> Tensor:
        """The loss of each chain: on the last minibatch, or on all data at the end of the last trajectory."""
        if self.hmc is None or self.hmc.home is None:
            return self.loss
        return self.temperature * self.hmc.home_energy / self.num_data

    @property
    def current(self) -> Params:
        """The parameters to draw; with HMC its last draw while a trajectory is under way."""
        if self.hmc is None or self.hmc.home is None:
            return self.params
        drawn = self.hmc.drawn
        return self.layout.views(drawn.to(self.leaves[0].dtype) if self.many is not None else drawn[0])

    def each(self, number: Any) -> Tensor:
        """A group's number as one for each chain."""
        return torch.as_tensor(number, device=self.alive.device).double().expand(self.count)

    def rates(self) -> Tensor:
        """Rate of each group, ``[chains, groups]``."""
        return torch.stack([self.each(group["rate"]) for group in self.sampler.param_groups], dim=-1)

    def curvatures(self) -> Tensor:
        """Top curvature of each group; with a Lambda that knows directions, the one that ``rate * curvature`` needs."""
        if self.geometry is None or not self.geometry.known:
            return (self.scaled if self.in_metric else self.curvature).values().double()
        return self.stiffness.value(self.geometry).double().unsqueeze(-1) / self.rates()

    def adapt(self, curvatures: Tensor, rise: float = 2.0) -> None:
        """Set the sampler's rates from the noise it has seen and the curvature ``[chains, groups]``."""
        columns = curvatures.to(self.leaves[0].device, torch.float32)
        numbers = list((columns if self.many is not None else columns[0]).unbind(-1))
        if isinstance(self.sampler, ISGD) and self.geometry is not None:
            prior = self._known_curvature() if rise > 1.0 else None
            self.sampler.adapt(numbers, rise, prior)
            if rise > 1.0 and self.stiffness.probes:
                self.sampler.relax(self.stiffness.value(self.geometry) / self.geometry.unit_rate)
        else:
            self.sampler.adapt(numbers, rise)

    def change_temperature(self, temperature: float) -> None:
        """Set rates for another temperature from the known noise and curvature, and adapt to both again."""
        self.warmed = True
        for group in self.sampler.param_groups:
            group["temperature"], group["frozen"] = temperature, False
        if isinstance(self.sampler, ISGD) and self.geometry is not None:
            self.geometry.change_temperature(self.sampler.rule())
            self.sampler.limit_excess()
        else:
            self.adapt(self.curvatures(), math.inf)
        if isinstance(self.sampler, ISGD):
            self.sampler.restart_scheme()

    @property
    def structure(self) -> str | None:
        """The shape of I-SGD's Lambda, by name."""
        return self.sampler.structure.name if isinstance(self.sampler, ISGD | HMC) else None

    def conditioning(self) -> dict[str, float] | None:
        """Condition numbers left by simpler shapes of Lambda; None if they are not known."""
        return self.geometry.conditioning() if isinstance(self.geometry, Full) and self.geometry.known else None

    def decide(self) -> bool:
        """Whether the sampler moves on to another shape of Lambda, since the present one is not worth its cost."""
        return isinstance(self.sampler, ISGD) and self.sampler.decide()

    def shape(self) -> None:
        """Shape Lambda by the noise alone; HMC does not depend on its size."""
        assert isinstance(self.sampler, ISGD | HMC)
        self.sampler.adapt(rise=math.inf, prior=self._known_curvature())

    def _known_curvature(self) -> list[Tensor]:
        """Curvature of f that is known without measuring: that of the prior, and of the logarithms of noise scales.

        A scale that fits has an information of about 2 for each example. If it is far too large, its measured curvature
        vanishes, and the chain would take a huge step.
        """
        found = self.target.prior_curvature(self.params, self.many is not None)
        scales = set(self.target.noise_scales())
        prior = dict(zip(self.params, torch._foreach_mul(found, self.prior_weight), strict=True))
        return [h + SCALE * self.num_data if name in scales else h for name, h in prior.items()]

    # -- densities and draws ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_likelihood(self, batch: Any) -> Tensor:
        """Log likelihood of the examples of a batch, ``[chains, n]``."""
        if self.many is None:
            return self.target.log_likelihood(self.current, batch).unsqueeze(0)
        return vmap(self.target.log_likelihood)(self.current, batch)

    @torch.no_grad()
    def log_prior(self) -> Tensor:
        """Log prior of the target times `prior_weight`, as in the loss, ``[chains]``."""
        one = self.differentiate.one if isinstance(self.differentiate, Single) else None
        many = self.differentiate if isinstance(self.differentiate, Many) and self.target.batched else one
        if many is not None and self.target.has_flat_prior:
            theta = self.flat(self.leaves)
            return self.prior_weight * many.flat_prior(theta).log_prob(theta)
        if self.many is None:
            return self.prior_weight * self.target.log_prior(self.params).unsqueeze(0)
        return self.prior_weight * vmap(self.target.log_prior)(self.params)

    @torch.no_grad()
    def natural(self, copy: bool = True) -> Params:
        """Natural parameters ``[chains, *shape]``; without ``copy`` valid until the next step."""
        found = self.target.constrain(self.current)
        kept = {name: x.detach().clone() if copy else x.detach() for name, x in found.items()}
        return {name: x.view((self.count, *self.layout.shapes[name])) for name, x in kept.items()}

    @torch.no_grad()
    def draw_buffers(self, number: int) -> Params:
        """Buffers kept with draw ``number``, ``[chains, *shape]``: those that differ from the target's, and statistics.

        BatchNorm layers in training mode normalise by the minibatch while sampling. Predictions need statistics of the
        data at the draw: averages over minibatches that no step uses.
        """
        found = self.fixed_buffers()
        module = self.target.module
        if module is None or not module.statistics:
            return found
        natural = self.target.constrain(self.current)
        each = []
        for k in range(self.count):
            own = natural if self.many is None else {name: x[k] for name, x in natural.items()}
            fresh = self.batches.fresh(number, REFRESH_BATCHES, REFRESH_SIZE, k)
            each.append(module.refreshed(own, fresh))
        return found | {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def fixed_buffers(self) -> Params:
        """Buffers that are not the target's, ``[chains, *shape]``: given by ``init``, or changed by forward passes.

        Their names are determined once.
        """
        if self.own_buffers is None:
            known, given = self.target.buffers, self.given_buffers
            changed = [n for n, x in self.buffers.items() if n in given or not torch.equal(x.to(known[n]), known[n])]
            self.own_buffers = changed
        return {name: self.buffers[name].expand(self.count, *self.buffers[name].shape) for name in self.own_buffers}

    def snapshot(self) -> list[Tensor]:
        """A copy of where the chains are."""
        return [leaf.detach().clone() for leaf in self.leaves]

    @torch.no_grad()
    def restore(self, saved: Sequence[Tensor], chains: Tensor | None = None) -> None:
        """Bring chains back to a `snapshot`: all of them, or those in a mask."""
        if chains is not None:
            saved = [torch.where(self.wide(chains, leaf), s, leaf) for s, leaf in zip(saved, self.leaves, strict=True)]
        torch._foreach_copy_(self.leaves, list(saved))
        self._before = None

    def merged(self, here: Sequence[Tensor], there: Sequence[Tensor], chains: Tensor) -> list[Tensor]:
        """A snapshot that is ``there`` for the chains in a mask and ``here`` for the others."""
        return [torch.where(self.wide(chains, b), b, a) for a, b in zip(here, there, strict=True)]

    @torch.no_grad()
    def shift(self, move: Tensor) -> None:
        """Move the parameters, flat."""
        torch._foreach_add_(
            self.leaves, [part.to(x.dtype) for part, x in zip(self.parts(move), self.leaves, strict=True)]
        )

    # -- failures -----------------------------------------------------------------------------------------------------

    def wide(self, mask: Tensor, like: Tensor) -> Tensor:
        """One number for each chain in a shape that broadcasts against a parameter."""
        return mask.view(-1, *([1] * (like.dim() - 1))) if self.many is not None else mask.view(())

    def _mask(self, tensors: Sequence[Tensor], chains: Tensor) -> list[Tensor]:
        return [torch.where(self.wide(chains, t), t, 0.0) for t in tensors]

    def _finite(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Which chains have a finite loss and gradient."""
        if self.many is None:
            return torch.isfinite(torch.stack([loss[0], *torch._foreach_norm(list(gradients))]).sum()).unsqueeze(0)
        return torch.isfinite(loss + sum(g.reshape(self.count, -1).sum(-1) for g in gradients)) & self.alive

    def give_up(self, stage: str) -> NoReturn:
        """Raise, since ``max_seconds`` is over in a ``stage`` of the warm-up, after which no draw is possible yet."""
        natural, taken = self.natural(), f"{self.gradients} gradient{'s' if self.gradients != 1 else ''}"
        for k in set(range(self.count)) - self.failures.keys():
            self.failures[k] = OutOfTimeError(
                f"max_seconds was over after {taken} of the warm-up ({stage}), before a first draw was possible: give "
                "more time or fewer chains",
                step=self.gradients,
                group=None,
                state={name: x[k].clone() for name, x in natural.items()},
            )
        raise next(reversed(self.failures.values()))

    def drop(self, chains: Tensor, loss: Tensor, gradients: Sequence[Tensor]) -> None:
        """Drop chains before a bad gradient moves them; raise if none is left."""
        natural = self.natural()
        at = (
            ""
            if finite_values(self.batch)
            else ". The minibatch has values that are NaN or infinite: mend or drop those"
        )
        for k in chains.nonzero().flatten().tolist():
            parts = [g if self.many is None else g[k] for g in gradients]
            bad = [label for label, g in zip(self.labels, parts, strict=False) if not bool(torch.isfinite(g).all())]
            what = f"the gradient of group {bad[0]!r} is not finite" if bad else f"the loss is {float(loss[k])}"
            if not bad and bool(torch.isfinite(loss[k])):
                what, bad = "the gradient overflows", [self.labels[0]]
            self.failures[k] = DivergedError(
                f"after {self.gradients} gradients {what}{at}. The state before it is kept in .state. If it happens at "
                "the start, check init and data; later, a longer warm-up, a smaller bias= or a lower temperature help.",
                step=self.gradients,
                group=bad[0] if bad else None,
                state={name: x[k].clone() for name, x in natural.items()},
            )
        self.alive = self.alive & ~chains
        if self.geometry is not None:
            self.geometry.alive = self.alive
        if not bool(self.alive.any()):
            raise next(iter(self.failures.values()))
