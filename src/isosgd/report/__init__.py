"""A report of draws as one HTML page: verdict, predictions, chains, rates, settings.

The page needs no network, JavaScript or other file; plots are SVG.
"""

from isosgd.report.page import Subject
from isosgd.report.write import report_html, write_report

__all__ = ["Subject", "report_html", "write_report"]
