"""The network that ``isosgd fit`` samples, and for how many steps: nothing but the size of the table decides.

It has one hidden layer; the scale of the noise and the scales of the prior, one a layer, are sampled too. Where a
gradient of all rows is affordable, chains are those of HMC on all of them, which has no bias, and carries a network's
predictions through their posterior. Where it is not, they take minibatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isosgd import Target, priors

LARGEST = 1 << 27  # numbers in a network that a folder may ask for
MOST_WORK = 5_000_000  # rows times weights up to which all rows are taken: some four minutes of a core
LITTLE_WORK = 400_000  # so little can be done twice as often in the same minute
WARMUP, APART = 6_000, 200  # steps on all rows before the first draw, and between two, at effort 1
LEAST_WARMUP, LEAST_APART = 1_300, 8  # below which nothing is found out, not even by one chain
LITTLE_EFFORT = 0.1  # below which to compile takes longer than it saves
FEW_WARMUP, FEW_APART = 5_000, 50  # steps on minibatches, at effort 1


@dataclass(frozen=True)
class Network:
    """What is needed to make the target again.

    Attributes:
        inputs: of the network.
        outputs: 1 for a regression, else the number of classes.
        hidden: units of the hidden layer.
        seed: of the weights that chains start at.
    """

    inputs: int
    outputs: int
    hidden: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        most = LARGEST // (self.inputs + self.outputs + 1)
        if self.hidden > most:
            raise ValueError(f"{self.hidden:,} hidden units are more than isosgd fit makes; {most:,} at most")

    @property
    def weights(self) -> int:
        """How many there are, biases among them."""
        return self.hidden * (self.inputs + 1) + self.outputs * (self.hidden + 1)

    def target(self) -> Target:
        """The posterior of the network."""
        likelihood = "gaussian" if self.outputs == 1 else "categorical"
        return Target.from_module(self._made(0), likelihood, priors.HierarchicalNormal())

    def start(self, chain: int) -> dict[str, Tensor]:
        """Weights of a new network for each chain; everything else starts where the target says."""
        return {name: p.detach() for name, p in self._made(chain).named_parameters()}

    def layers(self) -> dict[str, str]:
        """What to call its layers."""
        linear = [name for name, part in self._made(0).named_modules() if isinstance(part, nn.Linear)]
        named = dict(zip(linear, ("hidden layer", "output layer"), strict=True))
        return {**named, "likelihood.scale": "noise scale", "prior.scale": "prior scales"}

    def _made(self, chain: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.SeedSequence((self.seed, chain, 1)).generate_state(1)[0]))
            hidden, output = nn.Linear(self.inputs, self.hidden), nn.Linear(self.hidden, self.outputs)
            for layer, gain in ((hidden, math.sqrt(2)), (output, 1.0)):  # He et al. (2015)
                nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
                nn.init.zeros_(layer.bias)
            # Nothing stands in the third place, but folders of earlier runs call the layers 0 and 3.
            return nn.Sequential(hidden, nn.ReLU(), nn.Identity(), output)


def steps_for(method: str, rows: int, weights: int, effort: float) -> dict[str, Any]:
    """Settings of `isosgd.sample` for a network of so many weights, with ``effort`` times the usual number of steps.

    Example:
        >>> steps_for("isgd", rows=1_000, weights=751, effort=1.0)
        {'batch_size': 'all', 'warmup': 6000, 'keep_every': 200}
        >>> steps_for("hmc", rows=50_000, weights=751, effort=1.0)["batch_size"]
        'all'
        >>> steps_for("isgd", rows=50_000, weights=751, effort=2.0)
        {'batch_size': None, 'warmup': 10000, 'keep_every': 100}
    """
    work = rows * weights
    if method != "hmc" and (method != "isgd" or work > MOST_WORK):
        few = {"warmup": math.ceil(FEW_WARMUP * effort), "keep_every": math.ceil(FEW_APART * effort)}
        return {"batch_size": None, **few}
    apart = APART * (2 if work <= LITTLE_WORK else 1)
    return {
        "batch_size": "all",
        "warmup": max(LEAST_WARMUP, math.ceil(WARMUP * effort)),
        "keep_every": max(LEAST_APART, math.ceil(apart * effort)),
        **({"compile": False} if effort < LITTLE_EFFORT else {}),
    }
