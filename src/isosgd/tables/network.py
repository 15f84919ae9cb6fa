"""The network for tables: its posterior, the starts and lengths of its chains. Plain tensors in, draws out.

The network has hidden layers and, beside them, a linear path from inputs to outputs, so that a linear table needs no
hidden unit. All chains, and all networks at which they start, are one batched computation.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from isosgd import Posterior, Target, likelihoods, load, priors, resume, sample
from isosgd.engine.compiled import fastest_products
from isosgd.engine.gradients import Layout, Many, stacked
from isosgd.native.layers import THREADED
from isosgd.progress import LOGGER
from isosgd.sampling.settings import check_room
from isosgd.store import Manifest, StoredState
from isosgd.target.likelihoods import student_t_draw, student_t_variance
from isosgd.target.priors import student_t_log_prob
from isosgd.warmup.optimise import decay

LOG_LINEAR = "loglinear_t", "loglinear"  # the logarithm of the noise scale is linear in the inputs
NOISES = ("auto", "student_t", "gaussian", *LOG_LINEAR, "heteroscedastic_t", "heteroscedastic")  # for regressions
LIKELIHOODS = (*NOISES, "categorical")
DEGREES = 6.0, 12.0, math.inf  # degrees of freedom that the noise may have; the last is a Gaussian
SCALES = (5.0, 3.0), (2.0, 1.0)  # prior scales of hidden weights and of the output layer, for regressions and classes
LINEAR = 2.5  # prior deviation of a logit over rows, from the linear path
# Prior deviation over rows of the logarithm of the squared noise scale if that is linear in the inputs; and prior
# scales of its weights relative to weights of the mean if it is an output of the whole network.
SIZE_DEVIATION, SIZE_OF_NETWORK = 2.0, 1 / 3

LARGEST = 1 << 27  # largest number of a network in a folder

SKIP = "skip.weight", "skip.bias"  # parameters of the linear path

# The starts: networks trained by Adam, each on other rows, kept where they predict the other rows best.
HELD_OUT = 0.1  # share of rows that a start is not trained on
TRAINED_ON = 128  # rows per step
RATE = 1e-2
LOOKS, SCORED = 40, 2_000  # evaluations of the held-out rows, and the most rows of each
MEMORY = 0.9, 0.99
# standard errors by which, on at least so many rows, noise of varying scale must predict better
SURE, LEAST_ROWS = 2.0, 10
TRAINING_TIME = 0.25, 0.6  # share of a fit's time limit for training, with HMC and with minibatches
# Steps per row, least and most at effort 1; wide networks may have fewer, but not fewer than the last number.
TRAINING_BY_ROWS, TRAINING, WIDE_TRAINING = 2.5, (300, 16_000), 4_000

# The chains. Their lengths follow from the size of the table rather than the time, so that draws are reproducible.
GRADIENTS_BY_ROWS, GRADIENTS = 4.0, (1_000, 8_000)  # of each chain at effort 1: constant, per row, and the most
MOST_WORK = 2e12  # products of weights and rows at effort 1, some minutes
LEAST_WARMUP, DRAWS = 200, 50  # HMC with a low-rank mass needs at least these
SMALL = 5_000_000  # products of rows and weights of all chains; for less, directions of the mass do not pay
WARMUP_SHARE = 0.6, 0.4  # shares of the gradients, in general and for small tables, which settle sooner
HELD = 1 << 23  # numbers of a layer that a prediction holds at once
ALL_ROWS = 20_000  # most rows for gradients of all data
MINIBATCHES = 5_000  # gradients of each chain with minibatches at effort 1
# Hidden layers by the largest number of rows.
LAYERS = (499, (16,) * 3), (ALL_ROWS, (16,) * 4), (math.inf, (64,) * 3)


def usual_layers(rows: int) -> tuple[int, ...]:
    """Hidden layers for a number of rows.

    Example:
        >>> usual_layers(100), usual_layers(500), usual_layers(100_000)
        ((16, 16, 16), (16, 16, 16, 16), (64, 64, 64))
    """
    return next(layers for most, layers in LAYERS if rows <= most)


class Perceptron(nn.Module):
    """Hidden layers beside a linear path: ``gate * out(h) + skip(x)``.

    The gate is sampled: for a linear table it goes to zero, and the hidden layers to their prior. Parameters and ``x``
    may have a leading dimension of chains. With ``size``, further outputs times ``size`` are logarithms of the squared
    noise scale, ``[..., n, outputs, 2]``; they come from the linear path, and with ``inner`` also from the hidden
    layers.
    """

    batched = True  # see `isosgd.target.modules.ModuleLikelihood.batched`

    def __init__(self, inputs: int, outputs: int, hidden: tuple[int, ...], size: float | None, inner: bool) -> None:
        super().__init__()
        self.size = size
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        wide = outputs if size is None else 2 * outputs
        self.out = nn.Linear(sizes[-1], wide if inner else outputs) if hidden else None
        self.gate = nn.Parameter(torch.full((1,), 0.2)) if hidden else None
        self.skip = nn.Linear(inputs, wide, bias=not hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for each row."""
        h = x
        for layer in self.hidden:
            h = F.silu(_affine(h, layer))
        found = _affine(x, self.skip)
        if self.out is not None and self.gate is not None:
            curved = self.gate.unsqueeze(-1) * _affine(h, self.out)
            more = found.shape[-1] - curved.shape[-1]  # outputs that are linear in the inputs
            found = (F.pad(curved, (0, more)) if more else curved) + found
        return self.arranged(found)

    def arranged(self, found: Tensor, back: bool = False) -> Tensor:
        """Outputs of the layers in the order of the likelihood; with ``back`` a gradient in the reverse order."""
        if self.size is None:
            return found
        if back:
            return torch.cat([found[..., 0], self.size * found[..., 1]], -1)
        mean, log_square = found.chunk(2, -1)
        return torch.stack([mean, self.size * log_square], -1)


