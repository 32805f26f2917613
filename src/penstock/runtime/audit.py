"""The audit: one micro-batch of a call also goes through the unsplit model.

In the first step of each kind of batch, the user's own forward runs on one micro-batch before the
pipe does: on the same modules and devices, with the same random numbers, and with nothing left
behind (audit_reference.py). While the pipe runs, the audit watches the cells of that micro-batch.
Then it compares:

    the loss         of the micro-batch, or the outputs of `pipe(x)`
    the gradients    that the micro-batch adds to each parameter, and those of its inputs
    the buffers      after the forward of the micro-batch
    Python numbers   that the forward changes, before and after a recomputation
    the split        the loss, or the outputs, of some rows with those of two parts of them; and
                     some rows with the state that others have left, and without, if they leave any

If the operations of the loss function do not prove that it is a mean over rows (row_means.py), each
step also compares its loss with that of the outputs of all micro-batches together.

A difference is an `AuditError`, raised before the optimizer can step. The reference takes the time
of one forward and backward, and at most one more forward for the parts. Later steps run no forward
twice, unless `audit=N` repeats the audit, the model's own loss has new terms, or micro-batches go
new ways after a number that a layer has read (branches.py).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from penstock.data_parallel.dtensor import is_dtensor
from penstock.device.accelerator import is_captured
from penstock.errors import AuditError
from penstock.fingerprint import ModuleSnapshot
from penstock.microbatch import find_shared_ids, gather, list_tensors
from penstock.model.isolation import StateSnapshot
from penstock.model.partition import Partition
from penstock.model.placement import PlacedPartition
from penstock.model.stage_inputs import StageInputs
from penstock.nested_values import iter_hidden_tensors
from penstock.runtime.audit_reference import (
    AttributeKey,
    BufferKey,
    HostDrawsError,
    Reference,
    ReferenceForward,
    collect_buffers,
    read_plain_attributes,
    running,
)
from penstock.runtime.audit_rows import SPLIT_CURE, Rows, RowsCheck, find_split_tolerance
from penstock.runtime.digest import Digest, Digester, find_rounding
from penstock.runtime.execution import Execution
from penstock.runtime.kept_tensors import KeptPlace
from penstock.runtime.layer_settings import SettingsWatch
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.runtime.request import Request
from penstock.schedules.ir import Compute, Op, Program
from penstock.stage.branches import BranchRecord, BranchStageFunction
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.loss import LossReduction, identify_loss
from penstock.stage.loss_terms import OTHER_TERMS, TermComparison, TermSizes
from penstock.stage.payload import Payload, flatten_values, unflatten_values
from penstock.stage.rng import peek_seed
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.stage_runner import StageRunner
from penstock.state_copy import ReachedState, find_reachable
from penstock.torch_compat import (
    are_checkpoint_hooks,
    close_failed_checkpoints,
    get_eager_function,
    get_global_hook_ids,
    get_saved_tensor_hooks,
    pytree,
    unwrap_compiled,
)

if TYPE_CHECKING:
    from penstock.runtime.step import Call, PreparedPipe

_log = logging.getLogger("penstock")

# ---- which calls are audited ---------------------------------------------------------------------


_CALLS_TO_MOVE = 4
# So many other sizes of graphs are looked at one by one, and then every doubling.
_MAX_GRAPH_SIZES = 8


class AuditChoice(NamedTuple):
    """The choice of what is audited in a call.

    Attributes:
        kind: The kind of the call.
        compares_groups: Whether groups of rows are compared together and apart, which takes the
            time of a few micro-batches.
    """

    kind: Any
    compares_groups: bool


@dataclass
class Auditor:
    """Decides which calls of a pipe are audited. A copy of the pipe starts anew."""

    _audited_kinds: dict[Any, TermSizes] = field(default_factory=dict)
    _call_count: int = 0
    _told: set[str] = field(default_factory=set)
    kept_places: list[KeptPlace] = field(default_factory=list)
    _branches: dict[Any, BranchRecord] = field(default_factory=dict)  # by kind of call
    # By kind of call, if its forward goes by numbers of rows: those of the audited calls.
    _row_counts: dict[Any, set[tuple[int, ...]]] = field(default_factory=dict)
    _loss_counts: set[tuple[Any, tuple[int, ...]]] = field(default_factory=set)
    # By kind, the call in which weights that were 0 have moved. None: it was audited.
    _repeats: dict[Any, int | None] = field(default_factory=dict)
    # By kind, how many nodes the graphs of the stages had in calls that were found right.
    _graph_sizes: dict[Any, set[tuple[int | None, ...]]] = field(default_factory=dict)
    # Of calls in which the batch reads others from its inputs: see `StageInputs.other_reads`.
    _read_counts: dict[str, int] = field(default_factory=dict)
    _tested_ids: dict[Any, set[int]] = field(default_factory=dict)  # see `note_state_by_id`
    _size_count: int = 0  # of calls with graphs of other sizes
    _kind: Any = None  # of the call that runs, if it may be audited
    _request: ref[Request] | None = None  # of the call that has this kind
    _settings: SettingsWatch | None = None
    # The state of the layers, if this call has looked at it. It is that of an earlier call if
    # nothing has changed since, so what was read from the layers then need not be read again.
    snapshot: ModuleSnapshot | None = None
    _has_other_numbers: bool = False  # among the settings

    def __reduce__(self) -> tuple[type[Auditor], tuple[()]]:
        return Auditor, ()

    def select(self, request: Request, inputs: StageInputs) -> AuditChoice | None:
        """Return what should be audited in a call, or None."""
        self._kind = self._request = None
        if request.audit == "off" or running.is_running:
            return None
        if request.is_step and not torch.is_grad_enabled():
            return None
        self._call_count += 1
        kind = self._kind = self.identify(request, inputs)
        self._request = ref(request)
        is_due = isinstance(request.audit, int) and self._call_count % request.audit == 0
        repeat = self._repeats.get(kind)
        if repeat is not None and self._call_count >= repeat:
            self._repeats[kind] = None
            self.forget(kind)
        if self._has_other_numbers or self._has_new_ids(kind, request, inputs):
            self.forget(kind)
        audited_counts = self._row_counts.get(kind)
        has_new_counts = audited_counts is not None and inputs.rows.counts not in audited_counts
        if kind in self._audited_kinds and not has_new_counts and not is_due:
            return None
        return AuditChoice(kind, compares_groups=is_due)

    def _has_new_ids(self, kind: Any, request: Request, inputs: StageInputs) -> bool:
        """Return whether micro-batches have ids in common for the first time, if that matters."""
        tested = self._tested_ids.get(kind)
        if tested is None:
            return False
        shared = find_shared_ids(request.list_batch(), inputs.rows.counts)
        return not tested.issuperset(index for index, *_ in shared)

    def note_state_by_id(self, kind: Any, tested: Iterable[int]) -> None:
        """Remember that a forward computes with what the same rows have left before.

        So do other rows with the same ids, perhaps. `tested` are the tensors with ids that several
        micro-batches had, and it made no difference.
        """
        self._tested_ids.setdefault(kind, set()).update(tested)

    def note_zero_weights(self, kind: Any) -> None:
        """Let a call of this kind be audited once more when weights that are 0 have moved.

        Gradients show what is multiplied with one such weight, and not what is with two.
        """
        self._repeats.setdefault(kind, self._call_count + _CALLS_TO_MOVE)

    def find_new_terms(self, request: Request, inputs: StageInputs, sizes: TermSizes) -> Any:
        """Return the kind of a step that was not audited if its loss has new terms, or else None.

        The weight of a term may have been 0 so far, or too small to see whether it is a mean over
        rows. It is audited each time that it has doubled. A term that is no sum may have been a
        mean over rows by chance, as the deviation of equal numbers is. It is audited each time that
        the number of calls has grown eightfold.
        """
        # Without gradients there is no audit before the call, but outputs are joined all the same.
        joins_outputs = request.is_step and request.return_outputs and not torch.is_grad_enabled()
        if not (sizes or joins_outputs) or request.audit == "off" or running.is_running:
            return None
        self._add_age(sizes)
        # A loss function may have called the pipe in between.
        is_known = self._request is not None and self._request() is request
        kind = self._kind if is_known else self.identify(request, inputs)
        audited = self._audited_kinds.get(kind)
        if audited is None:
            return kind if joins_outputs else None
        for key, size in sizes.items():
            if size > (8 if key == OTHER_TERMS else 2) * audited.get(key, 0.0):
                return kind
        return None

    def find_new_graph(self, sizes: tuple[int | None, ...], is_audited: bool) -> Any:
        """Return the kind of a call if its layers have run other operations than so far, or None.

        The number of nodes that they made for a backward tells, whatever they went by. Where it is
        another one in many calls, as with layers that are skipped at random, it is looked at each
        time that the number of these calls has doubled. Branches have a watch of their own.
        """
        kind = self._kind
        if kind is None or kind not in self._audited_kinds or kind in self._branches:
            return None
        known = self._graph_sizes.setdefault(kind, set())
        if sizes in known or not any(sizes):
            return None
        if is_audited or not known:
            known.add(sizes)
            return None
        self._size_count += 1
        if self._size_count > _MAX_GRAPH_SIZES and self._size_count & (self._size_count - 1):
            return None
        return kind

    def compares_reads(self, inputs: StageInputs) -> bool:
        """Return whether the whole batch is compared because Python reads other numbers from it.

        Where it does so in many calls, as with lengths, the comparison is made each time that the
        number of these calls has doubled.
        """
        if self._kind is None:
            return False
        is_due = False
        for reads in inputs.other_reads:
            count = self._read_counts[reads] = self._read_counts.get(reads, 0) + 1
            is_due |= not count & (count - 1)
        return is_due

    def note_other_reads(self) -> None:
        """Let the next call in which the batch reads other numbers be compared, after an error."""
        self._read_counts.clear()

    def note_graph_sizes(self, kind: Any, sizes: tuple[int | None, ...]) -> None:
        """Remember that a call whose graphs had these sizes was found right.

        The next call of this kind is audited as a first one is.
        """
        self._graph_sizes[kind].add(sizes)
        self.forget(kind)

    def read_settings(self, request: Request, partition: Partition) -> None:
        """Look whether users have changed something in the layers since the last call."""
        self.snapshot = None
        if request.audit == "off" or running.is_running:
            return
        if self._settings is None:
            self._settings = SettingsWatch(partition.names)
        self._has_other_numbers = self._settings.read()
        self.snapshot = self._settings.snapshot

    def note_changed_state(self, attributes: Iterable[AttributeKey]) -> None:
        """Remember the attributes and buffers that forwards change. They are no settings."""
        if self._settings is not None:
            self._settings.ignore(attributes)

    def identify(self, request: Request, inputs: StageInputs) -> Any:
        """Return the kind of a call."""
        return (
            request.is_step,
            request.return_outputs,
            request.training,
            torch.is_grad_enabled(),
            request.checkpoint,
            identify_loss(request.loss_fn),
            inputs.chunks > 1,
            tuple(request.keyword_inputs),
            # The shapes are left out: batches of many lengths are of one kind. A forward that
            # takes another path for a shape, or whose units do, has another digest.
            tuple([_identify_input(value) for value in request.list_batch()]),
            inputs.kind_digest,
            # A pipe does not call the containers of its layers, so hooks do not see them.
            tuple(get_global_hook_ids()),
            self._settings and self._settings.key,
        )

    def note_audited(self, kind: Any, sizes: TermSizes | None = None) -> None:
        """Remember that a call of this kind was audited, and the terms of its loss."""
        audited = self._audited_kinds.setdefault(kind, {})
        if self._settings is not None and isinstance(kind, tuple):
            # A forward may have filled a cache, or set a flag.
            self._settings.read()
            alias = *kind[:-1], self._settings.key
            self._audited_kinds.setdefault(alias, audited)
            self._graph_sizes[alias] = self._graph_sizes.setdefault(kind, set())
        self._add_age(sizes or {})
        for key, size in (sizes or {}).items():
            audited[key] = max(size, audited.get(key, 0.0))

    def note_row_counts(self, kind: Any, counts: tuple[int, ...]) -> None:
        """Remember that a call was audited whose forward goes by its number of rows.

        Calls of this kind with other numbers of rows are audited, too.
        """
        self._row_counts.setdefault(kind, set()).add(counts)

    def note_loss_counts(self, kind: Any, counts: tuple[int, ...]) -> None:
        """Remember that a loss function calls the same functions for micro-batches and batch.

        It may go by their numbers of rows.
        """
        self._loss_counts.add((kind, counts))

    def knows_loss_counts(self, request: Request, inputs: StageInputs) -> bool:
        """Return whether these numbers of rows were noted for the loss of this kind of call."""
        if not self._loss_counts:
            return False
        return (self.identify(request, inputs), inputs.rows.counts) in self._loss_counts

    def _add_age(self, sizes: TermSizes) -> None:
        if OTHER_TERMS in sizes:
            sizes[OTHER_TERMS] = float(self._call_count)

    def note_kept(self, places: Sequence[KeptPlace]) -> None:
        """Remember where forwards leave tensors with a graph."""
        kept_keys = {(id(place.owner), place.key) for place in self.kept_places}
        self.kept_places += [p for p in places if (id(p.owner), p.key) not in kept_keys]

    def note_branches(self, kind: Any) -> None:
        """Let the stages be watched in later calls of this kind: see branches.py."""
        self._branches.setdefault(kind, BranchRecord())

    def find_branches(self, request: Request, inputs: StageInputs) -> BranchRecord | None:
        """Return what is known of the branches in a call. None: it has none, or no parts."""
        if not self._branches or request.audit == "off" or running.is_running:
            return None
        return self._branches.get(self.identify(request, inputs))

    def forget(self, kind: Any) -> None:
        """Let the next call of this kind be audited again."""
        self._audited_kinds.pop(kind, None)

    def tell_once(self, reason: str) -> None:
        """Log why a call was not audited, unless that was said before."""
        if reason not in self._told:
            self._told.add(reason)
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                _log.warning(
                    "penstock: the first step was not compared with the unsplit model, because %s. "
                    "Compare them with `penstock check`, or penstock.check. (audit='off' hides "
                    "this note.)",
                    reason,
                )


def _identify_input(value: Any) -> Any:
    """Return what tells kinds of calls apart by an input: not its numbers, but a flag.

    A layer may multiply by a number, so that 0 hides what it computes.
    """
    if isinstance(value, Tensor):
        is_flag = not value.ndim and value.device.type == "cpu" and not value.is_meta
        return type(value), value.dtype, value.ndim, is_flag and bool(value)
    if isinstance(value, int | float):
        return type(value), value if type(value) is bool else value == 0
    return type(value), getattr(value, "dtype", None), getattr(value, "ndim", 0)


def find_obstacle(placed: PlacedPartition, has_replicas: bool, reached: ReachedState) -> str | None:
    """Return why a call cannot be audited, or None if it can.

    `reached` is the state that the code of the model and the loss can reach.
    """
    if has_replicas:
        return "its stages are in DistributedDataParallel or fully_shard"
    modules = placed.partition.modules()
    if any(is_dtensor(p) for module in modules for p in module.parameters(recurse=False)):
        return "its parameters are sharded"
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return "a layer is a ScriptModule, which cannot be run without a trace"
    iterator = reached.find_uncopyable()
    if iterator is not None:
        return (
            f"a layer or the loss uses a {iterator}, which the forward of the audit would advance"
        )
    return None


# ---- one audited call ----------------------------------------------------------------------------


@dataclass
class CellRecord:
    """The results of the audited micro-batch in the pipe."""

    gradients: dict[int, Digest] = field(default_factory=dict)  # by id of the parameter
    # What cells of other stages may have added. See `_find_foreign_gradients`.
    foreign_gradients: dict[int, Digest] = field(default_factory=dict)
    buffers: dict[BufferKey, Digest] = field(default_factory=dict)
    outputs: dict[str, Digest] = field(default_factory=dict)  # of `pipe(x)`, by path
    output_paths: list[str | None] = field(default_factory=list)  # of the tensors in the output
    object_paths: frozenset[str] = frozenset()  # of what else is in the output
    recounted: set[AttributeKey] = field(default_factory=set)  # changed by a recomputation


class _AuditedMicrobatch(NamedTuple):
    """The forward of the unsplit model on the audited micro-batch, and the state that it changes.

    Attributes:
        forward: The forward.
        changes: The names of the state that it has changed.
        keeps_state: Whether the loss has changed state of its own.
    """

    forward: ReferenceForward
    changes: Sequence[str]
    keeps_state: bool


class Audit:
    """The audit of one call. It is the observer of its workers."""

    def __init__(
        self,
        placed: PlacedPartition,
        request: Request,
        inputs: StageInputs,
        execution: Execution,
        program: Program,
        reduction: LossReduction | None,
        auditor: Auditor,
        kind: Any,
        reached: ReachedState,
    ) -> None:
        self._placed, self._request, self._inputs = placed, request, inputs
        self._auditor, self._kind = auditor, kind
        # Not the execution, whose workers refer to the audit: the cycle would keep its tensors.
        self._cell_io, self._reduction = execution.cell_io, reduction
        self._digester, self._record, self._lock = Digester(), CellRecord(), threading.Lock()
        self._grads_before: dict[tuple[int, int], dict[int, Digest]] = {}
        # Of parameters of other stages, before a backward. See `_find_foreign_gradients`.
        self._other_grads_before: dict[int, Digest] = {}
        self._backward_lock = threading.Lock()
        self._attributes_before: dict[int, dict[AttributeKey, Any]] = {}  # by stage
        forwards = [
            action
            for lane in program.lanes
            for action in lane
            if isinstance(action, Compute) and action.op is Op.F
        ]
        orders: dict[int, list[int]] = {}  # by stage, the micro-batches in the order of their F
        for action in forwards:
            orders.setdefault(action.stage, []).append(action.microbatch)
        self.microbatch, *later = orders[0]
        self._later_microbatch = later[0] if later else None
        # Where another micro-batch comes first, it has changed the state.
        self._is_first_everywhere = all(order[0] == self.microbatch for order in orders.values())
        self._loss_order = _find_loss_order(program, max(orders))
        self._reorders_losses = self._loss_order != sorted(self._loss_order)
        devices = [placed.stage_devices[stage.index] for stage in placed.partition.stages]
        self._reference = Reference(
            placed.partition,
            devices,
            request,
            inputs,
            peek_seed(),
            reduction,
            self._digester,
            reached,
        )
        autocast = execution.context.autocast_dtypes
        self._rounding = find_rounding(
            [dtype for _, dtype in autocast] + self._reference.list_dtypes(), devices
        )
        self._rows_check = RowsCheck(
            self._reference,
            inputs,
            reduction,
            self.microbatch,
            self._rounding,
            {**self._reference.name_outside_parameters(), **self._name_parameters()},
        )
        self._forward: ReferenceForward | None = None
        self._reference_grads: dict[int, Digest] = {}
        self._roots: dict[str, Tensor] = {}  # the outputs of the reference, by path
        self._input_copies: list[Tensor] = []  # the inputs of the reference that need gradients
        # The modules after the forward of the reference: a backward may read their attributes.
        self._state: StateSnapshot | None = None
        self._reference_seed = 1.0
        self._reference_loss: Digest | None = None
        self._reference_outputs: dict[str, Digest] = {}
        # What is wrong with objects that the unsplit model returns, if the pipe returns them, too.
        self._hidden_outputs: dict[str, str] = {}
        self._split_problem: str | None = None
        self._state_problem: str | None = None  # one micro-batch depends on another's state
        self._failure: Exception | None = None  # an error of the unsplit model
        self._term_sizes: TermSizes = {}
        self._compares_row_counts = False

    # ---- before the call -----------------------------------------------------------------------

    def run_reference(self, loss: LossAccumulator | None) -> None:
        """Run the unsplit model on the micro-batch; in a step with its backward.

        `loss` is an accumulator like that of the step. It gives the gradient of the loss.
        """
        try:
            with ExitStack() as isolation:
                isolation.enter_context(self._reference.isolate())
                while True:
                    try:
                        microbatch = self._run_microbatch(loss)
                        break
                    except HostDrawsError:
                        pass
                    except Exception as error:
                        if not self._reference.replaces_sizes:
                            raise
                        # Code of C may not take them.
                        close_failed_checkpoints(error)
                        self._reference.replaces_sizes = False
                    isolation.close()
                    isolation.enter_context(self._reference.isolate())
                if not self._reference.is_stateless:
                    isolation.close()  # each of the others has one of its own
                self._compare_parts(microbatch)
        except Exception as error:  # the pipe shows whether it is an error of the model
            close_failed_checkpoints(error)
            self._failure = error
        if self._state_problem is not None and self._forward is None:
            self._fail(self._state_problem)

    def _run_microbatch(self, loss: LossAccumulator | None) -> _AuditedMicrobatch:
        """Run the unsplit model on the micro-batch, and find out what state it changes."""
        rows = self._reference.find_rows(self.microbatch)
        batch = self._reference.take_batch(rows)
        self._input_copies = list(
            {id(t): t for t in list_tensors(batch) if t.requires_grad}.values()
        )
        counted = self._reference.get_counted_targets(rows)
        state = self._reference.digest_loss_state() if self._reorders_losses else {}
        watch = self._reference.watch_state()
        forward = self._reference.run_forward(batch, self.microbatch, counted, records_state=True)
        changes = watch.find_changes(forward.changed_buffers)
        keeps_state = bool(state) and state != self._reference.digest_loss_state()
        self._reference.is_stateless = not (
            changes or keeps_state or forward.uses_own_generator or watch.has_host_draws()
        )
        self._auditor.note_changed_state(forward.changed_attributes | forward.changed_buffers)
        self._auditor.note_kept(self._reference.find_kept_places())
        self._note_outputs(forward.values, loss)
        return _AuditedMicrobatch(forward, changes, keeps_state)

    def _compare_parts(self, microbatch: _AuditedMicrobatch) -> None:
        """Find out whether micro-batches, rows, or the orders of losses depend on each other."""
        forward, changes, keeps_state = microbatch
        refusal = None
        if changes and self._later_microbatch is not None:
            self._compare_states(changes, self._later_microbatch)
            if self._reference.reads_earlier_stages(self.microbatch, self._later_microbatch):
                refusal = _KEPT_FOR_LOSS
        obstacle = None
        if forward.changed_state and not self._is_first_everywhere:
            obstacle = (
                "the forward changes buffers, and the stages take micro-batches in different orders"
            )
        elif forward.draws_in_loss:
            obstacle = "loss_fn draws from random or numpy.random, which all threads share"
        if obstacle is not None:
            self._auditor.note_audited(self._kind, self._term_sizes)
            self._auditor.tell_once(obstacle)
            return
        self._split_problem = self._split_problem or self._rows_check.compare_rows(forward)
        if self._inputs.chunks > 1:
            self._split_problem = self._split_problem or self._compare_branches(forward)
        if self._reference.has_zero_weights:
            self._auditor.note_zero_weights(self._kind)
        if keeps_state:
            self._compare_loss_orders()
        if forward.changed_hooks is not None:
            refusal = _describe_hooks(forward.changed_hooks)
        if self._reduction is not None and self._inputs.chunks > 1:
            refusal = _HOOKED_LEAF if self._reference.has_hooked_leaves() else refusal
        if refusal is None:
            self._forward = forward
        else:
            self._state_problem = refusal

    def _compare_branches(self, forward: ReferenceForward) -> str | None:
        """Compare the whole batch if its forward may go another way than that of micro-batches."""
        watch = forward.row_watch
        self._compares_row_counts = watch.compares_row_counts
        if self._rows_check.has_branches(forward):
            self._auditor.note_branches(self._kind)
        elif not watch.goes_by_row_count:
            return None
        problem = self._rows_check.compare_all_microbatches()
        if problem is not None and watch.goes_by_row_count:
            return f"the forward goes by the number of its rows, as `if len(x) > 4` does: {problem}"
        return problem

    def _compare_states(self, changes: Sequence[str], microbatch: int) -> None:
        """Find out whether a later micro-batch computes with the state that this one changes.

        The unsplit model computes every row with the state from before the batch. So some rows of
        the later micro-batch run with that state and with the changed one, and the results must
        agree.
        """
        ranges = self._reference.find_rows(self.microbatch), self._reference.find_rows(microbatch)
        # A quarter of a micro-batch shows as much as all of it, if the model runs on so few rows.
        few = [(start, start + max(1, (stop - start) // 4)) for start, stop in ranges]
        for first, later in (few, ranges):
            try:
                is_ahead = self._find_state_difference(first, later, microbatch)
            except Exception as error:  # the pipe shows whether it is an error of the model
                close_failed_checkpoints(error)
            else:
                if is_ahead is not None:
                    self._state_problem = _describe_state(changes, is_ahead)
                break
        if self._state_problem is None:
            self._compare_states_by_id(changes, few[1], microbatch)

    def _compare_states_by_id(self, changes: Sequence[str], rows: Rows, microbatch: int) -> None:
        """Find out whether rows with the same id, such as a user, compute with each other's state.

        If no two micro-batches have an id in common, later batches may.
        """
        try:
            if self._find_state_difference(rows, rows, microbatch) is None:
                return
            shared = self._reference.find_shared_ids()
            for _, row, other in shared:
                difference = self._find_state_difference(
                    (row, row + 1), (other, other + 1), microbatch
                )
                if difference is not None:
                    self._state_problem = _describe_state(changes, difference)
                    return
        except Exception as error:  # the model may not run on single rows
            close_failed_checkpoints(error)
            return
        self._auditor.note_state_by_id(self._kind, [index for index, *_ in shared])

    def _find_state_difference(self, first: Rows, later: Rows, microbatch: int) -> bool | None:
        """Return None if the results of later rows are the same after others have run.

        Otherwise return whether they are the same but for a counter that is far ahead. Raise if
        they are not finite, so that they show nothing.
        """
        parameters = self._name_parameters()  # not the inputs, of which each run has a copy
        expected: dict[Any, Digest] = {}
        for runs_first, is_ahead in ((False, False), (True, False), (True, True)):
            with self._reference.isolate():
                if runs_first:
                    watch = self._reference.watch_state()
                    self._run_rows(first, self.microbatch)
                    watch.rewind_generators()
                    # A layer may go by the number of its calls only when there were many.
                    if is_ahead and not watch.advance_counters():
                        return None
                actual = self._digest_results(self._run_rows(later, microbatch))
            expected = expected or actual
            if not all(math.isfinite(digest.product) for digest in expected.values()):
                raise ArithmeticError("the results of these rows are not finite")
            largest = max((d.norm for k, d in expected.items() if k in parameters), default=0.0)
            zero = Digest(0.0, 0.0)
            if any(
                actual.get(key, zero).find_difference(
                    expected.get(key, zero),
                    self._rounding,
                    least_size=self._rounding * largest if key in parameters else 0.0,
                )
                for key in {**expected, **actual}
                if key in parameters or isinstance(key, str)
            ):
                return is_ahead
        return None

    def _run_rows(self, rows: Rows, microbatch: int) -> ReferenceForward:
        batch = self._reference.take_batch(rows)
        counted = self._reference.get_counted_targets(rows)
        return self._reference.run_forward(batch, microbatch, counted)

    def _digest_results(self, forward: ReferenceForward) -> dict[Any, Digest]:
        """Return the digests of the loss or the outputs, and of all gradients by parameter."""
        tensors, _ = flatten_values(forward.values)
        compared = tensors[:1] if self._reduction is not None else tensors
        digests: dict[Any, Digest] = {
            f"output {index}": digest
            for index, digest in self._digester.digest_all(dict(enumerate(compared))).items()
        }
        roots = [tensor for tensor in tensors if tensor.requires_grad]
        if roots:
            pairs = [(root, torch.ones_like(root)) for root in roots]
            digests.update(self._reference.run_backward(pairs))
        return digests

    def _compare_loss_orders(self) -> None:
        """Find out whether the state of `loss_fn` depends on the order of the micro-batches."""
        first, second = self._loss_order[:2]
        states = []
        for order in ((first, second), (second, first)):
            with self._reference.isolate(), torch.no_grad():
                for microbatch in order:
                    self._run_rows(self._reference.find_rows(microbatch), microbatch)
                states.append(self._reference.digest_loss_state())
        if any(
            digest.find_difference(states[1].get(key, digest), self._rounding)
            for key, digest in states[0].items()
        ):
            order_text = ", ".join(map(str, self._loss_order))
            self._split_problem = (
                "loss_fn keeps state that depends on the order of the micro-batches, and this "
                f"schedule computes their losses in the order {order_text}, because it recomputes "
                "the last stage. Use a schedule such as '1f1b', or checkpoint='never', which take "
                "them in order."
            )

    def _note_outputs(self, values: tuple[Any, ...], loss: LossAccumulator | None) -> None:
        tensors, layout = flatten_values(values)
        if loss is None:
            self._reference_outputs = self._digest_by_path(values[0])
            self._roots, self._state = _list_by_path(values[0]), self._reference.take_snapshot()
            for path, leaf in _list_objects_by_path(values[0]).items():
                if any(tensor.requires_grad for tensor in iter_hidden_tensors(leaf)):
                    self._hidden_outputs[path] = _describe_hidden_output(leaf)
            return
        self._reference_loss = self._digester.digest(tensors[0])
        gradients = loss.compute_output_gradients(
            self.microbatch, Payload(tuple(tensors), layout)
        ).tensors
        assert gradients[0] is not None
        self._reference_seed = float(gradients[0])
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            self._reference_grads = self._reference.run_backward(pairs)

    def _digest_by_path(self, value: Any) -> dict[str, Digest]:
        return self._digester.digest_all(_list_by_path(value))

    # ---- while the pipe runs -------------------------------------------------------------------

    def take_turn(self, action: Compute) -> AbstractContextManager[object]:
        """Return a context for a computation.

        If a backward may give gradients to other stages, one backward runs at a time in this call,
        so that it is known which one has given what.
        """
        is_backward = action.op not in (Op.F, Op.R)
        return self._backward_lock if is_backward and self._has_own_gradients() else nullcontext()

    def before_compute(self, stage_runner: StageRunner, action: Compute) -> None:
        """Note the gradients before a backward, and attributes before a recomputation."""
        if action.microbatch != self.microbatch or action.op is Op.F:
            return
        if action.op is Op.R:
            attributes = read_plain_attributes(stage_runner.stage.modules())
            self._attributes_before[action.stage] = attributes
            return
        loss = self._cell_io.loss
        if loss is not None and action.op is not Op.W:
            # It sets gradients of earlier steps aside, if it has to.
            loss.before_backward(stage_runner, action.microbatch)
        self._grads_before[action.stage, action.microbatch] = self._digest_gradients(stage_runner)
        self._other_grads_before = self._digest_other_gradients(action.stage)

    def after_compute(
        self, stage_runner: StageRunner, action: Compute, payloads: Mapping[int, Payload]
    ) -> None:
        """Note what the cell has added to the gradients, or written to its buffers."""
        record = self._record
        if action.microbatch != self.microbatch:
            return
        if self._reduction is None and action.op is Op.F and OUTSIDE in payloads:
            payload = payloads[OUTSIDE]
            values = unflatten_values(payload.tensors, payload.layout)  # type: ignore[arg-type]
            record.outputs = self._digest_by_path(values[0])
            paths = {id(tensor): path for path, tensor in _list_by_path(values[0]).items()}
            record.output_paths = [paths.get(id(tensor)) for tensor in payload.tensors]
            record.object_paths = frozenset(_list_objects_by_path(values[0]))
        if action.op is Op.F:
            record.buffers.update(
                self._digester.digest_all(collect_buffers(stage_runner.stage.modules()))
            )
        elif action.op is Op.R:
            attributes = self._attributes_before.pop(action.stage)
            now = read_plain_attributes(stage_runner.stage.modules())
            record.recounted |= {key for key, old in attributes.items() if now.get(key) != old}
        else:
            before = self._grads_before.pop((action.stage, action.microbatch))
            after = self._digest_gradients(stage_runner)
            with self._lock:  # a tied parameter is on several ranks
                for key, old, new in self._find_foreign_gradients(action.stage):
                    added = new.minus(old)
                    record.foreign_gradients[key] = added.plus(record.foreign_gradients.get(key))
                for key, digest in after.items():
                    added = digest.minus(before.get(key))
                    record.gradients[key] = added.plus(record.gradients.get(key))

    def _digest_gradients(self, stage_runner: StageRunner) -> dict[int, Digest]:
        gradients = {
            id(parameter): gradient
            for parameter, gradient in stage_runner.iter_gradients()
            if gradient is not None
        }
        return self._digester.digest_all(gradients)

    def _find_foreign_gradients(self, stage_index: int) -> Iterator[tuple[int, Digest, Digest]]:
        """Yield the gradients that a backward gave to parameters of other stages, before and after.

        The backward of an `autograd.Function` that spans stages may call `backward` by itself, as
        that of reversible layers does. It gives gradients to the parameters of earlier stages, in
        whose own cells nothing is added any more. A rank that ends its lane meanwhile may change
        gradients, too, so these count only where the gradient of a parameter differs without them.
        """
        before = self._other_grads_before
        for key, digest in self._digest_other_gradients(stage_index).items():
            old = before.get(key, Digest(0.0, 0.0))
            if digest != old:
                yield key, old, digest

    def _digest_other_gradients(self, stage_index: int) -> dict[int, Digest]:
        """Return the gradients of all stages but one. No backward changes them meanwhile."""
        if not self._has_own_gradients():
            return {}
        gradients = {
            id(parameter): parameter.grad
            for stage in self._placed.partition.stages
            if stage.index != stage_index
            for module in stage.modules()
            for parameter in module.parameters(recurse=False)
            if parameter.grad is not None
        }
        return self._digester.digest_all(gradients)

    def _has_own_gradients(self) -> bool:
        return self._forward is not None and self._forward.has_own_gradients

    # ---- after the call ------------------------------------------------------------------------

    def _has_reference(self) -> bool:
        """Return whether there is a reference. Say so if it failed where the pipe did not."""
        if self._failure is not None:
            self._auditor.note_audited(self._kind, self._term_sizes)
            self._auditor.tell_once(f"the unsplit model raised {self._failure!r}")
        return self._forward is not None

    def check_step(self, sizes: TermSizes) -> None:
        """Compare the step with the reference. Raise an AuditError if they differ.

        `sizes` are those of the terms of its loss.
        """
        self._term_sizes = sizes
        if not self._has_reference():
            return
        loss = self._cell_io.loss
        assert isinstance(loss, LossAccumulator)
        losses = [self._digester.digest(item.loss) for item in loss.microbatch_losses]
        assert self._reference_loss is not None
        self._compare("the loss", losses[self.microbatch], self._reference_loss, is_forward=True)
        self._check_state()
        last_cell = len(self._placed.partition.stages) - 1, self.microbatch
        seed = self._cell_io.output_gradients[last_cell].tensors[0]
        assert seed is not None
        scale = float(seed) / self._reference_seed if self._reference_seed else 1.0
        self._check_gradients(self._reference_grads, scale)
        self._finish()

    def check_outputs(self) -> None:
        """Compare the outputs of `pipe(x)` with those of the reference."""
        if not self._has_reference():
            return
        outputs = self._record.outputs
        for path, digest in self._reference_outputs.items():
            if path in outputs:
                what = f"the output{path and ' at ' + path}"
                self._compare(what, outputs[path], digest, is_forward=True)
        # A pipe of a model of transformers returns no cache of keys and values.
        for path in self._record.object_paths & self._hidden_outputs.keys():
            self._split_problem = self._hidden_outputs[path]
        self._check_state()
        self._finish()

    def check_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Compare the gradients of `pipe(x)` with those of the reference.

        Args:
            output_gradients: The gradients of the outputs of the micro-batch.
        """
        roots, state = self._roots, self._state
        self._roots, self._state = {}, None
        pairs = []
        for path, gradient in zip(self._record.output_paths, output_gradients, strict=True):
            if gradient is None:
                continue
            root = roots.get(path or "")
            if root is None:
                return  # it has run before, or is an output that the unsplit model does not have
            if root.requires_grad:
                pairs.append((root, gradient.to(root.device)))
        if not pairs:
            return
        self._auditor.forget(self._kind)
        try:
            with self._reference.isolate(state):
                gradients = self._reference.run_backward(pairs)
        except Exception as error:
            self._failure = error
            self._has_reference()
            return
        self._check_gradients(gradients, 1.0)
        self._auditor.note_audited(self._kind, self._term_sizes)

    def _check_gradients(self, expected: Mapping[int, Digest], scale: float) -> None:
        actual, names = self._record.gradients, self._name_parameters()
        zero = Digest(0.0, 0.0)
        # Some gradients are 0 but for rounding, such as that of the bias of the keys of attention.
        largest = max((d.norm for d in expected.values() if math.isfinite(d.norm)), default=0.0)
        least_size = self._rounding * largest * abs(scale)
        for key, name in names.items():
            computed, wanted = actual.get(key, zero), expected.get(key, zero)
            foreign = self._record.foreign_gradients.get(key)
            if foreign and computed.find_difference(wanted, self._rounding, scale, least_size):
                computed = computed.plus(foreign)
            if computed is not zero or wanted is not zero:
                what = f"the gradient of '{name}'"
                self._compare(
                    what, computed, wanted, is_forward=False, scale=scale, least_size=least_size
                )
        self._check_input_gradients(expected, scale)

    def _check_input_gradients(self, expected: Mapping[int, Digest], scale: float) -> None:
        """Compare the gradients of the inputs. Several stages may take one and the same input."""
        sums: dict[torch.Size, list[Digest]] = {}  # of the pipe, and of the reference
        copies, self._input_copies = self._input_copies, []
        zero = Digest(0.0, 0.0)
        for copy in copies:
            pair = sums.setdefault(copy.shape, [zero, zero])
            pair[1] = pair[1].plus(expected.get(id(copy), zero))
        gradients = {
            (cell, index): gradient
            for cell, payload in self._cell_io.input_gradients.items()
            if cell[1] == self.microbatch
            for index, gradient in enumerate(payload.tensors)
            if gradient is not None
        }
        for key, digest in self._digester.digest_all(gradients).items():
            pair = sums.setdefault(gradients[key].shape, [zero, zero])
            pair[0] = pair[0].plus(digest)
        largest = max((pair[1].norm for pair in sums.values()), default=0.0)
        least_size = self._rounding * abs(scale) * largest
        for shape, (actual, wanted) in sums.items():
            what = f"the gradient of an input of shape {tuple(shape)}"
            self._compare(
                what, actual, wanted, is_forward=False, scale=scale, least_size=least_size
            )

    def _name_parameters(self) -> dict[int, str]:
        return {
            id(parameter): f"{prefix}.{name}".lstrip(".")
            for module, prefix in self._placed.partition.names().items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def _check_state(self) -> None:
        """Compare the buffers after the forward."""
        assert self._forward is not None
        names = self._placed.partition.names()
        for (module, name), actual in self._record.buffers.items():
            expected = self._forward.buffers.get((module, name))
            if expected is not None:
                what = f"the buffer '{names.get(module, '')}.{name}'".replace("'.", "'")
                self._compare(what, actual, expected, is_forward=True)
        # What only a recomputation changes is meant: it may count recomputations.
        for module, name in self._record.recounted & self._forward.changed_attributes:
            self._fail(
                f"the recomputation of micro-batch {self.microbatch} changes the attribute "
                f"'{name}' of '{names.get(module, '')}' once more, after its forward has changed "
                "it. Keep such state in a buffer, or pass checkpoint='never'."
            )

    def _fail(self, problem: str) -> NoReturn:
        raise AuditError(
            f"the audit of this {'step' if self._request.is_step else 'call'} found that {problem} "
            "The optimizer has not stepped. (audit='off' turns the audit off.)"
        )

    def _compare(
        self,
        what: str,
        actual: Digest,
        expected: Digest,
        *,
        is_forward: bool = True,
        scale: float = 1.0,
        least_size: float = 0.0,
    ) -> None:
        difference = actual.find_difference(expected, self._rounding, scale, least_size)
        if not difference:
            return
        size = "" if math.isinf(difference) else f" by {difference:.2g} of its size"
        self._fail(
            f"the pipe does not compute what the model computes: in micro-batch {self.microbatch}, "
            f"{what} differs{size} from that of the unsplit model. "
            f"{self._find_likely_cause(is_forward)} penstock.check compares more and names the "
            "layer."
        )

    def _find_likely_cause(self, is_forward: bool) -> str:
        """Return a sentence about the likely cause and its cure."""
        if not is_forward:
            return (
                "The forward is right, so a layer computes something else when it is recomputed, "
                "or its gradient depends on more than its inputs. Keep state in buffers, and try "
                "checkpoint='never'."
            )
        return (
            "A layer may read something that changes between micro-batches or threads: an "
            "attribute, a global, a thread-local or context variable, a clock, or a setting that "
            "was changed after the Pipe was made. Pass such values as inputs, and make the Pipe "
            "after the change."
        )

    def check_new_terms(self, sizes: TermSizes) -> None:
        """Find out whether a loss with new terms is a mean over rows, after its step."""
        self._term_sizes = sizes
        try:
            with torch.no_grad():
                self._split_problem = self._rows_check.compare_rows()
        except Exception as error:
            close_failed_checkpoints(error)
            self._failure = error
        self._has_reference()
        self._finish()

    def check_groups(self) -> None:
        """Find out whether groups of rows depend on each other, before a call that is not new."""
        self._split_problem = (
            self._rows_check.compare_groups() or self._rows_check.compare_all_microbatches()
        )
        self._finish()

    def check_branches(self, stages: Collection[Stage]) -> None:
        """Compare the whole batch, after a call whose micro-batches went different ways."""
        problem = self._rows_check.compare_all_microbatches()
        if problem is not None:
            where = ", ".join(map(str, stages))
            self._split_problem = (
                f"the layers of {where} go by numbers that they read from their rows, as `if "
                "x.mean() > 0` does. The unsplit model decides for the whole batch, and here the "
                f"micro-batches went different ways, or all another way than the batch: {problem}"
            )
        self._finish()

    def check_input_reads(self) -> None:
        """Compare the whole batch, after a call in which Python would read others from it."""
        problem = self._rows_check.compare_all_microbatches()
        if problem is not None:
            self._auditor.note_other_reads()
            self._split_problem = (
                "the code around the layers goes by numbers that it reads from the inputs, as "
                "`x / lengths.max().item()` does. The unsplit model reads them from the whole "
                f"batch, and a micro-batch has others: {problem}"
            )
        self._finish()

    def note_terms(self, sizes: TermSizes) -> None:
        """Note the terms of the model's own loss in `pipe(x)`, which was found right."""
        self._term_sizes = sizes
        self._auditor.note_audited(self._kind, sizes)

    def check_whole_loss(self, comparison: TermComparison, losses: LossAccumulator) -> None:
        """Compare the loss of a step with that of all outputs together.

        Args:
            comparison: Has the arguments of `loss_fn` for each micro-batch.
            losses: The losses of the micro-batches.
        """
        outputs = comparison.kept_outputs
        arguments = [outputs[microbatch] for microbatch in range(self._inputs.chunks)]
        rows = self._inputs.rows
        target_rows = rows._replace(output_dims=())  # those are dims of the output
        joined = tuple(
            gather(column, target_rows if index else rows)
            for index, column in enumerate(zip(*arguments, strict=True))
        )
        computed = self._reference.compute_whole_loss(joined)
        if computed is None:
            return
        whole, uses_float32, function_names = computed
        total = losses.compute_loss()
        numbers = [float(item.loss) for item in losses.microbatch_losses]
        size = max((abs(x) for x in (*numbers, float(whole)) if math.isfinite(x)), default=0.0)
        distance = abs(float(total) - float(whole))
        if distance <= find_split_tolerance(total.dtype, uses_float32, self._rounding) * size:
            if function_names == comparison.function_names:
                self._auditor.note_loss_counts(self._kind, self._inputs.rows.counts)
            return
        # A micro-batch without targets that count has a mean of nan.
        if not math.isfinite(distance) and not math.isfinite(whole):
            return
        self._auditor.forget(self._kind)
        self._fail(
            f"the losses of the micro-batches combine to {float(total):.6g}, but the loss of the "
            f"whole batch is {float(whole):.6g}. {SPLIT_CURE}"
        )

    def _finish(self) -> None:
        """Raise if the parts do not combine. Otherwise calls of this kind are found right.

        After an error, the next call of the kind is audited again.
        """
        problem = self._state_problem or self._split_problem
        if problem is not None:
            self._fail(problem)
        self._auditor.note_audited(self._kind, self._term_sizes)
        if self._compares_row_counts:
            self._auditor.note_row_counts(self._kind, self._inputs.rows.counts)


def _describe_state(changes: Sequence[str], is_ahead: bool) -> str:
    names = ", ".join(changes[:4]) or "a variable outside of the model"
    use = (
        "computes something else once it has grown"
        if is_ahead
        else "that of the next one computes with it"
    )
    return (
        f"the forward of a micro-batch changes {names}, and {use}. The unsplit model changes "
        "it once for the whole batch, after all rows have been computed. Change such state outside "
        "of the forward, after each step, or use chunks=1."
    )


_KEPT_FOR_LOSS = (
    "loss_fn reads what layers of an earlier stage have left outside of their outputs, such as "
    "features that a hook keeps. When it runs, that may be of another micro-batch. Return such "
    "values from the model, or use chunks=1."
)


_HOOKED_LEAF = (
    "loss_fn uses a tensor or a parameter of its own that has a hook (register_hook), and a step "
    "would call the hook for each micro-batch. Change that gradient after the step, move the "
    "parameter into the model, whose hooks see the gradient of the batch, or use chunks=1."
)


def _describe_hooks(name: str) -> str:
    return (
        f"the forward adds or removes hooks of '{name}'. In a pipe, stages and micro-batches would "
        "do so at different times, and each stage for itself. Register hooks before the Pipe is "
        "made, or between steps."
    )


def _list_by_path(value: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by where they are in it."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _list_objects_by_path(value: Any) -> dict[str, Any]:
    """Return what an output has beside tensors and None, by where it is."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    objects = (pair for pair in leaves if not isinstance(pair[1], Tensor | None))
    return {pytree.keystr(path): leaf for path, leaf in objects}


def _describe_hidden_output(leaf: Any) -> str:
    return (
        f"the model returns a {type(leaf).__name__} with a tensor inside, which is not one of the "
        "pipe's outputs, so a backward from it would reach the last stage only. Return tuples, "
        "lists or dicts."
    )


def _find_loss_order(program: Program, last_stage: int) -> list[int]:
    """Return the micro-batches in the order of their losses: in F, or in R if there is one."""
    actions = [
        action
        for lane in program.lanes
        for action in lane
        if isinstance(action, Compute) and action.stage == last_stage
    ]
    recomputed = {action.microbatch for action in actions if action.op is Op.R}
    return [
        action.microbatch
        for action in actions
        if action.op is (Op.R if action.microbatch in recomputed else Op.F)
    ]


# ---- the audits of one call ----------------------------------------------------------------------


class CallAudits:
    """The audits of one call of a pipe, in this order.

    1. `watch_branches` before the execution is built: stages whose forwards are known to branch.
    2. `start` before the lanes run: one micro-batch goes through the unsplit model, if the call is
       the first of its kind.
    3. `check` after the lanes have run: the audited micro-batch is compared, and what shows only
       now (new terms of the loss, new branches, other graphs, other numbers read from the inputs).
       Parameters do not change before the optimizer, so it is not too late.
    """

    def __init__(self, pipe: PreparedPipe, call: Call, reduction: LossReduction | None) -> None:
        """Read what users have changed in the layers since the last call.

        `reduction` says how the losses of a step are combined. None: the call is `pipe(x)`.
        """
        self._pipe, self._call, self._reduction = pipe, call, reduction
        self._auditor = pipe.auditor
        self._audit: Audit | None = None
        if call.is_local:  # stages in processes are not audited
            self._auditor.read_settings(call.request, pipe.placed_partition.partition)
        self._branches = self._auditor.find_branches(call.request, call.inputs)
        self._watched: Sequence[BranchStageFunction] = ()

    @property
    def knows_loss_counts(self) -> bool:
        """Whether these numbers of rows were noted for the loss of this kind of call."""
        return self._auditor.knows_loss_counts(self._call.request, self._call.inputs)

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

    def start(self, execution: Execution, program: Program) -> Audit | None:
        """Run the reference if the call should be audited, and observe the workers from now on.

        Return the audit of the micro-batch, or None.
        """
        self._execution, self._program = execution, program
        choice = self._auditor.select(self._call.request, self._call.inputs)
        if choice is None:
            return None
        audit = self._audit = self._build_audit(choice.kind)
        if audit is None:
            return None
        if choice.compares_groups:
            audit.check_groups()
        loss = (
            None if self._reduction is None else self._call.build_loss(execution, self._reduction)
        )
        assert loss is None or isinstance(loss, LossAccumulator)  # as in every local call
        audit.run_reference(loss)
        for worker in execution.workers:
            worker.observer = audit
        return audit

    def check(self, sizes: TermSizes | None, comparison: TermComparison | None = None) -> None:
        """Raise an AuditError if something is not as in the unsplit model.

        `pipe(x)` compares its outputs when they are joined.

        Args:
            sizes: The sizes of the terms of the loss. None: the call has no loss.
            comparison: The comparison of the losses of a step.
        """
        if sizes is not None:
            self._check_terms(sizes)
        self._check_branches()
        self._check_graph_sizes()
        self._check_input_reads()
        if comparison is not None and comparison.kept_outputs:
            self._check_whole_loss(comparison)

    def _check_terms(self, sizes: TermSizes) -> None:
        """Compare an audited step. In others, audit the loss if it has new terms."""
        if self._audit is None:
            call = self._call
            audit = self._build_audit(
                self._auditor.find_new_terms(call.request, call.inputs, sizes)
            )
            if audit is not None:
                audit.check_new_terms(sizes)
        elif self._reduction is None:
            self._audit.note_terms(sizes)
        else:
            self._audit.check_step(sizes)

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

    def _check_graph_sizes(self) -> None:
        """Audit the rows of the call if its layers have run other operations than so far."""
        sizes = self._execution.read_graph_sizes()
        kind = self._auditor.find_new_graph(sizes, self._audit is not None)
        if kind is None:
            return
        audit = self._build_audit(kind)
        if audit is not None:
            audit.check_new_terms({})
        self._auditor.note_graph_sizes(kind, sizes)

    def _check_input_reads(self) -> None:
        """Compare the whole batch if the code around the units reads other numbers from it."""
        if self._auditor.compares_reads(self._call.inputs):
            audit = self._build_audit(self._identify())
            if audit is not None:
                audit.check_input_reads()

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
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        # The first step creates lazy parameters, and the second one is audited. Tensors on `meta`
        # have no numbers to compare.
        if any(map(is_lazy, parameters)) or any(parameter.is_meta for parameter in parameters):
            return None
        reached = find_reachable([*modules, *placed.partition.names(), request.loss_fn])
        obstacle = find_obstacle(placed, not self._pipe.replicas.is_empty, reached)
        if not self._call.is_local:
            obstacle = "its stages are in processes"
        if obstacle is not None:
            self._auditor.note_audited(kind)
            self._auditor.tell_once(obstacle)
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
