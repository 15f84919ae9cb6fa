"""What users call: a target and data in, draws out, by any method."""

from isosgd.sampling.collector import Collector
from isosgd.sampling.llc import LLC, llc
from isosgd.sampling.merging import merge
from isosgd.sampling.recorders import Interrupted
from isosgd.sampling.resuming import resume
from isosgd.sampling.sample import sample
from isosgd.sampling.settings import methods
from isosgd.sampling.stored import load

__all__ = ["LLC", "Collector", "Interrupted", "llc", "load", "merge", "methods", "resume", "sample"]
