"""What users call: a target and data in, draws out, by any method."""

<<<<<<< HEAD
from isosgd.sampling.llc import LLC, llc
=======
from isosgd.sampling.merging import merge
>>>>>>> wt-dist
from isosgd.sampling.methods import methods
from isosgd.sampling.recorders import Interrupted
from isosgd.sampling.resuming import resume
from isosgd.sampling.sample import sample
from isosgd.sampling.stored import load

<<<<<<< HEAD
__all__ = ["LLC", "Interrupted", "llc", "load", "methods", "resume", "sample"]
=======
__all__ = ["Interrupted", "load", "merge", "methods", "resume", "sample"]
>>>>>>> wt-dist
