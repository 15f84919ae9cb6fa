"""`sample` and related functions: a target and data in, a `Posterior` out, by any method.

A call of `sample` passes through these files in turn:

1. `isosgd.sampling.sample` checks how the arguments go together.
2. `isosgd.sampling.trained`, around trained networks only, tries temperatures (`isosgd.sampling.ladder`), samples at
   the best one, and judges the draws by held-out examples.
3. `isosgd.sampling.run` sets up chains at one temperature and the plan of their draws (`isosgd.sampling.plan`).
4. `isosgd.sampling.loop` warms chains up and takes their steps; with ``draws="auto"``, `isosgd.sampling.stopping` says
   when to stop.
5. `isosgd.sampling.recorders` stores each draw, in memory or on disk, and makes the `Posterior`.
"""

from isosgd.sampling.collector import Collector
from isosgd.sampling.llc import LLC, llc
from isosgd.sampling.recorders import Interrupted
from isosgd.sampling.sample import resume, sample
from isosgd.sampling.settings import methods
from isosgd.sampling.stored import load, merge

__all__ = ["LLC", "Collector", "Interrupted", "llc", "load", "merge", "methods", "resume", "sample"]
