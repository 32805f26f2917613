"""The reference of an audit: the user's own forward on some rows of a batch, leaving no trace.

The forward runs on the modules of the pipe themselves, without a copy of their parameters. What it
could change is put aside first: attributes, buffers, and variables in closures, classes and globals
are exchanged for copies, gradients and hooks on them are taken away, and a parameter is copied when
something is about to write to it. (Parameters of a small model are copied before.)
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.microbatch import (
    find_related_rows,
    find_shared_ids,
    find_unlike_rows,
    list_tensors,
    take_rows,
)
from penstock.model.isolation import (
    StateSnapshot,
    isolated,
    preserve_gradients,
)
from penstock.model.partition import Partition, StageMap
from penstock.model.stage_inputs import StageInputs
from penstock.model.unsplit import UnsplitCells
from penstock.runtime.digest import Digest, Digester, is_small
from penstock.runtime.kept_tensors import KeptPlace, find_kept_places
from penstock.runtime.request import Request
from penstock.stage.aux_loss import CollectedLosses, carry_losses, thread_state
from penstock.stage.branches import LastNumberRead, RowWatch
from penstock.stage.caller_context import no_autocast
from penstock.stage.cell_graph import find_graph_leaves, has_python_nodes
from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm
from penstock.stage.host_rng import HostRngState
from penstock.stage.loss import LossReduction, LossStageFunction, find_loss_tensor
from penstock.stage.recompute import has_write_only_buffers
from penstock.stage.row_counts import RowCounts, unwrap_numbers
from penstock.stage.row_means import RowMeanProver
from penstock.stage.row_statistics import RowStatistics
from penstock.stage.stage import OUTSIDE
from penstock.state_copy import (
    MODULE_INTERNALS,
    SCALARS,
    ReachedState,
    StructureCopier,
    Variable,
    clone_state,
    find_reachable,
    is_of_numpy,
)
from penstock.torch_compat import (
    BatchNormBase,
    CompileFriendlyDispatchMode,
    FakeTensor,
    force_eager,
    get_innermost_dispatch_mode,
    pop_dispatch_mode,
    push_dispatch_mode,
    without_innermost_dispatch_mode,
)

BufferKey = tuple[nn.Module, str]
AttributeKey = tuple[nn.Module, str]


class _RunningReferences(threading.local):
    """Whether this thread runs the forward of a reference: pipes inside it are not audited."""

    is_running = False


running = _RunningReferences()


class ReferenceForward(NamedTuple):
    """The results of one forward of the unsplit model.

    Attributes:
        values: The output of the model; in a step the loss, with its extras and auxiliary losses.
        has_drawn: Whether it drew random numbers.
        uses_own_generator: Whether it drew them from a generator of the model's own.
        buffers: The digests of the buffers after it.
        changed_buffers: The buffers that it changed.
        changed_attributes: The attributes with numbers that it changed, such as a counter.
        adds_losses: Whether layers added auxiliary losses.
        has_own_gradients: Whether its backward is more than the derivatives of its operations: it
            has hooks or an `autograd.Function`, or leaves something out with `detach`.
        has_own_backward: Whether it has hooks or an `autograd.Function`.
        draws_in_loss: Whether `loss_fn` drew from `random` or `numpy.random`.
        row_watch: What it did that may depend on all rows of the batch, if it was watched.
        uses_float32: Whether an operation of the model returned a tensor of float32.
        changed_hooks: The name of a module or parameter whose hooks it changed, or None.
    """

    values: tuple[Any, ...]
    has_drawn: bool
    uses_own_generator: bool
    buffers: dict[BufferKey, Digest]
    changed_buffers: frozenset[BufferKey]
    changed_attributes: frozenset[AttributeKey]
    adds_losses: bool
    has_own_gradients: bool
    has_own_backward: bool
    draws_in_loss: bool
    row_watch: RowWatch
    uses_float32: bool
    changed_hooks: str | None

    @property
    def changed_state(self) -> bool:
        """Whether it changed a buffer."""
        return bool(self.changed_buffers)


class WholeLoss(NamedTuple):
    """The loss of a whole batch.

    Attributes:
        loss: The loss.
        uses_float32: Whether it uses float32 inside.
        function_names: The functions that `loss_fn` has called.
    """

    loss: Tensor
    uses_float32: bool
    function_names: Sequence[str]


class Reference:
    """The unsplit model of one call of a pipe.

    Args:
        partition: The model, cut.
        devices: The devices of the stages.
        request: The call.
        inputs: Its batch, split.
        seed: The seed of its random numbers.
        reduction: How the losses are combined; None for `pipe(x)`.
        digester: Makes the digests.
        reached: The state that the code of the model and the loss can reach.
    """

    def __init__(
        self,
        partition: Partition,
        devices: Sequence[torch.device],
        request: Request,
        inputs: StageInputs,
        seed: int,
        reduction: LossReduction | None,
        digester: Digester,
        reached: ReachedState,
    ) -> None:
        self._partition, self._devices = partition, devices
        self._reached = reached
        self._request, self._rows, self._seed = request, inputs.rows, seed
        self._inputs = inputs
        self._reduction, self._digester = reduction, digester
        self._stage_map: StageMap | None = None
        self._adds_losses = self._draws_in_loss = False
        self._separates_host_streams = False
        self._uses_float32: bool | None = None  # not known before a forward
        self._has_own_gradients: bool | None = None  # not known before a forward
        self.replaces_sizes = True  # whether forwards get sizes that know of other numbers of rows
        self.watches_rows = False  # whether forwards show if a selection is one among rows
        # Whether forwards are known to leave nothing behind, so that one isolation serves several.
        self.is_stateless = self._is_isolated = False
        self._write_log = _WriteLog([])  # of the running isolation
        stage_modules = (module for stage in partition.stages for module in stage.modules())
        # Stages of a traced model have copies of the modules around its units. The unsplit forward
        # does not run those, so their buffers are not compared.
        self._model_modules = list(partition.names())
        self.modules = list(dict.fromkeys([*self._model_modules, *stage_modules]))
        self._aliases: dict[Tensor, nn.Parameter] = {}  # the parameters that stood in for others

    def find_rows(self, microbatch: int) -> tuple[int, int]:
        """Return the first row of a micro-batch, and the one after its last."""
        counts = self._rows.counts
        start = sum(counts[:microbatch])
        return start, start + (counts[microbatch] if counts else 0)

    def get_counted_targets(self, *ranges: tuple[int, int]) -> tuple[Any, ...] | None:
        """Return the labels that the model's own loss counts in some rows, if that is known."""
        if self._reduction is None or self._request.target or not self._inputs.has_target:
            return None
        return (self.take_labels([target for (target,) in self._inputs.targets], ranges),)

    def take_labels(self, labels: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return some rows of the labels of the micro-batches. A row may have several labels.

        A range has rows of one micro-batch.
        """
        pieces = []
        for start, stop in ranges:
            ends = itertools.accumulate(self._rows.counts)
            microbatch = next(index for index, end in enumerate(ends) if start < end)
            begin, end = self.find_rows(microbatch)
            piece = labels[microbatch]
            if (start, stop) != (begin, end):
                times = len(piece) // (end - begin)
                piece = piece[(start - begin) * times : (stop - begin) * times]
            pieces.append(piece)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def find_unlike_rows(self) -> tuple[int, int] | None:
        """Return the two rows of the batch of which a loss may count most differently, if any."""
        request = self._request
        batch = request.target, request.inputs, dict(request.keyword_inputs)
        return find_unlike_rows(batch, sum(self._rows.counts))

    def find_related_rows(self) -> list[tuple[int, int, int]]:
        """Return rows that the model may relate by a number that an input has for each row.

        The target is left out: each step compares a loss function with the whole batch if it has
        to.
        """
        inputs = self._request.inputs, dict(self._request.keyword_inputs)
        return find_related_rows(inputs, sum(self._rows.counts))

    def find_shared_ids(self) -> list[tuple[int, int, int]]:
        """Return rows of different micro-batches that have the same id, by number of its tensor."""
        return find_shared_ids(self._request.list_batch(), self._rows.counts)

    def take_batch(self, *ranges: tuple[int, int]) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return copies of some rows: the inputs, the inputs by name and the target."""
        request = self._request
        batch = request.inputs, dict(request.keyword_inputs), request.target
        pieces = take_rows(batch, self._rows, *ranges)
        device = self._devices[-1]

        def copy_tensor(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        args, kwargs, target = StructureCopier(copy_tensor)(pieces)
        return (
            args,
            kwargs,
            tuple(value.to(device) if isinstance(value, Tensor) else value for value in target),
        )

    def watch_state(self) -> StateWatch:
        """Return an object that finds what a forward changes, inside an isolation."""
        reached, other_modules, containers = self._outside_state
        names = self._partition.names()
        names.update({module: type(module).__name__ for module in other_modules})
        own_tables = {
            id(table) for m in self.modules for table in map(vars(m).get, MODULE_INTERNALS)
        }
        others = [Variable(None, _UNNAMED, c) for c in containers if id(c) not in own_tables]
        outside = [*reached.variables, *others]
        return StateWatch(names, set(other_modules), outside, self._write_log)

    def find_kept_places(self) -> list[KeptPlace]:
        """Return where a forward has left tensors with a graph, inside an isolation."""
        reached, _, containers = self._outside_state
        own_tables = {id(value) for module in self.modules for value in vars(module).values()}
        others = [c for c in containers if id(c) not in own_tables]
        return find_kept_places(self._partition.names(), reached.variables, others)

    def take_snapshot(self) -> StateSnapshot:
        """Return a record of the modules as they are, in which a backward can run later."""
        return StateSnapshot(self.modules, lambda _: False)

    @cached_property
    def _outside_state(self) -> tuple[ReachedState, list[nn.Module], list[Any]]:
        """The state outside of the model: a loss may update a metric, a layer count in a closure.

        Looking for it takes as long as the rest of an isolation. Each of the isolations of an audit
        leaves it as it was, so it is looked for once.
        """
        reached = find_reachable(self.modules, self._reached)
        own_modules = set(self.modules)
        other_modules = [m for m in reached.find(nn.Module) if m not in own_modules]
        return reached, other_modules, reached.list_containers()

    @contextmanager
    def isolate(self, state: StateSnapshot | None = None) -> Iterator[None]:
        """Leave everything as it was, whatever the model and the loss do in this context.

        With `state`, the modules are inside the context as they were when it was recorded. Inside
        another isolation of a model whose forwards leave nothing behind, there is nothing to do.
        """
        if self.is_stateless and self._is_isolated:
            yield
            return
        with self._put_state_aside(state):
            yield

    @contextmanager
    def _put_state_aside(self, state: StateSnapshot | None) -> Iterator[None]:
        reached, other_modules, containers = self._outside_state
        other_state = StateSnapshot(
            other_modules, lambda tensor: not isinstance(tensor, nn.Parameter)
        )
        attributes = {id(value) for m in self.modules for value in vars(m).values()}
        for value in containers:
            if id(value) not in attributes:
                other_state.record(value)
        loss_parameters = list_parameters(other_modules)
        parameters = list_parameters(self.modules)

        def exchange_tensor(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                return tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if type(tensor) is not nn.Parameter:  # only its class knows how to copy it
                return tensor
            # Another leaf in the same memory: hooks of the parameter, or of a wrapper such as DDP,
            # do not see its gradient.
            alias = nn.Parameter(tensor.detach(), tensor.requires_grad)
            alias.__dict__.update(tensor.__dict__)
            self._aliases[alias] = tensor
            return alias

        write_log = self._write_log = _WriteLog([*parameters, *loss_parameters])
        was_running = running.is_running
        with (
            isolated(self.modules, map_tensor=exchange_tensor, variables=reached.variables),
            preserve_gradients(loss_parameters),
            write_log,
            force_eager(),
        ):
            running.is_running = self._is_isolated = True
            try:
                if state is not None:
                    state.restore()
                yield
            finally:
                running.is_running, self._is_isolated = was_running, False
                other_state.restore()
                # Autocast would reuse weights that it has cast here, whose graph is gone.
                torch.clear_autocast_cache()

    def run_forward(
        self,
        batch: tuple[Any, Any, tuple[Any, ...]],
        microbatch: int,
        counted_targets: tuple[Any, ...] | None = None,
        *,
        fixes_draws: bool = False,
        records_state: bool = False,
    ) -> ReferenceForward:
        """Run the model, and in a step the loss, on a batch that `take_batch` returned.

        Args:
            batch: The inputs, the inputs by name and the target.
            microbatch: The micro-batch whose random numbers it draws.
            counted_targets: The targets by which the loss is weighted, if those are not the target
                of the batch.
            fixes_draws: Whether random operations return fixed numbers.
            records_state: Whether to find out what it changes, and whether it has gradients of its
                own.
        """
        args, kwargs, target = batch
        # That of the first micro-batch serves for all: a unit is on the same stage for each.
        self._stage_map = self._stage_map or self._partition.map_stages(args, kwargs)
        cells = self._build_cells(fixes_draws)
        before = self._digest_buffers() if records_state else {}
        attributes = read_plain_attributes(self._model_modules if records_state else ()).items()
        watch = self._build_watch(microbatch if records_state else None)
        generators = set(self._write_log.generators)
        hooks = self._list_hooks() if records_state else {}
        # The watch costs time in every operation. What it says of float32 holds for all forwards.
        is_watched = records_state or self.watches_rows or self._uses_float32 is None
        # The watch outside, so that what it does itself does not go through the mode of the cells.
        with watch if is_watched else nullcontext(), cells.emulate(microbatch):
            values = self._compute(args, kwargs, counted_targets or target, watch)
        if cells.draws_host_random and not self._separates_host_streams:
            self._separates_host_streams = True
            raise HostDrawsError
        self._uses_float32 = bool(self._uses_float32) or watch.uses_float32
        has_own_backward = watch.has_tensor_hooks
        if not has_own_backward and records_state:
            nodes = (t.grad_fn for t in list_tensors(values) if t.grad_fn is not None)
            has_own_backward = has_python_nodes(nodes)
        has_own_gradients = has_own_backward or watch.has_own_gradients
        if records_state:
            self._has_own_gradients = has_own_gradients
            self.watches_rows = watch.may_select_rows
        buffers = self._digest_buffers() if records_state else {}
        now = read_plain_attributes(self._model_modules) if records_state else {}
        return ReferenceForward(
            values,
            has_drawn=cells.has_drawn
            or cells.uses_own_generator
            or not generators.issuperset(self._write_log.generators),
            uses_own_generator=cells.uses_own_generator,
            buffers=buffers,
            changed_buffers=frozenset([k for k, d in buffers.items() if before.get(k) != d]),
            changed_attributes=frozenset([k for k, old in attributes if now.get(k) != old]),
            adds_losses=self._adds_losses,
            has_own_gradients=has_own_gradients,
            has_own_backward=has_own_backward,
            draws_in_loss=self._draws_in_loss,
            row_watch=watch,
            uses_float32=self._uses_float32,
            changed_hooks=self._find_changed_hooks(hooks) if records_state else None,
        )

    def _build_watch(self, microbatch: int | None) -> _ForwardWatch:
        """Return what watches the forward of some rows, or of a micro-batch with what it reads."""
        buffers = {id(t) for m in self.modules for t in m._buffers.values()}
        if microbatch is None:
            return _ForwardWatch(buffer_ids=buffers)
        start, stop = self.find_rows(microbatch)
        counts = self._rows.counts
        row_counts = RowCounts(stop - start, {*counts, sum(counts)}, buffers)
        watch = _ForwardWatch(row_counts=row_counts, statistics=RowStatistics(), buffer_ids=buffers)
        watch.replaces_sizes = self.replaces_sizes
        return watch

    def _build_cells(self, fixes_draws: bool = False) -> UnsplitCells:
        """Return the cells of a forward in the running isolation, which restores generators."""
        assert self._stage_map is not None
        return UnsplitCells(
            self._seed,
            len(self._partition.stages),
            *self._stage_map,
            self._devices,
            fixes_draws,
            self._separates_host_streams,
            self._write_log.generators,
        )

    @torch.no_grad()
    def read_numbers(
        self, batch: tuple[Any, Any, tuple[Any, ...]], microbatch: int, count: int
    ) -> list[tuple[str, int | None]]:
        """Run the model until Python has read so many numbers of tensors, and return them."""
        args, kwargs, target = batch
        cells, watch = self._build_cells(fixes_draws=True), _ForwardWatch(count)
        try:
            with cells.emulate(microbatch), watch:
                self._compute(args, kwargs, target, watch)
        except LastNumberRead:
            pass
        return watch.reads

    def _list_hooks(self) -> dict[tuple[nn.Module, str], list[int]]:
        """Return the ids of the hooks of each module, and of each parameter."""
        hooks = {}
        for module in self._model_modules:
            tables = module._forward_pre_hooks, module._forward_hooks, module._backward_hooks
            hooks[module, ""] = [key for table in tables for key in table]
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter._backward_hooks:
                    hooks[module, name] = list(parameter._backward_hooks)
        return hooks

    def _find_changed_hooks(self, before: dict[tuple[nn.Module, str], list[int]]) -> str | None:
        """Return the name of a parameter whose hooks have changed, or of a module.

        A unit may change the hooks of its children, as one stage runs it. Code between units is run
        by several stages.
        """
        now = self._list_hooks()
        changed = [key for key in {**before, **now} if before.get(key, []) != now.get(key, [])]
        if not changed:
            return None
        assert self._stage_map is not None  # a forward has run
        units = [unit for unit, _ in self._stage_map[0]]
        children = {child for unit in units for child in unit.modules() if child is not unit}
        names = self._partition.names()
        problems = (
            f"{names[module]}.{parameter}".strip(".")
            for module, parameter in changed
            if parameter or module not in children
        )
        return next(problems, None)

    def _compute(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        targets: tuple[Any, ...],
        watch: _ForwardWatch,
    ) -> tuple[Any, ...]:
        def run_model(_: object) -> dict[int, tuple[Any, ...]]:
            # Not the loss function, which each step compares with the whole batch if it has to.
            watch.is_in_model = True
            try:
                return {OUTSIDE: (self._partition.run_unsplit(args, kwargs),)}
            finally:
                watch.is_in_model = False

        if self._reduction is None:
            return run_model(None)[OUTSIDE]
        loss_fn = self._request.loss_fn

        def compute_loss(*arguments: Any) -> Any:
            assert loss_fn is not None
            host_state = HostRngState() if self._separates_host_streams else None
            result = loss_fn(*arguments)
            self._draws_in_loss = host_state is not None and bool(host_state.find_used())
            return result

        compute = LossStageFunction(
            run_model,
            None if loss_fn is None else compute_loss,
            self._reduction,
            bool(targets),
            self._request.return_outputs,
        )
        losses = CollectedLosses()
        previous_sink, thread_state.sink = thread_state.sink, losses
        try:
            outputs = compute({OUTSIDE: targets})
        finally:
            thread_state.sink = previous_sink
        self._adds_losses = bool(losses.layer_count)
        return (carry_losses(outputs, losses) if losses else outputs)[OUTSIDE]

    @torch.no_grad()
    def compute_whole_loss(self, arguments: tuple[Any, ...]) -> WholeLoss | None:
        """Return the loss of the outputs of a whole batch.

        None: it cannot be compared with the losses of micro-batches. It fails, draws random
        numbers, or keeps state.
        """
        assert self._request.loss_fn is not None
        watch, prover = RowWatch(), RowMeanProver(*arguments)
        with self.isolate():
            cells = UnsplitCells(self._seed, 1, (), {}, own_states=self._write_log.generators)
            state = self.digest_loss_state()
            try:
                with cells.emulate(0), watch, prover:
                    result = self._request.loss_fn(*arguments)
            except Exception:  # outputs without rows are a list, which the loss may not take
                return None
            has_changed = state != self.digest_loss_state()
        value = find_loss_tensor(result)
        has_drawn = cells.has_drawn or bool(self._write_log.generators)
        if not isinstance(value, Tensor) or has_drawn or has_changed:
            return None
        return WholeLoss(value, watch.uses_float32, prover.function_names)

    @torch.no_grad()
    def reads_earlier_stages(self, microbatch: int, other: int) -> bool:
        """Return whether the loss of a micro-batch depends on where another one is in the model.

        The other one runs up to the last stage. What its layers leave outside of their outputs is
        then of that micro-batch, and the loss of the first one must not change.
        """
        loss_fn, last_stage = self._request.loss_fn, len(self._partition.stages) - 1
        if loss_fn is None or not last_stage or self._reduction is None:
            return False
        args, kwargs, target = self.take_batch(self.find_rows(microbatch))
        assert self._stage_map is not None  # a forward has run
        last_units = [unit for unit, stages in self._stage_map[0] if set(stages) == {last_stage}]
        digests = []

        def stop(*_: object) -> None:
            raise _LastStageReached

        with self.isolate():
            cells = self._build_cells()
            with cells.emulate(microbatch):
                output = self._partition.run_unsplit(args, kwargs)
            for is_beside in (False, False, True):
                if is_beside:
                    args, kwargs, _ = self.take_batch(self.find_rows(other))
                    hooks = [unit.register_forward_pre_hook(stop) for unit in last_units]
                    try:
                        with cells.emulate(other):
                            self._partition.run_unsplit(args, kwargs)
                        return False  # it does not stop, so its last stage has run as well
                    except _LastStageReached:
                        pass
                    finally:
                        for hook in hooks:
                            hook.remove()
                with self._write_log.watch():
                    results = list_tensors(loss_fn(output, *target))
                digests.append(self._digester.digest_all(dict(enumerate(results))))
        # A loss that differs from call to call has state, or draws.
        return digests[0] == digests[1] != digests[2]

    def _digest_buffers(self) -> dict[BufferKey, Digest]:
        with self._write_log.suspend():
            return self._digester.digest_all(collect_buffers(self._model_modules))

    def digest_loss_state(self) -> dict[Any, Digest]:
        """Return the digests of the tensors and numbers that `loss_fn` could keep as state.

        Lists of numbers are left out: they are logs. So are whole numbers, which count.
        """
        reached = find_reachable([self._request.loss_fn])
        own_modules = set(self.modules)
        own_tables = {id(value) for module in self.modules for value in vars(module).values()}
        states: list[Any] = [vars(m) for m in reached.find(nn.Module) if m not in own_modules]
        states += [{variable.name: variable.value} for variable in reached.variables]
        states += [c for c in reached.list_containers() if id(c) not in own_tables]
        tensors: dict[Any, Tensor] = {}
        for index, state in enumerate(states):
            is_table = isinstance(state, dict)
            for key, value in state.items() if is_table else enumerate(_list_entries(state)):
                if isinstance(value, float) and is_table:
                    tensors[index, key] = torch.tensor(value, dtype=torch.float64)
                elif (
                    isinstance(value, Tensor)
                    and not isinstance(value, nn.Parameter)
                    and (value.dim() or is_table)
                ):
                    tensors[index, key] = value
        return self._digester.digest_all(tensors)

    def list_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of the parameters, buffers and inputs."""
        tables = [table for m in self.modules for table in (m._parameters, m._buffers)]
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
        request = self._request
        return [t.dtype for t in (*tensors, *list_tensors((request.inputs, request.target)))]

    def uses_batch_norm(self) -> bool:
        """Return whether a BatchNorm computes with the statistics of its rows."""
        return any(isinstance(m, BatchNormBase) and m.training for m in self.modules)

    @cached_property
    def has_zero_weights(self) -> bool:
        """Whether a parameter that is all 0 may hide that rows depend on each other.

        What it is multiplied with does not show in the results, only in its gradient: the last
        layer of a new head, a gate that opens in training, the second matrix of LoRA. A bias is
        added, so it hides nothing.
        """
        parameters = [
            parameter
            for module in (*self.modules, *self._outside_state[1])
            for name, parameter in module._parameters.items()
            if type(parameter) is nn.Parameter and parameter.requires_grad and name != "bias"
        ]
        dense = [p for p in parameters if p.layout is torch.strided and p.numel()]
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in dense:
            by_device.setdefault(parameter.device, []).append(parameter.detach())
        # The first numbers of most are not 0, so that the rest is not read.
        suspects = [
            tensor
            for tensors in by_device.values()
            for tensor, is_other in zip(
                tensors,
                torch.stack([tensor.reshape(-1)[:8].any() for tensor in tensors]).tolist(),
                strict=True,
            )
            if not is_other
        ]
        return any(not bool(tensor.any()) for tensor in suspects)

    def has_hooked_leaves(self) -> bool:
        """Return whether the code uses a leaf with a hook that is not a parameter of the model."""
        own_ids = {id(p) for module in self.modules for p in module.parameters(False)}
        own_ids |= {id(original) for original in self._aliases.values()}
        return any(
            tensor.is_leaf and tensor.requires_grad and tensor._backward_hooks
            for tensor in self._reached.find(Tensor)  # as they are outside of an isolation
            if id(tensor) not in own_ids
        )

    def name_outside_parameters(self) -> dict[int, str]:
        """Return the names of the parameters of a loss, by their ids."""
        return {
            id(parameter): f"{type(module).__name__}.{name}"
            for module in self._outside_state[1]
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def run_backward(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[int, Digest]:
        """Run the backward, and return the digests of the gradients by id of their parameter.

        `pairs` are tensors with their gradients. Hooks of parameters are not called.
        """
        tensors, gradients = zip(*pairs, strict=True)
        sums: dict[tuple[int, int], Tensor] = {}  # on the device, which need not be waited for
        small: dict[tuple[int, int], Tensor] = {}

        def note_gradient(leaf: Tensor) -> None:
            assert leaf.grad is not None
            key = id(self._aliases.get(leaf, leaf)), len(sums) + len(small)
            if is_small(leaf.grad):
                small[key] = leaf.grad
            else:
                with self._write_log.suspend():
                    sums[key] = self._digester.compute_sums(leaf.grad)
            leaf.grad = None  # one large gradient at a time is in memory

        # A reentrant `torch.utils.checkpoint` hides its parameters from the graph.
        leaves = dict.fromkeys(leaf for leaf in self._aliases if leaf.requires_grad)
        leaves.update(
            dict.fromkeys(find_graph_leaves(t.grad_fn for t in tensors if t.grad_fn is not None))
        )
        with preserve_gradients(leaves), ExitStack() as hooks:
            for leaf in leaves:
                hooks.callback(leaf.register_post_accumulate_grad_hook(note_gradient).remove)
            # As in a worker: gradients do not depend on the caller's autocast.
            # Only Python code can write to a parameter: hooks, and the backward of a function. What
            # `torch.utils.checkpoint` repeats has been logged in the forward.
            is_logged = self._has_own_gradients is not False
            log = self._write_log.watch() if is_logged else self._write_log.suspend()
            with no_autocast(), log:
                torch.autograd.backward(list(tensors), list(gradients))
        digests: dict[int, Digest] = {}
        with self._write_log.suspend():
            parts = {**self._digester.read(sums), **self._digester.digest_all(small)}
        for (key, _), digest in parts.items():
            digests[key] = digest.plus(digests.get(key))
        return digests


def _list_entries(container: Any) -> list[Any]:
    return list(container) if isinstance(container, list | deque) else []


def list_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules, without those of their children."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def collect_buffers(modules: Iterable[nn.Module]) -> dict[BufferKey, Tensor]:
    """Return the buffers of modules that have numbers."""
    return {
        (module, name): buffer
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    }


def read_plain_attributes(modules: Iterable[nn.Module]) -> dict[AttributeKey, Any]:
    """Return the attributes of modules that are numbers."""
    return {
        (module, name): value
        for module in modules
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


class StateWatch:
    """Finds the state that a forward changes, so that the next one may compute with it.

    Args:
        names: The modules, and their names.
        other_modules: Those that are not part of the model: of its loss.
        variables: Variables outside of modules.
        write_log: Tells which parameters were written to.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        other_modules: set[nn.Module],
        variables: Sequence[Variable],
        write_log: _WriteLog,
    ) -> None:
        self._names, self._other_modules = names, other_modules
        self._variables, self._write_log = variables, write_log
        self._copier = StructureCopier(clone_state)
        self._before = self._read()
        self._table_sizes = self._measure_tables()
        self._buffers = {
            (module, name): float(buffer)
            for module in names
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_counter(buffer)
        }
        self._float_buffers = {
            (module, name): buffer.detach().clone()
            for module in names
            if not has_write_only_buffers(module)
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_float_state(buffer)
        }
        for _, value in self._before.values():
            self._copier(value)
        self._host_generators = StateSnapshot(())
        for value in self._copier.list_originals():
            if type(value) not in _NO_GENERATORS and _is_host_generator(value):
                self._host_generators.record(value)

    def _read(self) -> dict[Any, tuple[str, Any]]:
        """Return the name and value of each attribute and variable."""
        values: dict[Any, tuple[str, Any]] = {}
        for module, prefix in self._names.items():
            if isinstance(module, DeferredStatsBatchNorm):
                continue  # its attributes are the sums of the micro-batches so far
            attributes = vars(module)
            names = attributes.keys() - MODULE_INTERNALS
            for name in [name for name in attributes if name in names] if names else ():
                values[module, name] = f"{prefix}.{name}".lstrip("."), attributes[name]
            if module in self._other_modules:  # those of the model have digests
                for name, value in module._buffers.items():
                    values[module, name] = f"{prefix}.{name}".lstrip("."), value
        for index, variable in enumerate(self._variables):
            values[index] = variable.name, variable.read()
        return values

    def _measure_tables(self) -> list[int]:
        """Return how many hooks, members and so on the modules have."""
        tables = chain.from_iterable(map(_get_tables, map(vars, self._names)))
        return [*map(len, tables)]

    def rewind_generators(self) -> None:
        """Set the random generators of the model back, so that the next forward draws the same."""
        self._host_generators.restore()
        for generator, state in self._write_log.generators.items():
            generator.set_state(state)

    def has_host_draws(self) -> bool:
        """Return whether a forward has drawn from the model's own generators of Python or NumPy."""
        values = [v for v in self._copier.list_originals() if type(v) not in _NO_GENERATORS]
        return any(_is_host_generator(v) and self._copier.has_changed(v) for v in values)

    def advance_counters(self) -> bool:
        """Let the counters that a forward has changed be far ahead. Return whether there are any.

        A counter is a whole number in an attribute, a buffer, a variable or an object, a list that
        grows, or an `itertools.count`. Other numbers in buffers grow, too: a running maximum may be
        read only where it is above a limit.
        """
        has_counters = False
        for module in self._names:
            if has_write_only_buffers(module):
                continue
            tables: tuple[dict[str, Any], ...] = vars(module), module._buffers
            for table in tables:
                for name, value in list(table.items()):
                    if name in MODULE_INTERNALS:
                        continue
                    _, old = self._before.get(
                        (module, name), ("", self._buffers.get((module, name)))
                    )
                    before = self._float_buffers.get((module, name))
                    if _is_counter(value) and isinstance(old, int | float) and float(value) != old:
                        value.add_(_FAR_AHEAD)
                        has_counters = True
                    elif before is not None and _is_float_state(value):
                        has_counters |= _let_changes_grow(value, before)
                    else:
                        old = getattr(type(module), name, None) if old is None else old
                        has_counters |= self._advance(table, name, value, old)
        for index, variable in enumerate(self._variables):
            value, (_, old) = variable.read(), self._before.get(index, ("", None))
            if variable.namespace is not None:
                slot = {"": value}
                if self._advance(slot, "", value, old):
                    variable.set(slot[""])
                    has_counters = True
            if self._copier.has_changed(value) and not isinstance(value, Tensor | nn.Module):
                has_counters |= self._advance_entries(value)
        return has_counters

    def _advance_entries(self, value: Any) -> bool:
        """Let the counters in a dict, or in the attributes of an object, be far ahead."""
        before = self._copier(value)
        table, old_table = (
            (value, before)
            if isinstance(value, dict)
            else (getattr(value, "__dict__", {}), getattr(before, "__dict__", {}))
        )
        has_counters = False
        for name, entry in list(table.items()):
            # A counter of a class becomes one of the object when it is first raised.
            old = old_table.get(name, 0 if type(entry) is int and entry == 1 else None)
            has_counters |= self._advance(table, name, entry, old)
        return has_counters

    def _advance(self, table: dict[Any, Any], name: Any, value: Any, old: Any) -> bool:
        """Let one value be far ahead, if it is a counter that has changed. Return whether it is."""
        if type(value) is int and type(old) is int:
            if value == old:
                return False
            table[name] = value + _FAR_AHEAD
            return True
        if old is value:  # it has been copied before
            old = self._copier(value)
        if type(value) is list and len(value) > (len(old) if isinstance(old, list) else 0):
            value.extend([value[-1]] * _LONGER)
            return True
        if isinstance(value, itertools.count) and repr(value) != repr(old):
            table[name] = itertools.count(next(copy.copy(value)) + _FAR_AHEAD)
            return True
        return False

    def find_changes(self, changed_buffers: Iterable[BufferKey]) -> list[str]:
        """Return the names of the state that has changed, if a later forward may compute with it.

        BatchNorm in training writes its running statistics, and does not compute with them.
        """
        names = sorted(
            f"{self._names[module]}.{name}".lstrip(".")
            for module, name in changed_buffers
            if not (has_write_only_buffers(module) and name in _RUNNING_STATISTICS)
        )
        written = self._write_log.find_written()
        names += [
            f"{prefix}.{name}".lstrip(".")
            for module, prefix in self._names.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and _get_storage_address(parameter) in written
        ]
        now = self._read()
        have_changed: dict[int, bool] = {}  # by id: modules may share a configuration
        for key in {**self._before, **now}:
            name, value = now.get(key, ("", None))
            old_name, old = self._before.get(key, ("", None))
            is_same = value is old or (type(value) in SCALARS and value == old)
            if type(value) not in _NO_GENERATORS and (
                isinstance(value, torch.Generator) or _is_host_generator(value)
            ):
                continue
            if id(value) not in have_changed:
                have_changed[id(value)] = self._copier.has_changed(value)
            if not is_same or have_changed[id(value)]:
                names.append(name or old_name)
        if self._measure_tables() != self._table_sizes:  # the forward has registered a hook, say
            names.append(_UNNAMED)
        return list(dict.fromkeys(name for name in names if name != _UNNAMED)) or names[:1]


_FAR_AHEAD = 1_000_000
_LONGER = 100_000  # entries of a list
_LARGER = 1_000.0
_MAX_STATE = 1 << 20  # numbers of a buffer


def _is_float_state(value: Any) -> bool:
    """Return whether a tensor has numbers that a forward may let grow, and is not large."""
    if type(value) is not Tensor or value.is_meta or value.is_inference():
        return False
    is_plain = value.layout is torch.strided and value.numel() <= _MAX_STATE
    return is_plain and value.is_floating_point() and not value.requires_grad


def _let_changes_grow(value: Tensor, before: Tensor) -> bool:
    """Multiply the numbers that have changed. Return whether there are any.

    The others may belong to rows with other ids.
    """
    if value.shape != before.shape or value.device != before.device:
        return False
    has_changed = value.detach() != before
    with torch.no_grad():
        value.copy_(torch.where(has_changed, value * _LARGER, value))
    return bool(has_changed.any())


def _is_counter(value: Any) -> bool:
    """Return whether a tensor is a whole number."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_meta or value.is_complex():
        return False
    return value.dtype is not torch.bool and float(value).is_integer()  # no infinite number is


_UNNAMED = "a variable outside of the modules"
_RUNNING_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


# Types of most attributes, none of which is a random generator.
_NO_GENERATORS = frozenset((*SCALARS, dict, list, tuple, Tensor, nn.Parameter))
_get_tables = itemgetter(*(n for n, table in vars(nn.Module()).items() if isinstance(table, dict)))


def _is_host_generator(value: Any) -> bool:
    is_of_library = hasattr(value, "bit_generator") or hasattr(value, "set_state")
    return isinstance(value, random.Random) or (is_of_numpy(value) and is_of_library)


class HostDrawsError(Exception):
    """A forward has drawn from `random` or `numpy.random`, and has to be repeated.

    Few models do. The repetition draws the numbers of the pipe, which takes time in every unit.
    """


class _LastStageReached(Exception):
    """The forward of a micro-batch has come to the last stage."""


class _ForwardWatch(RowWatch):
    """Notes what a model does with its rows, and whether it says by itself what its gradient is.

    One mode for both: every operation goes through Python once.

    Attributes:
        is_in_model: Whether the model runs, and not the loss.
        has_own_gradients: Whether the model or the loss adds a hook, or leaves something out.
        has_tensor_hooks: Whether it adds a hook.
    """

    is_in_model = has_own_gradients = has_tensor_hooks = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and look at it."""
        if func in _GRADIENT_FUNCTIONS and torch.is_grad_enabled():
            self.has_own_gradients |= any(isinstance(a, Tensor) and a.requires_grad for a in args)
            self.has_tensor_hooks |= func is Tensor.register_hook
        if not self.is_in_model:
            # The model may have returned a size.
            return func(*unwrap_numbers(args), **unwrap_numbers(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


_GRADIENT_FUNCTIONS = frozenset((Tensor.register_hook, Tensor.detach, torch.detach))


class _WriteLog(CompileFriendlyDispatchMode):
    """Restores parameters that an operation writes to, and generators that it draws from.

    A copy is made at the first write, so a model that writes to none costs no memory. Small
    parameters are copied before: that takes less time than to look at each operation.

    Attributes:
        generators: The generators that the model has drawn from, and their states before.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._by_storage = {_get_storage_address(p): p for p in parameters}
        self._copies: dict[int, Tensor] = {}
        self.generators: dict[torch.Generator, Tensor] = {}
        tensors = self._by_storage.values()
        self._copies_before = all(map(_is_plain_on_cpu, tensors)) and (
            sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Copy the parameters that an operation is about to write to."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            self.generators.setdefault(generator, generator.get_state())
        known = _written_arguments.get(id(func))
        if known is None or known[0] is not func:
            known = _written_arguments[id(func)] = func, _find_written_arguments(func)
        for index, name in known[1]:
            value = args[index] if index < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                self._copy_before_write(tensor)
        return func(*args, **kwargs)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Run operations that write to no parameter, without the log."""
        is_innermost = get_innermost_dispatch_mode() is self
        with without_innermost_dispatch_mode() if is_innermost else nullcontext():
            yield

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at each operation, also if the parameters have been copied before.

        For code that may draw from generators of its own, and is not in a cell, which logs them.
        """
        if not self._copies_before:
            yield
            return
        push_dispatch_mode(self)
        try:
            yield
        finally:
            pop_dispatch_mode()

    def _copy_before_write(self, tensor: Any) -> None:
        # A micro-batch of another shape is traced inside the reference, with fake tensors.
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return
        address = _get_storage_address(tensor)
        if address in self._by_storage and address not in self._copies:
            self._copies[address] = self._by_storage[address].detach().clone()

    def find_written(self) -> set[int]:
        """Return the addresses of the parameters that hold other numbers now."""
        return {
            address
            for address, copy in self._copies.items()
            if not _is_equal(self._by_storage[address], copy)
        }

    # Only the stack of this thread changes: `TorchDispatchMode.__enter__` also sets flags that all
    # threads share.
    def __enter__(self) -> _WriteLog:
        """Watch the operations of this thread, or copy the parameters."""
        if not self._copies_before:
            push_dispatch_mode(self)
            return self
        self._copies = {address: p.detach().clone() for address, p in self._by_storage.items()}
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the parameters and generators."""
        if not self._copies_before:
            pop_dispatch_mode()
        for generator, state in self.generators.items():
            generator.set_state(state)
        written = self.find_written()
        with torch.no_grad():
            for address in written:
                self._by_storage[address].copy_(self._copies[address])


_SMALL_BYTES = 2 << 20


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers. A nan equals a nan."""
    if torch.equal(tensor, other):
        return True
    is_same_shape = tensor.shape == other.shape and tensor.dtype == other.dtype
    return is_same_shape and bool(
        ((tensor == other) | ((tensor != tensor) & (other != other))).all()
    )


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    is_plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided
    return is_plain and tensor.is_cpu and not is_lazy(tensor)


# By id of an operation, with the operation: its hash is computed in Python, which takes longer than
# all else here. There are about as many entries as PyTorch has operations.
_written_arguments: dict[int, tuple[Any, tuple[tuple[int, str], ...]]] = {}


def _find_written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _get_storage_address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return id(tensor)
