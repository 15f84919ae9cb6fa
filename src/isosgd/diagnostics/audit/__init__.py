"""Which tempered posterior does a training script sample? State it for a sampler, an optimizer or a described loop.

`loop` has the formulas, `findings` what is wrong with a loop, `reading` what an optimizer says about itself, and
`measure` runs a loop on a posterior that is known.
"""

from isosgd.diagnostics.audit.auditor import Audit, audit
from isosgd.diagnostics.audit.findings import Finding
from isosgd.diagnostics.audit.loop import Loop
from isosgd.diagnostics.audit.measure import Measured

__all__ = ["Audit", "Finding", "Loop", "Measured", "audit"]
