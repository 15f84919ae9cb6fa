"""Experiments: problems to sample, and how far a sampler's draws are from the truth."""

from isosgd.experiments.toy import Toy, compare, gaussian_w2

__all__ = ["Toy", "compare", "gaussian_w2"]
