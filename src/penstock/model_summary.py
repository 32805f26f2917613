"""A cut model as plain numbers: its units, their costs, and the transfers between stages.

`model/describe.py` builds a `ModelSummary` from a model, `model/report.py` prints it, and
`draw/model_picture.py` draws it. The module imports no torch, so the drawing code stays light.

    units      [wte] [h.0] [h.1] | [h.2] [h.3] [head]      "|" is a cut between stage 0 and stage 1
    transfers          h.1 -------> h.2                     stage 0 sends the output of h.1
    shared     wte.weight = head.weight                     both stages have the parameter
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class ComputeSeconds(NamedTuple):
    """The seconds of one micro-batch: forward, gradient of inputs, gradient of weights."""

    forward: float
    input_grad: float
    weight_grad: float


@dataclass(frozen=True)
class UnitSummary:
    """One call of a unit, which is the smallest part that a stage can take."""

    name: str
    stage: int
    parameter_count: int = 0  # 0 for a second call of the same unit
    parameter_bytes: int = 0
    seconds: ComputeSeconds | None = None  # None: not measured
    activation_bytes: int | None = None  # kept for the backward of one micro-batch


@dataclass(frozen=True)
class Transfer:
    """A value that one stage sends to another for every micro-batch.

    `producer` and `consumer` are indices of units. The value is computed by the unit `producer` or
    by operations after it, and used by the unit `consumer` or by operations next to it.
    """

    name: str
    src: int
    dst: int
    producer: int
    consumer: int
    nbytes: int | None = None  # None: not known
    source_line: str = ""  # file and line of the forward, for a value that no unit returned
    value_id: int = 0  # equal for transfers of one value to several stages

    @property
    def is_skip(self) -> bool:
        """Whether the value skips at least one stage."""
        return self.dst - self.src > 1


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages use, with all of its names."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    parameter_count: int
    parameter_bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """All that is known about a cut model.

    `stage_parameter_counts` and `stage_parameter_bytes` have one entry for each stage. A parameter
    that several stages share counts for each of them.
    """

    model_name: str
    units: tuple[UnitSummary, ...]
    transfers: tuple[Transfer, ...]
    shared_parameters: tuple[SharedParameter, ...]
    stage_parameter_counts: tuple[int, ...]
    stage_parameter_bytes: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stage_parameter_counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of units of each stage."""
        return tuple(len(self.stage_units(stage)) for stage in range(self.num_stages))

    @property
    def total_parameters(self) -> int:
        """The number of parameters of the model; shared ones count once."""
        repeated = sum(
            shared.parameter_count * (len(shared.stages) - 1) for shared in self.shared_parameters
        )
        return sum(self.stage_parameter_counts) - repeated

    @property
    def is_measured(self) -> bool:
        """Whether the time of every unit was measured."""
        return all(unit.seconds is not None for unit in self.units)

    def stage_units(self, stage: int) -> list[UnitSummary]:
        """Return the units of a stage."""
        return [unit for unit in self.units if unit.stage == stage]

    def unit_costs(self, unit: UnitSummary) -> tuple[float, ...]:
        """Return the seconds of F, I and W if all were measured, else the bytes of parameters."""
        if self.is_measured and unit.seconds is not None:
            return unit.seconds
        return (float(unit.parameter_bytes),)

    def stage_seconds(self, stage: int) -> ComputeSeconds:
        """Return the seconds of a stage: the sum over its units that were measured."""
        measured = [unit.seconds for unit in self.stage_units(stage) if unit.seconds is not None]
        if not measured:
            return ComputeSeconds(0.0, 0.0, 0.0)
        return ComputeSeconds(*map(sum, zip(*measured, strict=True)))

    def stage_activation_bytes(self, stage: int) -> int | None:
        """Return the bytes that a stage keeps for the backward of one micro-batch, or None."""
        sizes = [unit.activation_bytes for unit in self.stage_units(stage)]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def stage_load(self, stage: int) -> float:
        """Return the seconds of a stage, or the bytes of its parameters if nothing was measured."""
        if self.is_measured:
            return sum(self.stage_seconds(stage))
        return float(self.stage_parameter_bytes[stage])

    def with_transfer_bytes(self, transfer_bytes: dict[tuple[int, int, int], int]) -> ModelSummary:
        """Return a summary whose transfers have these sizes.

        The keys are (source stage, destination stage, index among the transfers between the two).
        """
        counts: dict[tuple[int, int], int] = {}
        transfers = []
        for transfer in self.transfers:
            index = counts.get((transfer.src, transfer.dst), 0)
            counts[transfer.src, transfer.dst] = index + 1
            nbytes = transfer_bytes.get((transfer.src, transfer.dst, index))
            transfers.append(replace(transfer, nbytes=nbytes))
        return replace(self, transfers=tuple(transfers))
