"""A forecast of the bytes that a step has alive on each rank, before the step runs.

The step is traced in an order that needs little memory: all actions of one micro-batch, then those
of the next. The trace has the storages that outlive an action: which action made each one, and
after which action it was gone. The same actions in the order of any schedule then need

    after an action:  the storages that were made until then, less those that are gone

On the CPU this is exact. What decides when a storage goes is the last action that uses it. A W may
run before or after the backwards of earlier stages, and both may use one storage. So a step with
Ws is traced twice, with each W as early and as late as possible, and a storage is gone when both
actions have run.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.device.accelerator import is_accelerator
from penstock.device.device import Device
from penstock.device.storage_probe import StorageProbe
from penstock.model.profiler import ExampleLoss, bind_target
from penstock.runtime.execution import InlineExecutor
from penstock.runtime.transport import Mailboxes
from penstock.runtime.worker import BoundAction
from penstock.schedules.ir import Action, Compute, Op, Program, Schedule
from penstock.stage.loss import LossFn, extract_model_loss, find_loss_tensor
from penstock.text_format import format_bytes
from penstock.torch_compat import pytree


class StorageLife(NamedTuple):
    """The rank and size of a storage, and the action after which it is gone.

    Without such an action the storage outlives the step.
    """

    rank: int
    size: int
    released_by: Action | None


class StepTrace(NamedTuple):
    """The memory of a step.

    Attributes:
        storages: The storages by the action that made them. In equal steps an action makes its
            storages in the same order, so the second key, a counter, finds a storage again.
        transient: The bytes by rank that are alive during an action only.
    """

    storages: Mapping[tuple[Action, int], StorageLife]
    transient: Mapping[Action, Mapping[int, int]]


@dataclass(frozen=True)
class MemoryForecast:
    """The bytes that training needs on each rank.

    Attributes:
        held: The bytes of parameters, gradients and buffers, which are there in any case.
        optimizer: The bytes of the optimizer's state.
        peak: The most bytes that a step adds to them.
    """

    held: tuple[int, ...]
    optimizer: tuple[int, ...]
    peak: tuple[int, ...]

    @property
    def total(self) -> tuple[int, ...]:
        """All bytes of each rank, at the peak of a step."""
        return tuple(map(sum, zip(self.held, self.optimizer, self.peak, strict=True)))

    def find_excess(self, caps: Sequence[float]) -> tuple[float, ...]:
        """Return by how many bytes each rank is above its cap."""
        return tuple(max(0.0, size - cap) for size, cap in zip(self.total, caps, strict=True))

    def describe(self, caps: Sequence[float]) -> str:
        """Return one line on what each rank needs, and its cap."""
        pairs = enumerate(zip(self.total, caps, strict=True))
        return ", ".join(
            f"rank {rank}: {format_bytes(size)} of {format_bytes(cap)}"
            for rank, (size, cap) in pairs
        )


def build_example_loss(loss_fn: LossFn | None, has_target: bool) -> LossFn:
    """Return a loss for the step that is traced, where the real one may lack its target.

    A loss that needs a target is replaced by one that keeps as much as a cross-entropy: a copy of
    the output.
    """
    if loss_fn is not None and (has_target or _takes_output_alone(loss_fn)):
        return loss_fn

    def keep_output(output: Any, *target: Any) -> Any:
        loss = find_loss_tensor(output) if loss_fn is None else None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return extract_model_loss(output)
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        return sum((t * 1).square().mean() for t in tensors if t.is_floating_point())

    return keep_output


def build_output_loss(loss_fn: LossFn | None, target: Any) -> ExampleLoss | None:
    """Return the loss of the first micro-batch by the number of micro-batches; None without one.

    It is there to be measured. Without a target, a loss that may take one is replaced as in
    `build_example_loss`.
    """
    if loss_fn is None:
        return None
    is_known = target is not None or _takes_nothing_else(loss_fn)
    example_loss = build_example_loss(loss_fn if is_known else None, target is not None)
    return partial(bind_target, example_loss, target)


def _takes_nothing_else(loss_fn: LossFn) -> bool:
    """Return whether a loss takes the output of the model, and not even an optional target."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        return len(inspect.signature(function).parameters) == 1
    except (TypeError, ValueError):
        return False


