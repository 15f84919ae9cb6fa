"""What must be the same for a run to be resumed: settings, data, model and start; and what is not, in words."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from isosgd.chain.batches import Data, DataSets, as_tensors, tree_map
from isosgd.potential import Params, Target
from isosgd.sampling.buffers import Buffers
from isosgd.store.shards import dtype_name, raw

SAME_LOSS = 1e-4  # relative: another machine may round otherwise, another model gives another loss
PROBED = 64  # rows at which the loss is compared
PLAIN = str | int | float | bool | None


def is_plain(value: Any) -> bool:
    """Whether a manifest holds a value as it is: text and numbers, and lists and dicts of them.

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
    """A setting as something that a manifest holds: itself, or its text without addresses of this process."""
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
    """What can be told of data. Of a loader that is little: what kind it is and how much it holds."""
    if isinstance(data, DataSets):
        return {"tensors": [fingerprint(t) for t in data.tensors], "rows": fingerprint(data.rows)}
    tensors = as_tensors(data)
    if tensors is not None:
        return {"tensors": [fingerprint(t) for t in tensors]}
    source = getattr(data, "dataset", None)
    return {
        "loader": type(data).__name__,
        "batches": _length(data),
        "dataset": None if source is None else type(source).__name__,
        "examples": _length(source),
    }


def inputs_identity(given: Any) -> list[dict[str, Any]]:
    """What can be told of inputs: of a tensor, or of several."""
    return [fingerprint(torch.as_tensor(x)) for x in (given if isinstance(given, tuple | list) else (given,))]


def _length(of: Any) -> int | None:
    try:
        return len(of)
    except TypeError:
        return None


def target_identity(target: Target, data: Data, starts: list[Params], buffers: Buffers) -> dict[str, Any]:
    """What can be told of a target: how it describes itself, where chains start, and what it says at some data.

    Args:
        target: what is sampled.
        data: checked.
        starts: free parameters of each chain.
        buffers: of its network; they are left as they are.
    """
    found: dict[str, Any] = {
        "describes": target.describe(),
        "frozen": {name: fingerprint(x) for name, x in buffers.frozen().items()},
        "start": [{name: fingerprint(x)["sha256"] for name, x in start.items()} for start in starts],
    }
    tensors = as_tensors(data.set(0) if isinstance(data, DataSets) else data)
    if tensors is not None:
        before, checked = buffers.now(), target._checked
        loss, gradients = target.gradient(starts[0], tree_map(lambda t: t[:PROBED], tensors), len(tensors[0]))
        buffers.load(before)
        target._checked = checked  # a first look at a batch changes buffers too, so it must come when it always does
        norms = torch.stack([g.double().norm().cpu() for g in gradients])
        found["loss"], found["gradient"] = float(loss), float(norms.square().sum().sqrt())
    return found


def differences(then: Any, now: Any, where: str = "") -> Iterator[str]:
    """What is not the same in two identities, each in a line."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*then, *now]):
            inner = f"{where}.{key}" if where else str(key)
            if key in then and key in now:
                yield from differences(then[key], now[key], inner)
            else:
                yield f"{inner} was {'there' if key in then else 'not there'} and is {'not' if key in then else 'now'}"
    elif isinstance(then, list | tuple) and isinstance(now, list | tuple) and len(then) == len(now):
        for i, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from differences(a, b, f"{where}[{i}]")
    elif isinstance(then, float) and isinstance(now, float) and where.endswith(("target.loss", "target.gradient")):
        if math.isfinite(then) and math.isfinite(now) and abs(then - now) > SAME_LOSS * max(abs(then), abs(now), 1e-2):
            yield f"{where} at the start was {then:.6g} and is {now:.6g}: the model or its likelihood has changed"
    elif where.endswith("sha256") or ".start[" in where:
        if then != now:
            yield f"the values of {where.removesuffix('.sha256')} have changed"
    elif then != now:
        yield f"{where} was {then!r} and is {now!r}"


def as_lines(found: list[str], most: int = 12) -> str:
    """Differences, each on a line of its own."""
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "".join(f"\n  {line}" for line in [*found[:most], *more])
