"""The classification tables: LeNet-5 on MNIST, residual networks and VGG-16 on CIFAR-10, every method from one command.

Temperatures are chosen once, on a tenth of the training set that models of their own have not seen (the *pilots*); all
other models see the whole training set, and the test set is looked at when everything is fixed. Chains from several
starts want lower temperatures than one, since their starts differ already: ladders are scored both ways.
"""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

import isosgd
from experiments.images import image_rivals as rivals
from experiments.images.classifiers import PILOT, SIDE_BY_SIDE, Task, prepare
from experiments.images.image_jobs import Job, Method, Outcome, gather
from experiments.images.image_methods import isgd, windowed
from experiments.images.tables import Result, Score
from isosgd.metrics import accuracy, auroc, brier, categorical_mnll, ece, fpr95, predictive_entropy

PAPER_T = 1e-5
DRAWS = 30
BINS = 40  # of histograms of entropies, from 0 to the logarithm of the number of classes
VARIANTS = ("alpha-c", "alpha-c-slr", "G-b", "G-b-slr", "G-c", "G-c-slr")
SAMPLERS: dict[str, Method] = {
    **{name: isgd(name) for name in VARIANTS},
    "windowed": windowed,
    "vsgd": rivals.vsgd,
    "sghmc": rivals.sghmc,
    "csghmc": rivals.csghmc,
}
RUNGS = {"single": rivals.single, **SAMPLERS}  # what is run from the pilots
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


