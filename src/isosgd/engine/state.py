"""The state of chains between two steps, as nested dicts and lists of tensors and plain values.

What can be computed from it (plans of a step, spectra, compiled code) is left out. New chains with the same settings
that load such a state continue like the original ones, bit for bit on a CPU. Gradients and the last minibatch are not
kept, so a state cannot be taken in the middle of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isosgd.engine.chains import Chains
from isosgd.engine.curvature import Curvature
from isosgd.engine.gradients import Many
from isosgd.errors import DivergedError

State = dict[str, Any]
FORMAT = 2  # of a state; one of another format is refused
STIFFNESS = ("image", "length", "probes", "turn")

AS_IS = "as it is"  # in a state: the reports of the warm-up of chains that go on from it without another one


def state_of(chains: Chains) -> State:
    """The state of chains. Its tensors are not copies: write them before the next step."""
    found: State = {
        "format": FORMAT,
        "params": chains.leaves,
        "sampler": chains.sampler.state_dict(),
        "batches": chains.batches.state(),
        "buffers": chains.buffers,
        "own_buffers": chains.own_buffers,
        "curvature": _curvature(chains.curvature),
        "scaled": _curvature(chains.scaled) if chains.in_metric else None,
        "stiffness": {name: getattr(chains.stiffness, name) for name in STIFFNESS},
        "keys": chains.keys,
        "gradients": chains.gradients,
        "probes": chains.probes,
        "loss": chains.loss,
        "alive": chains.alive,
        "failures": {k: failure_state(error) for k, error in chains.failures.items()},
    }
    if isinstance(chains.differentiate, Many):  # compiled gradients are rounded differently
        evaluate = chains.differentiate.evaluate
        found["compiled"] = {"calls": evaluate.calls, "unsupported_reason": evaluate.unsupported_reason}
    return found


@torch.no_grad()
def load_state(chains: Chains, state: State, same_batches: bool = True) -> None:
    """Bring chains to a state, whose tensors are on their device (see `moved`)."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"the state has format {state.get('format', 1)}, and this version of isosgd reads {FORMAT}: finish the run "
            "with the version that began it"
        )
    shapes = [tuple(x.shape) for x in state["params"]]
    if shapes != [tuple(x.shape) for x in chains.leaves]:
        raise ValueError(f"the state has parameters of shapes {shapes}: it was saved by chains of another model")
    chains.restore(state["params"])
    if state["scaled"] is not None:
        chains.enter_metric()
        _load_curvature(chains.scaled, state["scaled"])
    chains.sampler.load_state_dict(state["sampler"])
    if same_batches:
        chains.batches.load_state(state["batches"])
    for name, value in state["buffers"].items():
        chains.buffers[name].copy_(value)
    chains.own_buffers = state["own_buffers"]
    _load_curvature(chains.curvature, state["curvature"])
    for name in STIFFNESS:
        setattr(chains.stiffness, name, state["stiffness"][name])
    chains.keys = state["keys"]
    chains.gradients, chains.probes = state["gradients"], state["probes"]
    chains.loss, chains.alive = state["loss"], state["alive"]
    if chains.geometry is not None:
        chains.geometry.alive = chains.alive
    chains.failures = {k: failure_from(saved) for k, saved in state["failures"].items()}
    if isinstance(chains.differentiate, Many):
        evaluate, saved = chains.differentiate.evaluate, state["compiled"]
        evaluate.calls, evaluate.unsupported_reason = saved["calls"], saved["unsupported_reason"]


def moved(state: Any, device: torch.device, copy: bool = False) -> Any:
    """A nested state with its tensors on a device."""
    if isinstance(state, Tensor):
        return state.detach().to(device, copy=copy)
    if isinstance(state, dict):
        return {name: moved(value, device, copy) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(moved(value, device, copy) for value in state)
    return state


def take_over(chains: Chains, state: State) -> None:
    """Continue from the end of chains at another temperature, with the noise and curvature that they measured.

    With `AS_IS` in the state, which is then of the same temperature, rates stay as they are and are not measured again.
    """
    temperature = chains.temperature
    load_state(chains, moved(state, chains.alive.device, copy=True), same_batches=False)
    if AS_IS not in state:
        chains.change_temperature(temperature)


def _curvature(curvature: Curvature) -> State:
    return {
        "own": curvature.own,
        "joint": curvature.joint,
        "probes": curvature.probes,
        "generator": curvature.generator.get_state(),
    }


def _load_curvature(curvature: Curvature, state: State) -> None:
    curvature.own.copy_(state["own"])
    curvature.joint.copy_(state["joint"])
    curvature.probes = state["probes"]
    curvature.generator.set_state(state["generator"].cpu())


def failure_state(error: DivergedError) -> State:
    """What a diverged chain left behind, without its draws."""
    return {"message": str(error), "step": error.step, "group": error.group, "state": error.state}


def failure_from(state: State) -> DivergedError:
    """The error again."""
    return DivergedError(state["message"], step=state["step"], group=state["group"], state=state["state"])
