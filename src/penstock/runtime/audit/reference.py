"""The reference of an audit: the user's own forward on some rows of a batch, leaving no trace.

The forward runs on the modules of the pipe themselves, without a copy of their parameters. What it
could change is put aside first: attributes, buffers, and variables in closures, classes and globals
are exchanged for copies, gradients and hooks on them are taken away, and a parameter is copied when
something is about to write to it. (Parameters of a small model are copied before.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.microbatch import (
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
from penstock.runtime.audit.batch_rows import BatchRows
from penstock.runtime.audit.digest import Digest, Digester, find_rounding, is_small
from penstock.runtime.audit.kept_tensors import KeptPlace, find_kept_places
from penstock.runtime.audit.precision import (
    HIDING_SIZE,
    HIDING_SIZE_IN_DOUBLE,
    LOW_PRECISION_DTYPES,
    WideMode,
    widen,
    widened_units,
)
from penstock.runtime.audit.row_operations import RowOperations
from penstock.runtime.audit.state_watch import (
    UNNAMED_VARIABLE,
    AttributeKey,
    BufferKey,
    StateWatch,
    collect_buffers,
    is_host_generator,
    read_plain_attributes,
)
from penstock.runtime.audit.write_log import WriteLog, is_equal
from penstock.runtime.request import Request
from penstock.stage.aux_loss import CollectedLosses, carry_losses, thread_state
from penstock.stage.branches import LastNumberRead, RowWatch
from penstock.stage.caller_context import no_autocast
from penstock.stage.cell_graph import find_graph_leaves, has_python_nodes
from penstock.stage.host_rng import HostRngState
from penstock.stage.loss import LossReduction, LossStageFunction, find_loss_tensor
from penstock.stage.row_counts import RowCounts, unwrap_numbers
from penstock.stage.row_means import RowMeanProver
from penstock.stage.row_statistics import RowStatistics
from penstock.stage.stage import OUTSIDE
from penstock.state_copy import (
    MODULE_INTERNALS,
    ReachedState,
    StructureCopier,
    Variable,
    find_reachable,
)
from penstock.torch_compat import (
    BatchNormBase,
    close_failed_checkpoints,
    force_eager,
    pytree,
)


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
        own_gradients: The gradients that it gave to parameters by backwards of its own, as a layer
            with a local loss does; by id.
        output: In a step the output of the model, without its graph, if it was kept.
        operations: What looked at the operations of the model, if anything did.
        draws_number: Whether it drew single random numbers with torch, by which it may go.
        draws_host_random: Whether it drew from `random` or `numpy.random`.
        numbers: What tells whether other rows drew the same numbers, or None.
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
    own_gradients: Mapping[int, Digest]
    output: Any = None
    operations: RowOperations | None = None
    draws_number: bool = False
    draws_host_random: bool = False
    numbers: Any = None

    @property
    def changed_state(self) -> bool:
        """Whether it changed a buffer."""
        return bool(self.changed_buffers)


class ComputedLoss(NamedTuple):
    """The loss of some outputs.

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

    Attributes:
        names: The modules of the model, with their names.
        rows: The rows of the batch.

    Args:
        partition: The model, cut.
        devices: The devices of the stages.
        request: The call.
        inputs: Its batch, split.
        seed: The seed of its random numbers.
        reduction: How the losses are combined; None for `pipe(x)`.
        digester: Makes the digests.
        reached: The state that the code of the model and the loss can reach.
        autocast_dtypes: The dtypes of autocast in the call.
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
        autocast_dtypes: Sequence[torch.dtype] = (),
    ) -> None:
        self._partition, self._devices = partition, devices
        self._reached = reached
        self._request, self._seed = request, seed
        self.rows = BatchRows(request, inputs)
        self._reduction, self._digester = reduction, digester
        self._stage_map: StageMap | None = None
        self._adds_losses = self._draws_in_loss = False
        self._separates_host_streams = False
        self._uses_float32: bool | None = None  # not known before a forward
        self._has_own_gradients: bool | None = None  # not known before a forward
        self._written_buffers: frozenset[BufferKey] = frozenset()  # by the forward
        # Whether the model runs the same operations on any rows, and none writes to a parameter.
        self._writes_nothing = False
        self.replaces_sizes = True  # whether forwards get sizes that know of other numbers of rows
        self.uniform_level = 0.5  # that of uniform numbers where draws are fixed
        self.draws_uniform = False  # whether a forward with fixed draws has drawn some
        self.watches_rows = False  # whether forwards show if a selection is one among rows
        # Whether forwards are known to leave nothing behind, so that one isolation serves several.
        self.is_stateless = self._is_isolated = False
        self.chains_parts = False  # whether parts run as in a pipe: see `in_order`
        self._keeps_state = False
        self._write_log = WriteLog([])  # of the running isolation
        stage_modules = (module for stage in partition.stages for module in stage.modules())
        # Stages of a traced model have copies of the modules around its units. The unsplit forward
        # does not run those, so their buffers are not compared.
        self.names = partition.names()
        self._model_modules = list(self.names)
        self.modules = list(dict.fromkeys([*self._model_modules, *stage_modules]))
        self._aliases: dict[Tensor, nn.Parameter] = {}  # the parameters that stood in for others
        self._buffers = collect_buffers(self._model_modules)
        self._dtypes = frozenset([*autocast_dtypes, *self._list_dtypes()])
        self._wide_dtype: torch.dtype | None = None  # see `in_precision`

    def take_batch(self, *ranges: tuple[int, int]) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return copies of some rows: the inputs, the inputs by name and the target."""
        request = self._request
        batch = request.inputs, dict(request.keyword_inputs), request.target
        pieces = take_rows(batch, self.rows.inputs.rows, *ranges)
        device = self._devices[-1]

        def copy_tensor(tensor: Tensor) -> Tensor:
            return self._widen(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

        args, kwargs, target = StructureCopier(copy_tensor)(pieces)
        return (
            args,
            kwargs,
            tuple(value.to(device) if isinstance(value, Tensor) else value for value in target),
        )

    def take_target(self) -> tuple[Any, ...]:
        """Return the target of the whole batch, on the device of the loss."""
        rows = self.rows.inputs.rows
        target = take_rows(self._request.target, rows, (0, sum(rows.counts)))
        device = self._devices[-1]

        moved: tuple[Any, ...] = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().to(device), target
        )
        return moved

    def watch_state(self) -> StateWatch:
        """Return an object that finds what a forward changes, inside an isolation."""
        reached, other_modules, containers = self._outside_state
        names = {**self.names, **{module: type(module).__name__ for module in other_modules}}
        others = [Variable(None, UNNAMED_VARIABLE, container) for container in containers]
        outside = [*reached.variables, *others]
        return StateWatch(names, set(other_modules), outside, self._write_log)

    def find_kept_places(self) -> list[KeptPlace]:
        """Return where a forward has left tensors with a graph, inside an isolation."""
        reached, _, containers = self._outside_state
        return find_kept_places(self.names, reached.variables, containers)

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
        tables = {id(t) for m in self.modules for t in map(vars(m).get, MODULE_INTERNALS)}
        containers = [c for c in reached.list_containers() if id(c) not in tables]
        return reached, other_modules, containers

    @contextmanager
    def isolate(self, state: StateSnapshot | None = None) -> Iterator[None]:
        """Leave everything as it was, whatever the model and the loss do in this context.

        With `state`, the modules are inside the context as they were when it was recorded. Inside
        another isolation of a model whose forwards leave nothing behind, there is nothing to do.
        """
        if (self.is_stateless or self._keeps_state) and self._is_isolated:
            yield
            return
        with self._put_state_aside(state):
            yield

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Let each forward in the context begin with the state that the one before has left."""
        with self.isolate():
            self._keeps_state = True
            try:
                yield
            finally:
                self._keeps_state = False

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
        later_widened = self._find_unit_parameters() if self._wide_dtype is not None else ()

        def exchange_tensor(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                copy = self._widen(tensor.detach().clone())
                return copy.requires_grad_(tensor.requires_grad)
            if type(tensor) is not nn.Parameter:  # only its class knows how to copy it
                return tensor
            # Another leaf in the same memory: hooks of the parameter, or of a wrapper such as DDP,
            # do not see its gradient.
            values = tensor.detach()
            if id(tensor) not in later_widened:
                values = self._widen(values)
            alias = nn.Parameter(values, tensor.requires_grad)
            alias.__dict__.update(tensor.__dict__)
            self._aliases[alias] = self._aliases.get(tensor, tensor)
            return alias

        # A backward may write to them: `weight.main_grad`, as layers with fused accumulation do.
        attached = [tensor for _, tensor in _list_attached([*parameters, *loss_parameters])]
        previous_log = self._write_log
        write_log = WriteLog([*parameters, *loss_parameters, *attached])
        was_running, was_isolated = running.is_running, self._is_isolated
        exchanged = self.modules if self._wide_dtype is None else [*self.modules, *other_modules]
        self._write_log = write_log
        with (
            isolated(exchanged, map_tensor=exchange_tensor, variables=reached.variables),
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
                running.is_running, self._is_isolated = was_running, was_isolated
                self._write_log = previous_log
                other_state.restore()
                # Autocast would reuse weights that it has cast here, whose graph is gone.
                torch.clear_autocast_cache()

    # ---- precision -----------------------------------------------------------------------------

    @property
    def has_low_precision(self) -> bool:
        """Whether the model computes with 16 bits: by itself, or under autocast."""
        return not self._dtypes.isdisjoint(LOW_PRECISION_DTYPES)

    @property
    def has_single_precision(self) -> bool:
        """Whether the model computes in float32, or in float32 for now."""
        return torch.float32 in (self._dtypes if self._wide_dtype is None else [self._wide_dtype])

    @property
    def rounding(self) -> float:
        """The relative difference that counts as rounding."""
        dtypes = self._dtypes if self._wide_dtype is None else [self._wide_dtype]
        return find_rounding(dtypes, self._devices)

    @contextmanager
    def in_precision(self, dtype: torch.dtype) -> Iterator[None]:
        """Let forwards use this dtype where they have one with fewer bits, and no autocast.

        The parameters of a unit are converted while it runs, so there is no second copy of the
        model, unless gradients are computed. A model may insist on its dtypes, and raises then.
        """
        if self._stage_map is None:
            args, kwargs, _ = self.take_batch(self.rows.find_rows(0))
            self._stage_map = self._partition.map_stages(args, kwargs)
        before = self._wide_dtype, self._uses_float32, dict(self._aliases)
        self._wide_dtype, self._uses_float32 = dtype, None
        try:
            with no_autocast(), self._put_state_aside(None) if self.is_stateless else nullcontext():
                yield
        finally:
            self._wide_dtype, self._uses_float32, self._aliases = before

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor if self._wide_dtype is None else widen(tensor, self._wide_dtype)

    def _build_wide_mode(self) -> AbstractContextManager[object]:
        return nullcontext() if self._wide_dtype is None else WideMode(self._wide_dtype)

    def _find_unit_parameters(self) -> set[int]:
        """Return the ids of the parameters that units have, which are converted when they run."""
        assert self._stage_map is not None
        return {id(p) for unit, _ in self._stage_map[0] for p in unit.parameters()}

    def _build_unit_widening(self) -> AbstractContextManager[object]:
        """Return a context in which the parameters of each unit are converted before it runs."""
        if self._wide_dtype is None:
            return nullcontext()
        assert self._stage_map is not None
        units = [unit for unit, _ in self._stage_map[0]]
        return widened_units(units, self._wide_dtype, self._note_wide_parameter)

    def _note_wide_parameter(self, wide: nn.Parameter, parameter: nn.Parameter) -> None:
        self._aliases[wide] = self._aliases.get(parameter, parameter)

    # ---- forwards ------------------------------------------------------------------------------

    def run_forward(
        self,
        batch: tuple[Any, Any, tuple[Any, ...]],
        microbatch: int,
        counted_targets: tuple[Any, ...] | None = None,
        *,
        fixes_draws: bool = False,
        records_state: bool = False,
        keeps_output: bool = False,
        operations: RowOperations | None = None,
        keeps_numbers: bool = False,
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
            keeps_output: Whether to keep the output of the model in a step.
            operations: What looks at the operations of the model, if it should.
            keeps_numbers: Whether single numbers are not fixed: see `UnsplitCells`.
        """
        args, kwargs, target = batch
        self._separates_host_streams |= keeps_numbers
        # That of the first micro-batch serves for all: a unit is on the same stage for each.
        self._stage_map = self._stage_map or self._partition.map_stages(args, kwargs)
        cells = self._build_cells(fixes_draws, keeps_numbers)
        cells.uniform_level = self.uniform_level
        attributes = read_plain_attributes(self._model_modules) if records_state else {}
        watch = self._build_watch(microbatch if records_state else None)
        generators = set(self._write_log.generators)
        hooks = self._list_hooks() if records_state else {}
        # The watch costs time in every operation. What it says of float32 holds for all forwards.
        is_watched = records_state or self.watches_rows or self._uses_float32 is None
        # The watch outside, so that what it does itself does not go through the mode of the cells.
        with (
            self._write_log.log(),
            self._build_wide_mode(),
            watch if is_watched else nullcontext(),
            cells.emulate(microbatch),
            self._build_unit_widening(),
        ):
            is_logged = not (fixes_draws and self.is_stateless and self._writes_nothing)
            values, output = self._compute(
                args, kwargs, counted_targets or target, watch, operations, is_logged
            )
        detach_output = StructureCopier(lambda tensor: tensor.detach())
        output = detach_output(output) if keeps_output else None
        if cells.draws_host_random and not self._separates_host_streams:
            self._separates_host_streams = True
            raise HostDrawsError
        self.draws_uniform |= cells.has_uniform
        self._uses_float32 = bool(self._uses_float32) or watch.uses_float32
        has_own_backward = watch.has_tensor_hooks
        if not has_own_backward and records_state:
            nodes = (t.grad_fn for t in list_tensors(values) if t.grad_fn is not None)
            has_own_backward = has_python_nodes(nodes)
        has_own_gradients = has_own_backward or watch.has_own_gradients
        if records_state:
            self._has_own_gradients = has_own_gradients
            self.watches_rows = watch.may_select_rows
            self._writes_nothing = (
                self._write_log.is_clean
                and watch.runs_same_operations
                and not self._separates_host_streams
            )
        buffers = self._digest_buffers() if records_state else {}
        changed_buffers = frozenset(filter(self._has_changed, buffers))
        self._written_buffers |= changed_buffers
        return ReferenceForward(
            values,
            has_drawn=cells.has_drawn
            or cells.uses_own_generator
            or not generators.issuperset(self._write_log.generators),
            uses_own_generator=cells.uses_own_generator,
            buffers=buffers,
            changed_buffers=changed_buffers,
            changed_attributes=frozenset(
                [key for key, old in attributes.items() if vars(key[0]).get(key[1]) != old]
            ),
            adds_losses=self._adds_losses,
            has_own_gradients=has_own_gradients,
            has_own_backward=has_own_backward,
            draws_in_loss=self._draws_in_loss,
            row_watch=watch,
            uses_float32=self._uses_float32,
            changed_hooks=self._find_changed_hooks(hooks) if records_state else None,
            own_gradients=self._take_gradients(),
            output=output,
            operations=operations,
            draws_number=(cells.draws_number if self._has_rows(microbatch) else cells.draws_scalar),
            draws_host_random=cells.draws_host_random,
            numbers=cells.numbers,
        )

    def _has_rows(self, microbatch: int) -> bool:
        """Return whether a micro-batch has several rows: one number is not that of a row then."""
        start, stop = self.rows.find_rows(microbatch)
        return stop - start > 1

    def _take_gradients(self) -> dict[int, Digest]:
        """Return the gradients that parameters have so far, by id, and remove them."""
        gradients = {}
        for alias, parameter in self._aliases.items():
            if alias.grad is not None:
                gradients[id(parameter)], alias.grad = alias.grad, None
        return self._digester.digest_all(gradients)

    def _build_watch(self, microbatch: int | None) -> _ForwardWatch:
        """Return what watches the forward of some rows, or of a micro-batch with what it reads."""
        buffers = {id(t) for m in self.modules for t in m._buffers.values()}
        if microbatch is None:
            return _ForwardWatch(buffer_ids=buffers)
        start, stop = self.rows.find_rows(microbatch)
        counts = self.rows.inputs.rows.counts
        row_counts = RowCounts(stop - start, {*counts, sum(counts)}, buffers)
        watch = _ForwardWatch(row_counts=row_counts, statistics=RowStatistics(), buffer_ids=buffers)
        watch.replaces_sizes = self.replaces_sizes
        return watch

    def _build_cells(self, fixes_draws: bool = False, keeps_numbers: bool = False) -> UnsplitCells:
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
            keeps_numbers,
        )

    @torch.no_grad()
    def read_numbers(
        self, batch: tuple[Any, Any, tuple[Any, ...]], microbatch: int, count: int
    ) -> list[tuple[str, int | None]]:
        """Run the model until Python has read so many numbers of tensors, and return them."""
        args, kwargs, target = batch
        cells, watch = self._build_cells(fixes_draws=True), _ForwardWatch(count)
        try:
            with self._write_log.log(), cells.emulate(microbatch), watch:
                self._compute(args, kwargs, target, watch)
        except LastNumberRead:
            pass
        return watch.reads

    @torch.no_grad()
    def catches_error(
        self, batch: tuple[Any, Any, tuple[Any, ...]], microbatch: int, index: int
    ) -> bool:
        """Return whether the model goes on after the error of an operation that may raise.

        `index` counts the calls of such operations in a forward.
        """
        args, kwargs, target = batch
        cells, watch = self._build_cells(fixes_draws=True), _ForwardWatch()
        watch.fail_at = index
        try:
            with self._write_log.log(), cells.emulate(microbatch), watch:
                self._compute(args, kwargs, target, watch)
        except Exception as error:
            close_failed_checkpoints(error)
            return False
        return watch.has_failed

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
        problems = (
            f"{self.names[module]}.{parameter}".strip(".")
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
        operations: RowOperations | None = None,
        is_logged: bool = True,
    ) -> tuple[tuple[Any, ...], Any]:
        """Return what a step or a call returns, and the output of the model.

        Unless `is_logged`, the model is known to write to no parameter.
        """
        outputs = []
        watched = nullcontext() if operations is None else operations.watch()

        def run_model(_: object) -> dict[int, tuple[Any, ...]]:
            # Not the loss function, which each step compares with the whole batch if it has to.
            watch.is_in_model = True
            try:
                with nullcontext() if is_logged else self._write_log.suspend(), watched:
                    outputs.append(self._partition.run_unsplit(args, kwargs))
                return {OUTSIDE: (outputs[-1],)}
            finally:
                watch.is_in_model = False

        if self._reduction is None:
            return run_model(None)[OUTSIDE], outputs[-1]
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
            values = compute({OUTSIDE: targets})
        finally:
            thread_state.sink = previous_sink
        self._adds_losses = bool(losses.layer_count)
        return (carry_losses(values, losses) if losses else values)[OUTSIDE], outputs[-1]

    @torch.no_grad()
    def compute_loss(self, arguments: tuple[Any, ...]) -> ComputedLoss | None:
        """Return the loss of the outputs of a micro-batch, or of the whole batch.

        None: it cannot be compared with others. It fails, draws random numbers, or keeps state.
        """
        assert self._request.loss_fn is not None
        output, *targets = arguments
        # A loss may write to its target, as `target.masked_fill_(...)` does.
        copy_target = StructureCopier(lambda tensor: self._widen(tensor).clone())
        arguments = StructureCopier(self._widen)(output), *copy_target(targets)
        watch, prover = RowWatch(), RowMeanProver(*arguments)
        with self.isolate():
            cells = UnsplitCells(self._seed, 1, (), {}, own_states=self._write_log.generators)
            state = self.digest_loss_state()
            try:
                with (
                    self._write_log.log(),
                    self._build_wide_mode(),
                    cells.emulate(0),
                    watch,
                    prover,
                ):
                    result = self._request.loss_fn(*arguments)
            except Exception:  # outputs without rows are a list, which the loss may not take
                return None
            has_changed = state != self.digest_loss_state()
            has_drawn = cells.has_drawn or bool(self._write_log.generators)
        value = find_loss_tensor(result)
        if not isinstance(value, Tensor) or has_drawn or has_changed:
            return None
        return ComputedLoss(value, watch.uses_float32, prover.function_names)

    @torch.no_grad()
    def reads_earlier_stages(self, microbatch: int, other: int) -> bool:
        """Return whether the loss of a micro-batch depends on where another one is in the model.

        The other one runs up to the last stage. What its layers leave outside of their outputs is
        then of that micro-batch, and the loss of the first one must not change.
        """
        loss_fn, last_stage = self._request.loss_fn, len(self._partition.stages) - 1
        if loss_fn is None or not last_stage or self._reduction is None:
            return False
        args, kwargs, target = self.take_batch(self.rows.find_rows(microbatch))
        assert self._stage_map is not None  # a forward has run
        last_units = [unit for unit, stages in self._stage_map[0] if set(stages) == {last_stage}]
        digests = []

        def stop(*_: object) -> None:
            raise _LastStageReached

        with self.isolate():
            cells = self._build_cells()
            with self._write_log.log(), cells.emulate(microbatch):
                output = self._partition.run_unsplit(args, kwargs)
            for is_beside in (False, False, True):
                if is_beside:
                    args, kwargs, _ = self.take_batch(self.rows.find_rows(other))
                    hooks = [unit.register_forward_pre_hook(stop) for unit in last_units]
                    try:
                        with self._write_log.log(), cells.emulate(other):
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

    @property
    def may_have_own_gradients(self) -> bool:
        """Whether a backward may run Python code: see `ReferenceForward.has_own_gradients`."""
        return self._has_own_gradients is not False

    def _digest_buffers(self) -> dict[BufferKey, Digest]:
        return self._digester.digest_all(collect_buffers(self._model_modules))

    def digest_backward_state(self) -> dict[str, Digest]:
        """Return the digests of what a backward may add to beside gradients, by name.

        That is buffers, to which a hook may add squares of gradients, and what a user has attached
        to parameters, such as `weight.main_grad`. Forwards may run again in a backward, so the
        buffers to which they write are left out.
        """
        tensors = {
            f"{self.names[module]}.{name}".strip("."): buffer
            for (module, name), buffer in collect_buffers(self._model_modules).items()
            if buffer.is_floating_point() and (module, name) not in self._written_buffers
        }
        for module in self._model_modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.__dict__:
                    path = f"{self.names[module]}.{name}".strip(".")
                    attached = _list_attached([parameter])
                    tensors |= {f"{path}.{key}": tensor for key, tensor in attached}
        return self._digester.digest_all(tensors)

    def find_backward_writes(self, before: Mapping[str, Digest]) -> dict[str, Digest]:
        """Return the digests of what a backward has added to this state."""
        now = self.digest_backward_state() if before else {}
        return {name: now[name].minus(old) for name, old in before.items() if now[name] != old}

    def _has_changed(self, key: BufferKey) -> bool:
        """Return whether a forward has changed a buffer. Inside an isolation, it is a copy."""
        before, buffer = self._buffers.get(key), key[0]._buffers[key[1]]
        return before is None or buffer is None or not is_equal(buffer, before)

    def digest_loss_state(self) -> dict[Any, Digest]:
        """Return the digests of the tensors and numbers that `loss_fn` could keep as state.

        Lists of numbers are left out: they are logs. So are whole numbers, which count, as numbers
        of Python or as tensors.
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
                elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    is_count = not (value.dim() or value.is_floating_point() or value.is_complex())
                    if value.dim() or (is_table and not is_count):
                        tensors[index, key] = value
        return self._digester.digest_all(tensors)

    def _list_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of the parameters, buffers and inputs."""
        tables = [table for m in self.modules for table in (m._parameters, m._buffers)]
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
        request = self._request
        return [t.dtype for t in (*tensors, *list_tensors((request.inputs, request.target)))]

    def uses_batch_norm(self) -> bool:
        """Return whether a BatchNorm computes with the statistics of its rows."""
        return any(isinstance(m, BatchNormBase) and m.training for m in self.modules)

    @cached_property
    def has_own_generators(self) -> bool:
        """Whether the model can reach random generators of Python or NumPy."""
        values = self._outside_state[0].objects.values()
        return any(is_host_generator(v) for v in values if not isinstance(v, Tensor | nn.Module))

    @cached_property
    def has_scripted_code(self) -> bool:
        """Whether the model can reach a function that TorchScript has compiled."""
        return bool(self._reached.find(torch.jit.ScriptFunction))

    @cached_property
    def has_hiding_weights(self) -> bool:
        """Whether the weights of a parameter are so small that rows may be mixed unseen.

        What they are multiplied with does not show in the results, only in their gradient: the last
        layer of a new head, a gate that opens in training, the second matrix of LoRA, the 1e-6 of
        LayerScale. A bias is added, so it hides nothing.
        """
        parameters = [
            parameter
            for module in (*self.modules, *self._outside_state[1])
            for name, parameter in module._parameters.items()
            if type(parameter) is nn.Parameter and parameter.requires_grad and name != "bias"
        ]
        limits = {torch.float64: HIDING_SIZE_IN_DOUBLE}
        groups: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.layout is torch.strided and parameter.numel():
                kind = parameter.device, parameter.dtype, min(parameter.numel(), 8)
                groups.setdefault(kind, []).append(parameter)
        # The first numbers of most are large, so that the rest is not read.
        suspects = []
        for (_, dtype, count), tensors in groups.items():
            limit = limits.get(dtype, HIDING_SIZE)
            with torch.no_grad():
                first = torch.stack([tensor.reshape(-1)[:count] for tensor in tensors])
                sizes = first.abs().amax(1).tolist()
            suspects += [
                (tensor, limit)
                for tensor, size in zip(tensors, sizes, strict=True)
                if size <= limit
            ]
        return any(float(tensor.detach().abs().amax()) <= limit for tensor, limit in suspects)

    def has_hooked_leaves(self) -> bool:
        """Return whether the code uses a leaf with a hook that is not a parameter of the model."""
        own_ids = set(map(id, list_parameters(self.modules)))
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
            if leaf.grad is None:  # the backward of an `autograd.Function` has returned None
                return
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
            is_logged = self.may_have_own_gradients
            with no_autocast(), self._write_log.watch() if is_logged else nullcontext():
                torch.autograd.backward(list(tensors), list(gradients))
        digests: dict[int, Digest] = {}
        parts = {**self._digester.read(sums), **self._digester.digest_all(small)}
        for (key, _), digest in parts.items():
            digests[key] = digest.plus(digests.get(key))
        return digests


def _list_entries(container: Any) -> list[Any]:
    return list(container) if isinstance(container, list | deque) else []


def list_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules, without those of their children."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def _list_attached(parameters: Iterable[nn.Parameter]) -> list[tuple[str, Tensor]]:
    """Return the tensors in attributes of parameters, with the names of the attributes."""
    return [
        (name, value)
        for parameter in parameters
        for name, value in parameter.__dict__.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]


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
            self.has_tensor_hooks |= func in _HOOK_FUNCTIONS
        if not self.is_in_model:
            # The model may have returned a size.
            return func(*unwrap_numbers(args), **unwrap_numbers(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


# Who asks for the node of a tensor may register a hook on it.
_node_property: Any = Tensor.grad_fn
_HOOK_FUNCTIONS = frozenset((Tensor.register_hook, _node_property.__get__))
_GRADIENT_FUNCTIONS = _HOOK_FUNCTIONS | {Tensor.detach, torch.detach}
