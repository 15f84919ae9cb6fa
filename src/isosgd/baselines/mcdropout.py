"""MC-dropout (Gal and Ghahramani 2016): a network with random units missing.

Of the units that feed a layer with weights W, each is missing with probability p and the others count 1 / (1 - p). With
m the mask divided by 1 - p, ``W (m * x) = (W diag(m)) x``: a mask is a scaling of the weight's columns, exactly. So a
draw is a set of weights like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.func import vmap

from isosgd.baselines.base import Baseline, Plan, Training
from isosgd.baselines.masks import Place, Rates, check_rates, find_places
from isosgd.chain.chain import Chains
from isosgd.potential import Params


class MCDropout(Baseline):
    """Draws are the trained weights under random dropout masks.

    Targets no posterior: the draws scatter around weights that minimise the mean loss under dropout, and their spread
    comes from p, not from the data: of a linear model with weights w, ``diag(p / (1 - p) w^2)``, however many
    examples there are.

    Departures from the paper, all from draws being weights: a draw has one mask for all examples, in training one for
    each minibatch (the expected loss is the same); of a convolution whole channels are missing; and layers of dropout
    in the model act on the next linear or convolutional layer that the model calls. A model without any, or a target
    that is no module, has masks put in.

    Args:
        p: probability that a unit is missing: one for all linear and convolutional layers but the first (or the only
            one); or by names or patterns of layers. None: those of the model's own dropout layers, else 0.1.
        units: for a target that is no module: names of its weights, with the axis along which their inputs lie.
        train_lr: the highest rate of Adam.

    Example:
        >>> from isosgd import Target, sample
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> target = Target.from_module(torch.nn.Linear(3, 1), "gaussian")
        >>> posterior = sample(target, (x, x[:, :1]), method="mcdropout", p=0.5, draws=4, warmup=100, progress=False)
        >>> posterior.draws["weight"].shape, bool((posterior.draws["weight"] == 0).any())
        (torch.Size([1, 4, 1, 3]), True)
    """

    targets = "dropout masks on the weights of least mean loss under dropout"

    def __init__(self, *, p: Rates = None, units: Mapping[str, int] | None = None, train_lr: float = 0.01) -> None:
        super().__init__(train_lr=train_lr)
        self.p, self.units = check_rates(p), units

    def run(self, training: Training, plan: Plan) -> list[Params]:
        chains = training.chains
        places = find_places(chains.target, self.p, self.units, plan.example)
        if plan.training:
            training.train(plan.training, self.train_lr, lambda: self._gradient(training, places))
        here, found = chains.snapshot(), []
        for _ in range(plan.draws):
            self._put(chains, places, training.generator)
            found.append(chains.natural())
            chains.restore(here)
        return found

    @torch.no_grad()
    def _put(self, chains: Chains, places: list[Place], generator: torch.Generator) -> Params:
        """Multiply the weights by new masks; returns these."""
        masks = {place.name: place.mask(chains, generator) for place in places}
        for name, mask in masks.items():
            chains.params[name].mul_(mask)
        return masks

    def _gradient(self, training: Training, places: list[Place]) -> None:
        """Gradient of the loss under new masks: the likelihood's goes back through them, the prior's does not."""
        chains = training.chains
        here, prior = chains.snapshot(), _prior_score(chains)
        masks = self._put(chains, places, training.generator)
        masked = _prior_score(chains)
        chains.evaluate()
        chains.restore(here)
        with torch.no_grad():
            for name, leaf in chains.params.items():
                assert leaf.grad is not None
                likelihood = (leaf.grad + masked[name] / chains.num_data) * masks.get(name, 1.0)
                leaf.grad = likelihood - prior[name] / chains.num_data
        training.count("training")
        training.hold()


@torch.no_grad()
def _prior_score(chains: Chains) -> Params:
    score = chains.target.prior_score
    found: Params = score(chains.params) if chains.many is None else vmap(score)(chains.params)
    return found