class Bench:
    """A table in the making.

    Args:
        task: the network on all training images.
        pilot: the same with a tenth held out.
        chains: of our own setting and members of the ensemble, each from a start of its own.
        pilots: models to choose temperatures with, each from a start of its own.
        paper_keep: at most so many steps between draws in the paper's settings, to save time.
        ladder: temperatures to choose from, in place of each method's own.
        width: jobs that are done side by side.
        side_by_side: models that are trained at a time.
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
        width: int = 6,
        side_by_side: int = SIDE_BY_SIDE,
        command: str = "",
        earlier: Result | None = None,
        say: Callable[[str], None] = print,
        save: Callable[[Result], None] = lambda result: None,
    ) -> None:
        counts = {"chains": chains, "pilots": pilots, "side_by_side": side_by_side, "paper_keep": paper_keep}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if ladder is not None and not (ladder and all(math.isfinite(t) and t > 0 for t in ladder)):
            raise ValueError(f"ladder = {ladder}: temperatures must be positive numbers, at least one")
        own = LADDERS[task.recipe.data]
        self.ladders = own if ladder is None else {name: tuple(ladder) for name in own}
        self.task, self.pilot, self.chains, self.pilots, self.paper_keep = task, pilot, chains, pilots, paper_keep
        self.width, self.side_by_side, self.say, self.save = width, side_by_side, say, save
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
        for (seed, row), temperature, outcome in self.make(wanted):
            score = measure(outcome, self.task, seed)
            self.result.add(row, temperature, score)
            self.result.rows.sort(key=lambda known: order.index(known.row))
            self.result.settings["row seconds"] = before + time.monotonic() - began
            self.say(f"seed {seed}, {row}, T = {temperature}: {score.words()}")
            self.save(self.result)
            clear()
        return self.result

    def train(self, wanted: Sequence[tuple[int, str]], pilots: bool) -> None:
        """Have all starts ready that seeds and rows need, and those of the pilots."""
        began, before = time.monotonic(), self.result.settings.get("training seconds", 0.0)
        numbers = {
            (self.chains * seed + k, self.task.recipe.dropout if row == "mcdropout" else 0.0)
            for seed, row in wanted
            for k in range(self.chains if row in ("ours", "ensemble") else 1)
        }
        starts = [(self.pilot, PILOT + k, 0.0) for k in range(self.pilots if pilots else 0)]
        # Networks with dropout last, since they are not compiled.
        starts += [(self.task, *start) for start in sorted(numbers, key=lambda start: start[::-1])]
        prepare(starts, self.side_by_side)
        clear()
        self.result.settings["training seconds"] = before + time.monotonic() - began
        self.say(f"trained in {time.monotonic() - began:.1f} s")

    def climb(self, names: Sequence[str]) -> None:
        """Run ladders of temperatures from the pilots' starts, side by side, to choose by the held-out MNLL."""
        if not names:
            return
        pilot, recipe, labels = self.pilot, self.pilot.recipe, self.pilot.sets["held-out"].labels
        starts = [pilot.start(PILOT + k) for k in range(self.pilots)]
        rungs = [("single", 0.0), *((name, temperature) for name in names for temperature in self.ladders[name])]
        groups = [
            [
                (RUNGS[name], Job(pilot, start, 1 + k, temperature, DRAWS // 4, recipe.warmup, recipe.keep_every))
                for k, start in enumerate(starts)
            ]
            for name, temperature in rungs
        ]
        result = self.result
        result.ladder |= {name: {} for name in ("single", *names)}
        result.together |= {name: {} for name in ("single", *names)}
        for number, outcomes in gather(groups, self.width):
            (name, temperature), whole = rungs[number], Outcome.join(outcomes)
            each = torch.cat([outcome.mean("held-out") for outcome in outcomes])
            alone, joined = finite_mnll(each, labels.repeat(self.pilots)), finite_mnll(whole.mean("held-out"), labels)
            result.ladder[name][f"{temperature:g}"], result.together[name][f"{temperature:g}"] = alone, joined
            self.say(f"ladder, {name}, T = {temperature:g}: {alone}, together {joined} ({whole.seconds:.1f} s)")
            self.save(result)
            clear()
        self.climbed |= set(names)
        for name in names:
            for chains in sorted({1, self.chains} if name in OURS else {1}):
                _, temperature = self.chosen(name, chains)
                for end, word in ((max, "highest"), (min, "lowest")):
                    if len(self.ladders[name]) > 1 and temperature == end(self.ladders[name]):
                        much = f"{chains} chain{'s' * (chains > 1)}"
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

    def make(self, wanted: Sequence[tuple[int, str]]) -> Iterator[tuple[tuple[int, str], float | None, Outcome]]:
        """Seeds and rows, side by side: which is done, its temperature and what came out."""
        plans = [self.plan(row, seed) for seed, row in wanted]
        for i, outcomes in gather([jobs for jobs, _ in plans], self.width):
            yield wanted[i], plans[i][1], Outcome.join(outcomes)

    def plan(self, row: str, seed: int) -> tuple[list[tuple[Method, Job]], float | None]:
        """What is to be done for one row and one seed, the outcomes to be averaged, and the temperature."""
        recipe, own = self.task.recipe, (self.task.recipe.warmup, self.task.recipe.keep_every)

        def job(number: int, temperature: float, draws: int, times: tuple[int, int], dropout: float = 0.0) -> Job:
            start = self.task.start(self.chains * seed + number, dropout)
            return Job(self.task, start, 7919 * seed + number + 1, temperature, draws, *times)

        if row.endswith(PAPER):
            name = row.removesuffix(PAPER)
            warmup, keep = recipe.gauss if name.startswith("G") else recipe.alpha
            times = (warmup, min(keep, self.paper_keep or keep))
            return [(SAMPLERS[name], job(0, PAPER_T, DRAWS, times))], PAPER_T
        if row == "ours":
            (_, temperature), best = min((self.chosen(name, self.chains), name) for name in OURS)
            self.result.settings["ours"] = best
            parts = [DRAWS // self.chains + (k < DRAWS % self.chains) for k in range(self.chains)]
            return [(SAMPLERS[best], job(k, temperature, n, own)) for k, n in enumerate(parts) if n], temperature
        if row == "ensemble":
            return [(rivals.single, job(k, 0.0, 1, (0, 0))) for k in range(self.chains)], None
        if row == "mcdropout":
            return [(rivals.dropout, job(0, 0.0, DRAWS, (0, 0), recipe.dropout))], None
        if row in ("single", "swag"):
            return [(rivals.single if row == "single" else rivals.swag, job(0, 0.0, DRAWS, (0, 0)))], None
        _, temperature = self.chosen(row)
        return [(SAMPLERS[row], job(0, temperature, DRAWS, own))], temperature


def measure(outcome: Outcome, task: Task, seed: int) -> Score:
    """Scores of averaged predictions."""
    p, labels = outcome.mean("test"), task.sets["test"].labels
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
        both = (p + outcome.mean("mirrored")) / 2
        found.mirrored = {"accuracy": 100 * float(accuracy(both, labels)), "mnll": finite_mnll(both, labels)}
    if "outside" in task.sets:
        inside, outside = predictive_entropy(p), predictive_entropy(outcome.mean("outside"))
        found.auroc, found.fpr95 = float(auroc(inside, outside)), float(fpr95(inside, outside))
        found.entropies = {"test": histogram(inside, p.shape[1]), "outside": histogram(outside, p.shape[1])}
    return found


def histogram(entropies: Tensor, classes: int) -> list[int]:
    """How many predictions have which entropy, from none to the most there can be."""
    return [int(n) for n in torch.histc(entropies.float().cpu(), BINS, 0.0, math.log(classes))]


def finite_mnll(p: Tensor, labels: Tensor) -> float | None:
    """Mean negative log likelihood; None where predictions are not finite. A probability is at least 1e-12."""
    return float(categorical_mnll(p.clamp_min(1e-12), labels)) if bool(p.isfinite().all()) else None


def clear() -> None:
    """Give back the memory of captured steps."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