def _takes_output_alone(loss_fn: LossFn) -> bool:
    """Return whether a loss can be called without a target."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def order_depth_first(schedule: Schedule, late_weight_gradients: bool) -> Schedule:
    """Return a schedule with the same actions, one micro-batch after the other.

    The weight gradients of a micro-batch run right after their I, or after all of its backwards.
    """
    lanes: list[list[Compute]] = [[] for _ in schedule.lanes]
    stages = range(schedule.stages)
    for microbatch in range(schedule.chunks):
        late: list[Compute] = []
        order = [Compute(Op.F, stage, microbatch) for stage in stages]
        for stage in reversed(stages):
            cell = stage, microbatch
            if cell in schedule.recomputed:
                order.append(Compute(Op.R, *cell))
            order.append(Compute(Op.I if cell in schedule.divided else Op.B, *cell))
            if cell in schedule.divided:
                (late if late_weight_gradients else order).append(Compute(Op.W, *cell))
        for action in (*order, *reversed(late)):
            lanes[schedule.placement[action.stage]].append(action)
    return replace(schedule, lanes=tuple(map(tuple, lanes)), overlaps=frozenset())


def trace_storages(
    run_step: Callable[[InlineExecutor], object],
    devices: Mapping[int, Device],
    placement: Sequence[int],
) -> StepTrace:
    """Run a step twice and return the storages of the second one: see `profile_step_memory`."""
    owners = Counter(device.device for device in devices.values())
    # Ranks with an accelerator of their own get what is stored there.
    rank_of_device = {
        device.device: rank
        for rank, device in devices.items()
        if owners[device.device] == 1 and is_accelerator(device.device)
    }
    probe = StorageProbe(owners, rank_of_device)
    transient: dict[Action, Mapping[int, int]] = {}
    actions: list[Action] = []
    lives: dict[tuple[int, int, int], tuple[int, Action | None]] = {}

    @contextmanager
    def read_after_action(rank: int, bound_action: BoundAction) -> Iterator[None]:
        with probe.attribute_to(rank):
            yield
        actions.append(bound_action.action)
        transient[bound_action.action] = probe.read_transient_bytes()
        alive = probe.read_live_storages()
        for origin, (size, released_by) in lives.items():
            if released_by is None and origin not in alive:
                lives[origin] = size, bound_action.action
        lives.update({o: (s, None) for o, s in alive.items() if o not in before and o not in lives})

    with probe.track():
        mailbox_args = list(devices.values()), placement
        run_step(InlineExecutor(Mailboxes(*mailbox_args)))
        before = probe.read_live_storages()
        run_step(InlineExecutor(Mailboxes(*mailbox_args), read_after_action))
    storages = {
        (actions[context], number): StorageLife(rank, size, released_by)
        for (rank, context, number), (size, released_by) in lives.items()
    }
    return StepTrace(storages, transient)


def forecast_peak(
    program: Program, traces: Sequence[StepTrace], with_transient: bool
) -> tuple[int, ...]:
    """Return the most bytes alive after any action of the program, by rank.

    `with_transient` adds what is alive during an action only, as an allocator counts it.
    """
    remaining = [iter(lane) for lane in program.lanes]
    actions = [next(remaining[rank]) for rank in program.order]
    positions = {action: position for position, action in enumerate(actions)}
    changes: list[Counter[int]] = [Counter() for _ in actions]
    outliving: dict[tuple[object, int, int], list[Action]] = defaultdict(list)
    for key in dict.fromkeys(key for trace in traces for key in trace.storages):
        lives = [trace.storages[key] for trace in traces if key in trace.storages]
        releases = [life.released_by for life in lives if life.released_by is not None]
        rank, size = lives[0].rank, max(life.size for life in lives)
        if len(releases) < len(lives):
            outliving[_get_kind(key[0]), rank, size].append(key[0])
            continue
        changes[positions[key[0]]][rank] += size
        changes[max(positions[action] for action in releases)][rank] -= size
    actions_by_kind: dict[object, list[Action]] = defaultdict(list)
    for action in actions:
        actions_by_kind[_get_kind(action)].append(action)
    for (kind, rank, size), made_by in outliving.items():
        # What only the first action of a kind makes belongs to the step. In another order another
        # micro-batch is the first.
        is_of_step = made_by == [min(actions_by_kind[kind], key=_get_microbatch)]
        for action in actions_by_kind[kind][:1] if is_of_step else made_by:
            changes[positions[action]][rank] += size
    alive, peak = Counter[int](), [0] * program.schedule.ranks
    for action, change in zip(actions, changes, strict=True):
        alive.update(change)
        transient = traces[0].transient[action] if with_transient else {}
        peak = [max(most, alive[rank] + transient.get(rank, 0)) for rank, most in enumerate(peak)]
    return tuple(peak)


def _get_microbatch(action: Action) -> int:
    return action.microbatch if isinstance(action, Compute) else action.message.microbatch


def _get_kind(action: Action) -> object:
    """Return what the action does, without its micro-batch."""
    if isinstance(action, Compute):
        return action.op, action.stage
    return type(action), action.message.src, action.message.dst
