"""The posterior to sample: likelihoods, priors, and the target that joins them with the number of data."""

from isosgd.potential import likelihoods, priors
from isosgd.potential.likelihoods import Likelihood
from isosgd.potential.params import Params
from isosgd.potential.priors import Prior
from isosgd.potential.target import Target

__all__ = ["Likelihood", "Params", "Prior", "Target", "likelihoods", "priors"]
