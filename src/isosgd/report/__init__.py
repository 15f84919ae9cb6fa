"""A report of draws as one HTML page: verdict first, then predictions, chains, rates, settings.

The page needs no network, no JavaScript and no other file; plots are drawn as SVG.
"""

from isosgd.report.page import Subject
from isosgd.report.write import report_html, write_report

__all__ = ["Subject", "report_html", "write_report"]
