"""Runs on the disk, opened: to read what is there, or to go on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from isosgd.data.sources import Data, DataSets, Transform, as_tensors
from isosgd.engine.schedule import Start, start_of
from isosgd.errors import SamplingWarning
from isosgd.posterior import Posterior
from isosgd.sampling.identity import (
    data_identity,
    described,
    differences,
    fingerprint,
    inputs_identity,
    is_plain,
    target_identity,
)
from isosgd.sampling.settings import versions
from isosgd.store import Manifest, Shards, StoredDraws, StoreError, Writer
from isosgd.store.draws import Damaged, check_file
from isosgd.store.manifest import specs_of
from isosgd.store.shards import read_header
from isosgd.store.tree import plain, unpack
from isosgd.store.writer import STORED
from isosgd.target import Params, Target

Info = dict[str, Any]


def load(
    path: str | Path,
    target: Target | None = None,
    *,
    data: Any = None,
    chains: Sequence[int] | None = None,
    verify: bool = False,
    damaged: Damaged = "refuse",
) -> Posterior:
    """Open the draws of a run that was written by ``sample(..., store=path)``: finished, still running, or stopped.

    Nothing is read before it is needed. A shard's SHA-256 is compared when it is first used.

    Args:
        path: folder of the run.
        target: what was sampled, made as it was then; without it the draws can be looked at, but not predict.
        data: the training data, for ``posterior.summary()`` and ``posterior.trust()``.
        chains: numbers of chains, where not all are wanted. Chains that run in turn are stopped at different lengths:
            by default as many are shown as give most draws in all, each with the same number; ``info["lengths"]``
            says how many each has.
        verify: compare the SHA-256 of all shards now.
        damaged: ``refuse`` raises an error that names the shard when one is met that is not as it was written;
            ``drop`` compares all now, warns of such shards, and leaves their draws out.

    Returns:
        The draws, read as they are needed. ``info["complete"]`` says whether the run has come to its end.

    Raises:
        isosgd.store.StoreError: when there is no run, or it cannot be read.

    Example:
        >>> import tempfile
        >>> from isosgd import Target, load, priors, sample
        >>> y = torch.randn(200, generator=torch.Generator().manual_seed(0))
        >>> target = Target(lambda p, b: -0.5 * (b[0] - p["mu"]) ** 2, priors.Normal(10.0), init={"mu": 0.0})
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = sample(target, (y,), draws=20, keep_every=5, warmup=1000, progress=False, store=folder.name)
        >>> posterior = load(folder.name, target)
        >>> posterior.num_draws, posterior.info["complete"]
        (20, True)
        >>> folder.cleanup()
    """
    if damaged not in ("refuse", "drop"):
        raise ValueError(f"damaged = {damaged!r} is unknown; choose 'refuse' or 'drop'")
    folder = Path(path)
    manifest = Manifest.read(folder)
    shards = Shards(folder, manifest, damaged, verify)
    draws = StoredDraws(shards, chains)
    if target is not None:
        _check_target(folder, manifest, target)
    info = {
        **info_of(manifest.info, draws.chains),
        "complete": manifest.complete,
        "lengths": draws.lengths,
        "seconds": manifest.seconds,
        "store": str(path),
    }
    return Posterior(target, draws, info, data, StoredDraws(shards, draws.chains or None, buffers=True))


BY_CHAIN = ("keep_every", "warmup", "rates")
"""Lists in ``info`` with an item for each of its ``chain_indices``."""


def info_of(info: Info, chains: Sequence[int]) -> Info:
    """The info of a run as that of some of its chains. Of chains that were dropped there are no such items.

    Example:
        >>> info_of({"chain_indices": [0, 1, 3], "rates": [{"w": 0.1}, {"w": 0.2}, {"w": 0.3}]}, [3, 0])
        {'chain_indices': [3, 0], 'rates': [{'w': 0.3}, {'w': 0.1}], 'chains': 2}
    """
    known = info.get("chain_indices")
    if not isinstance(known, list) or not all(type(number) is int for number in known):
        known = []  # a manifest may be anyone's
    at = {number: place for place, number in enumerate(known)}
    lists = {
        name: info[name] for name in BY_CHAIN if isinstance(info.get(name), list) and len(info[name]) == len(known)
    }
    chosen = {name: [items[at[number]] for number in chains if number in at] for name, items in lists.items()}
    return {**info, **chosen, "chains": len(chains), "chain_indices": list(chains)}


def _check_target(folder: Path, manifest: Manifest, target: Target) -> None:
    """Refuse a target whose parameters, or the tensors that it holds fixed, are not those of the run."""
    found = {name: list(shape) for name, shape in target.describe()["parameters"].items()}
    wanted = {name: list(spec.shape) for name, spec in manifest.tensors.items()}
    if found and found != wanted:
        line = next(differences(wanted, found))
        raise ValueError(f"the target is not the one that {folder} was drawn from: {line}")
    then = {name: x for name, x in frozen_tensors(folder, manifest).items() if name not in manifest.buffers}
    now = {**target.frozen, **target.buffers}
    for name, x in then.items():
        if name in now and fingerprint(x) != fingerprint(now[name]):
            raise ValueError(
                f"{name!r} of the target's model is not as it was when {folder} was drawn: give the model its frozen "
                "tensors back, model.load_state_dict(safetensors.torch.load_file(path / 'frozen.safetensors'), "
                "strict=False), and make the target from it"
            )


def frozen_tensors(folder: Path, manifest: Manifest) -> Params:
    """What was written once: frozen parameters of the network, and its buffers at the start."""
    if manifest.frozen is None:
        return {}
    path = folder / manifest.frozen.file
    check_file(path, manifest.frozen)
    read_header(path)
    return dict(load_file(path))


@dataclass
class Asked:
    """What `sample` was asked for, as far as a store has to know it. The fields are its arguments, checked."""

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

    def __post_init__(self) -> None:
        if self.store_dtype not in STORED:
            raise ValueError(f"store_dtype = {self.store_dtype!r} is unknown; choose 'float32', 'bfloat16' or None")
        if self.store is None and (self.resume or self.store_dtype is not None):
            raise ValueError("resume and store_dtype go with store=, the folder of a run: give that too")
        seed = self.settings["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed = {seed!r} must be an integer of at least 0")
        if self.store is not None and not isinstance(self.store, str | Path):
            raise TypeError(f"store = {self.store!r} must be the path of a folder")

    @property
    def tensors(self) -> tuple[Tensor, ...] | None:
        """The data, where they are tensors of one data set."""
        return None if isinstance(self.data, DataSets) else as_tensors(self.data)

    @property
    def count(self) -> int:
        """Chains in all."""
        return int(self.settings["chains"]) * (self.data.sets if isinstance(self.data, DataSets) else 1)

    def start(self, chain: int) -> Params:
        """Free parameters at which a chain starts."""
        return self.target.initial(start_of(self.init, chain), device=self.device)

    def identity(self) -> Info:
        """What must be the same when the run is resumed."""
        starts = [self.start(k) for k in range(self.count)]
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

    def open(self, info: Info) -> Writer | None:
        """Begin the run, or go on with the one that is there; None when that one is complete.

        Args:
            info: what is known of a run that is begun.
        """
        assert self.store is not None
        folder, identity = Path(self.store), self.identity()
        if not self.resume or not Manifest.begun(folder):
            natural = self.target.constrain(self.target.initial(start_of(self.init, 0)))
            tensors = specs_of(natural, STORED[self.store_dtype])
            return Writer.create(
                folder, Manifest(info, identity, tensors), {**self.target.frozen, **self.target.buffers}
            )
        manifest = Manifest.read(folder)
        found = list(differences(manifest.identity, unpack(plain(identity))))
        if found:
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise ValueError(
                f"{folder} cannot be resumed: {'; '.join(found[:5])}{more}. Give what it was begun with, or another "
                "store="
            )
        if manifest.complete:
            Writer.reopen(folder).close()
            return None
        then = {**manifest.info.get("versions", {}), "threads": manifest.info.get("threads")}
        changed = list(differences(then, {**versions(), "threads": torch.get_num_threads()}))
        if changed:
            warnings.warn(
                f"{folder} goes on where it was, but other versions may round otherwise, so that its draws need not be "
                f"bit for bit those of a run that was never stopped: {'; '.join(changed)}",
                SamplingWarning,
                stacklevel=3,
            )
        writer = Writer.reopen(folder)
        if writer.manifest.complete:  # by another process, meanwhile
            writer.close()
            return None
        return writer


def settings_of(path: str | Path) -> tuple[Info, list[str]]:
    """The settings that a run was begun with, and the names of those options that a manifest cannot hold."""
    settings = Manifest.read(Path(path)).identity.get("settings")
    if not isinstance(settings, dict) or not isinstance(settings.get("options"), dict):
        raise StoreError(f"{path} does not say which settings it was begun with")
    settings = dict(settings)
    return settings, list(settings.pop("opaque", []))
