"""The audits of one call: the driver of a step knows nothing else of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from penstock.data_parallel.dtensor import is_dtensor
from penstock.device.accelerator import is_captured
from penstock.errors import AuditError, PenstockError
from penstock.model.placement import PlacedPartition
from penstock.runtime.audit.audited_call import Audit, find_forward_orders
from penstock.runtime.audit.kept_tensors import guard_kept_tensors
from penstock.runtime.audit.kind_record import GraphDescriptions
from penstock.runtime.audit.problems import build_error, describe_advanced_iterator
from penstock.runtime.audit.reference import list_parameters, running
from penstock.runtime.call_hints import add_call_hint
from penstock.runtime.execution import Execution
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.schedules.ir import Program
from penstock.stage.branches import BranchStageFunction
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.loss import LossReduction
from penstock.stage.loss_terms import Gates, TermComparison, TermSizes
from penstock.stage.stage import Stage
from penstock.state_copy import ReachedState, describe_iterator, find_reachable
from penstock.torch_compat import (
    are_checkpoint_hooks,
    get_eager_function,
    get_saved_tensor_hooks,
    unwrap_compiled,
)
from penstock.tracebacks import add_hint, has_hint

if TYPE_CHECKING:
    from penstock.runtime.step import Call, PreparedPipe


class _WatchedIterator(NamedTuple):
    """An iterator that keeps a call from being audited.

    Attributes:
        iterator: The iterator.
        description: Its description before the call.
        kind: The kind of the call.
    """

    iterator: Any
    description: Any
    kind: Any


class CallAudits:
    """The audits of one call of a pipe, in this order.

    1. `watch_branches` before the execution is built: stages whose forwards are known to branch.
    2. `start` before the lanes run: one micro-batch goes through the unsplit model, if the call is
       the first of its kind.
    3. `check` after the lanes have run: the audited micro-batch is compared, and what shows only
       now (new terms of the loss, new branches, other graphs, other numbers read from the inputs).
       Parameters do not change before the optimizer, so it is not too late.
       Of `pipe(x)`, `check_outputs` compares the outputs when they are joined, and
       `check_backward` the gradients in a backward.
    4. `guard_kept_tensors` at the end: tensors with a graph that forwards have left somewhere.
    """

    def __init__(self, pipe: PreparedPipe, call: Call, reduction: LossReduction | None) -> None:
        """Read what users have changed in the layers since the last call.

        `reduction` says how the losses of a step are combined. None: the call is `pipe(x)`.
        """
        self._pipe, self._call, self._reduction = pipe, call, reduction
        self._auditor = pipe.auditor
        self._audit: Audit | None = None
        self._kind_with_graphs: Any = None
        self._iterator: _WatchedIterator | None = None
        self._describes_all = False
        if call.is_local:  # stages in processes are not audited
            self._auditor.read_settings(call.request, pipe.placed_partition.partition)
        self._branches = self._auditor.find_branches(call.request, call.inputs)
        self._watched: Sequence[BranchStageFunction] = ()

    @property
    def knows_loss_counts(self) -> bool:
        """Whether these numbers of rows were noted for the loss of this kind of call."""
        return self._auditor.knows_loss_counts(self._call.request, self._call.inputs)

    @property
    def watched_gates(self) -> Gates:
        """The gates of the model's own loss that are watched."""
        request, inputs = self._call.request, self._call.inputs
        if request.loss_fn is not None or request.audit == "off" or inputs.chunks < 2:
            return Gates.NONE
        if not self._call.is_local:
            return Gates.NONE
        return Gates.ALL if self._auditor.may_mix_rows(request, inputs) else Gates.UNPROVEN

    def can_check_whole_loss(self) -> bool:
        """Return whether the loss of a step can be compared with that of the whole batch."""
        request, reduction = self._call.request, self._reduction
        if reduction is None or request.loss_fn is None:
            return False
        if request.audit == "off" or self._call.inputs.chunks < 2:
            return False
        # PyTorch's own classification losses are weighed by their targets, and mix no rows. The
        # compiler would compile a function under the mode of a proof once more.
        is_compiled = unwrap_compiled(request.loss_fn) is not request.loss_fn
        if (
            reduction.target_counter is not None
            or is_compiled
            or get_eager_function(request.loss_fn)
        ):
            return False
        devices = self._pipe.placed_partition.stage_devices.values()
        is_capturing = any(device.type != "cpu" and is_captured(device) for device in devices)
        is_layer = is_inside_cell()  # of another pipe
        return self._call.is_local and not (running.is_running or is_layer or is_capturing)

    def watch_branches(self) -> Sequence[Stage]:
        """Return the stages of the pipe, watched if their forwards have branches."""
        stages = self._pipe.placed_partition.partition.stages
        if self._branches is None:
            return stages
        watched_stages, self._watched = self._branches.watch(stages)
        return watched_stages

    def start(self, execution: Execution, program: Program) -> None:
        """Run the reference if the call should be audited, and observe the workers from now on."""
        self._execution_ref, self._program = ref(execution), program
        choice = self._auditor.select(self._call.request, self._call.inputs)
        self._kind_with_graphs = self._auditor.kind_with_graphs
        if self._kind_with_graphs is not None:
            execution.describe_graphs((self._last_microbatch,))
        if self._auditor.draws_host_random:
            self._describe_all(execution)
        audit = None if choice is None else self._build_audit(choice.kind)
        if choice is None or audit is None:
            return
        self._audit = audit
        if choice.compares_groups:
            audit.check_groups()
        loss = (
            None if self._reduction is None else self._call.build_loss(execution, self._reduction)
        )
        assert loss is None or isinstance(loss, LossAccumulator)  # as in every local call
        audit.run_reference(loss)
        if self._auditor.draws_numbers:  # it is known now, but its branches are not watched yet
            self._describe_all(execution)
        recorder = audit.observe()
        for worker in execution.workers:
            worker.observer = recorder

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Add a hint to an error of a layer that runs on the whole batch and not on parts of it."""
        try:
            yield
        except Exception as error:
            # A mistake in the arguments, such as a table that was split, explains more.
            add_call_hint(error, self._pipe.placed_partition, self._call.request)
            is_known = isinstance(error, PenstockError) or has_hint(error)
            if self._audit is not None and not is_known and self._audit.needs_more_rows():
                rows = self._call.inputs.rows.counts
                add_hint(
                    error,
                    f"The unsplit model runs on the whole batch of {sum(rows)} rows, and not on a "
                    f"micro-batch of {rows[self._audit.microbatch]}. A layer needs more rows, or "
                    "goes by their number. Use fewer chunks, or let it compute each row by itself.",
                )
            raise

    def check(self, sizes: TermSizes | None, comparison: TermComparison | None = None) -> None:
        """Raise an AuditError if something is not as in the unsplit model.

        Args:
            sizes: The sizes of the terms of the loss. None: the call has no loss.
            comparison: The comparison of the losses of a step.
        """
        self._check_iterator()
        self._check_moved_buffers()
        if sizes is not None:
            self._check_terms(sizes)
        self._check_branches()
        self._check_graphs()
        self._check_drawn()
        self._check_input_reads()
        self._check_plain_inputs()
        self._check_rows()
        if comparison is not None and comparison.kept_outputs:
            self._check_whole_loss(comparison)

    @property
    def needs_backward(self) -> bool:
        """Whether `check_backward` has something to compare, after the forward of `pipe(x)`.

        If not, they need not be kept until then, with the batch.
        """
        if self._audit is not None:
            return True
        graphs = self._execution.read_graph_descriptions(self._last_microbatch)
        if self._describes_all and None in graphs:
            return True
        return self._kind_with_graphs is not None and None in graphs

    @property
    def _execution(self) -> Execution:
        """The execution, which refers to its audits: a cycle would keep its tensors."""
        execution = self._execution_ref()
        assert execution is not None  # it is running
        return execution

    def check_outputs(self) -> None:
        """Raise an AuditError if the outputs of `pipe(x)` are not those of the unsplit model."""
        if self._audit is not None:
            self._audit.check_outputs()

    def check_structure(self, output: Any) -> None:
        """Compare the whole batch if outputs of `pipe(x)` have rows that had none, or none now."""
        structure = self._auditor.find_structure(output)
        if structure is None:
            return
        if self._call.inputs.chunks > 1 and not self._auditor.is_first_structure():
            audit = self._build_audit(self._identify())
            if audit is not None:
                audit.check_structure(self._auditor.find_lost_rows(structure))
        self._auditor.note_structure(structure)

    def check_backward(
        self, get_output_gradients: Callable[[int], Sequence[Tensor | None]]
    ) -> None:
        """Raise an AuditError if a backward of `pipe(x)` is not that of the unsplit model.

        Args:
            get_output_gradients: Returns the gradients of the outputs of a micro-batch.
        """
        if self._audit is not None:
            self._audit.check_backward(get_output_gradients(self._audit.microbatch))
        with torch.enable_grad():  # as in the forward
            self._check_graphs(after_backward=True)
            self._check_drawn()

    def guard_kept_tensors(self) -> None:
        """Let the backward of what forwards have left behind raise: see kept_tensors.py."""
        if self._auditor.kept_places:
            guard_kept_tensors(self._auditor.kept_places)

    def _check_terms(self, sizes: TermSizes) -> None:
        """Compare an audited step. In others, audit the loss if it has new terms."""
        if self._audit is None:
            call = self._call
            kind, compares_batch = self._auditor.find_new_terms(call.request, call.inputs, sizes)
            audit = self._build_audit(kind)
            if audit is not None:
                audit.check_new_terms(sizes, compares_batch)
        elif self._reduction is None:
            self._audit.check_terms(sizes)
        else:
            self._audit.check_step(sizes)

    def _check_iterator(self) -> None:
        """Raise if the call has advanced an iterator, which keeps it from being audited."""
        if self._iterator is None:
            return
        iterator, description, kind = self._iterator
        if describe_iterator(iterator) != description:
            self._auditor.forget(kind)
            problem = describe_advanced_iterator(type(iterator).__name__)
            raise build_error(problem, self._call.request.is_step)

    def _check_moved_buffers(self) -> None:
        """Find out whether rows depend on a buffer that a forward has changed for the first time.

        It may be a counter of events that no audited batch had.
        """
        moved = self._auditor.find_moved_buffers() if self._call.inputs.chunks > 1 else ()
        audit = self._build_audit(self._identify()) if moved else None
        if audit is not None:
            audit.check_moved_buffers(moved)

    def _check_branches(self) -> None:
        """Compare the whole batch if micro-batches went different ways."""
        if self._branches is None:
            return
        stages, ways = self._branches.find_new_ways(self._watched)
        if not stages:
            return
        audit = self._build_audit(self._identify())
        if audit is not None:
            are_equal = False
            try:
                audit.check_branches(stages)
                are_equal = True
            finally:
                self._branches.note_compared(ways, are_equal)

    def _check_graphs(self, after_backward: bool = False) -> None:
        """Audit the rows of the call if its layers have run other operations than so far."""
        kind, is_audited = self._kind_with_graphs, self._audit is not None
        graphs = self._execution.read_graph_descriptions(self._last_microbatch)
        if kind is None or not self._auditor.is_new_graph(kind, graphs, is_audited, after_backward):
            return
        audit = self._build_audit(kind)
        if audit is not None:
            audit.check_new_terms({})
        self._auditor.note_graphs(kind, graphs, after_backward)

    @property
    def _last_microbatch(self) -> int:
        return self._call.inputs.chunks - 1

    def _describe_all(self, execution: Execution) -> None:
        self._describes_all = True
        execution.describe_graphs(range(self._call.inputs.chunks))

    def _list_ways(self) -> list[GraphDescriptions]:
        """Return the ways of the micro-batches: those of watched branches, or their graphs."""
        chunks = range(self._call.inputs.chunks)
        if self._describes_all:
            return [self._execution.read_graph_descriptions(microbatch) for microbatch in chunks]
        ways: list[dict[int, int | None]] = [{} for _ in chunks]  # by stage
        orders = find_forward_orders(self._program) if self._watched else {}
        for function in self._watched:
            order = orders.get(function.stage.index, [])
            for microbatch, way in zip(order, function.ways, strict=False):
                ways[microbatch][function.stage.index] = way
        return [tuple(by_stage.values()) for by_stage in ways]

    def _check_drawn(self) -> None:
        """Compare rows of micro-batches that have gone new ways by the random numbers they drew."""
        if not self._auditor.draws_numbers:
            return
        microbatches = self._auditor.find_drawn_ways(self._list_ways())
        if not microbatches:
            return
        audit = self._audit or self._build_audit(self._identify())
        if audit is None:
            return
        try:
            for microbatch in microbatches:
                audit.check_drawn(microbatch)
        except AuditError:
            self._auditor.forget_drawn_ways()
            raise

    def _check_input_reads(self) -> None:
        """Compare the whole batch if the code around the units reads other numbers from it."""
        if self._auditor.compares_reads(self._call.inputs):
            audit = self._build_audit(self._identify())
            if audit is not None:
                audit.check_input_reads()

    def _check_plain_inputs(self) -> None:
        """Compare the whole batch if inputs that are no tensors have new contents."""
        if self._call.inputs.chunks > 1 and self._auditor.compares_plain_inputs(self._call.request):
            audit = self._build_audit(self._identify())
            if audit is not None:
                audit.check_plain_inputs()

    def _check_rows(self) -> None:
        """Compare the whole batch if the layers may mix rows, and it is time again."""
        if self._audit is None and self._auditor.compares_rows_again():
            audit = self._build_audit(self._identify())
            if audit is not None:
                audit.check_rows()

    def _check_whole_loss(self, comparison: TermComparison) -> None:
        """Compare the loss with that of the whole batch.

        It is called for losses that are not known to be means over rows.
        """
        audit = self._build_audit(self._identify())
        losses = self._execution.cell_io.loss
        if audit is not None and isinstance(losses, LossAccumulator):
            audit.check_whole_loss(comparison, losses)

    def _identify(self) -> Any:
        return self._auditor.identify(self._call.request, self._call.inputs)

    def _build_audit(self, kind: Any) -> Audit | None:
        """Return the audit of a call of this kind, or None if it should or can not be audited."""
        if kind is None:
            return None
        # A pipe inside another one is audited as a part of it. `torch.utils.checkpoint` around a
        # call counts the tensors that it saves, and would find more in the audited call.
        if is_inside_cell() or are_checkpoint_hooks(get_saved_tensor_hooks()):
            return None
        placed, request = self._pipe.placed_partition, self._call.request
        modules = placed.partition.modules()
        parameters = list_parameters(modules)
        # The first step creates lazy parameters, and the second one is audited. Tensors on `meta`
        # have no numbers to compare.
        if any(map(is_lazy, parameters)) or any(parameter.is_meta for parameter in parameters):
            return None
        reached = find_reachable([*modules, *placed.partition.names(), request.loss_fn])
        obstacle = _find_obstacle(placed, not self._pipe.replicas.is_empty, reached)
        if not self._call.is_local:
            obstacle = "its stages are in processes"
        if obstacle is not None:
            iterator = reached.find_uncopyable()
            if iterator is not None and self._call.is_local and self._call.inputs.chunks > 1:
                self._iterator = _WatchedIterator(iterator, describe_iterator(iterator), kind)
            self._auditor.note_audited(kind)
            self._auditor.log_once(obstacle)
            return None
        return Audit(
            placed,
            request,
            self._call.inputs,
            self._execution,
            self._program,
            self._reduction,
            self._auditor,
            kind,
            reached,
        )


def _find_obstacle(
    placed: PlacedPartition, has_replicas: bool, reached: ReachedState
) -> str | None:
    """Return why a call cannot be audited, or None if it can.

    `reached` is the state that the code of the model and the loss can reach.
    """
    if has_replicas:
        return "its stages are in DistributedDataParallel or fully_shard"
    modules = placed.partition.modules()
    if any(map(is_dtensor, list_parameters(modules))):
        return "its parameters are sharded"
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return "a layer is a ScriptModule, which cannot be run without a trace"
    iterator = reached.find_uncopyable()
    if iterator is not None:
        name = type(iterator).__name__
        return f"a layer or the loss uses a {name}, which the forward of the audit would advance"
    return None
