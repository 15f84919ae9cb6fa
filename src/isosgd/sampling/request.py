"""`RunRequest`, the checked arguments of `sample`: what they are compared with when a stored run is resumed."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isosgd.data.sources import Data, DataSets, Tensors, Transform, Transformed, as_tensors
from isosgd.differences import as_lines, differences
from isosgd.engine.schedule import Start, start_of
from isosgd.errors import SamplingWarning, check_integer
from isosgd.samplers import METHODS
from isosgd.sampling.settings import versions
from isosgd.sampling.stopping import MOST_DRAWS
from isosgd.store import Manifest, Writer
from isosgd.store.files import dtype_name, plain, raw, unpack
from isosgd.store.manifest import specs_of
from isosgd.store.writer import STORED, check_new, make_folder
from isosgd.target import Params, Target
from isosgd.target.batches import tensors_of, tree_map

PROBED = 64  # rows at which the loss is compared
PLAIN = str | int | float | bool | None
Info = dict[str, Any]


@dataclass
class RunRequest:
    """The checked arguments of `sample`, as far as a store needs them."""

    target: Target
    data: Data
    init: Start
    device: torch.device | None
    settings: Info
    options: Info
    store: str | Path | None
    resume: bool
    store_dtype: str | None
    held_out: Any = None
    transform: Transform | None = None
    starts: Sequence[Mapping[str, Tensor]] = ()

    def __post_init__(self) -> None:
        if self.store_dtype not in STORED:
            raise ValueError(f"store_dtype = {self.store_dtype!r} is unknown; choose 'float32', 'bfloat16' or None")
        if self.store is None and (self.resume or self.store_dtype is not None):
            raise ValueError("resume and store_dtype go with store=, the folder of a run: give that too")
        check_integer("seed", self.settings["seed"], 0)
        if self.store is not None and not isinstance(self.store, str | Path):
            raise TypeError(f"store = {self.store!r} must be the path of a folder")

    @property
    def tensors(self) -> Tensors | None:
        """The data, if they are tensors of one data set."""
        return None if isinstance(self.data, DataSets) else as_tensors(self.data)

    @property
    def count(self) -> int:
        """Number of chains."""
        return int(self.settings["chains"]) * (self.data.sets if isinstance(self.data, DataSets) else 1)

    def of_chain(self, chain: int) -> RunRequest:
        """The request of one chain, whose run is a part of the store."""
        store = None if self.store is None else Path(self.store) / f"part-{chain:04d}"
        settings = {**self.settings, "chains": 1, "first_chain": chain}
        return replace(
            self, settings=settings, store=store, starts=() if chain else self.starts
        )  # stored once for all parts

    def start(self, chain: int) -> Params:
        """Free parameters at which a chain starts."""
        return self.target.initial(start_of(self.init, chain), device=self.device)

    def identity(self) -> Info:
        """What must not change when the run is resumed."""
        first = self.settings.get("first_chain", 0)
        starts = [self.start(first + k) for k in range(self.count)]
        return {
            "settings": {
                **self.settings,
                "store_dtype": self.store_dtype,
                "options": {name: described(value) for name, value in self.options.items()},
                "opaque": [name for name, value in self.options.items() if not is_plain(value)],
            },
            "data": data_identity(self.data),
            "target": target_identity(self.target, self.data, starts, self.transform),
            "device": next(iter(starts[0].values())).device.type,
            **({} if self.held_out is None else {"held_out": inputs_identity(self.held_out)}),
        }

    def check_store(self) -> None:
        """Check that a run can begin in the folder."""
        if self.store is not None:
            make_folder(Path(self.store))
            if not self.resume:
                check_new(Path(self.store))

    def open(self, info: Info) -> Writer | None:
        """Begin the run, or continue the one that is there; None if that has all draws.

        Args:
            info: of a run that begins.
        """
        assert self.store is not None
        folder, identity = Path(self.store), self.identity()
        if not self.resume or not Manifest.begun(folder):
            natural = self.target.constrain(self.target.initial(start_of(self.init, 0)))
            tensors = specs_of(natural, STORED[self.store_dtype])
            fixed = {**self.target.frozen, **self.target.buffers}
            return Writer.create(folder, Manifest(info, identity, tensors), fixed, self.starts)
        if parts := Manifest.read(folder).parts:
            raise ValueError(
                f"{folder} holds a run of {len(parts)} parts, merged or drawn by ranks: in one process they go on by "
                "isosgd.resume(store, target, data, draws=...)"
            )
        writer = Writer.reopen(folder)  # lock first: checks must hold while this process writes
        with writer.closed_on_error():
            return self._going_on(writer, identity)

    def _going_on(self, writer: Writer, identity: Info) -> Writer | None:
        """The writer, after checking that the stored run is this one; None, closed, if it has all draws."""
        manifest, folder, now = writer.manifest, writer.folder, unpack(plain(identity))
        same = differences(_without_length(complete_identity(manifest.identity), now), _without_length(now, now))
        found = [*self._cut_short(manifest, now), *same]
        if found:
            raise ValueError(
                f"{folder} cannot be resumed:{as_lines(found)}\ngive what it was begun with, or another store="
            )
        longer = manifest.identity.get("settings") != now["settings"]
        if manifest.complete and not longer:
            writer.close()
            return None
        then = {**manifest.info.get("versions", {}), "threads": manifest.info.get("threads")}
        changed = list(differences(then, {**versions(), "threads": torch.get_num_threads()}))
        if changed:
            warnings.warn(
                f"{folder} goes on where it was, but other versions may round otherwise, so that its draws need not be "
                f"bit for bit those of a run that was never stopped: {'; '.join(changed)}",
                SamplingWarning,
                stacklevel=4,
            )
        if longer:
            writer.extend(identity)
        return writer

    def _cut_short(self, manifest: Manifest, now: Info) -> list[str]:
        """Why the run cannot be extended to the new number of draws; empty if it can."""
        then, asked = manifest.identity.get("settings", {}), now["settings"]
        old, new = then.get("draws"), asked["draws"]
        if (old, then.get("budget")) == (new, asked.get("budget")):
            return []
        change = f"settings.draws was {old!r} and is {new!r}"
        shorter = "a run can be extended, not cut short (posterior.select shows some of its draws)"
        if asked["method"] not in METHODS:
            return [f"{change}, but {asked['method']} makes its draws all at once: begin another run"]
        if new != "auto":
            there = max((shard.stop for shard in manifest.shards), default=0) if old == "auto" else old
            return [f"{change}: {shorter}"] if new < there else []
        if old != "auto":
            return [f"{change}, which watches predictions from the first draw on: give a number"]
        before, after = (MOST_DRAWS if s.get("budget") is None else s["budget"] for s in (then, asked))
        return [f"settings.budget was {before} and is {after}: {shorter}"] if after < before else []


def complete_identity(identity: Info) -> Info:
    """An identity whose target says what the temperature acts on; older folders have only the option."""
    target, settings = identity.get("target"), identity.get("settings")
    describes = target.get("describes") if isinstance(target, dict) else None
    options = settings.get("options") if isinstance(settings, dict) else None
    if not (isinstance(target, dict) and isinstance(describes, dict) and isinstance(options, dict)):
        return identity
    if options.get("tempered") != "likelihood":
        return identity
    return {**identity, "target": {**target, "describes": {**describes, "tempered": "likelihood"}}}


def _without_length(identity: Info, now: Info) -> Info:
    """An identity without what may change when a run is extended."""
    settings = {k: v for k, v in identity.get("settings", {}).items() if k not in ("draws", "budget")}
    watched = ("held_out",) if now["settings"]["draws"] != "auto" else ()
    return {**{k: v for k, v in identity.items() if k not in watched}, "settings": settings}


# -- identity: what must not change when a run is resumed -------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Whether a manifest can hold a value: text and numbers, and lists and dicts of them.

    Example:
        >>> is_plain({"rates": [0.1, None]}), is_plain([object()])
        (True, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and is_plain(item) for key, item in value.items())
    return isinstance(value, PLAIN)


def described(value: Any) -> Any:
    """A value for a manifest: itself, or its text without memory addresses."""
    if is_plain(value):
        return value
    name = getattr(value, "__qualname__", None)
    if callable(value) and name:
        return f"{getattr(value, '__module__', '')}.{name}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def fingerprint(x: Tensor) -> dict[str, Any]:
    """Shape, dtype and SHA-256 of a tensor's bytes."""
    content: Any = raw(x).numpy()
    return {"shape": list(x.shape), "dtype": dtype_name(x.dtype), "sha256": hashlib.sha256(content).hexdigest()}


