"""Lets the unsplit model draw what the cells of a pipe would: each stage has its own generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.checking.subject import CheckedModel
from penstock.partition.forward.tables import is_metadata_only
from penstock.partition.forward.trace import NodeKind
from penstock.partition.forward.whole import TracedPartition
from penstock.partition.partition import Partition
from penstock.stage.randomness import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed

FunctionStages = Mapping[Any, Sequence[int | None]]  # by function; None: every stage that needs it


class CellRngEmulator:
    """Of one batch, micro-batch by micro-batch."""

    def __init__(self, checked: CheckedModel, model: nn.Module) -> None:
        partition = checked.partition
        self._num_stages = len(partition.stages)
        self._units = {
            name: (model.get_submodule(name), homes)
            for name, homes in _find_unit_stages(partition).items()
        }
        self._function_stages = _find_function_stages(partition)
        self._seed, self._used_rng = peek_seed(), False

    @contextmanager
    def emulate(self, microbatch: int) -> Iterator[None]:
        """Within, the model computes this micro-batch."""
        cells = [
            CellRngMode(derive_cell_seed(self._seed, stage, microbatch))
            for stage in range(self._num_stages)
        ]
        with ExitStack() as hooks, ExitStack() as here:

            def enter_stage(stage: int) -> None:
                here.close()
                here.enter_context(cells[stage])

            between = InterUnitRngMode(self._function_stages, enter_stage)
            turns: Counter[str] = Counter()

            def enter_unit(name: str, homes: Sequence[int]) -> None:
                between.unit_depth += 1
                enter_stage(homes[min(turns[name], len(homes) - 1)])
                turns[name] += 1

            def exit_unit() -> None:
                between.unit_depth -= 1

            for name, (unit, homes) in self._units.items():
                before = unit.register_forward_pre_hook(
                    lambda *_, name=name, homes=homes: enter_unit(name, homes), prepend=True
                )
                after = unit.register_forward_hook(lambda *_: exit_unit(), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            if self._function_stages:
                hooks.enter_context(between)
            yield
        self._used_rng |= any(cell.has_drawn for cell in cells)

    def advance_generator(self) -> None:
        """Move the generator on, as a pipe does."""
        if self._used_rng:
            advance_caller_rng()


def _find_unit_stages(partition: Partition) -> dict[str, list[int]]:
    """The stages of a unit's calls, one after another."""
    found: dict[str, list[int]] = {}
    if isinstance(partition.how, TracedPartition):
        for call, stage in partition.how.ownership.call_stages.items():
            found.setdefault(call.unit, []).append(stage)
        return found
    return {name: [stage.index] for stage in partition.stages for name in stage.names}


def _find_function_stages(partition: Partition) -> FunctionStages:
    """The stages that run what is called between units, function by function."""
    found: dict[Any, list[int | None]] = {}
    if isinstance(partition.how, TracedPartition):
        division = partition.how.summary.assignment
        for at, step in enumerate(division.trace.nodes):
            if step.kind is not NodeKind.UNIT:
                found.setdefault(step.func, []).append(division.node_stages.get(at))
    return found


class InterUnitRngMode(TorchFunctionMode):
    """Outside of units, a step draws from the generator of the stage that would run it."""

    def __init__(self, function_stages: FunctionStages, enter_stage: Callable[[int], None]) -> None:
        super().__init__()
        self._stage_iterators, self._enter_stage = (
            {func: iter(those) for func, those in function_stages.items()},
            enter_stage,
        )
        self.unit_depth = 0  # of units that compute

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ever."""
        if (
            not self.unit_depth
            and func in self._stage_iterators
            and not is_metadata_only(func, args)
        ):
            stage = next(self._stage_iterators[func], None)
            if stage is not None:
                self._enter_stage(stage)
        return func(*args, **(kwargs or {}))
