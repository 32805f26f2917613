"""The audit: one micro-batch of a call also goes through the unsplit model.

In the first step of each kind of batch, the user's own forward runs on one micro-batch before the
pipe does: on the same modules and devices, with the same random numbers, and with nothing left
behind (reference.py). While the pipe runs, the cells of that micro-batch are recorded
(cell_recorder.py). Then the audit compares:

    the loss         of the micro-batch, or the outputs of `pipe(x)`
    the gradients    that the micro-batch adds to each parameter, and those of its inputs
    the buffers      after the forward of the micro-batch
    Python numbers   that the forward changes, before and after a recomputation
    the split        the loss, or the outputs, of some rows with those of two parts (rows.py)
    the state        some rows with the state that others have left, and without, if they leave any
                     (state_check.py)

If the operations of the loss function do not prove that it is a mean over rows (row_means.py), each
step also compares its loss with that of the outputs of all micro-batches together.

A difference is an `AuditError`, raised before the optimizer can step. The reference takes the time
of one forward and backward, and at most one more forward for the parts. Later steps run no forward
twice, unless `audit=N` repeats the audit, the model's own loss has new terms, or micro-batches go
new ways after a number that a layer has read (branches.py) or drawn (`Auditor.draws_numbers`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from penstock.microbatch import gather, list_tensors
from penstock.model.isolation import StateSnapshot
from penstock.model.placement import PlacedPartition
from penstock.model.stage_inputs import StageInputs
from penstock.nested_values import iter_hidden_tensors
from penstock.runtime.audit.cell_recorder import (
    CellRecord,
    CellRecorder,
    list_by_path,
    list_objects_by_path,
)
from penstock.runtime.audit.digest import Digest, Digester
from penstock.runtime.audit.layer_settings import MovedBuffer
from penstock.runtime.audit.precision import (
    LEAST_DIFFERENCE,
    find_split_tolerance,
)
from penstock.runtime.audit.problems import (
    HOOKED_LEAF,
    KEPT_FOR_LOSS,
    build_error,
    describe_backward_state,
    describe_evaluation_state,
    describe_hidden_output,
    describe_hooks,
    describe_lost_rows,
)
from penstock.runtime.audit.reference import (
    HostDrawsError,
    Reference,
    ReferenceForward,
)
from penstock.runtime.audit.row_results import (
    SPLIT_CURE,
    counts_nothing,
    find_loss,
    format_different,
)
from penstock.runtime.audit.rows import SMALL_MICROBATCH, RowsCheck
from penstock.runtime.audit.state_check import StateCheck
from penstock.runtime.execution import Execution
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.runtime.request import Request
from penstock.schedules.ir import Compute, Op, Program
from penstock.stage.branches import RowWatch
from penstock.stage.loss import LossReduction
from penstock.stage.loss_terms import TermComparison, TermSizes, has_half_open_gate
from penstock.stage.payload import Payload, flatten_values
from penstock.stage.rng import peek_seed
from penstock.stage.stage import Stage
from penstock.state_copy import ReachedState, Variable, find_reachable
from penstock.torch_compat import (
    close_failed_checkpoints,
)

if TYPE_CHECKING:
    from penstock.runtime.audit.auditor import Auditor


_SHOWN_TOTAL = 0.01  # of the loss: what is divided otherwise makes a difference


class _AuditedMicrobatch(NamedTuple):
    """The forward of the unsplit model on the audited micro-batch, and the state that it changes.

    Attributes:
        forward: The forward.
        changes: The names of the state that it has changed.
        backward_changes: The names of what only its backward has changed.
        keeps_state: Whether the loss has changed state of its own.
    """

    forward: ReferenceForward
    changes: Sequence[str]
    backward_changes: Sequence[str]
    keeps_state: bool


class Audit:
    """The audit of one call."""

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
        self._digester, self._record = Digester(), CellRecord()
        orders = find_forward_orders(program)
        self.microbatch, *self._later_microbatches = orders[0]
        # Where another micro-batch comes first, it has changed the state.
        self._first_microbatch = self.microbatch
        self._is_first_everywhere = all(order[0] == self.microbatch for order in orders.values())
        self._recomputes = any(
            isinstance(action, Compute) and action.op is Op.R
            for lane in program.lanes
            for action in lane
        )
        self._overtaken_stages = _find_overtaken_stages(program)
        self._loss_order = _find_loss_order(program, max(orders))
        self._reorders_losses = self._loss_order != sorted(self._loss_order)
        devices = [placed.stage_devices[stage.index] for stage in placed.partition.stages]
        self._reference = Reference(
            placed.partition,
            devices,
            request,
            inputs,
            # After the call, the generator of the caller is that of the next one.
            peek_seed() if execution.seed is None else execution.seed,
            reduction,
            self._digester,
            reached,
            [dtype for _, dtype in execution.context.autocast_dtypes],
        )
        self._rounding = self._reference.rounding
        self._rows_check = RowsCheck(
            self._reference,
            inputs,
            reduction,
            self.microbatch,
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
        self._shows_no_state = False  # no later micro-batch has targets that the loss counts

    # ---- before the call -----------------------------------------------------------------------

    def run_reference(self, loss: LossAccumulator | None) -> None:
        """Run the unsplit model on the micro-batch; in a step with its backward.

        `loss` is an accumulator like that of the step. It gives the gradient of the loss.
        """
        try:
            with ExitStack() as isolation:
                microbatch = self._run_microbatch(isolation, loss)
                for index in self._later_microbatches:
                    if not self._counts_nothing(microbatch.forward):
                        break
                    # What is wrong would not show. Perhaps another one has targets that count.
                    isolation.close()
                    self.microbatch = index
                    self._rows_check = replace(self._rows_check, microbatch=index)
                    microbatch = self._run_microbatch(isolation, loss)
                if self._counts_nothing(microbatch.forward):
                    return
                if not self._reference.is_stateless:
                    isolation.close()  # each of the others has one of its own
                self._compare_parts(microbatch)
        except Exception as error:  # the pipe shows whether it is an error of the model
            close_failed_checkpoints(error)
            self._failure = error
        if self._state_problem is not None and self._forward is None:
            self._fail(self._state_problem)

    def _run_microbatch(
        self, isolation: ExitStack, loss: LossAccumulator | None
    ) -> _AuditedMicrobatch:
        """Run the unsplit model on the micro-batch in an isolation, which it enters."""
        while True:
            isolation.enter_context(self._reference.isolate())
            try:
                return self._run_isolated(loss)
            except HostDrawsError:
                pass
            except Exception as error:
                if not self._reference.replaces_sizes:
                    raise
                # Code of C may not take them.
                close_failed_checkpoints(error)
                self._reference.replaces_sizes = False
            isolation.close()

    def _counts_nothing(self, forward: ReferenceForward) -> bool:
        """Return whether the loss of a step counts nothing of the micro-batch.

        It is 0 or not a number, whatever the model computes.
        """
        if self._reduction is None:
            return False
        is_zero = not any(d.norm for d in self._reference_grads.values())
        return counts_nothing(forward) or (is_zero and not float(find_loss(forward)))

    def _run_isolated(self, loss: LossAccumulator | None) -> _AuditedMicrobatch:
        """Run the unsplit model on the micro-batch, and find out what state it changes."""
        rows = self._reference.rows.find_rows(self.microbatch)
        batch = self._reference.take_batch(rows)
        self._input_copies = list(
            {id(t): t for t in list_tensors(batch) if t.requires_grad}.values()
        )
        counted = self._reference.rows.get_counted_targets(rows)
        state = self._reference.digest_loss_state() if self._reorders_losses else {}
        watch = self._reference.watch_state()
        forward = self._reference.run_forward(
            batch,
            self.microbatch,
            counted,
            records_state=True,
            keeps_output=rows[1] - rows[0] < SMALL_MICROBATCH,
            operations=self._rows_check.record_operations(),
        )
        changes = watch.find_changes(forward.changed_buffers)
        keeps_state = bool(state) and state != self._reference.digest_loss_state()
        self._reference.is_stateless = not (
            changes or keeps_state or forward.uses_own_generator or watch.has_host_draws()
        )
        self._auditor.note_changed_state(forward.changed_attributes | forward.changed_buffers)
        self._auditor.note_kept(self._reference.find_kept_places())
        if self._inputs.chunks > 1 and (forward.draws_number or forward.draws_host_random):
            self._auditor.note_drawn_numbers(self._kind, forward.draws_host_random)
        self._note_outputs(forward.values, loss)
        backward_changes: list[str] = []
        if forward.has_own_backward and self._reference_grads:
            now = watch.find_changes(forward.changed_buffers)
            backward_changes = [name for name in now if name not in changes]
            self._reference.is_stateless &= not backward_changes
        return _AuditedMicrobatch(forward, changes, backward_changes, keeps_state)

    def _compare_parts(self, microbatch: _AuditedMicrobatch) -> None:
        """Find out whether micro-batches, rows, or the orders of losses depend on each other."""
        forward, changes, backward_changes, keeps_state = microbatch
        refusal = None
        is_first = self.microbatch == self._first_microbatch
        if (changes or backward_changes) and self._later_microbatches:
            later = self._later_microbatches if is_first else [self.microbatch]
            check = self._build_state_check()
            self._state_problem = check.compare(
                changes, backward_changes, later, bool(forward.changed_buffers)
            )
            self._shows_no_state = check.shows_nothing
            refusal = self._state_problem if check.shares_graph else None
            if check.tested_ids is not None:
                self._auditor.note_state_by_id(self._kind, check.tested_ids)
            other = self._later_microbatches[0] if is_first else self._first_microbatch
            if self._reference.reads_earlier_stages(self.microbatch, other):
                refusal = KEPT_FOR_LOSS
        if self._later_microbatches:
            self._state_problem = self._state_problem or self._compare_evaluation(changes)
        if changes and forward.has_own_backward and self._inputs.chunks > 1:
            self._state_problem = self._state_problem or self._compare_backward_state()
        obstacle = None
        if forward.changed_state and is_first and not self._is_first_everywhere:
            obstacle = (
                "the forward changes buffers, and the stages take micro-batches in different orders"
            )
        elif forward.draws_in_loss:
            obstacle = "loss_fn draws from random or numpy.random, which all threads share"
        if obstacle is not None:
            self._auditor.note_audited(self._kind, self._term_sizes)
            self._auditor.log_once(obstacle)
            return
        self._split_problem = self._split_problem or self._rows_check.compare_rows(forward)
        if self._inputs.chunks > 1:
            self._split_problem = self._split_problem or self._compare_branches(forward)
        if self._reference.has_hiding_weights:
            self._auditor.note_hiding_weights(self._kind)
        if keeps_state:
            problem = self._build_state_check().compare_loss_orders(self._loss_order)
            self._split_problem = problem or self._split_problem
        if forward.changed_hooks is not None:
            refusal = describe_hooks(forward.changed_hooks)
        if self._reduction is not None and self._inputs.chunks > 1:
            refusal = HOOKED_LEAF if self._reference.has_hooked_leaves() else refusal
        if refusal is None:
            # The step holds no tensors of the reference while it runs.
            self._forward = forward._replace(output=None, operations=None, row_watch=RowWatch())
        else:
            self._state_problem = refusal

    def _compare_backward_state(self) -> str | None:
        """Return how a backward computes with what its forward has left, or None.

        That is right where no other forward comes in between, as in the last stage of 1F1B.
        """
        left = self._build_state_check().find_backward_state()
        stages = [s for s in self._placed.partition.stages if s.index in self._overtaken_stages]
        modules = {module for stage in stages for module in stage.modules()}
        reached = find_reachable(list(modules)) if left else ReachedState()
        names = [
            tensor.name
            for tensor in left
            if (
                reached.has_variable(tensor.owner)
                if isinstance(tensor.owner, Variable)
                else tensor.owner in modules
            )
        ]
        return describe_backward_state(list(dict.fromkeys(names))) if names else None

    def _build_state_check(self) -> StateCheck:
        return StateCheck(
            self._reference,
            self._digester,
            self._first_microbatch,
            self.microbatch,
            compares_loss_only=self._reduction is not None,
            parameter_ids=self._name_parameters(),
            recomputes=self._recomputes,
            other_microbatch=next(
                (m for m in self._later_microbatches if m != self._first_microbatch),
                self._first_microbatch,
            ),
        )

    def _compare_evaluation(self, changes: Sequence[str]) -> str | None:
        """Return how training computes with what calls in eval mode leave, or None.

        It is tried in the call that leaves something, as the next one may leave no more, and once
        more in training, if that comes later. Then it is known which modules are in training mode.
        """
        modes = {module: module.training for module in self._reference.modules}
        history = self._auditor.modes
        if self._request.training and torch.is_grad_enabled():
            history.training = modes
            if history.evaluation is None:
                return None
        elif changes:
            history.evaluation, history.changes = modes, changes
        else:
            return None
        assert history.evaluation is not None
        history.has_difference |= self._build_state_check().compare_training(
            history.evaluation, history.training or dict.fromkeys(modes, True)
        )
        if history.training is None:
            return None
        if history.has_difference:
            return describe_evaluation_state(history.changes)
        history.evaluation = None
        return None

    def _compare_branches(self, forward: ReferenceForward) -> str | None:
        """Compare the whole batch if its forward may go another way than that of micro-batches."""
        watch = forward.row_watch
        self._compares_row_counts = watch.compares_row_counts
        has_branches = self._rows_check.has_branches(forward)
        if has_branches:
            self._auditor.note_branches(self._kind)
        if not self._rows_check.computes_each_row():
            self._auditor.note_possible_mixing(self._kind)
            problem = self._rows_check.compare_mixed_rows()
        elif has_branches or watch.goes_by_row_count:
            problem = self._rows_check.compare_all_microbatches()
        else:
            return None
        if problem is not None and watch.goes_by_row_count:
            return f"the forward goes by the number of its rows, as `if len(x) > 4` does: {problem}"
        return problem

    def _note_outputs(self, values: tuple[Any, ...], loss: LossAccumulator | None) -> None:
        tensors, layout = flatten_values(values)
        if loss is None:
            self._reference_outputs = self._digester.digest_all(list_by_path(values[0]))
            self._roots, self._state = list_by_path(values[0]), self._reference.take_snapshot()
            for path, leaf in list_objects_by_path(values[0]).items():
                if any(tensor.requires_grad for tensor in iter_hidden_tensors(leaf)):
                    self._hidden_outputs[path] = describe_hidden_output(leaf)
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

    def observe(self) -> CellRecorder:
        """Return what observes the workers, so that the pipe can be compared with the reference."""
        recorder = CellRecorder(
            self._placed.partition.stages,
            self.microbatch,
            self._digester,
            self._cell_io,
            records_outputs=self._reduction is None,
            has_own_gradients=self._forward is not None and self._forward.has_own_gradients,
        )
        self._record = recorder.record
        return recorder

    # ---- after the call ------------------------------------------------------------------------

    def _has_reference(self) -> bool:
        """Return whether there is a reference. Say so if it failed where the pipe did not."""
        if self._failure is not None:
            self._auditor.note_audited(self._kind, self._term_sizes)
            self._auditor.log_once(f"the unsplit model raised {self._failure!r}")
        return self._forward is not None

    @torch.no_grad()
    def needs_more_rows(self) -> bool:
        """Return whether the unsplit model runs on the whole batch, and has failed on a part."""
        if self._failure is None or isinstance(self._failure, torch.OutOfMemoryError):
            return False
        try:
            with self._reference.isolate():
                batch = self._reference.take_batch((0, sum(self._inputs.rows.counts)))
                self._reference.run_forward(batch, self.microbatch)
        except Exception as error:
            close_failed_checkpoints(error)
            return False
        return True

    def check_step(self, sizes: TermSizes) -> None:
        """Compare the step with the reference. Raise an AuditError if they differ.

        `sizes` are those of the terms of its loss.
        """
        self._term_sizes = sizes
        if not self._has_reference():
            return
        if self._state_problem is not None:
            self._fail(self._state_problem)  # or the loss would differ by it
        loss = self._cell_io.loss
        assert isinstance(loss, LossAccumulator)
        computed_loss = self._digester.digest(loss.microbatch_losses[self.microbatch].loss)
        assert self._reference_loss is not None
        self._compare("the loss", computed_loss, self._reference_loss, is_forward=True)
        self._check_state()
        last_cell = len(self._placed.partition.stages) - 1, self.microbatch
        seed = self._cell_io.output_gradients[last_cell].tensors[0]
        assert seed is not None
        scale = float(seed) / self._reference_seed if self._reference_seed else 1.0
        self._check_gradients(self._reference_grads, scale)
        self._compare_gates()
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
        self._note_audited()

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
            for module, prefix in self._reference.names.items()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def _check_state(self) -> None:
        """Compare the buffers after the forward, unless another micro-batch has changed them."""
        assert self._forward is not None
        names = self._reference.names
        is_first = self.microbatch == self._first_microbatch
        for (module, name), actual in self._record.buffers.items() if is_first else ():
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
        raise build_error(problem, self._request.is_step)

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

    def check_new_terms(self, sizes: TermSizes, compares_batch: bool = False) -> None:
        """Find out whether a loss with new terms is a mean over rows, after its step.

        With `compares_batch`, the whole batch is compared: the rows that show it may be anywhere.
        """
        self._term_sizes = sizes
        try:
            is_validation = not torch.is_grad_enabled()
            with torch.no_grad():
                self._split_problem = self._rows_check.compare_rows()
                # Without a graph, what the means of the model's own loss count is not known.
                compares_batch |= is_validation and self._request.loss_fn is None
                if compares_batch and not self._split_problem:
                    self._split_problem = self._rows_check.compare_all_microbatches()
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

    def check_drawn(self, microbatch: int) -> None:
        """Compare rows with the random numbers of a micro-batch, after a call."""
        problem = self._rows_check.compare_drawn(microbatch)
        if problem is not None:
            self._auditor.forget(self._kind)
            self._fail(problem)

    def check_rows(self) -> None:
        """Compare the whole batch, in a later call of layers that may mix rows."""
        problem = self._rows_check.compare_mixed_rows()
        if problem is not None:
            self._auditor.note_possible_mixing(self._kind)  # the next call is compared, too
            self._split_problem = f"a layer mixes rows of the batch: {problem}"
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

    def check_moved_buffers(self, moved: Sequence[MovedBuffer]) -> None:
        """Compare some rows with the buffers that a call has changed and as they were before."""
        problem = self._build_state_check().compare_buffers(moved)
        if problem is not None:
            self._auditor.forget(self._kind)
            self._fail(problem)

    def check_structure(self, lost_rows: str | None) -> None:
        """Compare the whole batch, after a call whose outputs have other rows than before.

        `lost_rows` is the path of an output that had rows, and now is a list of tensors.
        """
        self._split_problem = self._rows_check.compare_all_microbatches()
        if lost_rows is not None and self._split_problem is None:
            self._split_problem = describe_lost_rows(lost_rows)
        self._finish()

    def check_plain_inputs(self) -> None:
        """Compare the whole batch, after a call whose inputs that are no tensors are others."""
        problem = self._rows_check.compare_all_microbatches()
        if problem is not None:
            self._auditor.forget_plain_inputs()
            self._split_problem = (
                "an input that is no tensor may have an entry for each row, as `zip(x, weights)` "
                "takes it. Every micro-batch gets all of it, and takes the first entries. Pass a "
                f"tensor, which is split: {problem}"
            )
        self._finish()

    def check_terms(self, sizes: TermSizes) -> None:
        """Note the terms of the model's own loss in `pipe(x)`, which was found right."""
        self._term_sizes = sizes
        self._compare_gates()
        self._finish()

    def _compare_gates(self) -> None:
        """Compare the whole batch if gates of the model's own loss let a part of its rows through.

        The few rows that were compared need not be among them.
        """
        if has_half_open_gate(self._term_sizes) and self._split_problem is None:
            self._split_problem = self._rows_check.compare_all_microbatches()

    def check_whole_loss(self, comparison: TermComparison, losses: LossAccumulator) -> None:
        """Compare the loss of a step with that of all outputs together.

        Args:
            comparison: Has the arguments of `loss_fn` for each micro-batch.
            losses: The losses of the micro-batches.
        """
        outputs = comparison.kept_outputs
        arguments = [outputs[microbatch] for microbatch in range(self._inputs.chunks)]
        # Where a target has no rows of a tensor, all micro-batches have the same object, such as a
        # dict of weights. So the target is that of the batch, and is not joined.
        output = gather([output for output, *_ in arguments], self._inputs.rows)
        joined = output, *self._reference.take_target()
        computed = self._reference.compute_loss(joined)
        if computed is None:
            return
        total, whole = float(losses.compute_loss()), float(computed.loss)
        numbers = [float(item.loss) for item in losses.microbatch_losses]
        size = max((abs(x) for x in (*numbers, whole) if math.isfinite(x)), default=0.0)
        tolerance = find_split_tolerance(computed.loss.dtype, computed.uses_float32, self._rounding)
        are_equal = abs(total - whole) <= tolerance * size
        if abs(total - whole) > LEAST_DIFFERENCE * size:
            exact = self._compute_exact_losses(arguments, joined, losses)
            if exact is not None:
                total, whole = exact
                are_equal = abs(total - whole) <= find_split_tolerance(torch.float64) * size
        if are_equal:
            has_same_functions = computed.function_names == comparison.function_names
            # A total is a part of the loss, perhaps times a small factor.
            if has_same_functions and comparison.shows_totals(_SHOWN_TOTAL * size):
                self._auditor.note_loss_counts(self._kind, self._inputs.rows.counts)
            return
        # A micro-batch without targets that count has a mean of nan.
        if not math.isfinite(total) and not math.isfinite(whole):
            return
        self._auditor.forget(self._kind)
        total_text, whole_text = format_different(total, whole)
        self._fail(
            f"the losses of the micro-batches combine to {total_text}, but the loss of the "
            f"whole batch is {whole_text}. {SPLIT_CURE}"
        )

    def _compute_exact_losses(
        self, arguments: Sequence[tuple[Any, ...]], joined: tuple[Any, ...], losses: LossAccumulator
    ) -> tuple[float, float] | None:
        """Return the losses of the micro-batches, combined, and that of the batch, in float64.

        None: they cannot be computed, or not in float64.
        """
        try:
            with self._reference.in_precision(torch.float64):
                *parts, whole = map(self._reference.compute_loss, (*arguments, joined))
        except Exception as error:  # the loss insists on its dtypes
            close_failed_checkpoints(error)
            return None
        computed = [item for item in (*parts, whole) if item and not item.uses_float32]
        if len(computed) < len(parts) + 1:
            return None
        *part_losses, whole_loss = [item.loss for item in computed]
        return float(losses.combine(part_losses)), float(whole_loss)

    def _finish(self) -> None:
        """Raise if the parts do not combine. Otherwise calls of this kind are found right.

        After an error, the next call of the kind is audited again.
        """
        problem = self._state_problem or self._split_problem
        if problem is not None:
            self._fail(problem)
        self._note_audited()
        if self._compares_row_counts:
            self._auditor.note_row_counts(self._kind, self._inputs.rows.counts)

    def _note_audited(self) -> None:
        """Remember that calls of this kind are right, if rows were compared that differ and count.

        Otherwise, as with a first batch of zeros, the next call is audited.
        """
        if self._rows_check.shows_nothing or self._shows_no_state:
            self._auditor.note_equal_rows(self._kind)
        else:
            self._auditor.note_audited(self._kind, self._term_sizes)


def _find_overtaken_stages(program: Program) -> set[int]:
    """Return the stages where a forward comes between that of another micro-batch and its backward.

    A recomputation is no such forward: what it leaves is put back.
    """
    stages: set[int] = set()
    for lane in program.lanes:
        last_forwards: dict[int, int] = {}  # by stage, the micro-batch
        for action in lane:
            if not isinstance(action, Compute) or action.op in (Op.R, Op.W):
                continue
            if action.op is Op.F:
                last_forwards[action.stage] = action.microbatch
            elif last_forwards.get(action.stage) != action.microbatch:
                stages.add(action.stage)
    return stages


def find_forward_orders(program: Program) -> dict[int, list[int]]:
    """Return the micro-batches of each stage in the order of their forwards."""
    orders: dict[int, list[int]] = {}
    for lane in program.lanes:
        for action in lane:
            if isinstance(action, Compute) and action.op is Op.F:
                orders.setdefault(action.stage, []).append(action.microbatch)
    return orders


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
