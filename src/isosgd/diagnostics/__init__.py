"""Whether to believe the draws: R-hat, effective numbers of draws, Monte-Carlo errors."""

from isosgd.diagnostics.convergence import Convergence, Summary, summarise
from isosgd.diagnostics.traces import ess, integrated_time, rhat

__all__ = ["Convergence", "Summary", "ess", "integrated_time", "rhat", "summarise"]
