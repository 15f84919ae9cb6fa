"""Which tempered posterior does a training script sample? State it for a sampler, an optimizer or a described loop.

`description` has the formulas, `findings` what is wrong with a loop, `reading` what an optimizer says about itself, and
`running` measures a loop on a posterior that is known.
"""

from isosgd.diagnostics.audit.auditor import Audit, audit
from isosgd.diagnostics.audit.description import Loop
from isosgd.diagnostics.audit.findings import Finding
from isosgd.diagnostics.audit.running import Measured

__all__ = ["Audit", "Finding", "Loop", "Measured", "audit"]
