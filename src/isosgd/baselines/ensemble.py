"""Deep ensembles (Lakshminarayanan, Pritzel, Blundell 2017): networks trained from different starts."""

from __future__ import annotations

import copy

import numpy as np
import torch

from isosgd.baselines.base import Baseline, Start, Training, TrainingPlan
from isosgd.target import Params, Target


class Ensemble(Baseline):
    """Independently trained networks, one for each draw.

    Targets no posterior: each draw is a mode of it, and the frequency of a mode depends on the optimizer. With a single
    mode, as in a convex problem, all members agree up to the remaining noise of SGD, for any posterior variance.

    Departures from the paper: Adam with a cosine schedule; no adversarial examples; the noise scale of a regression is
    the target's. Layers with ``reset_parameters`` get new initial weights, the entries of other tensors are shuffled. A
    target that is not a module has one start, so that only the minibatches differ: for other starts pass ``init=``, a
    function from the number of a member to start values.

    Args:
        train_lr: the initial rate of Adam.
    """

    targets = "modes, one for each training"
    paper = "Lakshminarayanan, Pritzel, Blundell 2017"
    departures = "Adam at a rate that falls along a cosine; no adversarial examples"

    def members(self, draws: int) -> int:
        return draws

    def starts(self, target: Target, seed: int) -> Start | None:
        if target.module is None:
            return None
        module = copy.deepcopy(target.module._module)
        names = {name for name, _ in module.named_parameters()}
        first = {name: x.detach() for name, x in target.initial().items() if name in names}
        devices = list({p.device for p in first.values() if p.device.type == "cuda"})

        def fresh(member: int) -> Params:
            """Initial weights of a member, reproducible by its number."""
            word = int(np.random.SeedSequence((seed, member)).generate_state(1, np.uint32)[0])
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(word)
                found = {name: x.flatten()[torch.randperm(x.numel(), device=x.device)].view_as(x)
                         for name, x in first.items()}  # fmt: skip
                for prefix, layer in module.named_modules():
                    reset = getattr(layer, "reset_parameters", None)
                    if callable(reset) and any(True for _ in layer.parameters(recurse=False)):
                        reset()
                        own = layer.named_parameters(prefix, recurse=False)
                        found.update({name: p.detach().clone() for name, p in own if name in found})
            return found

        return fresh

    def run(self, training: Training, plan: TrainingPlan) -> list[Params]:
        training.train(plan.training, self.train_lr)
        return [training.chains.natural()]
