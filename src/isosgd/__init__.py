"""Sample the posterior of any PyTorch model with stochastic gradients, at a learning rate found automatically.

>>> import isosgd, torch
>>> _ = torch.manual_seed(0)
>>> x = torch.linspace(-1, 1, 200)[:, None]
>>> y = 2 * x + 0.3 * torch.randn(200, 1)
>>> target = isosgd.Target.from_module(torch.nn.Linear(1, 1), likelihood="gaussian")
>>> posterior = isosgd.sample(target, (x, y), draws=50)
>>> posterior.predict(torch.tensor([[0.5]])).mean.round(decimals=0)
tensor([[1.]])
"""

from isosgd import noise
from isosgd.data import DataSets
from isosgd.diagnostics.audit import audit
from isosgd.errors import DivergedError, OutOfTimeError, RankError, SamplingWarning
from isosgd.posterior import Comparison, Posterior, Prediction
from isosgd.samplers import ISGD, METHODS, PRESETS, SGHMC, SGLD, SGNHT, VSGD, Sampler
from isosgd.sampling import LLC, Collector, Interrupted, llc, load, merge, methods, resume, sample
from isosgd.target import Target, likelihoods, priors
from isosgd.warmup import GroupReport, WarmupReport

__version__ = "0.1.0"

__all__ = [
    "ISGD",
    "LLC",
    "METHODS",
    "PRESETS",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "VSGD",
    "Collector",
    "Comparison",
    "DataSets",
    "DivergedError",
    "GroupReport",
    "Interrupted",
    "OutOfTimeError",
    "Posterior",
    "Prediction",
    "RankError",
    "Sampler",
    "SamplingWarning",
    "Target",
    "WarmupReport",
    "audit",
    "likelihoods",
    "llc",
    "load",
    "merge",
    "methods",
    "noise",
    "priors",
    "resume",
    "sample",
]
