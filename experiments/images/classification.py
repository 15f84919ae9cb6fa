"""The classification tables: LeNet-5 on MNIST, residual networks and VGG-16 on CIFAR-10, every method from one command.

Temperatures are chosen once, on a tenth of the training set that models of their own have not seen (the *pilots*); all
other models see the whole training set, and the test set is looked at when everything is fixed. Chains from several
starts want lower temperatures than one, since their starts differ already: ladders are scored both ways.
"""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

import isosgd
from experiments.images.classifiers import PILOT, State, Task
from experiments.images.tables import Result, Score
from isosgd import DivergedError, Posterior, sample
from isosgd.metrics import accuracy, auroc, brier, categorical_mnll, ece, fpr95, predictive_entropy

PAPER_T = 1e-5
DRAWS = 30
BINS = 40  # of histograms of entropies, from 0 to the logarithm of the number of classes
CYCLES = 3  # of cyclical SGHMC ...
EXPLORATION = 0.8  # ... and the share of each that does not count
SNAPSHOTS = 20  # of SWAG
LEAST_WARMUP = 400  # of a warm-up that the library drives in windows
VARIANTS = ("alpha-c", "alpha-c-slr", "G-b", "G-b-slr", "G-c", "G-c-slr")
LADDERS: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": {
        "alpha-c": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
        "windowed": (3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0),
        "sghmc": (1e-3, 1e-2, 0.1, 1.0),
        "csghmc": (1e-3, 1e-2, 0.1, 1.0),
    },
    "cifar10": {
        "alpha-c": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        "windowed": (3e-3, 1e-2, 3e-2, 0.1, 0.3),
        "sghmc": (1e-2, 0.1),
        "csghmc": (1e-2, 0.1),
    },
}
TEMPERED = ("alpha-c", "windowed", "sghmc", "csghmc")
OURS = ("alpha-c", "windowed")  # one of them is our setting, by the held-out tenth
PAPER = " paper"  # behind the name of a row: the paper's temperature, warm-up and spacing
ROWS = (
    "single", *(name + PAPER for name in (*VARIANTS, "vsgd")), *TEMPERED, "swag", "mcdropout", "ensemble", "ours",
)  # fmt: skip


class Outcome(NamedTuple):
    """What draws predict for each set of images, averaged, and what they took."""

    predicted: dict[str, Tensor]
    gradients: int
    seconds: float
    notes: dict[str, float]


