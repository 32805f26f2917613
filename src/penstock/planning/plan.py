"""`Plan`: how a model is cut, placed, scheduled and run, with the forecast of a step.

A plan holds the profile that it was made from, so it can be saved, read, compared, edited and
loaded on another machine. Everything else about it is computed: `load` therefore checks an edited
plan as if it were new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf, isinf
from os import PathLike
from typing import Any, Self

from penstock.display import render_html
from penstock.errors import ArgumentError
from penstock.planning.profile import Profile, parse_json, read_json, write_json
from penstock.planning.schedule_timer import ScheduleTimer
from penstock.planning.stage_costs import CostTable, StageCosts, count_chunks
from penstock.schedules.bound import Objective
from penstock.schedules.cost import exceeds
from penstock.schedules.families import FAMILIES, make
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.lowering import lower, recompute
from penstock.schedules.notation import dumps, loads
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import require_sound
from penstock.text_format import collapse_name_ranges, format_bytes, format_seconds

_VERSION = 1


@dataclass(frozen=True)
class Forecast:
    """The forecast of a plan: what it is expected to do.

    Attributes:
        step: The seconds of one step by itself.
        period: The seconds between steps, if each rank starts the next one when it has ended its
            part of this one.
        bubble: The idle share of all ranks' time, by cause. "fill" is before the first action of a
            rank, "drain" after its last one. "messages" is a wait for a message that is on its way,
            and "waits" is a wait for something that another rank has not computed yet.
        peak: The most bytes on each rank.
        resident: The part of it that is there whatever the schedule is.
    """

    step: float
    period: float
    bubble: dict[str, float]
    peak: tuple[float, ...]
    resident: tuple[float, ...]


@dataclass(frozen=True)
class Alternative:
    """Another plan that was considered: its choices in words, seconds, and most bytes on a rank."""

    choice: str
    seconds: float
    peak: float


@dataclass(frozen=True)
class Certificate:
    """The certificate of a plan: what is proved about it.

    Attributes:
        bound: No plan in the searched space takes fewer seconds.
        schedule_bound: No schedule takes fewer seconds with the plan's cut, micro-batches,
            recomputation and memory.
        space: The searched space in words.
        method: What the bounds come from, in words.
    """

    bound: float
    schedule_bound: float
    space: str
    method: str


@dataclass(frozen=True, repr=False)
class Plan:
    """A cut, its placement and schedule, micro-batches, recomputation and runtime.

    Printing a plan shows the choice, the next best, the forecast and the certificate.

    Attributes:
        profile: The model and the devices that it was made for.
        cut: The number of units of each stage.
        placement: The rank of each stage.
        chunks: The number of micro-batches.
        recompute: Whether each stage recomputes its activations.
        schedule_name: The name of the schedule: a family, "fit" or "solver".
        schedule: Its actions, without recomputations.
        runtime: The runtime.
        memory: The cap of each rank, in bytes.
        objective: What was minimized: "makespan" for one step by itself, "period" for steps that
            follow each other.
        alternatives: The next best choices.
        certificate: How far the plan is from the best.

    Raises:
        ArgumentError: The sizes of the parts do not match, or a rank exceeds its memory.
        InvalidScheduleError: The schedule is incomplete or deadlocks.
    """

    profile: Profile
    cut: tuple[int, ...]
    placement: tuple[int, ...]
    chunks: int
    recompute: tuple[bool, ...]
    schedule_name: str
    schedule: Schedule
    runtime: str
    memory: tuple[float, ...]
    objective: Objective = "makespan"
    alternatives: tuple[Alternative, ...] = ()
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        ranks, stages = len(self.profile.devices), len(self.cut)
        if self.runtime not in self.profile.runtimes:
            names = ", ".join(self.profile.runtimes)
            raise ArgumentError(f"runtime {self.runtime!r} is not one of the profile's ({names})")
        sizes = {
            "placement": len(self.placement),
            "recompute": len(self.recompute),
            "the placement of its schedule": self.schedule.stages,
        }
        for name, size in sizes.items():
            if size != stages:
                raise ArgumentError(f"the plan cuts {stages} stages, but {name} has {size}")
        if self.placement != self.schedule.placement or self.chunks != self.schedule.chunks:
            raise ArgumentError(
                f"the plan has {self.chunks} micro-batches and places its stages on ranks "
                f"{list(self.placement)}, but its schedule has {self.schedule.chunks} and "
                f"{list(self.schedule.placement)}"
            )
        if self.schedule.ranks != ranks or len(self.memory) != ranks:
            raise ArgumentError(
                f"the plan is for {ranks} devices, but has {self.schedule.ranks} lanes and "
                f"{len(self.memory)} memory caps"
            )
        if count_chunks(self.profile.rows, self.chunks) != self.chunks:
            raise ArgumentError(
                f"a batch of {self.profile.rows} rows cannot be split into {self.chunks} "
                f"micro-batches, only into {count_chunks(self.profile.rows, self.chunks)}"
            )
        require_sound(self.full_schedule, self._busy_costs.graph)
        short = [
            f"rank {rank} needs {format_bytes(peak)}, {format_bytes(peak - cap)} more than its cap "
            f"of {format_bytes(cap)}"
            for rank, (peak, cap) in enumerate(zip(self.forecast.peak, self.memory, strict=True))
            if exceeds(peak, cap)
        ]
        if short:
            raise ArgumentError(
                f"this plan does not fit in memory: {'; '.join(short)}. Recompute more stages, "
                "move units to other ranks, or raise the cap."
            )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.profile.devices)

    @property
    def rows(self) -> int:
        """The rows of one micro-batch."""
        return -(-self.profile.rows // self.chunks)

    @cached_property
    def _busy_costs(self) -> StageCosts:
        """The costs while all ranks are busy."""
        table = CostTable(self.profile, self.chunks, self.runtime)
        return table.stage_costs(self.cut, self.placement)

    @cached_property
    def _costs_and_forecast(self) -> tuple[StageCosts, Forecast]:
        # Quicker than the timeline, which holds every message: there may be millions of actions.
        timer = ScheduleTimer(self.schedule_name, self.schedule, self._busy_costs.graph)
        costs = timer.speed_up(self._busy_costs, self.recompute, self.profile.devices)
        peak = tuple(
            size + timer.peak(rank, costs, self.recompute)
            for rank, size in enumerate(costs.resident)
        )
        return costs, Forecast(*timer.forecast(costs, self.recompute), peak, costs.resident)

    @property
    def costs(self) -> StageCosts:
        """The costs of the stages at the speed of devices in this plan, and what ranks hold anyway.

        Idle ranks leave more to the others: see `DeviceProfile.idle_gain`.
        """
        return self._costs_and_forecast[0]

    @cached_property
    def full_schedule(self) -> Schedule:
        """The schedule with its recomputations."""
        return recompute(self.schedule, lambda stage, microbatch: self.recompute[stage])

    @cached_property
    def program(self) -> Program:
        """The schedule with its recomputations and messages."""
        return lower(self.full_schedule, self._busy_costs.graph)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step. Its memory counts activations only."""
        return simulate(self.program, self.costs.cost)

    @property
    def forecast(self) -> Forecast:
        """The seconds of a step, its bubble by cause, and the bytes of each rank."""
        return self._costs_and_forecast[1]

    @property
    def seconds(self) -> float:
        """The seconds of the objective."""
        return self.forecast.step if self.objective == "makespan" else self.forecast.period

    @property
    def gap(self) -> float | None:
        """By how much, as a fraction, a plan in the searched space may be faster; None if unknown.

        The certificate proves it. For a plan of 51 ms of which none is faster than 50, it is 0.02.
        If nothing is proved, it is infinite.
        """
        if self.certificate is None:
            return None
        return _compute_gap(self.seconds, self.certificate.bound)

    @property
    def stage_units(self) -> list[tuple[str, ...]]:
        """The names of the units of each stage."""
        names = self.profile.unit_names
        return [names[start:end] for start, end in pairwise(accumulate(self.cut, initial=0))]

    def check_model(self, unit_names: Sequence[str]) -> None:
        """Raise if the model has other units than the one that was planned.

        Args:
            unit_names: The names of the model's units, in order.
        """
        if tuple(unit_names) == self.profile.unit_names:
            return
        planned = len(self.profile.units)
        if len(unit_names) != planned:
            difference = f"it has {len(unit_names)} units, and the plan is for {planned}"
        else:
            unit, mine, other = next(
                (i, a, b)
                for i, (a, b) in enumerate(zip(unit_names, self.profile.unit_names, strict=True))
                if a != b
            )
            difference = f"its unit {unit} is {mine!r}, and that of the plan is {other!r}"
        raise ArgumentError(
            f"this plan is for another model ({self.profile.model}): {difference}. Make a plan for "
            "this model with penstock.plan."
        )

    # ---- JSON ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values that `json` can write. The forecast is for readers only."""
        forecast = vars(self.forecast) | {"peak": list(self.forecast.peak)}
        family = FAMILIES.get(self.schedule_name)
        return {
            "format": "penstock plan",
            "version": _VERSION,
            "model": self.profile.model,
            "cut": list(self.cut),
            "placement": list(self.placement),
            "chunks": self.chunks,
            "recompute": list(self.recompute),
            "schedule": self.schedule_name,
            **({} if family else {"actions": dumps(self.schedule).splitlines()}),
            "runtime": self.runtime,
            "memory": [None if isinf(cap) else cap for cap in self.memory],
            "objective": self.objective,
            "forecast": forecast,
            "alternatives": [vars(alternative) for alternative in self.alternatives],
            "certificate": self.certificate and vars(self.certificate),
            "profile": self.profile.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the plan that `to_json` has written, or that was edited since.

        Args:
            data: What `to_json` has returned.

        Raises:
            ArgumentError: A field is missing or wrong, or the plan does not fit in memory.
            InvalidScheduleError: The schedule deadlocks or is incomplete.
        """
        with parse_json(data, "plan", _VERSION):
            profile = Profile.from_json(data["profile"])
            placement = tuple(int(rank) for rank in data["placement"])
            chunks = int(data["chunks"])
            name = str(data["schedule"])
            if "actions" in data:
                schedule = loads("\n".join(map(str, data["actions"])))
                if not isinstance(schedule, Schedule):
                    raise ArgumentError("the actions of a plan have no edges: remove that line")
            else:
                ranks = len(profile.devices)
                schedule = make(name, ranks, chunks, len(placement) // ranks)
            certificate = data.get("certificate")
            return cls(
                profile=profile,
                cut=tuple(int(count) for count in data["cut"]),
                placement=placement,
                chunks=chunks,
                recompute=tuple(bool(flag) for flag in data["recompute"]),
                schedule_name=name,
                schedule=schedule,
                runtime=str(data["runtime"]),
                memory=tuple(inf if cap is None else float(cap) for cap in data["memory"]),
                objective=data.get("objective", "makespan"),
                alternatives=tuple(Alternative(**row) for row in data.get("alternatives", ())),
                certificate=Certificate(**certificate) if certificate else None,
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a JSON file, which can be read, compared and edited.

        Args:
            path: The file to write.
        """
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a plan from a file that `save` has written, and check it as if it were new.

        Args:
            path: The file.

        Raises:
            ArgumentError: The file is not a plan, or the plan does not fit in memory.
            InvalidScheduleError: Its schedule deadlocks or is incomplete.
        """
        return cls.from_json(read_json(path))

    def with_profile(self, profile: Profile) -> Plan:
        """Return the same choices with other measurements, and without a certificate.

        Args:
            profile: The other measurements, of the same units.
        """
        return replace(self, profile=profile, alternatives=(), certificate=None)

    # ---- text ------------------------------------------------------------------------------

    def describe_choice(self) -> str:
        """Return the choice in one line."""
        return describe_choice(
            self.schedule_name, self.placement, self.chunks, self.recompute, self.runtime
        )

    def __repr__(self) -> str:
        return f"Plan({self.describe_choice()}, {format_seconds(self.seconds)})"

    def __str__(self) -> str:
        return "\n".join(_describe_plan(self))

    def _repr_html_(self) -> str | None:
        return render_html(self)


def describe_choice(
    schedule: str,
    placement: Sequence[int],
    chunks: int,
    recompute: Sequence[bool],
    runtime: str,
) -> str:
    """Return the choices of a plan in one line.

    >>> describe_choice("zb-v", (0, 1, 1, 0), 8, (True, False, False, True), "threads")
    'zb-v, 4 stages on 2 ranks, 8 micro-batches, recompute 2 of 4 stages, threads'
    """
    ranks, stages = max(placement) + 1, len(placement)
    redone = sum(recompute)
    how_much = {0: "recompute nothing", stages: "recompute everything"}.get(
        redone, f"recompute {redone} of {stages} stages"
    )
    placed = f"{stages} stages on {ranks} ranks"
    return f"{schedule}, {placed}, {chunks} micro-batches, {how_much}, {runtime}"


def _describe_plan(plan: Plan) -> list[str]:
    forecast = plan.forecast
    lines = [f"plan for {plan.profile.model}: {plan.describe_choice()}", ""]
    lines += [*_format_table(list_stages(plan)), "", describe_step(plan)]
    for rank, (peak, cap) in enumerate(zip(forecast.peak, plan.memory, strict=True)):
        limit = "no cap" if isinf(cap) else f"of {format_bytes(cap)}, {peak / cap:.0%}"
        static = format_bytes(forecast.resident[rank])
        lines.append(f"rank {rank}: {format_bytes(peak)} {limit} ({static} without activations)")
    if plan.alternatives:
        lines += ["", "next best:"]
        for other in plan.alternatives:
            slower = other.seconds / plan.seconds - 1
            lines.append(
                f"  {format_seconds(other.seconds)} (+{slower:.1%}), {format_bytes(other.peak)}: "
                f"{other.choice}"
            )
    if plan.certificate:
        summary, explanation = describe_certificate(plan, plan.certificate)
        lines += ["", f"certificate: {summary}", explanation]
    return lines


def list_stages(plan: Plan) -> list[tuple[str, ...]]:
    """Return the table of a plan's stages: a header, and a row for each."""
    seconds = plan.costs.cost
    rows: list[tuple[str, ...]] = [("stage", "rank", "units", "F", "I", "W", "recompute")]
    for stage, names in enumerate(plan.stage_units):
        shown = ", ".join(collapse_name_ranges(list(names)))
        columns = (seconds.F[stage], seconds.I[stage], seconds.W[stage])
        rows.append(
            (
                str(stage),
                str(plan.placement[stage]),
                shown if len(shown) <= 40 else f"{shown[:37]}...",
                *map(format_seconds, columns),
                "yes" if plan.recompute[stage] else "no",
            )
        )
    return rows


def describe_step(plan: Plan) -> str:
    """Return a line on the times of a step, and why ranks are idle in it."""
    forecast = plan.forecast
    bubble = sum(forecast.bubble.values())
    causes = ", ".join(f"{cause} {share:.1%}" for cause, share in forecast.bubble.items())
    return (
        f"step {format_seconds(forecast.step)}, period {format_seconds(forecast.period)}, "
        f"{bubble:.1%} idle ({causes})"
    )


def describe_certificate(plan: Plan, certificate: Certificate) -> tuple[str, str]:
    """Return two sentences: how far the plan, and its schedule, are from the best."""
    gap = _compute_gap(plan.seconds, certificate.bound)
    schedule_gap = _compute_gap(plan.seconds, certificate.schedule_bound)
    summary = (
        f"no plan in the searched space ({certificate.space}) is faster than "
        f"{format_seconds(certificate.bound)}; this one is within {gap:.1%}."
    )
    if isinf(gap):
        summary = (
            f"it is not known how much faster a plan in the searched space ({certificate.space}) "
            "may be."
        )
    explanation = (
        f"This schedule is within {schedule_gap:.1%} of the best for its cut and memory. "
        f"({certificate.method})"
    )
    if isinf(schedule_gap):
        explanation = (
            "It is not known how far this schedule is from the best for its cut and memory."
        )
    return summary, explanation


def _compute_gap(seconds: float, bound: float) -> float:
    if not bound:
        return inf if seconds else 0.0  # a bound of 0 proves nothing
    return max(0.0, seconds / bound - 1)


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
