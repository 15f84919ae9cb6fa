"""`Collector` keeps draws of a loop of the user's own, and makes a `Posterior` of them."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isosgd.data.sources import as_tensors
from isosgd.differences import as_lines, check_ranks, differences
from isosgd.engine.ranks import Replicas
from isosgd.errors import DivergedError, check_integer, warn_caller
from isosgd.posterior import Posterior
from isosgd.samplers import METHODS, Sampler
from isosgd.samplers.half import wide
from isosgd.samplers.injection import capturing
from isosgd.samplers.shards import Shards, is_sharded
from isosgd.sampling.request import fingerprint
from isosgd.sampling.settings import versions
from isosgd.sampling.stored import load
from isosgd.store import Manifest, StoreError, Writer
from isosgd.store.files import pack, plain, unpack
from isosgd.store.manifest import BUFFER, DTYPE_NAMES, NAME, File, specs_of
from isosgd.store.writer import SHARED, STORED, new_file, new_state, read_state
from isosgd.target import Likelihood, Params, Target
from isosgd.target.modules import unwrapped
from isosgd.target.priors import WeightDecay
from isosgd.warmup.reports import GroupReport, WarmupReport

MOST_DRAWS = 1000
SAME_MODEL = (
    "all ranks must make the same call, with the same model: seed torch before it is made, or have all ranks load its "
    "state_dict, before fully_shard"
)


class Collector:
    """Keeps draws while the optimizer of a training loop takes its steps. Only `posterior` is called, at the end.

    Steps replayed from a CUDA graph count when ``optimizer.replayed()`` is called.

    Draws are taken while ``optimizer.draws_ready``, at equal distances. Memory holds at most ``draws``: when there are
    more, every other one is dropped and the distance doubles.

    Args:
        optimizer: a sampler of this library.
        model: the network that it steps, possibly within DDP or `torch.compile`. Replicas of DDP are compared at each
            draw; it is an error if ranks draw different noise.
        target: a `Target` made from the model, for predictions and diagnostics; or give the likelihood instead.
        likelihood: as of `Target.from_module`, with fixed noise scales. The prior is the optimizer's ``weight_decay``.
        keep_every: steps between draws; ``auto`` starts with what the warm-up has measured.
        draws: the most draws in memory.
        store: a folder to write all draws to; read it with `isosgd.load`. Draws of a model sharded over ranks
            (`fully_shard`) need one: all ranks make the same calls, and each writes its rows of a draw before the next
            step.
        resume: continue the draws in ``store``, if there are any. Call `restore`, or load the optimizer's
            ``state_dict``, before the first step. Draws after that state are dropped and taken again.
        store_dtype: dtype in which draws are written; their own by default, float32 for parameters in bfloat16.

    Example:
        >>> from isosgd import ISGD, likelihoods
        >>> _ = torch.manual_seed(0)
        >>> model, x = nn.Linear(1, 1), torch.randn(200, 1)
        >>> y = 2 * x + torch.randn(200, 1)
        >>> optimizer = ISGD(model.parameters(), num_data=200, batch_size=50, warmup=800)
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
        resume: bool = False,
        store_dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> None:
        if not isinstance(optimizer, Sampler):
            raise TypeError(f"optimizer of type {type(optimizer).__name__}: pass a sampler of isosgd, such as ISGD")
        self.optimizer, self.keep_every, self.most = optimizer, keep_every, draws
        self._folder = None if store is None else Path(store)
        self._draws: list[Params] = []
        self._with: list[Params] = []
        self._taken: list[int] = []  # step of each draw
        self._count, self._due, self._spacing = 0, 0, keep_every
        self._last: float = 0  # last step; infinity if the store may have draws after the optimizer's step
        self._began = time.monotonic()
        self._writer: Writer | None = None
        given = dict(keep_every=keep_every, draws=draws, resume=resume, store_dtype=store_dtype)
        # Ranks that share a model all raise if one of them has a bad argument, or if arguments differ.
        check_ranks(
            optimizer.whole.together(lambda: given | self._take(model, target, likelihood, resume, store_dtype)),
            SAME_MODEL,
        )
        if store is not None:
            manifest = self._manifest(store_dtype)
            self._specs = manifest.tensors | {BUFFER + name: spec for name, spec in manifest.buffers.items()}
            self._taken = optimizer.whole.together(lambda: self._open(manifest, resume))[0]
            self._count, self._last = len(self._taken), math.inf if self._taken else 0
            with nullcontext() if self._writer is None else self._writer.closed_on_error():
                check_ranks(optimizer.whole.together(self._see), SHARED)
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: self._step()),
            # Draws before a saved state are on disk, in files that end there.
            optimizer.register_state_dict_pre_hook(lambda _: None if self._writer is None else self._writer.flush()),
        ]

    def __len__(self) -> int:
        return self._count

    def _take(
        self,
        model: nn.Module,
        target: Target | None,
        likelihood: str | Likelihood | None,
        resume: bool,
        store_dtype: str | None,
    ) -> dict[str, Any]:
        """Check the arguments and set what is sampled; returns what must be equal on all ranks that share a model."""
        optimizer, keep_every, draws, in_memory = self.optimizer, self.keep_every, self.most, self._folder is None
        if keep_every != "auto":
            check_integer("keep_every", keep_every, 1, ", or 'auto'")
        check_integer("draws", draws, 2)
        if target is not None and likelihood is not None:
            raise ValueError("target= and likelihood= both say what is sampled: pass one of them")
        ddp = next((m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)
        group = getattr(ddp, "process_group", None)
        self.model = model = unwrapped(model)
        self._shards = optimizer.whole if isinstance(optimizer.whole, Shards) else None
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._replicas = Replicas(group) if several and self._shards is None else None
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
        if self._shards is not None and in_memory:
            raise ValueError("draws of a model that is sharded over ranks do not stay in memory: give store=")
        if resume and in_memory:
            raise ValueError("resume=True goes with store=, the folder of a run: give that too")
        if store_dtype is not None and in_memory:
            raise ValueError("store_dtype goes with store=, the folder of a run: give that too")
        if store_dtype not in STORED:
            raise ValueError(f"store_dtype = {store_dtype!r} is unknown; choose 'float32', 'bfloat16' or None")
        by_scheme = optimizer.given or (optimizer.own_warmup is not None and optimizer.own_warmup.by_scheme)
        if not in_memory and keep_every == "auto" and by_scheme:
            raise ValueError("a store keeps every draw, and at a rate of your own nothing says how many: keep_every=")
        manifest = self._manifest(store_dtype)
        return {"identity": manifest.identity, **_specs(manifest), **self._whole_on_each_rank()}

    def _whole_on_each_rank(self) -> dict[str, Any]:
        """Fingerprints of what every rank that shares a model has a copy of.

        A rank has only its rows of sharded parameters, so it cannot be seen whether these come from one model. But a
        target holds the whole model, and buffers are not sharded, except that BatchNorm statistics are of the rank's
        examples.
        """
        if self._shards is None:
            return {}
        layers = {name: m for name, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
        buffers = {n: x for n, x in self.model.named_buffers() if n.rpartition(".")[0] not in layers}
        start = {} if self.target is None else {**self.target.initial(), **self.target.frozen}
        return {
            kind: {name: fingerprint(x) for name, x in tensors.items() if not is_sharded(x)}
            for kind, tensors in (("target", start), ("buffers of the model", buffers))
        }

    def _manifest(self, store_dtype: str | None) -> Manifest:
        """The manifest of a new store."""
        drawn = {
            name: torch.empty(p.shape, dtype=torch.float32 if p.dtype == torch.bfloat16 else p.dtype, device="meta")
            for name, p in self._params.items()
        }
        info, sampler, kept = self._info(), self.optimizer, self._shards
        of = {id(p): group for group in sampler.param_groups for p in group["params"]}
        groups = {name: of[id(p if kept is None else kept.part_of[p])] for name, p in self._params.items()}
        settings = {"method": info["method"], "seed": info["seed"]}
        for unit in ("temperature", "num_data", "weight_decay"):
            values = {name: group[unit] for name, group in groups.items()}
            settings[unit] = values if len(set(values.values())) > 1 else next(iter(values.values()))
        identity = {"loop": type(sampler).__name__, "settings": settings, "target": {"describes": info["target"]}}
        return Manifest(info, identity, specs_of(drawn, STORED[store_dtype]), specs_of(self._buffers))

    def _open(self, manifest: Manifest, resume: bool) -> list[int]:
        """On rank 0, begin or continue the store; returns the steps of its draws."""
        folder, target = self._folder, self.target
        if folder is None or self.optimizer.whole.rank:
            return []
        if not (resume and Manifest.begun(folder)):
            fixed = {} if target is None else {**target.frozen, **target.buffers}
            self._writer = Writer.create(folder, manifest, fixed)
            return []
        if Manifest.read(folder).parts:
            raise ValueError(f"{folder} holds merged runs, which a loop cannot extend: give another store=")
        writer = Writer.reopen(folder)
        with writer.closed_on_error():
            then, now = map(_compared, (writer.manifest, manifest))
            if not (then["target"] and now["target"]):  # a loop may have no target
                del then["target"], now["target"]
            if found := list(differences(then, now)):
                raise ValueError(
                    f"{folder} holds draws of another loop:{as_lines(found)}\ngive what it was begun with, or another "
                    "store="
                )
        self._writer = writer
        return [shard.step for shard in writer.manifest.shards for _ in range(shard.start, shard.stop)]

    def _see(self) -> dict[str, Any]:
        """Check that this rank sees the folder; returns the hash of its manifest, which must be equal on all ranks."""
        assert self._folder is not None
        if not (self._folder / NAME).exists():
            raise StoreError(f"rank {self.optimizer.whole.rank} does not see {self._folder / NAME}: {SHARED}")
        return {NAME: {"sha256": sha256((self._folder / NAME).read_bytes()).hexdigest()}}

    @property
    def spacing(self) -> int:
        """Steps between draws."""
        if self.keep_every != "auto":
            return self.keep_every
        own = self.optimizer.own_warmup
        return (
            own.spacing if own is not None and own.curvatures else 1
        )  # with schemes or rates of the user nothing is measured

    def _step(self) -> None:
        optimizer = self.optimizer
        if capturing():
            return  # capturing a graph takes no step
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
        """The optimizer has loaded an earlier state: drop the draws after it."""
        left, had = sum(taken <= step for taken in self._taken), len(self._taken)
        if self._folder is not None and had and not (step or self.optimizer.resumed):
            raise ValueError(
                f"{self._folder} holds {had} draws, and the optimizer is at its beginning: call restore() before the "
                "first step, or load the state that you saved, optimizer.load_state_dict(...); or give another store="
            )
        if self._folder is not None and left < had:
            self.optimizer.whole.together(lambda: None if self._writer is None else self._writer.cut(left))
        self._draws, self._with, self._taken = self._draws[:left], self._with[:left], self._taken[:left]
        self._count, self._due = left, 0
        self.keep_every = self.spacing if left else self._spacing
        if left:
            group = {**self.optimizer.param_groups[0], "step": step}
            since = self._taken[-1] if group.get("start") is None else step  # in cycles draws are due at fixed steps
            self._due = since + self.optimizer.schedule.steps_to(group, self.spacing)
        if self._folder is not None and left < had:
            warn_caller(
                f"{had - left} draws of {self._folder} are dropped: they are of steps after {step}, from which the "
                "optimizer goes on"
            )
        if self._folder is not None and left and self._due <= step:
            raise ValueError(
                f"{self._folder} ends at step {self._taken[-1]} and the optimizer goes on at step {step}: the draws "
                "between are missing. Load the state of another step, or give another store="
            )

    @torch.no_grad()
    def _keep(self) -> None:
        draw, whole = {name: self._copied(p) for name, p in self._params.items()}, self.optimizer.whole
        bad = any(not torch.isfinite(x).all() for x in draw.values())
        if whole.largest(torch.tensor(float(bad), device=next(iter(self._params.values())).device)):
            error = DivergedError(
                f"after {self._count} draws the chain is not finite any more: the draws so far are in .draws of this "
                "error. A smaller lr, where it is yours, or a smaller bias= would help",
                step=self.optimizer.param_groups[0]["step"], group=None, state={},
            )  # fmt: skip
            error.draws = {name: x[0] for name, x in _stacked(self._draws).items()}
            raise error
        buffers = {name: x.detach().to("cpu", copy=True) for name, x in self._buffers.items()}
        step = self.optimizer.param_groups[0]["step"]
        if self._replicas is not None:
            self._replicas.compare(step, draw.values(), (p.grad for p in self._params.values()))
        if self._writer is not None:
            self._writer.manifest.complete = False  # until the next `posterior`
        if self._shards is not None:
            self._write_rows(draw, buffers, step)
        elif self._writer is not None:
            one, other = ({name: x.unsqueeze(0) for name, x in part.items()} for part in (draw, buffers))
            self._writer.add(0, one, other, step)
        self._count += 1
        self._taken.append(step)
        if self._folder is not None:
            return
        self._draws.append(draw)
        self._with.append(buffers)
        if len(self._draws) > self.most:
            assert self.keep_every != "auto"
            if len(self._draws) % 2 == 0:  # keep this draw; the next is twice as far from it
                self._due = self.optimizer.param_groups[0]["step"] + self.optimizer.steps_to(2 * self.keep_every)
            self._draws, self._with, self._taken = self._draws[1::2], self._with[1::2], self._taken[1::2]
            self._count, self.keep_every = len(self._draws), 2 * self.keep_every

    def _copied(self, p: Any) -> Tensor:
        """A CPU copy of a parameter, or of this rank's rows of it."""
        value = p.detach() if self._shards is None else self._shards.part_of[p].detach()
        if p.dtype == torch.bfloat16:  # the sampler holds the lower half of the float32
            value = wide(value.view(torch.int16), self.optimizer.half.low(p))
        return cast(Tensor, value.to("cpu", copy=True))

    def _write_rows(self, draw: Params, buffers: Params, step: int) -> None:
        """Write this rank's rows; when all ranks have, rank 0 adds the files to the manifest."""
        folder, whole = self._folder, self.optimizer.whole
        assert folder is not None
        every = draw if whole.rank else draw | {BUFFER + name: x for name, x in buffers.items()}
        stored = {name: x[None, None].to(DTYPE_NAMES[self._specs[name].stored]) for name, x in every.items()}
        name = f"draws-{self._count:06d}-{whole.rank:04d}.safetensors"
        files = [File(**about) for about in whole.together(lambda: asdict(new_file(folder, name, stored)))]
        whole.together(lambda: None if self._writer is None else self._writer.add_files(files, step))

    def checkpoint(self, more: Any = None) -> None:
        """Write all that the loop needs to continue from here to the store, replacing the last checkpoint.

        That is the state of the optimizer, the sampled parameters, the model's buffers, and ``more``. All ranks of a
        sharded model make this call, and each writes its part; the last checkpoint counts until all have.

        Args:
            more: anything that `restore` is to return, such as the state of the generator of minibatches: dicts, lists,
                numbers, text and tensors.
        """
        if self._folder is None:
            raise ValueError("a checkpoint is written to the store: give store=")
        folder, whole, writer = self._folder, self.optimizer.whole, self._writer
        number = whole.together(self._next_number)[0]
        state = {"optimizer": self.optimizer.state_dict(), "model": self._held(), "more": more}
        name = f"checkpoint-{number:06d}-{whole.rank:04d}.safetensors"
        written = whole.together(lambda: asdict(new_state(folder, name, *pack(state))))
        whole.together(lambda: None if writer is None else writer.mark_files([File(**about) for about in written]))

    def _next_number(self) -> int:
        if self._writer is None and not self.optimizer.whole.rank:
            raise ValueError("this collector is closed, and writes no checkpoint: make another one with resume=True")
        return 0 if self._writer is None else self._writer.manifest.number

    @torch.no_grad()
    def restore(self) -> Any:
        """Restore model and optimizer from the last `checkpoint`, before the first step.

        Draws after it are dropped at the next step and taken again. As many ranks as wrote the checkpoint must call
        this.

        Returns:
            The ``more`` of `checkpoint`; None if there is no checkpoint.
        """
        folder, whole = self._folder, self.optimizer.whole
        if folder is None:
            raise ValueError("a checkpoint is read from the store: give store=, and resume=True")
        found = Manifest.read(folder).checkpoints
        self.optimizer.resumed = True  # also without a checkpoint
        if not found:
            return None
        if len(found) != whole.ranks:
            raise ValueError(
                f"the checkpoint in {folder} is of {len(found)} ranks, and there are {whole.ranks}: go on with as many"
            )
        states: list[Any] = []
        whole.together(lambda: states.append(read_state(folder, found[whole.rank])))
        (state,) = states
        for name, x in self._held().items():
            x.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["more"]

    def _held(self) -> Params:
        """Sampled parameters, or this rank's rows of them, and buffers."""
        of = {} if self._shards is None else self._shards.part_of
        return {**dict(self.model.named_buffers()), **{name: of.get(p, p).detach() for name, p in self._params.items()}}

    def close(self) -> None:
        """Stop collecting, and release the store."""
        for hook in self._hooks:
            hook.remove()
        writer, self._writer = self._writer, None
        if writer is not None:
            with writer.closed_on_error():
                writer.finish(self._info())
            writer.close()

    def posterior(self, data: Any = None, *, chains: Any = ()) -> Posterior:
        """The draws so far; collecting goes on until `close`.

        Args:
            data: the training data, for ``summary`` and ``trust``.
            chains: collectors of other loops over the same model and data, as further chains.
        """
        every = [self, *chains]
        for one in every:
            if one._replicas is not None:
                one._replicas.look()
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
            info = self._info()
            self.optimizer.whole.together(lambda: None if self._writer is None else self._writer.finish(info))
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
        if len(every) > 1:
            info["seed"] = [one["seed"] for one in infos]
        return Posterior(self.target, parts[0], info, data if data is None else as_tensors(data) or data, parts[1])

    def _info(self) -> dict[str, Any]:
        """How the draws were made."""
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
            "seed": sampler.generator.initial_seed(),
            "warmup": [report.as_dict()],
            "rates": [{group["name"]: _number(group["rate"]) for group in sampler.param_groups}],
            "gradients": first["step"],
            "target": {} if self.target is None else self.target.describe(),
            "versions": versions(),
            "complete": True,
            "seconds": time.monotonic() - self._began,
        }

    def _report(self) -> WarmupReport:
        own, groups = self.optimizer.own_warmup, self.optimizer.param_groups
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


def _specs(manifest: Manifest) -> dict[str, Any]:
    """Names, shapes and dtypes of a draw, to compare."""
    return {
        kind: {name: asdict(spec) for name, spec in specs.items()}
        for kind, specs in (("tensors", manifest.tensors), ("buffers", manifest.buffers))
    }


def _compared(manifest: Manifest) -> dict[str, Any]:
    """What must not change when a loop continues its store."""
    identity = unpack(plain(manifest.identity))
    settings = {name: value for name, value in identity.get("settings", {}).items() if name != "seed"}
    about = {"optimizer": identity.get("loop"), "target": identity.get("target", {}).get("describes")}
    return {**about, "settings": settings, **_specs(manifest)}


def _number(rate: Any) -> float:
    return float("nan") if rate is None else float(rate)


def _stacked(draws: list[Params], chains: int = 1) -> dict[str, Tensor]:
    """Draws of chains, one after the other, as ``[chains, draws, *shape]``."""
    if not draws:
        return {}
    found = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    return {name: x.reshape(chains, -1, *x.shape[1:]) for name, x in found.items()}