def settings(task: Task, name: str, draws: int, warmup: int, keep_every: int) -> dict[str, Any]:
    """The method of a row as arguments of `isosgd.sample`.

    Args:
        task: the network.
        name: of the row.
        draws: of each chain.
        warmup: steps before the first draw.
        keep_every: steps between draws.
    """
    recipe = task.recipe
    common: dict[str, Any] = {"draws": draws, "warmup": warmup, "keep_every": keep_every}
    if name == "windowed":
        return common | {"preset": name}
    if name in VARIANTS:  # the injected noise is that of the warm-up's estimate, and stays so
        return common | {"preset": name, "track_every": None}
    if name == "vsgd":
        return common | {"method": name, "warmup": max(LEAST_WARMUP, warmup)}
    if name == "sghmc":  # at a hundredth of the training's highest rate
        return common | {"method": name, "lr": 0.01 * recipe.peak, "warmup": 0}
    if name == "csghmc":  # the rate falls from half the training's highest
        each = math.ceil(draws / CYCLES)
        cycle, lowest = max(keep_every, 5) * each, 0.5 * (1 + math.cos(math.pi * EXPLORATION))
        rate, apart = 0.5 * recipe.peak * lowest, max(1, round((1 - EXPLORATION) * cycle / each))
        own = {"lr": rate, "cycle": cycle, "exploration": EXPLORATION, "keep_every": apart}
        return common | {"method": name, "warmup": 0, **own}
    if name == "swag":
        apart = max(1, task.steps(recipe.swag, recipe.batch_size) // SNAPSHOTS)
        return {"method": name, "draws": draws, "warmup": 0, "keep_every": apart, "snapshots": SNAPSHOTS}
    if name == "mcdropout":
        return {"method": name, "draws": draws, "warmup": 0}
    raise ValueError(f"{name!r} is no method of these tables")


def run(
    task: Task,
    name: str,
    starts: Sequence[State],
    seed: int,
    temperature: float | None = None,
    draws: int = 1,
    times: tuple[int, int] = (0, 0),
) -> Posterior:
    """Draws of a method, a chain from each of the trained models; or, of ``single``, these models themselves.

    Args:
        task: the network.
        name: of the method.
        starts: trained models.
        seed: of everything.
        temperature: T, for methods that have one.
        draws: of each chain.
        times: steps before the first draw and between draws.

    Raises:
        DivergedError: where a chain did.
    """
    dropout = task.recipe.dropout if name == "mcdropout" else 0.0
    target = task.target(dropout)
    if name == "single":
        every = {key: torch.stack([start[key] for start in starts]).unsqueeze(1).cpu() for key in starts[0]}
        parameters = set(target.initial())
        values = {key: x for key, x in every.items() if key in parameters}
        return Posterior(target, values, {}, buffers={k: x for k, x in every.items() if k not in parameters})
    given = settings(task, name, draws, *times)
    burn_in = math.ceil(times[0] / times[1]) if name == "sghmc" else 0  # its rate is given: no warm-up is needed
    given["draws"] += burn_in
    posterior = sample(
        target,
        (task.train.pixels, task.train.labels),
        init=lambda k: starts[k],
        chains=len(starts),
        batch_size=task.recipe.batch_size,
        seed=seed,
        transform=task.train.transform,
        progress=False,
        **({} if temperature is None else {"temperature": temperature}),
        **given,
    )
    if posterior.num_chains < len(starts):
        raise DivergedError(next(iter(posterior.info["dropped"].values())), step=0, group=None, state={})
    return posterior.select(draws=slice(burn_in, None)) if burn_in else posterior


def outcome_of(task: Task, posterior: Posterior, began: float, dropout: float = 0.0) -> Outcome:
    """Predictions of draws, and what they took."""
    predicted = task.predictions(posterior, dropout)
    rates = [rate for chain in posterior.info.get("rates", []) for rate in chain.values()]
    notes = {"least rate": min(rates), "largest rate": max(rates)} if rates else {}
    return Outcome(predicted, posterior.info.get("gradients", 0), time.monotonic() - began, notes)


def diverged(task: Task, began: float) -> Outcome:
    """What a chain predicts that went to infinity: nothing."""
    nothing = {name: torch.full((len(some), 1), math.nan) for name, some in task.sets.items()}
    return Outcome(nothing, 0, time.monotonic() - began, {})


class Bench:
    """A table in the making.

    Args:
        task: the network on all training images.
        pilot: the same with a tenth held out.
        chains: of our own setting and members of the ensemble, each from a start of its own.
        pilots: models to choose temperatures with, each from a start of its own.
        paper_keep: at most so many steps between draws in the paper's settings, to save time.
        ladder: temperatures to choose from, in place of each method's own.
        command: that makes the result, to be kept with it.
        earlier: a result of the same settings to go on with: its ladders hold, and what it has is not made again.
        say: told of every row as it comes.
        save: given the result whenever it has grown.
    """

    def __init__(
        self,
        task: Task,
        pilot: Task,
        *,
        chains: int = 5,
        pilots: int = 2,
        paper_keep: int | None = None,
        ladder: Sequence[float] | None = None,
        command: str = "",
        earlier: Result | None = None,
        say: Callable[[str], None] = print,
        save: Callable[[Result], None] = lambda result: None,
    ) -> None:
        counts = {"chains": chains, "pilots": pilots, "paper_keep": paper_keep}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if ladder is not None and not (ladder and all(math.isfinite(t) and t > 0 for t in ladder)):
            raise ValueError(f"ladder = {ladder}: temperatures must be positive numbers, at least one")
        own = LADDERS[task.recipe.data]
        self.ladders = own if ladder is None else {name: tuple(ladder) for name in own}
        self.task, self.pilot, self.chains, self.pilots, self.paper_keep = task, pilot, chains, pilots, paper_keep
        self.say, self.save = say, save
        device = task.train.device
        self.result = Result(
            task.recipe.data,
            task.model,
            settings={
                **asdict(task.recipe),
                **{"draws": DRAWS, "chains": chains, "pilots": pilots, "paper_keep": paper_keep},
                "examples": len(task.train),
            },
            command=command,
            versions={
                "isosgd": isosgd.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        )
        if earlier is not None:
            self.result.go_on(earlier)
        self.climbed = self._climbed()

    def _climbed(self) -> set[str]:
        """Methods whose ladders an earlier result has to their end; others stay on record until climbed again."""
        climbed = set()
        for name, wanted in self.ladders.items():
            found = {float(t) for t in self.result.ladder.get(name, {})}
            if not found <= set(wanted):
                raise ValueError(
                    f"the earlier result has tried {name} at {sorted(found)}, now {sorted(wanted)} are asked for: give "
                    "the same --ladder, or write to another folder"
                )
            if found == set(wanted):
                climbed.add(name)
        return climbed

    def run(self, seeds: int = 5, rows: Sequence[str] | None = None, once: Sequence[str] = ()) -> Result:
        """All rows, each for all seeds, which have starts and chains of their own.

        Args:
            seeds: how many.
            rows: names of rows (see `ROWS`); all by default.
            once: names of further rows, for one seed only, the first of those that the others are made for.
        """
        rows = [row for row in ROWS if row not in once] if rows is None else list(rows)
        if unknown := [row for row in (*rows, *once) if row not in ROWS]:
            raise ValueError(f"rows {unknown} are not known; choose from {', '.join(ROWS)}")
        rows = list(dict.fromkeys(rows))
        once = [row for row in dict.fromkeys(once) if row not in rows]  # what runs for all seeds runs for the first
        have = {row.row: {score.seed for score in row.scores} for row in self.result.rows}
        wanted = [(seed, row) for row in rows for seed in range(seeds) if seed not in have.get(row, ())]
        first = min((seed for seed, _ in wanted), default=0)  # with whose starts, which are needed anyway
        wanted += [(first, row) for row in once if row not in have]
        order = [*rows, *once, *have]
        names = [name for name in TEMPERED if {name, "ours" if name in OURS else name} & {row for _, row in wanted}]
        missing = [name for name in names if name not in self.climbed]
        self.train(wanted, bool(missing))
        self.climb(missing)
        began, before = time.monotonic(), self.result.settings.get("row seconds", 0.0)
        for seed, row in wanted:
            temperature, outcome = self.make(row, seed)
            score = measure(outcome, self.task, seed)
            self.result.add(row, temperature, score)
            self.result.rows.sort(key=lambda known: order.index(known.row))
            self.result.settings["row seconds"] = before + time.monotonic() - began
            self.say(f"seed {seed}, {row}, T = {temperature}: {score.words()}")
            self.save(self.result)
        return self.result

    def train(self, wanted: Sequence[tuple[int, str]], pilots: bool) -> None:
        """Have all starts ready that seeds and rows need, and those of the pilots."""
        began, before = time.monotonic(), self.result.settings.get("training seconds", 0.0)
        for k in range(self.pilots if pilots else 0):
            self.pilot.start(PILOT + k)
        for seed, row in wanted:
            self.starts(row, seed)
        self.result.settings["training seconds"] = before + time.monotonic() - began
        self.say(f"trained in {time.monotonic() - began:.1f} s")

    def starts(self, row: str, seed: int) -> list[State]:
        """The trained models that a row of a seed begins with."""
        dropout = self.task.recipe.dropout if row == "mcdropout" else 0.0
        count = self.chains if row in ("ours", "ensemble") else 1
        return [self.task.start(self.chains * seed + k, dropout) for k in range(count)]

    def climb(self, names: Sequence[str]) -> None:
        """Run ladders of temperatures from the pilots' starts, to choose by the held-out MNLL."""
        if not names:
            return
        pilot, labels = self.pilot, self.pilot.sets["held-out"].labels
        times = (pilot.recipe.warmup, pilot.recipe.keep_every)
        starts = [pilot.start(PILOT + k) for k in range(self.pilots)]
        result = self.result
        result.ladder |= {name: {} for name in ("single", *names)}
        result.together |= {name: {} for name in ("single", *names)}
        rungs = [("single", 0.0), *((method, t) for method in names for t in self.ladders[method])]
        for name, t in rungs:
            began = time.monotonic()
            alone: float | None = None
            joined: float | None = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", isosgd.SamplingWarning)  # some rungs are meant to be too hot
                try:
                    posterior = run(pilot, name, starts, 1, t or None, max(1, DRAWS // 4), times)
                    chains = [posterior.select(chains=[k]) for k in range(self.pilots)]
                    each = torch.cat([pilot.predictions(chain)["held-out"] for chain in chains])
                    alone = finite_mnll(each, labels.repeat(self.pilots))
                    joined = finite_mnll(torch.stack(each.chunk(self.pilots)).mean(0), labels)
                except DivergedError:
                    pass
            result.ladder[name][f"{t:g}"], result.together[name][f"{t:g}"] = alone, joined
            self.say(f"ladder, {name}, T = {t:g}: {alone}, together {joined} ({time.monotonic() - began:.1f} s)")
            self.save(result)
        self.climbed |= set(names)
        for name in names:
            for count in sorted({1, self.chains} if name in OURS else {1}):
                _, temperature = self.chosen(name, count)
                for end, word in ((max, "highest"), (min, "lowest")):
                    if len(self.ladders[name]) > 1 and temperature == end(self.ladders[name]):
                        much = f"{count} chain{'s' * (count > 1)}"
                        self.say(
                            f"ladder, {name}, {much}: the {word} temperature is the best; try others with --ladder"
                        )

    def chosen(self, name: str, chains: int = 1) -> tuple[float, float]:
        """The best held-out MNLL of a method, alone or with several chains together, and its temperature.

        Of equals (all astray) the coldest.
        """
        ladder = self.result.ladder if chains == 1 else self.result.together
        found = {float(t): math.inf if m is None else m for t, m in ladder[name].items()}
        temperature = min(found, key=lambda t: (found[t], t))
        return found[temperature], temperature

    def plan(self, row: str) -> tuple[str, float | None, int, tuple[int, int]]:
        """The method of a row, its temperature, draws of each chain, and steps before the first and between them."""
        recipe, own = self.task.recipe, (self.task.recipe.warmup, self.task.recipe.keep_every)
        if row.endswith(PAPER):
            name = row.removesuffix(PAPER)
            warmup, keep = recipe.gauss if name.startswith("G") else recipe.alpha
            return name, PAPER_T, DRAWS, (warmup, min(keep, self.paper_keep or keep))
        if row == "ours":
            (_, temperature), best = min((self.chosen(name, self.chains), name) for name in OURS)
            self.result.settings["ours"] = best
            return best, temperature, math.ceil(DRAWS / self.chains), own
        if row in ("single", "ensemble"):
            return "single", None, 1, (0, 0)
        if row in ("swag", "mcdropout"):
            return row, None, DRAWS, (0, 0)
        return row, self.chosen(row)[1], DRAWS, own

    def make(self, row: str, seed: int) -> tuple[float | None, Outcome]:
        """A row of a seed: its temperature, and what came out."""
        name, temperature, draws, times = self.plan(row)
        starts, began = self.starts(row, seed), time.monotonic()
        try:
            posterior = run(self.task, name, starts, 7919 * seed + 1, temperature, draws, times)
        except DivergedError:
            return temperature, diverged(self.task, began)
        dropout = self.task.recipe.dropout if row == "mcdropout" else 0.0
        return temperature, outcome_of(self.task, posterior, began, dropout)


def measure(outcome: Outcome, task: Task, seed: int) -> Score:
    """Scores of averaged predictions."""
    p, labels = outcome.predicted["test"], task.sets["test"].labels
    about = {"gradients": outcome.gradients, "seconds": outcome.seconds, "notes": outcome.notes}
    if not bool(p.isfinite().all()):
        return Score(seed, diverged=True, **about)  # type: ignore[arg-type]
    found = Score(
        seed,
        accuracy=100 * float(accuracy(p, labels)),
        mnll=finite_mnll(p, labels),
        ece=float(ece(p, labels)),
        brier=float(brier(p, labels)),
        **about,  # type: ignore[arg-type]
    )
    if "mirrored" in task.sets:  # training mirrors half of the images: the average over both is the model's, too
        both = (p + outcome.predicted["mirrored"]) / 2
        found.mirrored = {"accuracy": 100 * float(accuracy(both, labels)), "mnll": finite_mnll(both, labels)}
    if "outside" in task.sets:
        inside, outside = predictive_entropy(p), predictive_entropy(outcome.predicted["outside"])
        found.auroc, found.fpr95 = float(auroc(inside, outside)), float(fpr95(inside, outside))
        found.entropies = {"test": histogram(inside, p.shape[1]), "outside": histogram(outside, p.shape[1])}
    return found


def histogram(entropies: Tensor, classes: int) -> list[int]:
    """How many predictions have which entropy, from none to the most there can be."""
    return [int(n) for n in torch.histc(entropies.float().cpu(), BINS, 0.0, math.log(classes))]


def finite_mnll(p: Tensor, labels: Tensor) -> float | None:
    """Mean negative log likelihood; None where predictions are not finite. A probability is at least 1e-12."""
    return float(categorical_mnll(p.clamp_min(1e-12), labels)) if bool(p.isfinite().all()) else None
