"""A whole step of training or sampling as one CUDA graph; the same code runs step by step on a CPU.

Drawing a minibatch, gathering and augmenting it, the network forwards and backwards (bfloat16, channels last) and the
update are captured once; a step is then one call of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.images.images import Images
from isosgd.samplers.flat import Flat
from isosgd.samplers.fused import FusedStep
from isosgd.samplers.groups import layer_groups

WARM_UPS = 3  # runs before a capture, in which libraries choose and load what they use


class Capture:
    """A function without arguments that runs as a CUDA graph, or as it is where there is no GPU.

    Args:
        body: it may not wait for the device; what it reads and writes must stay in its place.
        device: where it works.
        generators: that it draws from, beside torch's own.
        before: called before each of the runs that are thrown away.
    """

    def __init__(
        self,
        body: Callable[[], None],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._run: Callable[[], Any] = body
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                before()
                body()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        before()
        with torch.cuda.graph(graph):
            body()
        self._run = graph.replay

    def __call__(self) -> None:
        """Run it once."""
        self._run()


class Chain:
    """A network on its way: minibatches, gradients and steps.

    Args:
        model: the network; its parameters become views of one flat tensor.
        images: the training set.
        batch_size: n.
        decay: precision of the Gaussian prior over N.
        friction: of Theorem 2; 1 for steps without momentum.
        noise: whether steps inject noise.
        shuffled: whether minibatches are taken in epochs, each image once, mirrored in every second epoch, which trains
            a little better; samplers want them independent.
        compiled: whether `torch.compile` makes the network's kernels, on a GPU: that takes about a minute, and training
            is faster then.
        seed: of minibatches, augmentation and noise.

    References:
        Jordan, 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024 (mirroring in every second epoch).
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        batch_size: int,
        *,
        decay: float,
        friction: float = 1.0,
        noise: bool = True,
        shuffled: bool = False,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        if not 1 <= batch_size <= len(images):
            raise ValueError(f"batch_size = {batch_size} must be at least 1 and at most the {len(images)} images")
        self.model, self.images, self.batch_size = model, images, batch_size
        self._network: Callable[[Tensor], Tensor] = model
        if compiled and images.device.type == "cuda":
            self._network = torch.compile(model, dynamic=False)
        names = dict(model.named_parameters())
        numbers = {id(p): i for i, p in enumerate(names.values())}
        self.groups = [[numbers[id(p)] for p in group["params"]] for group in layer_groups(names.items())]
        self.flat = Flat(list(names.values()))
        self.update = FusedStep(self.flat, self.groups, decay=decay, friction=friction, noise=noise)
        self.generator = torch.Generator(images.device).manual_seed(seed)
        self.loss = torch.zeros((), device=images.device)
        self._order: Tensor | None = None
        self._mirror: Tensor | None = None
        if shuffled:
            self._order = self._shuffle()
            coins = torch.randint(2, (len(images),), generator=self.generator, device=images.device)
            self._mirror = coins.bool()
        self._place = torch.arange(batch_size, device=images.device)
        self.update.pace.zero_()  # nothing moves while it is captured
        model.train()
        # Without a kernel the update asks the host for its rates, which no graph can.
        device = images.device if self.update.kernel is not None else torch.device("cpu")
        self._step = Capture(self._body, device, [self.generator], self._forget)
        self.update.settle()
        self.update.pace.fill_(1.0)
        self.gradients = 0

    @property
    def num_data(self) -> int:
        """N."""
        return len(self.images)

    def _forget(self) -> None:
        for p in self.flat.params:
            p.grad = None

    def _body(self) -> None:
        self._advance(self._gradient())

    def _gradient(self) -> Tensor:
        """Gradients of a new minibatch, and a random number besides."""
        self._forget()
        n, device = self.batch_size, self.images.device
        drawn = torch.empty(n + 1, dtype=torch.int64, device=device).random_(generator=self.generator)
        index = drawn[:n] % len(self.images)
        if self._order is not None:
            index = self._order[self._place % len(self._order)]
            self._place += n
        x, y = self.images.take(index, self.generator, self._mirror)
        with autocast(device, torch.bfloat16):
            logits = self._network(x)
        loss = cross_entropy(logits.float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss = loss.detach()
        return drawn[n:]

    def _advance(self, key: Tensor) -> None:
        self.update.step(self.grads(), key, self.generator)

    def grads(self) -> list[Tensor]:
        """The last minibatch's gradients, without the prior's."""
        return [p.grad for p in self.flat.params]  # type: ignore[misc]

    def step(self, count: int = 1) -> None:
        """So many steps, at the rates and the pace that are set."""
        for _ in range(count):
            if self._order is not None and self.gradients % (len(self._order) // self.batch_size) == 0:
                self._new_epoch(self._order)
            self._step()
            self.gradients += 1

    def _new_epoch(self, order: Tensor) -> None:
        order.copy_(self._shuffle())
        torch.arange(self.batch_size, out=self._place)
        if self._mirror is not None:
            self._mirror.logical_not_()

    def _shuffle(self) -> Tensor:
        """The images of an epoch, whole minibatches of them, in a new order."""
        order = torch.randperm(self.num_data, generator=self.generator, device=self.images.device)
        return order[: self.num_data // self.batch_size * self.batch_size]

    @torch.no_grad()
    def flat_gradient(self, out: Tensor) -> Tensor:
        """The last gradient, that of the prior included, in the flat layout."""
        return self.flat.join(self.grads(), out).add_(self.flat.values, alpha=self.update.decay)


def descend(
    chains: Sequence[Chain], rates: Tensor | Sequence[Tensor], progress: Callable[[int], None] = lambda steps: None
) -> None:
    """Steps of several chains side by side, without injected noise, at each of ``rates`` for all groups, one a step.

    On a GPU each has a stream of its own, so that small networks, which leave most of it idle, share it. ``rates`` are
    those of all chains, or a tensor for each, of a length of its own. ``progress`` is told of steps as they are queued,
    which a GPU allows for a thousand or so at most.
    """
    device = chains[0].images.device
    each = [rates] * len(chains) if isinstance(rates, Tensor) else list(rates)
    paces = [torch.stack([some, torch.zeros_like(some)], 1).to(device).unbind() for some in each]
    streams = [own_stream(device) for _ in chains]
    for chain in chains:
        chain.update.rates.fill_(1.0)
    synchronize(device)
    for turn in zip_longest(*paces):
        for chain, pace, stream in zip(chains, turn, streams, strict=True):
            if pace is not None:
                with stream:
                    chain.update.pace.copy_(pace)
                    chain.step()
        progress(sum(pace is not None for pace in turn))
    synchronize(device)
    for chain in chains:
        chain.update.pace.fill_(1.0)


def own_stream(device: torch.device) -> Any:
    """A context in which a GPU's work is queued apart from that of others; elsewhere one that does nothing."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Work in fewer bits on a GPU; elsewhere do nothing."""
    return torch.autocast(device.type, dtype, enabled=device.type == "cuda", cache_enabled=False)


def one_cycle(steps: int, peak: float, rise: float = 0.2) -> Tensor:
    """Rates that rise to ``peak`` in the first part of the steps and fall to zero along a cosine.

    Example:
        >>> rates = one_cycle(10, 0.1, rise=0.2)
        >>> float(rates.max()) <= 0.1, float(rates[-1]) < 0.005
        (True, True)
    """
    if steps < 1 or not peak > 0:
        raise ValueError(f"{steps} steps with a rate of at most {peak}: both must be positive")
    at = (torch.arange(steps) + 0.5) / steps
    falling = 0.5 * (1 + torch.cos(torch.pi * (at - rise).clamp_min(0) / (1 - rise)))
    return peak * torch.where(at < rise, at / rise, falling)


@torch.no_grad()
def refresh_statistics(model: nn.Module, images: Images, generator: torch.Generator, examples: int = 5_000) -> None:
    """New statistics for the BatchNorm layers of a draw: means over minibatches of so many augmented examples.

    No more than the set has.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return
    examples = min(examples, len(images))
    size = min(500, examples)
    was = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
    model.train()
    for i in range(max(1, examples // size)):
        for layer in layers:
            layer.momentum = 1 / (i + 1)  # a plain mean over the minibatches
        index = torch.randint(len(images), (size,), generator=generator, device=images.device)
        with autocast(images.device, torch.bfloat16):
            model(images.take(index, generator)[0])
    for layer, momentum in zip(layers, was, strict=True):
        layer.momentum = momentum


@torch.no_grad()
def probabilities(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], dropout: bool = False) -> Tensor:
    """Class probabilities of all images, ``[N, classes]``, with dropout on or off."""
    model.eval()
    if dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.train()
    found = []
    for x, _ in batches:
        with autocast(x.device, torch.float16):
            logits = model(x.contiguous(memory_format=torch.channels_last))
        found.append(logits.float().softmax(-1))
    model.train()
    return torch.cat(found)
