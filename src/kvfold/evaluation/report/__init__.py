"""Rows as a page that people read."""

from kvfold.evaluation.report.page import BASELINES, report

__all__ = ["BASELINES", "report"]
