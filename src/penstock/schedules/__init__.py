"""Schedules: named families, a search for a fitting one, and the tools that work on them.

A family is a function of sizes that returns a `Schedule`; `registry` lists them all. This package
does not import torch. See README.md.
"""

from __future__ import annotations

from penstock.schedules.families.common import check_sizes, loop, vee
from penstock.schedules.families.dualpipe import dualpipe_v
from penstock.schedules.families.gpipe import clocked, forward_only, gpipe, looped_bfs, naive
from penstock.schedules.families.one_f_one_b import eager_one_f_one_b, interleaved, one_f_one_b
from penstock.schedules.families.v_shape import v_half, v_min, zb_v
from penstock.schedules.families.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedules.fit import fit, lower_bound
from penstock.schedules.registry import FAMILIES, Family, family_of, make

__all__ = [
    "FAMILIES",
    "Family",
    "check_sizes",
    "clocked",
    "dualpipe_v",
    "eager_one_f_one_b",
    "family_of",
    "fit",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "loop",
    "looped_bfs",
    "lower_bound",
    "make",
    "naive",
    "one_f_one_b",
    "v_half",
    "v_min",
    "vee",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
