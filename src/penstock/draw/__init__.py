"""Drawings of timelines, simulated or measured, and of a model that was cut into stages.

text           a timeline as lines of characters, for terminals and tests
picture        a timeline as SVG or PNG, as in the papers
trace          a timeline as Chrome trace events, for Perfetto
write_gallery  the pictures of all schedules on one page
run_page       a measured step beside its plan, as one HTML file
memory         the measured memory of a step over the forecast, as SVG or PNG
plan           a plan: its cut, the forecast timeline, and memory against the cap, as SVG or PNG
chain          a model: its units, the cuts and the values that cross them, as SVG or PNG

This package does not import torch. See README.md.
"""

import penstock.draw.notebook  # noqa: F401 (registers how notebooks show values)
from penstock.draw.gallery import Exhibit, exhibits, write_gallery
from penstock.draw.memory import memory
from penstock.draw.model_picture import chain
from penstock.draw.page import run_page
from penstock.draw.perfetto import trace, write_trace
from penstock.draw.picture import picture
from penstock.draw.plan_picture import plan
from penstock.draw.text import text

__all__ = [
    "Exhibit",
    "chain",
    "exhibits",
    "memory",
    "picture",
    "plan",
    "run_page",
    "text",
    "trace",
    "write_gallery",
    "write_trace",
]
