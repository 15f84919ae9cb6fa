"""Samplers: torch optimizers over two steppers. They see parameters and gradients, never models or data."""

from isosgd.samplers.base import Sampler
from isosgd.samplers.groups import layer_groups
from isosgd.samplers.isgd import ISGD, PRESETS
from isosgd.samplers.local import LocalSampler
from isosgd.samplers.registry import METHODS, REGISTRY, Method
from isosgd.samplers.sghmc import SGHMC
from isosgd.samplers.sgld import SGLD
from isosgd.samplers.sgnht import SGNHT
from isosgd.samplers.vsgd import VSGD

__all__ = [
    "ISGD",
    "METHODS",
    "PRESETS",
    "REGISTRY",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "VSGD",
    "LocalSampler",
    "Method",
    "Sampler",
    "layer_groups",
]
