"""Every baseline by name, in the form that the registry of samplers has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from isosgd.baselines.ensemble import Ensemble
from isosgd.baselines.mcdropout import MCDropout
from isosgd.baselines.snapshots import Snapshots
from isosgd.baselines.swag import SWAG
from isosgd.samplers import Method

BASELINES: Mapping[str, Method] = MappingProxyType(
    {
        "mcdropout": Method(
            MCDropout,
            "baseline",
            "Gal, Ghahramani 2016",
            "one mask for all examples of a draw, folded into its weights; of convolutions, whole channels",
        ),
        "swag": Method(
            SWAG,
            "baseline",
            "Maddox et al. 2019",
            "the rate is chosen; plain SGD, no momentum; variances centred as they come",
        ),
        "ensemble": Method(
            Ensemble,
            "baseline",
            "Lakshminarayanan, Pritzel, Blundell 2017",
            "Adam at a rate that falls along a cosine; no adversarial examples",
        ),
        "snapshots": Method(
            Snapshots,
            "baseline",
            "Huang et al. 2017; Mandt, Hoffman, Blei 2017",
            "the rate is chosen; plain SGD, no momentum; a first training with Adam",
        ),
    }
)
