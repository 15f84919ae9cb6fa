"""What users call: a target and data in, draws out, by any method.

A call of `sample` passes through these files in turn:

1. `isosgd.sampling.sample` checks how the arguments go together.
2. `isosgd.sampling.trained`, around trained networks only, tries temperatures (`isosgd.sampling.ladder`), runs at the
   best one, and lets held-out examples judge the draws.
3. `isosgd.sampling.run` sets up chains at one temperature.
4. `isosgd.sampling.loop` warms chains up and takes their steps; with ``draws="auto"`` `isosgd.sampling.stopping` says
   when to end.
5. `isosgd.sampling.recorders` keeps each draw, in memory or in a store, and makes the `Posterior`.
"""

from isosgd.sampling.collector import Collector
from isosgd.sampling.llc import LLC, llc
from isosgd.sampling.recorders import Interrupted
from isosgd.sampling.sample import resume, sample
from isosgd.sampling.settings import methods
from isosgd.sampling.stored import load, merge

__all__ = ["LLC", "Collector", "Interrupted", "llc", "load", "merge", "methods", "resume", "sample"]
