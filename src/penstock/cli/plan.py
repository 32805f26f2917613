"""`penstock plan`: the fastest plan for a profile, printed, saved and drawn."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from penstock import draw
from penstock.cli.report import show_activity
from penstock.draw.page import plan_page
from penstock.errors import ArgumentError
from penstock.planning import Plan, Profile, search_plan
from penstock.text_format import make_printable


def load_profile(target: str, devices: int | None, optimizer: str) -> Profile:
    """Return the profile that a target names, for so many devices.

    The target is a .json file, or MODULE:FACTORY, whose model is measured.
    """
    if ":" in target:
        return _profile_factory(target, devices, optimizer)
    if Path(target).suffix != ".json":
        raise ArgumentError(
            f"'{target}' is neither a profile (a .json file of Profile.save) nor MODULE:FACTORY, a "
            "function that returns (model, batch, ...)"
        )
    profile = Profile.load(target)
    return profile if devices is None else profile.with_devices(devices)


def _profile_factory(target: str, devices: int | None, optimizer: str) -> Profile:
    from penstock.cli.factory import load_factory, run_user_code  # imports torch
    from penstock.model.model_profile import profile_model, resolve_optimizer
    from penstock.model.planner import list_planned_devices

    factor = resolve_optimizer(optimizer)
    # What the factory and the model print goes to stderr: stdout has the plan alone.
    with redirect_stdout(sys.stderr), show_activity("measuring the model") as tell:
        loaded = load_factory(target)
        with run_user_code(f"{target}: the model cannot be measured"):
            return profile_model(
                loaded.model,
                loaded.example,
                list_planned_devices(devices),
                units=loaded.units,
                optimizer_factor=factor,
                progress=lambda what, fraction: tell(f"{what}, {fraction:.0%}"),
            )


def run_split(target: str, stages: int, chunks: int, balance: str | None) -> None:
    """Cut the model of a factory, and print the stages."""
    from penstock.cli.factory import load_factory, run_user_code  # imports torch
    from penstock.model.placement import split

    with redirect_stdout(sys.stderr), show_activity("tracing and measuring the model"):
        loaded = load_factory(target)
        with run_user_code(f"{target}: the model cannot be cut"):
            partition = split(
                loaded.model,
                stages,
                loaded.example,
                chunks=chunks,
                units=loaded.units,
                balance=balance,
            )
    print(make_printable(str(partition)))


def run(
    target: str,
    devices: int | None,
    memory: str | None,
    objective: str,
    solver_seconds: float,
    save: Path | None,
    picture: Path | None,
    optimizer: str = "adamw",
    html: Path | None = None,
) -> Plan:
    """Search for a plan, print it, and write the files that were asked for."""
    if objective not in ("makespan", "period"):
        raise ArgumentError(f"objective {objective!r} is unknown: it is 'makespan' or 'period'")
    profile = load_profile(target, devices, optimizer)
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
    if html is not None:
        plan_page(plan).write(html)
    return plan
