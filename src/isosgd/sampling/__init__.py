"""What users call: a target and data in, draws out, by any method."""

from isosgd.sampling.collector import Collector
from isosgd.sampling.methods import methods
from isosgd.sampling.recorders import Interrupted
from isosgd.sampling.resuming import resume
from isosgd.sampling.sample import sample
from isosgd.sampling.stored import load

__all__ = ["Collector", "Interrupted", "load", "methods", "resume", "sample"]