def _affine(x: Tensor, layer: Any) -> Tensor:
    if layer.weight.dim() == 2:
        return F.linear(x, layer.weight, layer.bias)
    if layer.bias is None:
        return torch.bmm(x, layer.weight.mT)
    return torch.baddbmm(layer.bias.unsqueeze(-2), x, layer.weight.mT)


@dataclass(frozen=True)
class Network:
    """All that defines the target.

    Attributes:
        inputs: of the network.
        outputs: number of predicted numbers, or of classes.
        likelihood: ``student_t``, ``gaussian``, ``categorical``; ``loglinear_t`` and ``loglinear``, with a noise scale
            whose logarithm is linear in the inputs; ``heteroscedastic_t`` and ``heteroscedastic``, with a noise scale
            that is an output of the network; or ``auto``, one of the first two or a log-linear one, by predictions of
            held-out rows.
        hidden: units of each hidden layer; none for a linear model.
        scale: prior scale of hidden weights, times ``sqrt(fan_in)``; 5 by default, 2 for classes.
        out: the same for the output layer; 3 by default, 1 for classes.
        linear: prior scale of weights of the linear path; 1 by default, for classes `LINEAR` over the root of the
            number of inputs.
        df: degrees of freedom of Student-t noise.
        seed: of the initial weights.
        size: prior scales of the weights of a varying noise scale relative to those of the mean; by default
            `SIZE_DEVIATION` over the root of the number of inputs, or `SIZE_OF_NETWORK`.

    A varying noise scale is ``s exp(r(x) / 2)``, where ``s`` is sampled like a constant scale, and ``r`` is linear in x
    or a second output of the network, including gate and linear path. Its weights start at zero, so that training
    begins with a constant scale. A separate network for ``r`` was worse than both.
    """

    inputs: int
    outputs: int
    likelihood: str = "student_t"
    hidden: tuple[int, ...] = (64, 64, 64)
    scale: float | None = None
    out: float | None = None
    df: float = 6.0
    seed: int = 0
    size: float | None = None
    linear: float | None = None

    def __post_init__(self) -> None:
        if self.size is None:
            linear = SIZE_DEVIATION / math.sqrt(max(1, self.inputs))
            object.__setattr__(self, "size", SIZE_OF_NETWORK if self._inner else linear)
        classes = self.likelihood == "categorical"
        linear = LINEAR / math.sqrt(max(1, self.inputs)) if classes else 1.0
        for name, usual in zip(("scale", "out", "linear"), (*SCALES[classes], linear), strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.likelihood not in LIKELIHOODS:
            raise ValueError(f"likelihood = {self.likelihood!r} is unknown; choose one of {', '.join(LIKELIHOODS)}")
        if any(isinstance(units, bool) or not isinstance(units, int) or units < 1 for units in self.hidden):
            raise ValueError(f"hidden layers {self.hidden!r}: give the units of each, such as (64, 64, 64)")
        if self.weights > LARGEST:
            raise ValueError(f"hidden layers {self.hidden!r} have {self.weights:,} weights; {LARGEST:,} at most")

    @property
    def weights(self) -> int:
        """Number of weights and biases."""
        sizes = [self.inputs, *self.hidden]
        inner = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
        linear = (1 + self._sizes) * self.outputs * (self.inputs + (not self.hidden))
        curved = (1 + self._inner) * self.outputs * (self.hidden[-1] + 1) + 1 if self.hidden else 0
        return inner + linear + curved

    def products(self, rows: int, chains: int) -> int:
        """Products of rows and weights in all chains, the cost of a gradient."""
        return self.weights * chains * rows

    @property
    def _sizes(self) -> bool:
        """Whether the noise scale varies with the inputs."""
        return self._inner or self.likelihood in LOG_LINEAR

    @property
    def _inner(self) -> bool:
        """Whether the noise scale is an output of the hidden layers, too."""
        return self.likelihood in ("heteroscedastic", "heteroscedastic_t")

    @property
    def tails(self) -> float:
        """Degrees of freedom of the noise; infinite for a Gaussian."""
        return math.inf if self.likelihood in ("gaussian", "loglinear", "heteroscedastic") else self.df

    def target(self) -> Target:
        """The posterior of the network."""
        many = self.outputs if self.outputs > 1 else None
        noise: likelihoods.Likelihood
        if self.likelihood in ("auto", "student_t"):
            noise = likelihoods.StudentT(self.df, outputs=many)
        elif self.likelihood == "gaussian":
            noise = likelihoods.Gaussian(outputs=many)
        elif self.likelihood == "categorical":
            noise = likelihoods.Categorical()
        else:
            noise = likelihoods.Heteroscedastic(self.tails, scale=None, outputs=many)
        assert self.scale is not None and self.out is not None and self.linear is not None
        table: dict[str, priors.Prior] = {"skip.weight": priors.Normal(self.linear), "*.bias": priors.Normal(1.0)}
        if self.hidden:
            table |= {"hidden.*.weight": priors.FanInNormal(self.scale), "out.weight": priors.FanInNormal(self.out)}
            table["gate"] = priors.Normal(1.0)
        return Target.from_module(self._made(0), noise, table)

    def with_tails_of(self, residuals: Tensor) -> Network:
        """The network whose noise fits residuals ``[m, outputs]`` best, by the likelihood at its best scale.

        Example:
            >>> noise = torch.randn(2_000, 1, generator=torch.Generator().manual_seed(0))
            >>> Network(3, 1, "student_t").with_tails_of(noise).likelihood
            'gaussian'
            >>> found = Network(3, 1, "loglinear_t").with_tails_of(noise**3)
            >>> found.likelihood, found.df
            ('loglinear_t', 6.0)
        """
        unit = residuals.double().square().mean(0).sqrt().clamp_min(1e-12)
        scales = torch.logspace(-1.5, 0.2, 60, dtype=torch.float64, device=unit.device)[:, None, None]
        z = residuals.double() / unit / scales  # [scales, m, outputs]

        def best(df: float) -> float:
            return float((student_t_log_prob(z, df) - scales.log()).mean(1).amax(0).sum())

        df = max(DEGREES, key=best)
        if math.isfinite(df):
            return replace(self, df=df)
        return replace(self, likelihood={"student_t": "gaussian", "loglinear_t": "loglinear"}[self.likelihood])

    def start(self, chain: int) -> dict[str, Tensor]:
        """Initial weights of a chain; everything else starts at the target's values."""
        return {name: p.detach() for name, p in self._made(chain).named_parameters()}

    def layers(self) -> dict[str, str]:
        """Names of its layers."""
        count = len(self.hidden)
        named = {f"hidden.{i}": f"hidden layer {i + 1}" if count > 1 else "hidden layer" for i in range(count)}
        return {
            **named,
            "out": "output layer",
            "gate": "gate",
            "skip": "linear path",
            "likelihood.scale": "noise scale",
        }

    def _made(self, chain: int) -> Perceptron:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.SeedSequence((self.seed, chain, 1)).generate_state(1)[0]))
            size = self.size if self._sizes else None
            net = Perceptron(self.inputs, self.outputs, self.hidden, size, self._inner)
            for layer in net.hidden:
                assert isinstance(layer, nn.Linear)
                nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features))  # He et al. (2015)
                nn.init.normal_(layer.bias, std=0.3)
            nn.init.zeros_(net.skip.weight)
            if net.out is not None:
                nn.init.normal_(net.out.weight, std=math.sqrt(1.0 / net.out.in_features))
                nn.init.zeros_(net.out.weight[self.outputs :])  # weights of the noise scale, if it is an output
                nn.init.zeros_(net.out.bias)
            return net


