"""`nanotron report`: a run as one HTML page that stands alone."""

from nanotron.report.page import write_report

__all__ = ["write_report"]
