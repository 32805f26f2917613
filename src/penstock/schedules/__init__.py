"""Schedules: named families, a search for a fitting one, and the tools that work on them.

A family is a function of sizes that returns a `Schedule`; `FAMILIES` lists them all. This package
does not import torch. See README.md.
"""

from __future__ import annotations

from penstock.schedules import families
from penstock.schedules.families import *  # noqa: F403 (every family is public)
from penstock.schedules.fit import fit, lower_bound

__all__ = ["fit", "lower_bound"]
__all__ += families.__all__
__all__.sort()