def gradient_rows(rows: int) -> int:
    """Rows in a gradient of a chain: all, or a minibatch."""
    return TRAINED_ON if rows > ALL_ROWS else rows


def steps_for(rows: int, network: Network, chains: int, effort: float) -> dict[str, int]:
    """Steps of training, gradients of the warm-up, steps between draws, and number of draws of each chain.

    Example:
        >>> small, large = Network(10, 1, hidden=(16, 16, 16)), Network(10, 1, hidden=(64, 64, 64))
        >>> steps_for(500, small, chains=8, effort=1.0)
        {'training': 1250, 'warmup': 1200, 'keep_every': 36, 'draws': 50}
        >>> steps_for(500, large, chains=8, effort=4.0)
        {'training': 1250, 'warmup': 7200, 'keep_every': 96, 'draws': 50}
        >>> steps_for(50_000, large, chains=8, effort=2.0)
        {'training': 32000, 'warmup': 4000, 'keep_every': 120, 'draws': 50}
    """
    products = network.products(gradient_rows(rows), chains)
    if rows > ALL_ROWS:
        usual, share = float(MINIBATCHES), WARMUP_SHARE[1]
    else:
        usual, share = min(GRADIENTS[0] + GRADIENTS_BY_ROWS * rows, GRADIENTS[1]), WARMUP_SHARE[products < SMALL]
    gradients = effort * min(usual, MOST_WORK / (3.0 * products))
    warmup = max(math.ceil(share * gradients), LEAST_WARMUP)
    draws = round(_between(DRAWS * effort, 10, DRAWS))
    narrow = MOST_WORK / (3.0 * network.products(TRAINED_ON, chains))
    most_training = max(WIDE_TRAINING, max(1.0, effort) * min(TRAINING[1], narrow))
    return {
        "training": math.ceil(_between(TRAINING_BY_ROWS * rows, TRAINING[0], most_training) * min(1.0, effort)),
        "warmup": warmup,
        "keep_every": max(2, round((1.0 - share) * gradients / draws)),
        "draws": draws,
    }


