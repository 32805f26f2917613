"""Lets the unsplit model draw what the cells of a pipe would: each stage has its own generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.checking.subject import Subject
from penstock.partition.forward.tables import only_looks
from penstock.partition.forward.trace import Kind
from penstock.partition.forward.whole import Whole
from penstock.partition.partition import Partition
from penstock.stage.randomness import OwnRandom, move_on, next_seed, seed_of_cell

Steps = Mapping[Any, Sequence[int | None]]  # by function; None: every stage that needs it


class Draws:
    """Of one batch, micro-batch by micro-batch."""

    def __init__(self, subject: Subject, model: nn.Module) -> None:
        partition = subject.partition
        self._stages = len(partition.stages)
        self._units = {
            name: (model.get_submodule(name), homes) for name, homes in _homes(partition).items()
        }
        self._between = _steps_between(partition)
        self._seed, self._drew = next_seed(), False

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Within, the model computes this micro-batch."""
        cells = [
            OwnRandom(seed_of_cell(self._seed, stage, microbatch)) for stage in range(self._stages)
        ]
        with ExitStack() as hooks, ExitStack() as here:

            def enter(stage: int) -> None:
                here.close()
                here.enter_context(cells[stage])

            between = Between(self._between, enter)
            turns: Counter[str] = Counter()

            def begin(name: str, homes: Sequence[int]) -> None:
                between.depth += 1
                enter(homes[min(turns[name], len(homes) - 1)])
                turns[name] += 1

            def end() -> None:
                between.depth -= 1

            for name, (unit, homes) in self._units.items():
                before = unit.register_forward_pre_hook(
                    lambda *_, name=name, homes=homes: begin(name, homes), prepend=True
                )
                after = unit.register_forward_hook(lambda *_: end(), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            if self._between:
                hooks.enter_context(between)
            yield
        self._drew |= any(cell.drew for cell in cells)

    def end(self) -> None:
        """Move the generator on, as a pipe does."""
        if self._drew:
            move_on()


def _homes(partition: Partition) -> dict[str, list[int]]:
    """The stages of a unit's calls, one after another."""
    found: dict[str, list[int]] = {}
    if isinstance(partition.how, Whole):
        for call, stage in partition.how.cut.calls.items():
            found.setdefault(call.unit, []).append(stage)
        return found
    return {name: [stage.index] for stage in partition.stages for name in stage.names}


def _steps_between(partition: Partition) -> Steps:
    """The stages that run what is called between units, function by function."""
    found: dict[Any, list[int | None]] = {}
    if isinstance(partition.how, Whole):
        division = partition.how.survey.division
        for at, step in enumerate(division.trace.steps):
            if step.kind is not Kind.UNIT:
                found.setdefault(step.func, []).append(division.stages.get(at))
    return found


class Between(TorchFunctionMode):
    """Outside of units, a step draws from the generator of the stage that would run it."""

    def __init__(self, steps: Steps, enter: Callable[[int], None]) -> None:
        super().__init__()
        self._steps, self._enter = {func: iter(those) for func, those in steps.items()}, enter
        self.depth = 0  # of units that compute

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """As ever."""
        if not self.depth and func in self._steps and not only_looks(func, args):
            stage = next(self._steps[func], None)
            if stage is not None:
                self._enter(stage)
        return func(*args, **(kwargs or {}))
