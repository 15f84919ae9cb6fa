"""Samplers that `isosgd.METHODS` has under their names in `isosgd.sample`, as classes."""

from isosgd import METHODS

AdaptiveSGHMC = METHODS["adaptive-sghmc"]
CSGHMC = METHODS["csghmc"]
CSGLD = METHODS["csgld"]
FullSGFS = METHODS["sgfs-full"]
MomentumISGD = METHODS["isgd-momentum"]
PSGLD = METHODS["psgld"]
SGFS = METHODS["sgfs"]
SGRHMC = METHODS["sgrhmc"]
SGRLD = METHODS["sgrld"]