def _between(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


class Starts(NamedTuple):
    """A trained network for each chain, the number of steps, and the predictions of held-out rows.

    Rows and their negative log likelihoods are ``[chains, m]``; for regressions there are residuals over the predicted
    noise scale, ``[chains * m, outputs]``.
    """

    states: list[dict[str, Tensor]]
    steps: int
    rows: Tensor
    losses: Tensor
    residuals: Tensor | None


def trained_starts(
    network: Network,
    x: Tensor,
    y: Tensor,
    chains: int,
    steps: int,
    seed: int,
    deadline: float = math.inf,
    both: bool = False,
) -> list[Starts]:
    """Train the networks at which chains start, by Adam on nine tenths of the rows.

    Each network has its own random rows, and is kept where it predicts the other rows best. All are one batched
    computation, which ends at the ``deadline`` (`time.monotonic`). With ``both`` (for log-linear noise), as many
    networks with a constant noise scale are trained on the same rows, and come first.
    """
    target = network.target()
    n = len(x)
    generator = torch.Generator().manual_seed(seed)
    held = min(max(1, round(HELD_OUT * n)), n - 1)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(chains)]).to(x.device)
    params = stacked([target.initial(network.start(chain), x.device) for chain in range(chains)])
    layout = Layout({name: p[0] for name, p in params.items()})
    theta = torch.cat([p.detach().reshape(chains, -1) for p in params.values()], -1)
    free = torch.ones_like(theta)
    if both:  # a constant scale is a log-linear one with weights that stay at zero
        fixed = free.clone()
        for name, value in layout.views(fixed).items():
            if name in SKIP:
                value[:, network.outputs :] = 0.0
        theta, order, free = torch.cat([fixed * theta, theta]), order.repeat(2, 1), torch.cat([fixed, free])
    inside, outside = order[:, held:], order[:, :held]
    many = Many(target, n - held, layout)
    seen = outside[:, :SCORED]
    train, test = (x[inside], y[inside]) if n - held <= TRAINED_ON else None, (x[seen], y[seen])
    lane = torch.arange(len(theta), device=x.device).unsqueeze(-1)
    mean, square, best = torch.zeros_like(theta), torch.zeros_like(theta), torch.full_like(theta[:, 0], math.inf)
    saved, every, i = theta, max(1, steps // LOOKS), 0
    for i in range(1, steps + 1):
        part = train
        if part is None:
            chosen = torch.randint(n - held, (chains, TRAINED_ON), generator=generator)
            rows = inside[lane, chosen.to(x.device).repeat(len(theta) // chains, 1)]
            part = x[rows], y[rows]
        _, gradient, _ = many.flat(theta, part, False)
        gradient.mul_(free)
        mean.lerp_(gradient, 1.0 - MEMORY[0])
        square.lerp_(gradient.square(), 1.0 - MEMORY[1])
        root = (square / (1.0 - MEMORY[1] ** i)).sqrt_().add_(1e-8)
        theta = theta - (RATE * decay(i, steps) / (1.0 - MEMORY[0] ** i)) * mean / root
        if i % every == 0 or i == steps:
            with torch.no_grad():
                loss = -target.log_likelihood_by_chain(layout.views(theta), test).mean(-1)
            lower = loss < best
            best, saved = torch.where(lower, loss, best), torch.where(lower.unsqueeze(-1), theta, saved)
            if time.monotonic() > deadline:
                break
    natural, residuals = target.constrain(layout.views(saved)), None
    with torch.no_grad():
        losses = -target.log_likelihood_by_chain(layout.views(saved), test)
        if network.likelihood != "categorical":
            said = functional_call(network._made(0), {name: natural[name] for name in network.start(0)}, (test[0],))
            mean, log_square = said.unbind(-1) if network._sizes else (said, torch.zeros_like(said))
            residuals = (test[1] - mean) * (-0.5 * log_square).exp()
    found = []
    for k in range(0, len(theta), chains):
        own = slice(k, k + chains)
        states = [{name: value[chain].clone() for name, value in natural.items()} for chain in range(k, k + chains)]
        if both and not k:
            for state in states:
                state |= {name: state[name][: network.outputs].clone() for name in SKIP if name in state}
        left = None if residuals is None else residuals[own].flatten(0, 1)
        found.append(Starts(states, i, seen[own], losses[own], left))
    return found


def starts_of(
    network: Network, x: Tensor, y: Tensor, chains: int, steps: int, seed: int, seconds: float
) -> tuple[Network, Starts]:
    """Train the starts within ``seconds``, and choose the noise; returns the network to sample and its starts.

    With ``auto`` noise, networks with constant and with log-linear noise are trained on the same rows; the latter are
    taken if they predict held-out rows better by `SURE` standard errors.
    """
    deadline = time.monotonic() + seconds
    if network.likelihood != "auto":
        return network, trained_starts(network, x, y, chains, steps, seed, deadline)[0]
    kinds = [replace(network, likelihood=likelihood) for likelihood in ("student_t", "loglinear_t")]
    found = trained_starts(kinds[1], x, y, chains, steps, seed, deadline, both=True)
    change = (found[1].losses - found[0].losses).double().flatten()
    rows = found[0].rows.flatten()  # several networks may have left out the same rows
    times = torch.bincount(rows, minlength=len(x))
    by_row = (change.new_zeros(len(x)).index_add_(0, rows, change) / times)[times > 0]
    error = float(by_row.std()) / math.sqrt(len(by_row)) if len(by_row) >= LEAST_ROWS else math.inf
    changing = float(by_row.mean()) < -SURE * error
    LOGGER.info(
        "NLL of %d rows that starts were not trained on, with noise of a log-linear size less of one: %.3f ± %.3f",
        len(by_row), float(by_row.mean()), error,
    )  # fmt: skip
    starts = found[changing]
    assert starts.residuals is not None
    return kinds[changing].with_tails_of(starts.residuals), starts._replace(steps=2 * starts.steps)


def sample_network(
    network: Network,
    x: Tensor,
    y: Tensor,
    *,
    chains: int = 8,
    effort: float = 1.0,
    max_seconds: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    store: str | Path | None = None,
    begin: Callable[[Network], None] | None = None,
    progress: bool = False,
) -> Posterior:
    """Draws from the posterior of a network for rows in standard units.

    Args:
        network: what to sample.
        x: inputs ``[n, inputs]``, standardised, float32.
        y: targets ``[n, outputs]``, standardised; class indices ``[n]``.
        chains: each starts at its own trained network.
        effort: factor on the number of steps.
        max_seconds: time limit.
        seed: same seed and settings, same draws.
        device: where to compute; the CPU by default.
        store: folder for draws and trained networks, for `resume_network`.
        begin: called with the network, whose noise is then known, between training and the first draw.
        progress: show a progress line.
    """
    place = torch.device(device or "cpu")
    x, y, target = x.to(place), y.to(place), network.target()
    check_room(target.initial(), chains, 0)
    steps: dict[str, Any] = steps_for(len(x), network, chains, effort)
    rows, minibatches = gradient_rows(len(x)), len(x) > ALL_ROWS
    training, products = steps.pop("training"), network.products(rows, chains)
    if minibatches:
        steps |= {"method": "isgd", "batch_size": rows}
    else:
        steps |= {"method": "hmc", "structure": "diagonal" if products < SMALL else "lowrank"}
    with fast_arithmetic(place, products):
        target.check(target.initial(device=place), (x, y))
        began, limit = time.monotonic(), math.inf if max_seconds is None else max_seconds
        network, trained = starts_of(network, x, y, chains, training, seed, TRAINING_TIME[minibatches] * limit)
        starts = trained.states
        if begin is not None:
            begin(network)
        left = None
        if max_seconds is not None:
            spent = time.monotonic() - began
            left = max(max_seconds - spent, 0.1 * max_seconds)
            # The time of a gradient is estimated from the training, so that draws are spread over the time.
            fit = left * trained.steps / (spent * max(1.0, rows / TRAINED_ON))
            share = min(1.0, fit / (steps["warmup"] + steps["draws"] * steps["keep_every"]))
            steps["warmup"] = max(LEAST_WARMUP, int(share * steps["warmup"]))
            steps["keep_every"] = max(2, int(share * steps["keep_every"]))
        return sample(
            network.target(), (x, y), starts=starts, temperature=1.0, chains=chains, seed=seed, device=place,
            store=store, progress=progress, max_seconds=left, compile=False, **steps,
        )  # fmt: skip


def resume_network(
    network: Network,
    x: Tensor,
    y: Tensor,
    store: str | Path,
    *,
    draws: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Posterior:
    """Continue a stopped run of `sample_network`, or extend it to ``draws`` of each chain."""
    place = torch.device(device or "cpu")
    if parts := Manifest.read(Path(store)).parts:  # merged runs
        for part in parts:
            resume_network(network, x, y, Path(store) / part, draws=draws, device=device, progress=progress)
        return load(store, network.target(), data=(x, y))
    starts = [StoredState(Path(store), about) for about in Manifest.read(Path(store)).starts]
    if not starts:
        raise ValueError(f"{store} does not hold the networks that its chains began with: begin another run")
    with fast_arithmetic(place, network.products(gradient_rows(len(x)), len(starts))):
        return resume(
            store, network.target(), (x.to(place), y.to(place)), starts=starts, device=place, progress=progress,
            draws=draws,
        )  # fmt: skip


@contextmanager
def fast_arithmetic(device: torch.device, products: int) -> Iterator[None]:
    """Set torch up for small networks, as a context.

    - Subnormal numbers are zero, since products with them are many times slower, and saturated units have such slopes.
    - Small gradients use one thread, since two wait for each other on busy cores.
    """
    flushed, threads = float(torch.tensor([1e-40]) * 1.0) == 0.0, torch.get_num_threads()
    torch.set_flush_denormal(True)
    if products < THREADED:
        torch.set_num_threads(1)
    try:
        with fastest_products(device):
            yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(threads)


@torch.no_grad()
def predicted_by_draws(network: Network, posterior: Posterior, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and noise variance of each row by each draw, ``[draws, n, outputs]``; for classes their probabilities.

    Uses double precision, so that the prediction of a row does not depend on the rest of its batch.
    """
    module, target = network._made(0), network.target()
    assert target.module is not None and isinstance(target.module.likelihood, likelihoods.Likelihood)
    draws = {name: value.flatten(0, 1).double() for name, value in posterior.draws.items()}
    count, found = len(next(iter(draws.values()))), []
    size = max(1, HELD // max(1, len(x) * max(network.hidden, default=1)))
    own = {name: draws.pop(name) for name in target.module.extra()}
    for a in range(0, count, size):
        part = {name: value[a : a + size] for name, value in draws.items()}
        wide = x.double().expand(min(size, count - a), -1, -1)
        output = functional_call(module, part, (wide,))
        scales = {name: value[a : a + size] for name, value in own.items()}
        found.append(vmap(target.module.likelihood.predict)(output, scales))
    mean, variance = (torch.cat([part[name] for part in found]) for name in ("mean", "variance"))
    return mean, variance


def with_noise(network: Network, mean: Tensor, variance: Tensor, generator: torch.Generator) -> Tensor:
    """Targets drawn from the mean and noise variance of each draw."""
    unit = math.sqrt(student_t_variance(network.tails))
    return mean + variance.sqrt() * student_t_draw(mean, network.tails, generator) / unit
