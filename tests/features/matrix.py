"""The verdict of a cell of the table: equal, or refused with a message; else an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.checker.reference import StepOutcome
from penstock.errors import PenstockError
from penstock.schedules.families import FAMILIES
from tests.features.trainee import Feature, Way

SCHEDULES = [*(name for name, family in FAMILIES.items() if family.trains), "fit"]


@dataclass(frozen=True)
class Equal:
    """All numbers equal those of the unsplit model, in every way it was run."""


@dataclass(frozen=True)
class Refused:
    """The pipe raised the same PenstockError in every way it was run."""

    message: str


Verdict = Equal | Refused


class InBetween(AssertionError):
    """Neither equal nor refused: some number differs, or the ways of running it disagree."""


def verdict(feature: Feature, schedule: str) -> Verdict:
    """Run a feature in all its ways, which include both runtimes, and return the verdict."""
    ways = [Way(schedule, *way) for way in feature.ways]
    found = {way: _of_run(feature, way) for way in ways}
    different = set(found.values())
    if len(different) > 1:
        raise InBetween("\n".join(f"{way}: {one}" for way, one in found.items()))
    return different.pop()


def _of_run(feature: Feature, way: Way) -> Verdict:
    try:
        found = feature.found(way)
    except PenstockError as error:
        return Refused(str(error))
    return compared(feature, way, found)


def compared(feature: Feature, way: Way, found: Sequence[StepOutcome]) -> Verdict:
    """Return Equal if no number of any step differs, else raise."""
    wrong = [
        f"step {at}: {difference}"
        for at, pair in enumerate(zip(found, feature.expected, strict=True))
        for difference in pair[0].compare_to(pair[1])
        if not difference.size <= feature.tolerance
    ]
    if wrong:
        raise InBetween(f"{feature.name} under {way}:\n" + "\n".join(wrong))
    return Equal()
