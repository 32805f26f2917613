"""A cut model on paper: its units in order, what they cost, and what goes between the stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class ComputeSeconds(NamedTuple):
    """Of one micro-batch: forward, gradient of the inputs, gradient of the weights."""

    forward: float
    input_grad: float
    weight_grad: float


@dataclass(frozen=True)
class UnitSummary:
    """One call of a unit: the smallest part that a stage takes."""

    name: str
    stage: int
    parameter_count: int = 0  # numbers; those of a unit that is called again count once
    parameter_bytes: int = 0  # bytes of them
    seconds: ComputeSeconds | None = None  # None: not measured
    activation_bytes: int | None = None  # bytes of one micro-batch, for its backward


@dataclass(frozen=True)
class Transfer:
    """A value that one stage sends to another for every micro-batch.

    It is made after the piece `start`, and used by the piece `end`, or right before or after it.
    """

    name: str
    src: int
    dst: int
    producer: int
    consumer: int
    nbytes: int | None = None  # bytes; None: not known
    source_line: str = ""  # the line of the forward, where no unit made it
    value_id: int = 0  # the same for one that goes to several stages

    @property
    def is_skip(self) -> bool:
        """Does it jump over a stage?"""
        return self.dst - self.src > 1


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages have, with all of its names."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    parameter_count: int
    parameter_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """All that is known of a cut. `parameters` and `sizes` are those of each stage."""

    model_name: str
    units: tuple[UnitSummary, ...]
    transfers: tuple[Transfer, ...]
    shared_parameters: tuple[SharedParameter, ...]
    stage_parameter_counts: tuple[int, ...]
    stage_parameter_bytes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many."""
        return len(self.stage_parameter_counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The units of each stage."""
        return tuple(len(self.stage_units(stage)) for stage in range(self.num_stages))

    @property
    def total_parameters(self) -> int:
        """The model's parameters, each once."""
        again = sum(one.parameter_count * (len(one.stages) - 1) for one in self.shared_parameters)
        return sum(self.stage_parameter_counts) - again

    @property
    def is_measured(self) -> bool:
        """Is it known how long everything takes?"""
        return all(piece.seconds is not None for piece in self.units)

    def stage_units(self, stage: int) -> list[UnitSummary]:
        """A stage's pieces."""
        return [piece for piece in self.units if piece.stage == stage]

    def stage_seconds(self, stage: int) -> ComputeSeconds:
        """Of a stage, if it was measured."""
        found = [piece.seconds for piece in self.stage_units(stage) if piece.seconds is not None]
        return (
            ComputeSeconds(*(sum(column) for column in zip(*found, strict=True)))
            if found
            else _ZERO_SECONDS
        )

    def stage_activation_bytes(self, stage: int) -> int | None:
        """Bytes of one micro-batch that a stage keeps for its backward."""
        found = [piece.activation_bytes for piece in self.stage_units(stage)]
        return None if None in found else sum(kept or 0 for kept in found)

    def stage_load(self, stage: int) -> float:
        """What a stage weighs: seconds, or bytes of parameters where nothing was measured."""
        return (
            sum(self.stage_seconds(stage))
            if self.is_measured
            else float(self.stage_parameter_bytes[stage])
        )

    def with_transfer_bytes(self, transfer_bytes: dict[tuple[int, int, int], int]) -> ModelSummary:
        """With the bytes of flows: by source, destination, and which of those between the two."""
        seen: dict[tuple[int, int], int] = {}
        flows = []
        for flow in self.transfers:
            turn = seen.get((flow.src, flow.dst), 0)
            seen[flow.src, flow.dst] = turn + 1
            flows.append(replace(flow, nbytes=transfer_bytes.get((flow.src, flow.dst, turn))))
        return replace(self, transfers=tuple(flows))


_ZERO_SECONDS = ComputeSeconds(0.0, 0.0, 0.0)

# ---- words --------------------------------------------------------------------------------


def format_bytes(size: float) -> str:
    """Three digits.

    >>> format_bytes(512), format_bytes(1_536_000)
    ('512 B', '1.54 MB')
    """
    for factor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= 0.9995 * factor:
            return f"{size / factor:.3g} {name}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three digits.

    >>> format_seconds(1.25), format_seconds(0.0125), format_seconds(2e-6)
    ('1.25 s', '12.5 ms', '2 µs')
    """
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {name}"
    return f"{seconds / 1e-6:.3g} µs"


def format_count(count: int) -> str:
    """As papers count parameters.

    >>> format_count(1_685), format_count(124_439_808)
    ('1,685', '124M')
    """
    for factor, letter in ((1e9, "B"), (1e6, "M")):
        if count >= 0.9995 * factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:,}"


def format_stages(stages: tuple[int, ...] | list[int]) -> str:
    """In a sentence.

    >>> format_stages([2]), format_stages([0, 2, 3])
    ('stage 2', 'stages 0, 2 and 3')
    """
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"


def collapse_name_ranges(names: list[str]) -> list[str]:
    """Neighbours that are counted on are said as one.

    >>> collapse_name_ranges(["wte", "h.0", "h.1", "h.2", "ln_f"])
    ['wte', 'h.0 to h.2', 'ln_f']
    """
    runs: list[list[str]] = []
    for name in names:
        if runs and _next_name(runs[-1][-1]) == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]


def _next_name(name: str) -> str | None:
    """The neighbour's name; a number may stand anywhere but it is the last that counts."""
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        if parts[at].isdigit():
            return ".".join([*parts[:at], str(int(parts[at]) + 1), *parts[at + 1 :]])
    return None
