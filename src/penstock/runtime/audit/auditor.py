"""Which calls are audited, and the audits of one call.

`Auditor` belongs to a pipe and remembers what was audited. `CallAudits` belongs to one call; the
driver of a step knows nothing else of this folder. Both are on the path of every step, which visits
as few modules as it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from penstock.data_parallel.dtensor import is_dtensor
from penstock.device.accelerator import is_captured
from penstock.errors import AuditError, PenstockError
from penstock.fingerprint import ModuleSnapshot
from penstock.microbatch import find_constant_inputs, find_shared_ids, have_different_rows
from penstock.model.partition import Partition
from penstock.model.placement import PlacedPartition
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.audit.audited_call import Audit, find_forward_orders
from penstock.runtime.audit.cell_recorder import list_by_path
from penstock.runtime.audit.kept_tensors import KeptPlace, guard_kept_tensors
from penstock.runtime.audit.kind_record import (
    AuditChoice,
    GraphDescriptions,
    KindRecord,
    ModeHistory,
    OutputStructure,
)
from penstock.runtime.audit.layer_settings import MovedBuffer, SettingsWatch
from penstock.runtime.audit.problems import build_error, describe_advanced_iterator
from penstock.runtime.audit.reference import list_parameters, running
from penstock.runtime.audit.state_watch import AttributeKey
from penstock.runtime.call_hints import add_call_hint
from penstock.runtime.execution import Execution
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.runtime.request import Request
from penstock.schedules.ir import Program
from penstock.stage.branches import BranchRecord, BranchStageFunction
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.loss import LossReduction, identify_loss
from penstock.stage.loss_terms import OTHER_TERMS, Gates, TermComparison, TermSizes, is_gate
from penstock.stage.stage import Stage
from penstock.state_copy import ReachedState, describe_iterator, find_reachable
from penstock.torch_compat import (
    are_checkpoint_hooks,
    get_eager_function,
    get_global_hook_ids,
    get_saved_tensor_hooks,
    pytree,
    unwrap_compiled,
)
from penstock.tracebacks import add_hint, has_hint

if TYPE_CHECKING:
    from penstock.runtime.step import Call, PreparedPipe

_log = logging.getLogger("penstock")

_CALLS_TO_MOVE = 4
# So many other graphs are looked at one by one, and then every doubling.
_MAX_GRAPHS = 8
_MAX_STRUCTURES = 16


@dataclass
class Auditor:
    """Decides which calls of a pipe are audited. A copy of the pipe starts anew."""

    # By kind. A call that changes a setting, such as a flag, has two kinds and one record.
    _records: dict[Any, KindRecord] = field(default_factory=dict)
    _call_count: int = 0
    _logged_reasons: set[str] = field(default_factory=set)
    kept_places: list[KeptPlace] = field(default_factory=list)
    modes: ModeHistory = field(default_factory=ModeHistory)
    # Of calls in which the batch reads others from its inputs: see `StageInputs.other_reads`.
    _read_counts: dict[str, int] = field(default_factory=dict)
    _has_branches: bool = False  # whether any kind of call has
    _has_loss_counts: bool = False
    _has_possible_mixing: bool = False  # whether a kind has `mixing_count`
    _graph_count: int = 0  # of calls with other graphs
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
        record = self._get_record(kind)
        if record.repeat_at is not None and self._call_count >= record.repeat_at:
            record.repeat_at = record.terms = None
        if (
            self._has_other_numbers
            or _has_new_ids(record, request, inputs)
            or _has_other_rows(record, request, inputs)
        ):
            record.terms = None
        counts = inputs.rows.counts
        has_new_counts = record.row_counts is not None and counts not in record.row_counts
        is_known = record.is_audited
        if record.has_equal_rows:
            is_known = not have_different_rows(
                (request.inputs, dict(request.keyword_inputs)), inputs.rows
            )
        if is_known and not has_new_counts and not is_due:
            return None
        record.has_equal_rows = False
        return AuditChoice(kind, compares_groups=is_due)

    def _get_record(self, kind: Any) -> KindRecord:
        return self._records.setdefault(kind, KindRecord())

    def note_state_by_id(self, kind: Any, tested: Iterable[int]) -> None:
        """Remember that a forward computes with what the same rows have left before.

        So do other rows with the same ids, perhaps. `tested` are the tensors with ids that several
        micro-batches had, and it made no difference.
        """
        record = self._get_record(kind)
        record.tested_ids = (record.tested_ids or set()).union(tested)

    def note_hiding_weights(self, kind: Any) -> None:
        """Let a call of this kind be audited once more when very small weights have moved.

        Gradients show what is multiplied with one such weight, and not what is with two.
        """
        record = self._get_record(kind)
        if not record.is_repeated:
            record.is_repeated, record.repeat_at = True, self._call_count + _CALLS_TO_MOVE

    def find_new_terms(
        self, request: Request, inputs: StageInputs, sizes: TermSizes
    ) -> tuple[Any, bool]:
        """Return the kind of a step that was not audited if its loss has new terms, or else None.

        Also return whether the whole batch is compared: numbers of a gate have come through for the
        first time, or twice as many as ever before.

        The weight of a term may have been 0 so far, or too small to see whether it is a mean over
        rows. It is audited each time that it has doubled. A term that is no sum may have been a
        mean over rows by chance, as the deviation of equal numbers is. It is audited each time that
        the number of calls has grown eightfold.
        """
        # Without gradients there is no audit before the call, but losses and outputs of rows are
        # joined all the same.
        is_validation = request.is_step and not torch.is_grad_enabled()
        if not (sizes or is_validation) or request.audit == "off" or running.is_running:
            return None, False
        self._add_age(sizes)
        # A loss function may have called the pipe in between.
        is_known = self._request is not None and self._request() is request
        kind = self._kind if is_known else self.identify(request, inputs)
        terms = self._get_record(kind).terms
        if terms is None:
            return (kind if is_validation else None), False
        new_keys = [
            key
            for key, size in sizes.items()
            if size > (8 if key == OTHER_TERMS else 2) * terms.get(key, 0.0)
        ]
        return (kind if new_keys else None), any(map(is_gate, new_keys))

    @property
    def kind_with_graphs(self) -> Any:
        """The kind of this call if its graphs are compared. Branches have a watch of their own."""
        if self._kind is None or self._get_record(self._kind).branches is not None:
            return None
        return self._kind

    def is_new_graph(
        self, kind: Any, graphs: GraphDescriptions, is_audited: bool, after_backward: bool
    ) -> bool:
        """Return whether the layers in a call of this kind have run other operations than so far.

        The graphs that they made for a backward tell, whatever the layers went by. Where there is
        another one in many calls, as with layers that are skipped at random, it is looked at each
        time that the number of these calls has doubled.
        """
        record = self._get_record(kind)
        entry = after_backward, graphs
        if not record.is_audited or entry in record.graphs or not any(graphs):
            return False
        if is_audited or not any(known[0] == after_backward for known in record.graphs):
            record.graphs.add(entry)
            return False
        self._graph_count += 1
        is_skipped = self._graph_count > _MAX_GRAPHS and self._graph_count & (self._graph_count - 1)
        return not is_skipped

    def note_drawn_numbers(self, kind: Any, from_host: bool) -> None:
        """Remember that a forward draws single random numbers: `if torch.rand(()) < 0.1`.

        `from_host`: it draws from `random` or `numpy.random`. Python need not read those from a
        tensor, so only graphs show that a layer goes by them.
        """
        record = self._get_record(kind)
        record.draws_numbers, record.draws_host_random = True, from_host

    @property
    def draws_numbers(self) -> bool:
        """Whether the forward of this call may go by random numbers."""
        return self._kind is not None and self._get_record(self._kind).draws_numbers

    @property
    def draws_host_random(self) -> bool:
        """Whether the forward of this call draws from `random` or `numpy.random`."""
        return self._kind is not None and self._get_record(self._kind).draws_host_random

    def find_drawn_ways(self, ways: Sequence[GraphDescriptions]) -> list[int]:
        """Return the micro-batches that have gone ways that are to be compared.

        `ways` are those of all micro-batches. Where there are many, as with layers that are skipped
        at random, the next ones are compared each time that their number has doubled.
        """
        record = self._get_record(self._kind)
        microbatches = []
        for microbatch, way in enumerate(ways):
            if not any(way) or way in record.drawn_ways:
                continue
            record.drawn_count += 1
            count = record.drawn_count
            if count <= _MAX_GRAPHS or not count & (count - 1):
                microbatches.append(microbatch)
                record.drawn_ways.add(way)
        return microbatches

    def forget_drawn_ways(self) -> None:
        """Let all micro-batches be compared again, after an error."""
        record = self._get_record(self._kind)
        record.drawn_ways.clear()
        record.drawn_count = 0

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

    def compares_plain_inputs(self, request: Request) -> bool:
        """Return whether the whole batch is compared for the inputs that are no tensors."""
        if self._kind is None:
            return False
        return self._get_record(self._kind).plain_inputs.have_new_contents(request)

    def forget_plain_inputs(self) -> None:
        """Let the next call with such inputs be compared, after an error."""
        self._get_record(self._kind).plain_inputs.forget()

    def find_structure(self, output: Any) -> OutputStructure | None:
        """Return the structure of an output of `pipe(x)` if it was not noted before.

        A tensor has rows if it is as long as its micro-batch, and others may be so by chance.
        """
        if self._kind is None:
            return None
        spec = pytree.tree_structure(output)
        if any(spec == known.spec for known in self._get_record(self._kind).structures):
            return None
        return OutputStructure(spec, set(list_by_path(output)))

    def note_structure(self, structure: OutputStructure) -> None:
        """Remember the structure of an output that was found right."""
        structures = self._get_record(self._kind).structures
        if len(structures) < _MAX_STRUCTURES:
            structures.append(structure)

    def is_first_structure(self) -> bool:
        """Return whether no output of this kind of call has been noted."""
        return not self._get_record(self._kind).structures

    def find_lost_rows(self, structure: OutputStructure) -> str | None:
        """Return which output had rows in an earlier call and is a list of tensors in this one."""
        for known in self._get_record(self._kind).structures:
            for path in known.paths - structure.paths:
                if f"{path}[0]" in structure.paths:
                    return path
        return None

    def note_other_reads(self) -> None:
        """Let the next call in which the batch reads other numbers be compared, after an error."""
        self._read_counts.clear()

    def note_possible_mixing(self, kind: Any) -> None:
        """Remember that the layers are not known to compute each row by itself.

        Later batches may have rows that are mixed, such as two that are near each other.
        """
        self._get_record(kind).mixing_count = 1
        self._has_possible_mixing = True

    def may_mix_rows(self, request: Request, inputs: StageInputs) -> bool:
        """Return whether layers in calls of this kind are not known to compute rows apart."""
        if not self._has_possible_mixing:
            return False
        return self._get_record(self.identify(request, inputs)).mixing_count is not None

    def compares_rows_again(self) -> bool:
        """Return whether to compare the whole batch, since the layers may mix rows.

        The comparison takes the time of a step. So it is made each time that the number of these
        calls has doubled.
        """
        if self._kind is None:
            return False
        record = self._get_record(self._kind)
        if record.mixing_count is None:
            return False
        record.mixing_count += 1
        return not record.mixing_count & (record.mixing_count - 1)

    def note_graphs(self, kind: Any, graphs: GraphDescriptions, after_backward: bool) -> None:
        """Remember that a call with these graphs was found right.

        The next call of this kind is audited as a first one is.
        """
        self._get_record(kind).graphs.add((after_backward, graphs))
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

    def find_moved_buffers(self) -> Sequence[MovedBuffer]:
        """Return the small buffers that this call has changed, and no audited forward had."""
        if self._settings is None or self._kind is None:
            return ()
        return self._settings.find_moved_buffers()

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
            _has_ignored_labels(request),
            inputs.kind_digest,
            # A pipe does not call the containers of its layers, so hooks do not see them.
            tuple(get_global_hook_ids()),
            self._settings and self._settings.key,
        )

    def note_audited(self, kind: Any, sizes: TermSizes | None = None) -> None:
        """Remember that a call of this kind was audited, and the terms of its loss."""
        record = self._get_record(kind)
        terms = record.terms = {} if record.terms is None else record.terms
        if self._settings is not None and isinstance(kind, tuple):
            # A forward may have filled a cache, or set a flag.
            self._settings.read()
            other_kind = *kind[:-1], self._settings.key
            if not self._get_record(other_kind).is_audited:
                self._records[other_kind] = record
        self._add_age(sizes or {})
        for key, size in (sizes or {}).items():
            terms[key] = max(size, terms.get(key, 0.0))

    def note_equal_rows(self, kind: Any) -> None:
        """Remember that a call was audited whose rows are equal or count nothing.

        The next call of this kind is audited if its rows differ.
        """
        self._get_record(kind).has_equal_rows = True

    def note_row_counts(self, kind: Any, counts: tuple[int, ...]) -> None:
        """Remember that a call was audited whose forward goes by its number of rows.

        Calls of this kind with other numbers of rows are audited, too.
        """
        record = self._get_record(kind)
        record.row_counts = (record.row_counts or set()) | {counts}

    def note_loss_counts(self, kind: Any, counts: tuple[int, ...]) -> None:
        """Remember that a loss function calls the same functions for micro-batches and batch.

        It may go by their numbers of rows.
        """
        self._get_record(kind).loss_counts.add(counts)
        self._has_loss_counts = True

    def knows_loss_counts(self, request: Request, inputs: StageInputs) -> bool:
        """Return whether these numbers of rows were noted for the loss of this kind of call."""
        if not self._has_loss_counts:
            return False
        record = self._get_record(self.identify(request, inputs))
        return inputs.rows.counts in record.loss_counts

    def _add_age(self, sizes: TermSizes) -> None:
        if OTHER_TERMS in sizes:
            sizes[OTHER_TERMS] = float(self._call_count)

    def note_kept(self, places: Sequence[KeptPlace]) -> None:
        """Remember where forwards leave tensors with a graph."""
        kept_keys = {(id(place.owner), place.key) for place in self.kept_places}
        self.kept_places += [p for p in places if (id(p.owner), p.key) not in kept_keys]

    def note_branches(self, kind: Any) -> None:
        """Let the stages be watched in later calls of this kind: see branches.py."""
        record = self._get_record(kind)
        record.branches = record.branches or BranchRecord()
        self._has_branches = True

    def find_branches(self, request: Request, inputs: StageInputs) -> BranchRecord | None:
        """Return what is known of the branches in a call. None: it has none, or no parts."""
        if not self._has_branches or request.audit == "off" or running.is_running:
            return None
        return self._get_record(self.identify(request, inputs)).branches

    def forget(self, kind: Any) -> None:
        """Let the next call of this kind be audited again."""
        self._get_record(kind).terms = None

    def log_once(self, reason: str) -> None:
        """Log why a call was not audited, unless that was said before."""
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                _log.warning(
                    "penstock: the first step was not compared with the unsplit model, because %s. "
                    "Compare them with `penstock check`, or penstock.check. (audit='off' hides "
                    "this note.)",
                    reason,
                )


def _has_other_rows(record: KindRecord, request: Request, inputs: StageInputs) -> bool:
    """Return whether an input has rows that differ for the first time. Remember which have."""
    known_inputs = record.constant_inputs
    if known_inputs == []:
        return False
    batch = request.inputs, dict(request.keyword_inputs)
    record.constant_inputs = find_constant_inputs(batch, inputs.rows, known_inputs)
    return known_inputs is not None and record.constant_inputs != known_inputs


def _has_new_ids(record: KindRecord, request: Request, inputs: StageInputs) -> bool:
    """Return whether micro-batches have ids in common for the first time, if that matters."""
    if record.tested_ids is None:
        return False
    shared = find_shared_ids(request.list_batch(), inputs.rows.counts)
    return not record.tested_ids.issuperset(index for index, *_ in shared)


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


def _has_ignored_labels(request: Request) -> bool:
    """Return whether a validation step has labels below 0, which a mean of the model leaves out.

    There is no graph that shows what it counts.
    """
    if not request.is_step or request.loss_fn is not None or torch.is_grad_enabled():
        return False
    tensors = (value for value in request.list_batch() if isinstance(value, Tensor))
    return any(t.dtype is torch.int64 and bool((t < 0).any()) for t in tensors if not t.is_meta)


# ---- the audits of one call ----------------------------------------------------------------------


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
