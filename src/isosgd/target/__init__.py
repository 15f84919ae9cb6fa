"""The density to sample: likelihoods, priors, and the target that combines them."""

from isosgd.target import likelihoods, priors
from isosgd.target.likelihoods import Likelihood
from isosgd.target.params import Params
from isosgd.target.priors import Prior
from isosgd.target.target import Target

__all__ = ["Likelihood", "Params", "Prior", "Target", "likelihoods", "priors"]
