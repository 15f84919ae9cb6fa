"""Draws from a loop of the user's own, collected into a `Posterior`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from isosgd.data.sources import as_tensors
from isosgd.errors import DivergedError
from isosgd.posterior import Posterior
from isosgd.samplers import METHODS, Sampler
from isosgd.samplers.half import wide
from isosgd.samplers.injection import capturing
from isosgd.samplers.shards import Shards
from isosgd.sampling.settings import versions
from isosgd.sampling.stored import load
from isosgd.store import Manifest, Writer
from isosgd.store.manifest import specs_of
from isosgd.store.writer import STORED
from isosgd.target import Likelihood, Params, Target
from isosgd.target.modules import unwrapped
from isosgd.target.priors import WeightDecay
from isosgd.warmup.reports import GroupReport, WarmupReport

MOST_DRAWS = 1000


class Collector:
    """Keeps draws as a loop's optimizer takes its steps: nothing is to be called but `posterior`, at the end.

    A step that is replayed from a CUDA graph is one for which ``optimizer.replayed()`` is called.

    Draws are taken while ``optimizer.draws_ready``, and are equally far apart. In memory there are at most ``draws``:
    when there are more, every other one is dropped and those to come are twice as far apart.

    Args:
        optimizer: a sampler of this library, which takes the steps.
        model: the network that it moves; within DDP or `torch.compile`, too.
        target: what is sampled, for predictions and diagnostics: a `Target` made from the model; or leave it out and
            give the likelihood.
        likelihood: as of `Target.from_module`, with scales of noise that are known. The prior is that of the
            optimizer's ``weight_decay``.
        keep_every: steps between draws; ``auto`` begins with what the warm-up found.
        draws: kept in memory, at most.
        store: a folder to write draws to as they come, all of them; `isosgd.load` reads it. Draws of a model that is
            sharded over ranks (`fully_shard`) must have one: all ranks make the same calls, parameters are put
            together one after the other, and rank 0 writes them.
        store_dtype: dtype in which they are written; their own by default, which is float32 for parameters in bfloat16:
            draws are the float32 numbers that the optimizer steps.

    Example:
        >>> from isosgd import ISGD, likelihoods
        >>> _ = torch.manual_seed(0)
        >>> model, x = nn.Linear(1, 1), torch.randn(200, 1)
        >>> y = 2 * x + torch.randn(200, 1)
        >>> optimizer = ISGD(model.parameters(), num_data=200, batch_size=50, warmup=2000)
        >>> collector = Collector(optimizer, model, likelihood=likelihoods.Gaussian(1.0), keep_every=5)
        >>> while len(collector) < 20:
        ...     rows = torch.randint(200, (50,))
        ...     optimizer.zero_grad()
        ...     (0.5 * (model(x[rows]) - y[rows]).square().mean()).backward()
        ...     _ = optimizer.step()
        >>> posterior = collector.posterior((x, y))
        >>> posterior.draws["weight"].shape
        torch.Size([1, 20, 1, 1])
    """

    def __init__(
        self,
        optimizer: Sampler,
        model: nn.Module,
        target: Target | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        keep_every: int | Literal["auto"] = "auto",
        draws: int = MOST_DRAWS,
        store: str | Path | None = None,
        store_dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> None:
        if not isinstance(optimizer, Sampler):
            raise TypeError(f"optimizer of type {type(optimizer).__name__}: pass a sampler of isosgd, such as ISGD")
        if keep_every != "auto" and (isinstance(keep_every, bool) or not isinstance(keep_every, int) or keep_every < 1):
            raise ValueError(f"keep_every = {keep_every!r} must be an integer of at least 1, or 'auto'")
        if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
            raise ValueError(f"draws = {draws!r} must be an integer of at least 2")
        if target is not None and likelihood is not None:
            raise ValueError("target= and likelihood= both say what is sampled: pass one of them")
        model = unwrapped(model)
        self.optimizer, self.model, self.keep_every, self.most = optimizer, model, keep_every, draws
        self._shards = optimizer.whole if isinstance(optimizer.whole, Shards) else None
        whole_of = {} if self._shards is None else {id(part): p for p, part in self._shards.part_of.items()}
        moved = {
            id(whole_of.get(id(p), p)): float(g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
        }
        self._params = {name: p for name, p in model.named_parameters() if id(p) in moved}
        if len(self._params) < len(moved):
            raise ValueError(
                f"the optimizer moves {len(moved)} tensors, and {len(self._params)} of them are parameters of this "
                "model: pass the model whose parameters it was given"
            )
        if likelihood is not None:
            prior = WeightDecay({name: moved[id(p)] for name, p in self._params.items()})
            n = optimizer.param_groups[0]["num_data"]
            target = Target.from_module(
                model, likelihood, prior, num_data=n, sampled=lambda name, p: name in self._params
            )
        self.target = target
        if target is not None:
            names = target.constrain(target.initial())
            if unknown := sorted(set(names) ^ set(self._params)):
                raise ValueError(
                    f"the target and the loop differ in {unknown[0]!r}: the loop samples the parameters of the model "
                    "alone. Give the scale of the noise, such as likelihoods.Gaussian(0.5), and a prior whose scales "
                    "are fixed"
                )
        tracked = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
        self._buffers = dict(model.named_buffers()) if tracked else {}
        self._draws: list[Params] = []
        self._with: list[Params] = []
        self._taken: list[int] = []  # after which steps
        self._count, self._due, self._last, self._spacing = 0, 0, 0, keep_every
        self._began = time.monotonic()
        self._writer: Writer | None = None
        self._folder = None if store is None else Path(store)
        if self._shards is not None and store is None:
            raise ValueError("draws of a model that is sharded over ranks do not stay in memory: give store=")
        if store is not None:
            if store_dtype not in STORED:
                raise ValueError(f"store_dtype = {store_dtype!r} is unknown; choose 'float32', 'bfloat16' or None")
            if keep_every == "auto" and (optimizer.given or (optimizer.own is not None and optimizer.own.by_scheme)):
                raise ValueError(
                    "a store keeps every draw, and at a rate of your own nothing says how many: keep_every="
                )
            drawn = {
                name: torch.empty(p.shape, dtype=torch.float32 if p.dtype == torch.bfloat16 else p.dtype, device="meta")
                for name, p in self._params.items()
            }
            manifest = Manifest(
                self._info(), {"loop": type(optimizer).__name__}, specs_of(drawn, STORED[store_dtype]),
                specs_of(self._buffers),
            )  # fmt: skip
            fixed = {} if target is None else {**target.frozen, **target.buffers}
            if self._leads:
                self._writer = Writer.create(Path(store), manifest, fixed)
        elif store_dtype is not None:
            raise ValueError("store_dtype goes with store=, the folder of a run: give that too")
        self._hook = optimizer.register_step_post_hook(lambda *_: self._step())

    def __len__(self) -> int:
        return self._count

    @property
    def _leads(self) -> bool:
        """Whether this process keeps the draws."""
        return self._shards is None or self._shards.mesh.get_local_rank() == 0

    @property
    def spacing(self) -> int:
        """Steps between draws."""
        if self.keep_every != "auto":
            return self.keep_every
        own = self.optimizer.own
        return own.spacing if own is not None and own.curvatures else 1  # schemes and rates of users measure none

    def _step(self) -> None:
        optimizer = self.optimizer
        if capturing():
            return  # nothing has moved
        step = optimizer.param_groups[0]["step"]
        if step <= self._last:
            self._go_back(step - 1)
        self._last = step
        if not optimizer.draws_ready or step < self._due:
            return
        if self.keep_every == "auto":
            self.keep_every = self.spacing
        self._due = step + optimizer.steps_to(self.keep_every)
        self._keep()

    def _go_back(self, step: int) -> None:
        """An earlier state of the optimizer was loaded: draws after it are of a chain that was given up."""
        left = sum(taken <= step for taken in self._taken)
        if self._folder is not None and left < len(self._taken):
            raise ValueError(
                f"the optimizer went back from step {self._last} to {step}, and {self._folder} holds "
                f"{len(self._taken) - left} draws of the steps between: close() this collector and make one with "
                f"another store=; isosgd.load(...).select(draws=slice({left})) are the draws before"
            )
        self._draws, self._with, self._taken = self._draws[:left], self._with[:left], self._taken[:left]
        self._count = left
        if left and self.keep_every != "auto":
            self._due = self._taken[-1] + self.optimizer.steps_to(self.keep_every)
        else:
            self._due, self.keep_every = 0, self._spacing

    @torch.no_grad()
    def _keep(self) -> None:
        draw = {name: self._whole(p) for name, p in self._params.items()}
        if not all(bool(torch.isfinite(x).all()) for x in draw.values()):
            error = DivergedError(
                f"after {self._count} draws the chain is not finite any more: the draws so far are in .draws of this "
                "error. A smaller lr, where it is yours, or a smaller bias= would help",
                step=self.optimizer.param_groups[0]["step"], group=None, state={},
            )  # fmt: skip
            error.draws = {name: x[0] for name, x in _stacked(self._draws).items()}
            raise error
        buffers = {name: x.detach().to("cpu", copy=True) for name, x in self._buffers.items()}
        self._count += 1
        self._taken.append(self.optimizer.param_groups[0]["step"])
        if self._writer is not None:
            self._writer.manifest.complete = False  # until the next `posterior`
            one, other = ({name: x.unsqueeze(0) for name, x in part.items()} for part in (draw, buffers))
            self._writer.add(0, one, other, self.optimizer.param_groups[0]["step"])
        if self._folder is not None:
            return
        self._draws.append(draw)
        self._with.append(buffers)
        if len(self._draws) > self.most:
            assert self.keep_every != "auto"
            if len(self._draws) % 2 == 0:  # this one stays, so that the next is twice as far from it
                self._due = self.optimizer.param_groups[0]["step"] + self.optimizer.steps_to(2 * self.keep_every)
            self._draws, self._with, self._taken = self._draws[1::2], self._with[1::2], self._taken[1::2]
            self._count, self.keep_every = len(self._draws), 2 * self.keep_every

    def _whole(self, p: Any) -> Tensor:
        """A copy of a parameter; of one that is sharded all ranks put it together, and rank 0 has it."""
        if self._shards is None:
            value = p.detach()
            if p.dtype == torch.bfloat16:  # the sampler holds the rest of its float32
                value = wide(value.view(torch.int16), self.optimizer.half.low(p))
            return cast(Tensor, value.to("cpu", copy=True))
        whole: Tensor = p.detach().full_tensor()
        # Where it is not finite, its sum is not: every rank raises then.
        return whole.to("cpu", copy=True) if self._leads else whole.sum().cpu()

    def close(self) -> None:
        """Collect no more, and let go of the store."""
        self._hook.remove()
        writer, self._writer = self._writer, None
        if writer is not None:
            with writer.closed_on_error():
                writer.finish(self._info())
            writer.close()

    def posterior(self, data: Any = None, *, chains: Any = ()) -> Posterior:
        """The draws so far; collecting goes on until `close`.

        Args:
            data: the training data, for ``summary`` and ``trust``.
            chains: collectors of other loops over the same model and data; each is a further chain.
        """
        every = [self, *chains]
        for one in every:
            if not len(one):
                raise ValueError(
                    f"there is no draw yet: after {one.optimizer.param_groups[0]['step']} steps the optimizer is "
                    f"{one.optimizer.phase!r} (see its draws_ready); take more steps"
                )
        for name in ("method", "temperature", "num_data"):
            if len(found := {one._info()[name] for one in every}) > 1:
                raise ValueError(f"chains= of one posterior have one {name}, not {sorted(found)}: collect them apart")
        if self._folder is not None:
            if len(every) > 1:
                raise ValueError("chains= goes with draws in memory: read each store by isosgd.load")
            if self._writer is not None:
                self._writer.finish(self._info())
            if self._shards is not None:
                self._shards.total(torch.zeros(1, device=self._shards.mesh.device_type))  # all is written
            return load(self._folder, self.target, data=data)
        length = min(len(one) for one in every)
        parts = [_stacked([d for one in every for d in getattr(one, kept)[-length:]], len(every))
                 for kept in ("_draws", "_with")]  # fmt: skip
        infos = [one._info() for one in every]
        info = infos[0] | {
            name: [item for one in infos for item in one[name]] for name in ("keep_every", "warmup", "rates")
        }
        info |= {"chains": len(every), "chain_indices": list(range(len(every))), "draws": length}
        info |= {"gradients": sum(one["gradients"] for one in infos)}
        return Posterior(self.target, parts[0], info, data if data is None else as_tensors(data) or data, parts[1])

    def _info(self) -> dict[str, Any]:
        """How the draws came about."""
        sampler = self.optimizer
        first = sampler.param_groups[0]
        kinds = {kind: name for name, kind in METHODS.items()}
        report = self._report()
        return {
            "method": kinds.get(type(sampler), type(sampler).__name__),
            "options": {},
            "temperature": first["temperature"],
            "density": "(likelihood * prior)^(1/T) of the loss in the loop",
            "num_data": first["num_data"],
            "batch_size": sampler.batch_size,
            "draws": self._count,
            "chains": 1,
            "chain_indices": [0],
            "sets": 1,
            "engine": "a loop of the user's own",
            "keep_every": [self.spacing],
            "seed": None,
            "warmup": [report.as_dict()],
            "rates": [{group["name"]: _number(group["rate"]) for group in sampler.param_groups}],
            "gradients": first["step"],
            "target": {} if self.target is None else self.target.describe(),
            "versions": versions(),
            "complete": True,
            "seconds": time.monotonic() - self._began,
        }

    def _report(self) -> WarmupReport:
        own, groups = self.optimizer.own, self.optimizer.param_groups
        if own is None or own.by_scheme or not own.curvatures:
            return WarmupReport(True, "", 0, 0, None, [])
        composite = [self.optimizer.friction * g["temperature"] / g["num_data"] for g in groups]
        reports = [
            GroupReport(g["name"], rate, c / rate if rate else float("inf"), h, rate * h)
            for g, c, h, rate in zip(
                groups, composite, own.curvatures, [_number(g["rate"]) for g in groups], strict=True
            )
        ]
        name = own.structure or None
        return WarmupReport(
            not own.reason, own.reason, own.spent, own.optimisation, own.spacing, reports, structure=name
        )


def _number(rate: Any) -> float:
    return float("nan") if rate is None else float(rate)


def _stacked(draws: list[Params], chains: int = 1) -> dict[str, Tensor]:
    """Draws of chains, one after the other, as ``[chains, draws, *shape]``."""
    if not draws:
        return {}
    found = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    return {name: x.reshape(chains, -1, *x.shape[1:]) for name, x in found.items()}
