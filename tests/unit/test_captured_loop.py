"""Steps of a loop of one's own in a CUDA graph, without a GPU: a tape of operations stands for the graph.

As in a graph, operations are recorded once and then repeated on the same memory, and nothing may look at a value.
What a tape does not show is `benchmarks/loop_graph.py` for: it needs a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isosgd
from isosgd import METHODS

N, SIZE = 400, 40
LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
STATIC = {name: kind for name, kind in METHODS.items() if name not in ("hmc", "csgld", "csghmc")}
pytestmark = pytest.mark.filterwarnings("ignore:the warm-up of .* did not settle:isosgd.SamplingWarning")


class Tape(TorchDispatchMode):
    """Records operations, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in LOOKS, "a value was looked at while recording"
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Loop:
    def __init__(self, name: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(N, 2)
        self.y = self.x.sum(1, keepdim=True) + 0.5 * torch.randn(N, 1)
        self.model, self.rows = nn.Linear(2, 1), torch.zeros(SIZE, dtype=torch.long)
        self.batches = torch.Generator().manual_seed(1)
        settings = {"num_data": N, "batch_size": SIZE, "capturable": True, **settings}
        self.optimizer = METHODS[name](self.model.parameters(), **settings)

    def load(self, other: Loop) -> None:
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.batches.set_state(other.batches.get_state())

    def next(self) -> None:
        self.rows.copy_(torch.randint(N, (SIZE,), generator=self.batches))

    def body(self) -> None:
        self.optimizer.zero_grad()
        ((self.model(self.x[self.rows]) - self.y[self.rows]).square().mean() / 0.5).backward()
        self.optimizer.step()

    def until(self, step: int) -> None:
        while self.optimizer.param_groups[0]["step"] < step:
            self.next()
            self.body()


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is recorded does happen on a tape: steps that are captured count as taken here."""

    @contextmanager
    def recording() -> Iterator[Tape]:
        with monkeypatch.context() as patch, Tape() as tape:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield tape

    return recording


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {"alpha": 0.9} if name == "psgld" else {}) for name in STATIC),  # whose V first is a plain average
        ("isgd", {"structure": "layer"}),
        ("sgld", {"lr": 1e-4}),
    ],
)
def test_replays_of_a_captured_step_are_the_steps_of_the_loop(name: str, more: dict[str, Any], capture: Any) -> None:
    plain, captured = Loop(name, warmup=120, **more), Loop(name, warmup=120, **more)
    plain.until(123)
    captured.load(plain)
    for loop in (plain, captured):
        loop.until(130)  # the noise is next followed by the eager loop at 143
    captured.next()
    with capture() as tape:
        captured.body()
    assert captured.optimizer.param_groups[0]["step"] == 130
    plain.until(131)
    for step in range(132, 142):
        plain.until(step)
        captured.next()
        tape.replay()
        for p, q in zip(plain.model.parameters(), captured.model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("name", "more"), [("sgld", {}), ("sghmc", {}), ("isgd", {}), ("isgd", {"structure": "layer"})]
)
def test_noise_is_followed_between_replays(name: str, more: dict[str, Any], capture: Any) -> None:
    """With that of the warm-up alone the variances of a long run were off by up to 23%."""
    loop = Loop(name, warmup=120, **more)
    loop.until(130)
    first, params = copy.deepcopy(loop.optimizer.state_dict()), list(loop.model.parameters())
    with capture() as tape:
        loop.body()
    for _ in range(
        260
    ):  # a full matrix takes in a noise vector every 128 steps, and changes after the 64th, 128th, ...
        loop.next()
        tape.replay()
        loop.optimizer.replayed()
    loop.until(402)  # eager, and met by the captured step
    saved, place = copy.deepcopy(loop.optimizer.state_dict()), [p.detach().clone() for p in params]
    loop.next()
    tape.replay()
    after = [p.detach().clone() for p in params]
    torch._foreach_copy_([p.detach() for p in params], place)
    loop.optimizer.load_state_dict(saved)
    loop.body()
    assert all(torch.equal(p, q) for p, q in zip(params, after, strict=True))
    seen = [state["param_groups"][0]["seen"] for state in (first, saved)]
    assert seen[1] - seen[0] >= (2 if more or name != "isgd" else 1)


def test_a_collector_is_told_of_replays(capture: Any) -> None:
    loop = Loop("isgd", warmup=120)
    loop.until(130)
    collector = isosgd.Collector(loop.optimizer, loop.model, likelihood=isosgd.likelihoods.Gaussian(0.5), keep_every=5)
    with capture() as tape:
        loop.body()
    assert len(collector) == 0
    for _ in range(26):
        loop.next()
        tape.replay()
        loop.optimizer.replayed()
    draws = collector.posterior((loop.x, loop.y)).draws["weight"]
    assert draws.shape == (1, 6, 1, 2) and len(draws.unique(dim=1)[0]) == 6
    assert torch.equal(draws[0, -1], loop.model.weight.detach())


@pytest.mark.parametrize(
    ("name", "settings", "steps", "message"),
    [
        ("sgld", {"lr": 1e-4, "capturable": False}, 5, ".*made without capturable=True"),
        ("isgd", {}, 5, "its phase is 'optimising'"),
        ("sghmc", {"warmup": 120}, 120, "its phase is 'sampling': take steps until draws_ready, and three more"),
        ("sgld", {"lr": 1e-4, "decay": 0.6}, 5, "its rate changes from step to step"),
        ("csgld", {"warmup": 120}, 125, "its rate changes from step to step"),
        ("isgd", {"lam": 1.0, "noise": "gaussian"}, 50, ".*make it with track_every=None"),
    ],
)
def test_a_step_that_replays_would_not_be_is_refused(
    name: str, settings: dict[str, Any], steps: int, message: str, capture: Any
) -> None:
    loop = Loop(name, **settings)
    loop.until(steps)
    with pytest.raises(RuntimeError, match=f"cannot be captured in a CUDA graph: {message}"), capture():
        loop.body()
