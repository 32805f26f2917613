"""`penstock plan`: the fastest plan for a profile, printed, saved and drawn."""

from __future__ import annotations

from pathlib import Path

from penstock import draw
from penstock.cli.report import show_activity
from penstock.errors import ArgumentError
from penstock.planning import Plan, Profile, search_plan


def load_profile(target: str, devices: int | None) -> Profile:
    """Return the profile that a target names, for so many devices."""
    if Path(target).suffix != ".json":
        raise ArgumentError(f"'{target}' is not a profile: pass a .json file of Profile.save")
    profile = Profile.load(target)
    return profile if devices is None else profile.with_devices(devices)


def run(
    target: str,
    devices: int | None,
    memory: str | None,
    objective: str,
    solver_seconds: float,
    save: Path | None,
    picture: Path | None,
) -> Plan:
    """Search for a plan, print it, and write the files that were asked for."""
    if objective not in ("makespan", "period"):
        raise ArgumentError(f"objective {objective!r} is unknown: it is 'makespan' or 'period'")
    profile = load_profile(target, devices)
    with show_activity("planning") as tell:
        plan = search_plan(
            profile,
            memory=memory,
            objective="makespan" if objective == "makespan" else "period",
            solver_seconds=solver_seconds,
            progress=lambda what, fraction: tell(f"planning, {fraction:.0%}: {what}"),
        )
    print(plan)
    if save is not None:
        plan.save(save)
    if picture is not None:
        draw.plan(plan, picture)
    return plan
