"""Recorded runs of plans: what their ops took, and how well a simulation predicts them."""

from schedlang.extras.measured.comparison import Comparison, compare, predict
from schedlang.extras.measured.comparison_text import (
    comparison_json,
    comparison_text,
    notes_of,
)
from schedlang.extras.measured.recorded_run import Run, read_run, run_of

__all__ = [
    "Comparison",
    "Run",
    "compare",
    "comparison_json",
    "comparison_text",
    "notes_of",
    "predict",
    "read_run",
    "run_of",
]
