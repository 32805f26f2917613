"""Whether a micro-batch depends on the state that another one has left.

The unsplit model computes every row with the state from before the batch. So some rows of a later
micro-batch run twice, with that state and with the one that rows of the first micro-batch have
left, and the results and gradients must agree. Where they do, six things may still hide state:

    a counter or an age    The layer may go by it only once it has grown, or now and then. The rows
                           run again with the counter far ahead (counters.py), and in the calls
                           whose comparisons have other results (counter_probe.py).
    an opaque value        The next name of a phase, the next date or the next entry of an iterator
                           cannot be predicted, so it is refused if each forward changes it.
    a settled buffer       The vectors of a spectral norm may have converged before training. The
                           rows run again with other numbers in the buffer.
    an id of a row         State of a user or a class matters to rows with the same id, and the
                           micro-batches may have none in common. The rows run after themselves.
    the other mode         Only training may compute with what calls in eval mode leave.
    a backward             It may read what its forward has left, which other forwards overwrite.

`loss_fn` may keep state, too. Its own order of micro-batches must not matter where a schedule
computes the losses in another one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from penstock.runtime.audit.batch_rows import Rows
from penstock.runtime.audit.counter_probe import CounterProbe, Counters
from penstock.runtime.audit.counters import Key, Text
from penstock.runtime.audit.digest import Digest, Digester
from penstock.runtime.audit.layer_settings import MovedBuffer
from penstock.runtime.audit.precision import find_repetition_rounding
from penstock.runtime.audit.problems import (
    describe_opaque_state,
    describe_shared_graph,
    describe_state,
)
from penstock.runtime.audit.reference import Reference, ReferenceForward
from penstock.runtime.audit.row_results import ShowsNothingError
from penstock.runtime.audit.state_watch import (
    BufferKey,
    LeftTensor,
    StateWatch,
    set_counters,
)
from penstock.stage.cell_graph import has_saved_tensors, iter_nodes
from penstock.stage.payload import flatten_values
from penstock.torch_compat import close_failed_checkpoints

ModuleModes = Mapping[nn.Module, bool]  # whether each is in training mode

_MAX_CALLS = 12  # later calls that are tried
_EVENTS = 100, 1_000_000  # by which a counter of events is moved


class StateCheck:
    """Compares the results of some rows with the state that others have left, and without.

    Attributes:
        shares_graph: Whether a micro-batch computes with a graph that another one has left, so that
            a backward may fail.
        shows_nothing: Whether every micro-batch that was compared counts nothing for the loss.
        tested_ids: The tensors with ids that several micro-batches have and that made no
            difference, though the same rows compute with what they have left. None: they do not.

    Args:
        reference: The unsplit model.
        digester: Makes the digests.
        first_microbatch: The micro-batch that comes first, and changes the state.
        microbatch: The audited micro-batch, with whose random numbers its rows run.
        compares_loss_only: Whether the results are a loss with its extras.
        parameter_ids: The ids of the parameters whose gradients are compared.
        recomputes: Whether stages are recomputed.
        other_microbatch: A micro-batch that is not the first one.
    """

    def __init__(
        self,
        reference: Reference,
        digester: Digester,
        first_microbatch: int,
        microbatch: int,
        compares_loss_only: bool,
        parameter_ids: Collection[int],
        recomputes: bool,
        other_microbatch: int,
    ) -> None:
        self._reference, self._digester = reference, digester
        self._first_microbatch, self._microbatch = first_microbatch, microbatch
        self._other_microbatch = other_microbatch
        self._compares_loss_only = compares_loss_only
        self._parameter_ids, self._recomputes = parameter_ids, recomputes
        self.shares_graph = self.shows_nothing = False
        self._runs_backward = False  # whether the backward of the first rows changes state, too
        self.tested_ids: list[int] | None = None

    def compare(
        self,
        changes: Sequence[str],
        backward_changes: Sequence[str],
        later_microbatches: Sequence[int],
        changes_buffers: bool,
    ) -> str | None:
        """Return how a micro-batch computes with the state that the first one leaves, or None.

        Args:
            changes: The names of what a forward changes.
            backward_changes: The names of what only its backward changes, such as a counter of a
                hook.
            later_microbatches: The micro-batches to compare, until one counts for the loss.
            changes_buffers: Whether a forward changes buffers of the model.
        """
        self._runs_backward = bool(backward_changes)
        names = [*changes, *backward_changes]
        for microbatch in later_microbatches:
            try:
                return self._compare_microbatch(names, microbatch, changes_buffers)
            except ShowsNothingError:
                continue
        self.shows_nothing = True
        return None

    def _compare_microbatch(
        self, changes: Sequence[str], microbatch: int, changes_buffers: bool
    ) -> str | None:
        """Compare a later micro-batch. Raise a `ShowsNothingError` if its loss counts nothing."""
        ranges = (
            self._reference.rows.find_rows(self._first_microbatch),
            self._reference.rows.find_rows(microbatch),
        )
        # A quarter of a micro-batch shows as much as all of it, if the model runs on so few rows.
        few = [(start, start + max(1, (stop - start) // 4)) for start, stop in ranges]
        # With 16 bits, rounding hides a small difference. Not every model computes with more.
        precisions = [torch.float32, None] if self._reference.has_low_precision else [None]
        has_shown = False
        for dtype, (first_rows, later_rows) in itertools.product(precisions, (few, ranges)):
            try:
                with nullcontext() if dtype is None else self._reference.in_precision(dtype):
                    is_ahead = self._find_difference(first_rows, later_rows, microbatch)
            except ShowsNothingError:
                has_shown = False
                continue
            except _SharedGraphError:
                self.shares_graph = True
                return describe_shared_graph(changes)
            except _OpaqueStateError as error:
                return describe_opaque_state(str(error))
            except Exception as error:  # the pipe shows whether it is an error of the model
                close_failed_checkpoints(error)
                has_shown = True
            else:
                has_shown = True
                if is_ahead is not None:
                    return describe_state(changes, is_ahead, self._runs_backward)
                break
        if not has_shown:
            raise ShowsNothingError
        for rows in (few[1], ranges[1]):
            try:
                return self._compare_ids(changes, rows, microbatch, changes_buffers)
            except ShowsNothingError:
                continue
        return None

    def _compare_ids(
        self, changes: Sequence[str], rows: Rows, microbatch: int, changes_buffers: bool
    ) -> str | None:
        """Return how rows with the same id, such as a user, compute with each other's state.

        If no two micro-batches have an id in common, later batches may. That is not known if
        the id is none of the inputs. Raise a `ShowsNothingError` if the loss counts nothing of
        these rows.
        """
        try:
            difference = self._find_difference(rows, rows, microbatch)
            if difference is None:
                return None
            if not self._reference.rows.has_row_ids(with_target=not changes_buffers):
                # The id is computed, as the code of a row is in vector quantization. Rows of other
                # micro-batches may always have the same one.
                return describe_state(changes, difference, self._runs_backward)
            shared = self._reference.rows.find_shared_ids()
            for _, row, other in shared:
                difference = self._find_difference((row, row + 1), (other, other + 1), microbatch)
                if difference is not None:
                    return describe_state(changes, difference, self._runs_backward)
        except ShowsNothingError:
            raise
        except Exception as error:  # the model may not run on single rows
            close_failed_checkpoints(error)
            return None
        self.tested_ids = [index for index, *_ in shared]
        return None

    def _find_difference(self, first: Rows, later: Rows, microbatch: int) -> bool | None:
        """Return None if the results of later rows are the same after others have run.

        Otherwise return whether they are the same but for a counter that is far ahead. Raise a
        `ShowsNothingError` if they are 0 or not finite, as without targets that count.
        """
        with self._reference.isolate():
            watch = self._reference.watch_state()
            expected = self._digest_results(self._run_rows(later, microbatch))
            after_later = watch.describe_moved()
        if not _shows_something(expected):
            raise ShowsNothingError
        with self._reference.isolate():
            watch = self._reference.watch_state()
            first_forward = self._run_first_rows(first, watch)
            after_first = watch.describe_moved().counters
            settled = watch.find_settled_buffers()
            later_forward = self._run_rows(later, microbatch)
            self._check_graphs(first_forward, later_forward)
            actual = self._digest_results(later_forward)
            after_both, opaque_both = watch.describe_moved()
            # A text that seemed to grow, as every text that was empty does.
            opaque_both |= {
                key: text
                for key, text in after_both.items()
                if isinstance(text, Text) and not text.goes_on_from(after_first.get(key))
            }
            # What is a function of the last rows is the same whatever has run before.
            opaque_names = [
                watch.find_name(key)
                for key, description in {**after_later.counters, **after_later.opaque}.items()
                if key in opaque_both and repr(opaque_both[key]) != repr(description)
            ]
            common_keys = after_first.keys() & after_both.keys()
            moving = {key for key in common_keys if after_first[key] != after_both[key]}
            common_keys = after_first.keys() & after_later.counters.keys()
            constant = {key for key in common_keys if after_first[key] == after_later.counters[key]}
            has_counters = first != later and bool(watch.find_counters(moving))
            # Only to see whether there is anything to advance: the isolation ends here.
            distances = [n for n in (1, 0) if watch.advance_counters(moving, constant, n)]
        if self._do_results_differ(actual, expected):
            return False
        if settled and self._is_iterated(settled, first, later, microbatch):
            return False
        if opaque_names:
            raise _OpaqueStateError(opaque_names[0])
        # A layer may go by the number of its calls only when there were many, or now and then. It
        # may count before it asks, or after.
        for steps_before in distances:
            with self._reference.isolate():
                watch = self._reference.watch_state()
                self._run_first_rows(first, watch)
                watch.advance_counters(moving, constant, steps_before)
                actual = self._digest_results(self._run_rows(later, microbatch))
            if self._do_results_differ(actual, expected):
                return True
        if has_counters and self._goes_by_calls(expected, moving, first, later, microbatch):
            return True
        return None

    def _goes_by_calls(
        self,
        expected: dict[Any, Digest],
        moving: Collection[Key],
        first: Rows,
        later: Rows,
        microbatch: int,
    ) -> bool:
        """Return whether rows have other results in a call that compares counters in another way.

        A layer may act in one call only, or in some of every seven. See counter_probe.py.
        """
        known_calls: set[tuple[Any, ...]] = set()
        todo: deque[Counters | None] = deque([None])  # the counters that the first rows leave
        for _ in range(_MAX_CALLS):
            if not todo:
                break
            counters = todo.popleft()
            if counters is not None:
                with self._reference.isolate():
                    watch = self._reference.watch_state()
                    self._run_first_rows(first, watch)
                    set_counters(watch.find_counters(moving), counters)
                    try:
                        actual = self._digest_results(self._run_rows(later, microbatch))
                    except Exception as error:  # a table may have no entry for so many calls
                        close_failed_checkpoints(error)
                        continue
                if self._do_results_differ(actual, expected):
                    return True
            for found in self._find_other_calls(counters, moving, first, later, microbatch):
                if tuple(found) not in known_calls:
                    known_calls.add(tuple(found))
                    todo.append(found)
        return False

    def _find_other_calls(
        self,
        counters: Counters | None,
        moving: Collection[Key],
        first: Rows,
        later: Rows,
        microbatch: int,
    ) -> list[Counters]:
        """Return the counters of later calls in which they would be compared with another result.

        Args:
            counters: Those of the call that is looked at. None: those that the first rows leave.
            moving: The places of the values that move in each forward.
            first: The first rows.
            later: The later rows.
            microbatch: The micro-batch of the later rows.
        """
        for keeps_types in (False, True):
            with self._reference.isolate():
                watch = self._reference.watch_state()
                self._run_first_rows(first, watch)
                places = watch.find_counters(moving)
                values = counters or [place.value for place in places.values()]
                probe = CounterProbe(values, keeps_types)
                try:
                    return watch.probe_counters(
                        places, probe, lambda: self._run_rows(later, microbatch)
                    )
                except Exception as error:
                    close_failed_checkpoints(error)
        return []

    def _is_iterated(
        self, buffers: Collection[BufferKey], first: Rows, later: Rows, microbatch: int
    ) -> bool:
        """Return whether each forward goes on from numbers that have hardly changed.

        The vectors of a spectral norm may have converged when training begins, and move again when
        the optimizer has stepped. So others are set, and the rows are compared again.
        """
        results = []
        for runs_first in (False, True):
            with self._reference.isolate():
                watch = self._reference.watch_state()
                watch.disturb(buffers)
                if runs_first:
                    self._run_first_rows(first, watch)
                results.append(self._digest_results(self._run_rows(later, microbatch)))
        expected, actual = results
        return _shows_something(expected) and self._do_results_differ(actual, expected)

    def compare_training(self, evaluation: ModuleModes, training: ModuleModes) -> bool:
        """Return whether training computes with what calls in eval mode have left of their rows.

        It must be the same whichever rows they had, and however many calls there were.

        Args:
            evaluation: The modes of the modules in calls that leave something.
            training: Their modes in training.
        """
        microbatches = self._first_microbatch, self._other_microbatch
        ranges = [self._reference.rows.find_rows(microbatch) for microbatch in microbatches]
        few = [(start, start + max(1, (stop - start) // 4)) for start, stop in ranges]
        first, second = few
        results = []
        try:
            for calls in ((first,), (second,), (first, second)):
                with self._reference.isolate():
                    watch = self._reference.watch_state()
                    _set_modes(evaluation)
                    for rows in calls:
                        with torch.no_grad():
                            self._run_rows(rows, self._microbatch)
                        watch.rewind_generators()
                    _set_modes(training)
                    with torch.enable_grad():
                        forward = self._run_rows(second, self._microbatch)
                        results.append(self._digest_results(forward))
        except Exception as error:  # the model may not run on so few rows
            close_failed_checkpoints(error)
            return False
        expected, *others = results
        return _shows_something(expected) and any(
            self._do_results_differ(actual, expected) for actual in others
        )

    def find_backward_state(self) -> list[LeftTensor]:
        """Return the tensors of its rows that a forward leaves and its backward reads.

        What all micro-batches leave may be the same in the first step, as a mask of what is
        clipped. So the numbers are changed between the forward and the backward.
        """
        start, stop = self._reference.rows.find_rows(self._microbatch)
        if stop - start < 2:
            return []
        try:
            with self._reference.isolate():
                watch = self._reference.watch_state()
                self._run_rows((start, (start + stop) // 2), self._microbatch)
                sizes = {key: t.value.shape for key, t in watch.find_left_tensors().items()}
            if not sizes:
                return []
            results = []
            for is_disturbed in (False, True):
                with self._reference.isolate():
                    watch = self._reference.watch_state()
                    forward = self._run_rows((start, stop), self._microbatch)
                    left = [
                        tensor
                        for key, tensor in watch.find_left_tensors().items()
                        if key in sizes and tensor.value.shape != sizes[key]
                    ]
                    if not left:  # the others may be the same for all rows
                        return []
                    for tensor in left if is_disturbed else ():
                        tensor.disturb()
                    results.append(self._digest_results(forward))
        except Exception as error:  # the model may not run on fewer rows
            close_failed_checkpoints(error)
            return []
        expected, actual = results
        return left if self._do_results_differ(actual, expected) else []

    def compare_buffers(self, moved: Sequence[MovedBuffer]) -> str | None:
        """Return how rows depend on buffers that forwards have changed, or None.

        A layer may count rare events, and go by their number only when there were many. So the rows
        also run with numbers that have moved on as far as a million events would move them.
        """
        names = [f"{self._reference.names.get(m.module, '')}.{m.name}".lstrip(".") for m in moved]
        rows = self._reference.rows.find_rows(self._microbatch)

        def run(distance: int) -> dict[Any, Digest]:
            with self._reference.isolate():
                for buffer in moved:
                    step = buffer.after - buffer.before
                    buffer.module._buffers[buffer.name] = buffer.before + step * distance
                return self._digest_results(self._run_rows(rows, self._microbatch))

        try:
            expected = run(0)
            differs = any(self._do_results_differ(run(n), expected) for n in (1, *_EVENTS))
        except Exception as error:  # such as an index that is too large
            close_failed_checkpoints(error)
            return None
        return describe_state(names, is_ahead=False) if differs else None

    def compare_loss_orders(self, order: Sequence[int]) -> str | None:
        """Return how the state of `loss_fn` depends on the order of the micro-batches, or None.

        Args:
            order: The order in which the schedule computes their losses.
        """
        first, second = order[:2]
        states = []
        for pair in ((first, second), (second, first)):
            with self._reference.isolate(), torch.no_grad():
                for microbatch in pair:
                    self._run_rows(self._reference.rows.find_rows(microbatch), microbatch)
                states.append(self._reference.digest_loss_state())
        rounding = self._reference.rounding
        if not any(
            digest.find_difference(states[1].get(key, digest), rounding)
            for key, digest in states[0].items()
        ):
            return None
        order_text = ", ".join(map(str, order))
        return (
            "loss_fn keeps state that depends on the order of the micro-batches, and this "
            f"schedule computes their losses in the order {order_text}, because it recomputes "
            "the last stage. Use a schedule such as '1f1b', or checkpoint='never', which take "
            "them in order."
        )

    # ---- runs of rows --------------------------------------------------------------------------

    def _run_first_rows(self, first: Rows, watch: StateWatch) -> ReferenceForward:
        forward = self._run_rows(first, self._microbatch)
        if self._runs_backward:
            self._digest_results(forward)
        watch.rewind_generators()
        return forward

    def _check_graphs(self, first: ReferenceForward, later: ReferenceForward) -> None:
        """Raise a `_SharedGraphError` if a forward computes with a graph that another one has left.

        A layer may compute a weight once and keep it. The backward of the first micro-batch frees
        the tensors that this graph has saved, and a recomputed forward has left no graph.
        """
        graphs = [
            {node for node in iter_nodes(roots) if getattr(node, "variable", None) is None}
            for forward in (first, later)
            if (roots := [t.grad_fn for t in flatten_values(forward.values)[0] if t.requires_grad])
        ]
        shared = set.intersection(*graphs) if len(graphs) == 2 else ()
        if any(self._recomputes or has_saved_tensors(node) for node in shared):
            raise _SharedGraphError

    def _run_rows(self, rows: Rows, microbatch: int) -> ReferenceForward:
        batch = self._reference.take_batch(rows)
        counted = self._reference.rows.get_counted_targets(rows)
        return self._reference.run_forward(batch, microbatch, counted)

    def _digest_results(self, forward: ReferenceForward) -> dict[Any, Digest]:
        """Return the digests of the loss or the outputs, and of all gradients by parameter."""
        tensors, _ = flatten_values(forward.values)
        compared = tensors[:1] if self._compares_loss_only else tensors
        digests: dict[Any, Digest] = {
            f"output {index}": digest
            for index, digest in self._digester.digest_all(dict(enumerate(compared))).items()
        }
        roots = [tensor for tensor in tensors if tensor.requires_grad]
        if roots:
            pairs = [(root, torch.ones_like(root)) for root in roots]
            digests.update(self._reference.run_backward(pairs))
        return digests

    def _do_results_differ(self, actual: dict[Any, Digest], expected: dict[Any, Digest]) -> bool:
        """Return whether two runs on the same rows have other results or gradients.

        Each run has a copy of the inputs, so their gradients are not compared.
        """
        parameters = self._parameter_ids
        rounding = find_repetition_rounding(self._reference.rounding)
        largest = max((d.norm for k, d in expected.items() if k in parameters), default=0.0)
        zero = Digest(0.0, 0.0)
        return any(
            actual.get(key, zero).find_difference(
                expected.get(key, zero),
                rounding,
                least_size=rounding * largest if key in parameters else 0.0,
            )
            for key in {**expected, **actual}
            if key in parameters or isinstance(key, str)
        )


def _set_modes(modes: ModuleModes) -> None:
    """Let modules be in training or in eval mode, inside an isolation."""
    for module, is_training in modes.items():
        module.training = is_training


class _SharedGraphError(Exception):
    """The forward of a micro-batch computes with a graph that another one has left."""


class _OpaqueStateError(Exception):
    """Each forward changes a value, and it is not known how it goes on. The text is its name."""


def _shows_something(results: Mapping[Any, Digest]) -> bool:
    """Return whether results are finite, and not all 0."""
    products = [digest.product for digest in results.values()]
    return any(products) and all(map(math.isfinite, products))