def data_identity(data: Data) -> dict[str, Any]:
    """Fingerprints of tensors; of a loader its type and lengths."""
    if isinstance(data, DataSets):
        return {"tensors": [fingerprint(t) for t in data.tensors], "rows": fingerprint(data.rows)}
    tensors = as_tensors(data)
    if tensors is not None:
        return {"tensors": tree_map(fingerprint, tensors if isinstance(tensors, dict) else list(tensors))}
    source = getattr(data, "dataset", None)
    return {
        "loader": type(data).__name__,
        "batches": _length(data),
        "dataset": None if source is None else type(source).__name__,
        "examples": _length(source),
    }


def inputs_identity(given: Any) -> list[dict[str, Any]]:
    """Fingerprints of one or several inputs."""
    every = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple | list) else (given,)
    return [fingerprint(torch.as_tensor(x)) for x in every]


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except TypeError:
        return None


def target_identity(
    target: Target, data: Data, starts: list[Params], transform: Transform | None = None
) -> dict[str, Any]:
    """Description of a target, fingerprints of its tensors and starts, and its loss and gradient at some data.

    Args:
        starts: free parameters of each chain.
    """
    found: dict[str, Any] = {
        "describes": target.describe(),
        "frozen": {name: fingerprint(x) for name, x in target.frozen.items()},
        "start": [{name: fingerprint(x)["sha256"] for name, x in start.items()} for start in starts],
    }
    tensors = as_tensors(data.set(0) if isinstance(data, DataSets) else data)
    if tensors is not None:
        batch = tree_map(lambda t: t[:PROBED], tensors)
        first = tensors_of(tensors)[0]
        batch = Transformed(transform, 0, first.device)(batch)
        checked = target._checked
        with target.using(target.initial_buffers(None, starts[0])):
            loss, gradients = target.gradient(starts[0], batch, len(first))
        target._checked = checked  # the first checked batch is to be a whole minibatch
        norms = torch.stack([g.double().norm().cpu() for g in gradients])
        found["loss"], found["gradient"] = float(loss), float(norms.square().sum().sqrt())
    return found
