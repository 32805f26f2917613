"""What the unsplit model computes: on the whole batch, or micro-batch by micro-batch.

Some models compute something else when the batch is cut, and rightly so: BatchNorm in training
normalises what it sees, and random numbers are drawn for each cell. Their reference is the model
itself, run over one micro-batch after another with the draws of the pipe's cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from penstock.checker.case import CheckedModel, ModelCallResult, StepArguments
from penstock.checker.report import Difference
from penstock.microbatch import gather
from penstock.model.partition import Partition
from penstock.model.traced.torch_functions import is_metadata_only
from penstock.model.traced.trace import NodeKind
from penstock.model.traced.traced_partition import TracedPartition
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.rng import CellRngMode, advance_caller_rng, derive_cell_seed, peek_seed
from penstock.torch_compat import pytree

# -------------------------------------------------------------------------------------------------
# Lets the unsplit model draw what the cells of a pipe would: each stage has its own generator.
# -------------------------------------------------------------------------------------------------

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


# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchDependence:
    """What makes a model depend on how the batch is cut, by nature."""

    uses_rng: bool
    batch_norms: tuple[str, ...]

    @property
    def is_independent(self) -> bool:
        """Nothing does."""
        return not self.uses_rng and not self.batch_norms

    def __str__(self) -> str:
        if self.is_independent:
            return "the unsplit model on the whole batch, in float64"
        reasons = ["it draws random numbers"] if self.uses_rng else []
        if self.batch_norms:
            reasons.append(f"BatchNorm ({', '.join(self.batch_norms[:3])}) is in training")
        return (
            f"the unsplit model, micro-batch by micro-batch, in float64, as {' and '.join(reasons)}"
        )


def detect_batch_dependence(checked: CheckedModel, training: bool = True) -> BatchDependence:
    """Watch a copy of the model at work."""
    model = checked.copy_model()
    if not training:
        model.eval()
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    with CellRngMode(0) as random, torch.no_grad():
        checked.run_model(model, checked.arguments.take_whole_batch())
    return BatchDependence(random.has_drawn, tuple(norms))


@dataclass(frozen=True)
class StepOutcome:
    """The numbers of a step, by kind and name; None where there is no gradient."""

    tensors: dict[tuple[str, str], Tensor | None]

    def compare_to(self, expected: StepOutcome) -> Iterator[Difference]:
        """How far each is from what is expected."""
        for (kind, name), wanted in expected.tensors.items():
            yield compute_difference(kind, name, self.tensors.get((kind, name)), wanted)

    def differs_from(self, other: StepOutcome, *kinds: str) -> bool:
        """Does any number of these kinds?"""
        return any(d.size for d in self.compare_to(other) if d.kind in kinds)


def compute_difference(
    kind: str, name: str, actual: Tensor | None, expected: Tensor | None
) -> Difference:
    """How far one tensor is from another."""
    if actual is None or expected is None:
        if actual is expected:
            return Difference(kind, name, 0.0)
        note = "is missing" if actual is None else "is there, and the unsplit model has none"
        return Difference(kind, name, float("inf"), note)
    if actual.shape != expected.shape:
        note = f"has the shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        return Difference(kind, name, float("inf"), note)
    actual, expected = (t.to_dense() if t.is_sparse else t for t in (actual, expected))
    if torch.equal(actual, expected) or not expected.numel():
        return Difference(kind, name, 0.0)
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    mine, theirs = actual.to(wide), expected.to(wide)
    both_nan = mine.isnan() & theirs.isnan()
    apart = (
        (mine - theirs).abs().masked_fill(both_nan | (mine == theirs), 0.0).nan_to_num(torch.inf)
    )
    finite = theirs.abs().nan_to_num(0.0, 0.0)
    size = float(apart.max()) / max(1.0, float(finite.max()))
    return Difference(kind, name, 0.0 if size <= _get_rounding_tolerance(expected) else size)


def _get_rounding_tolerance(expected: Tensor) -> float:
    """What a model gives in float32, whatever it is asked for, is no more exact than that."""
    if not expected.is_floating_point() or expected.dtype is torch.float64:
        return 0.0
    return 8 * torch.finfo(expected.dtype).eps


def collect_training_outcome(
    model: nn.Module, loss: Tensor, outputs: Any, arguments: StepArguments | None = None
) -> StepOutcome:
    """What a step leaves; with `values`, also the gradients of the inputs."""
    numbers: dict[tuple[str, str], Tensor | None] = {("loss", ""): _snapshot_tensor(loss)}
    numbers.update(_collect_output_tensors(outputs))
    for name, parameter in model.named_parameters():
        numbers["gradients", f"of '{name}'"] = _snapshot_tensor(parameter.grad)
    for name, buffer in model.named_buffers():
        numbers["buffers", f"'{name}'"] = _snapshot_tensor(buffer)
    if arguments is not None:
        for name, tensor in arguments.get_named_tensors().items():
            if tensor.requires_grad:
                numbers["inputs", f"gradient of {name}"] = _snapshot_tensor(tensor.grad)
    return StepOutcome(numbers)


def collect_eval_outcome(loss: Tensor, outputs: Any) -> StepOutcome:
    """What eval mode gives."""
    return StepOutcome({("loss", ""): _snapshot_tensor(loss), **_collect_output_tensors(outputs)})


def _collect_output_tensors(outputs: Any) -> dict[tuple[str, str], Tensor | None]:
    """The tensors among the outputs that are put together by rows."""
    found = pytree.tree_flatten_with_path(outputs)[0]
    return {
        ("outputs", pytree.keystr(path)): _snapshot_tensor(leaf)
        for path, leaf in found
        if isinstance(leaf, Tensor) and leaf.dim()
    }


def _snapshot_tensor(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def run_unsplit(
    checked: CheckedModel, model: nn.Module, arguments: StepArguments, whole_batch: bool
) -> tuple[Tensor, Any]:
    """The loss and the outputs of the model itself; with gradients on, its backward, too."""
    pieces, rows = arguments.split_microbatches(1 if whole_batch else checked.chunks)
    for layer in model.modules():
        if isinstance(layer, DeferredStatsBatchNorm):
            layer.begin_minibatch(len(pieces))
    draws = CellRngEmulator(checked, model)
    calls = []
    for microbatch, piece in enumerate(pieces):
        with draws.emulate(microbatch):
            calls.append(checked.run_model(model, piece))
    draws.advance_generator()
    total = _reduce_losses(
        calls, [1.0] if whole_batch else rows.fractions(), checked.loss_reduction.is_sum
    )
    if torch.is_grad_enabled() and total.requires_grad:
        total.backward()
    return total.detach(), gather([call.output for call in calls], rows)


def _reduce_losses(
    calls: Sequence[ModelCallResult], shares: Sequence[float], is_sum: bool
) -> Tensor:
    """The loss of a batch, from those of its parts: by weights, if there are some."""
    weights = [call.weight for call in calls if call.weight is not None]
    parts: list[float | Tensor] = [1.0 if is_sum else share for share in shares]
    if weights and len(calls) > 1:
        parts = [weight / torch.stack(weights).sum() for weight in weights]
    total = torch.zeros_like(calls[0].loss)
    for call, share, part in zip(calls, shares, parts, strict=True):
        total = total + call.aux_loss * share
        if not isinstance(part, Tensor) or part:  # what counts for nothing may be no number
            total = total + call.loss * part
    return total.to(calls[0].loss.dtype)
