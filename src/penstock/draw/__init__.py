"""Timelines, drawn: simulated or measured, they look the same.

text        lines of characters, for terminals and tests
picture     SVG or PNG, as in the papers
trace       Chrome trace events, for Perfetto
gallery     every schedule's picture on one page
memory      what was alive in a run, over what was forecast
chain       no timeline, but a cut model: its units, the cuts, and what crosses them
"""

from penstock.draw.gallery import Exhibit, exhibits, write_gallery
from penstock.draw.memory import memory
from penstock.draw.model_picture import chain
from penstock.draw.perfetto import trace, write_trace
from penstock.draw.picture import picture
from penstock.draw.text import text

__all__ = [
    "Exhibit",
    "chain",
    "exhibits",
    "memory",
    "picture",
    "text",
    "trace",
    "write_gallery",
    "write_trace",
]
