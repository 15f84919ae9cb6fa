"""The model of the UCI regressions: the paper's network, its prior, and the noise of the targets.

The network has one hidden layer of ReLU units. The scales of its prior are sampled, one for each input and one for each
layer, and so is the scale of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from experiments.models import mlp
from isosgd import Target, likelihoods, priors

Noise = Literal["gaussian", "student", "varying"]
NOISES: dict[Noise, str] = {"gaussian": "Gaussian noise", "student": "Student-t noise", "varying": "noise by input"}

# Wide, and sure of it: under a half-Cauchy the network predicts worse (docs/uci.md).
WIDE = priors.LogNormal(math.sqrt(10), sigma=0.2)


@dataclass(frozen=True)
class Model:
    """What is sampled, the same for all sets.

    Attributes:
        noise: of the observations: ``gaussian``; ``student`` with ``tails``; or ``varying``: Gaussian, of a size that
            the network says for each input by a second output.
        tails: degrees of freedom of a Student-t.
        scales: prior of the scales of the network's prior; with None they are those of `isosgd.priors.FanInNormal`.
    """

    noise: Noise = "student"
    tails: float = 6.0
    scales: priors.PositivePrior | None = WIDE

    def network(self, features: int, hidden: int) -> nn.Sequential:
        """With weights drawn from torch's random numbers."""
        return mlp(features, hidden, 2 if self.noise == "varying" else 1)

    def target(self, features: int, hidden: int) -> Target:
        """The posterior of the network."""
        likelihood: likelihoods.Likelihood = {
            "student": likelihoods.StudentT(self.tails),
            "gaussian": likelihoods.Gaussian(),
            "varying": likelihoods.Heteroscedastic(),
        }[self.noise]
        prior: priors.Prior | dict[str, priors.Prior] = priors.FanInNormal()
        if self.scales is not None:
            prior = {"0.weight": priors.Relevance(self.scales), "*": priors.HierarchicalNormal(self.scales)}
        return Target.from_module(self.network(features, hidden), likelihood, prior)

    def start(self, features: int, hidden: int, seed: int, chain: int) -> dict[str, Tensor]:
        """Weights of a new network; everything else starts where the target says."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.SeedSequence((seed, chain, 1)).generate_state(1)[0]))
            return {name: p.detach() for name, p in self.network(features, hidden).named_parameters()}

    def describe(self) -> dict[str, object]:
        """For the record of a run."""
        tails = {"tails": self.tails} if self.noise == "student" else {}
        return {"noise": self.noise, **tails, "scales": self.scales and self.scales.describe()}
