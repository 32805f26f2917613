"""Whether rows depend on each other: some rows run together and apart, and results must combine.

A pipe computes a batch in parts, so the loss, the outputs and the gradients of two parts must
combine to those of both together. Four tests have different powers:

    a few rows       in the first step. Two rows show what depends on the number of rows (a mean
                     over rows, a sum over a given number) and what counts unlike rows differently.
                     Rows with the same id show what depends on the other rows of a group.
                     If micro-batches are large, an eighth of one, twice, shows what two rows do
                     not: a row that is the largest of many, an expert that is full, rows that are
                     sorted. Gradients are compared as well if the forward has its own: a backward
                     may depend on more rows than the forward, by a hook, a custom backward, or a
                     value that is detached; and if weights are 0 or very small, which hides in
                     the results what they are multiplied with.
    two groups       with `audit=N`, every N steps, always with gradients. Each group has half the
                     rows of a micro-batch.
    all              with the groups, and in the first step if the forward has branches, selects
    micro-batches    among rows (branches.py), goes by their number (row_counts.py), or has an
                     operation that is not known to compute each row by itself (row_operations.py).
                     They show what needs more rows than a micro-batch has, such as a term for
                     batches of more than four rows. No backward.
    exchanged        if the forward draws single random numbers, for each micro-batch that goes a
    halves           new way by them. They show what rows do with the numbers that it has drawn.

The rows run in training, with random operations that return fixed numbers (fixed_draws.py) and with
PyTorch's own BatchNorm in eval mode: it sees one micro-batch at a time, and users know. If that
does not work, as with the random numbers of Python, everything runs in eval mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.microbatch import MicrobatchRows, list_tensors
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.audit.batch_rows import Rows
from penstock.runtime.audit.digest import Digest
from penstock.runtime.audit.precision import find_split_tolerance
from penstock.runtime.audit.reference import Reference, ReferenceForward
from penstock.runtime.audit.row_gradients import (
    LossSeeds,
    OutputSeeds,
    RowDims,
    RowsResult,
    Seeds,
    compare_gradients,
    describe_weighted_write,
    select_seeds,
)
from penstock.runtime.audit.row_operations import RowOperations
from penstock.runtime.audit.row_results import (
    Losses,
    ShowsNothingError,
    compare_losses,
    compare_outputs,
    find_loss,
    find_step_output,
    find_weight,
    is_close,
)
from penstock.runtime.loss_accumulator import LossAccumulator
from penstock.stage.branches import RowWatch
from penstock.stage.host_rng import HostRngState
from penstock.stage.loss import LossExtras, LossReduction
from penstock.stage.payload import Payload, flatten_values
from penstock.torch_compat import BatchNormBase, close_failed_checkpoints

_SPLIT_INPUT_PROBLEM = (
    "the results of the micro-batches are not those of the whole batch, and the model does not run "
    "on two micro-batches together. An input with as many rows as the batch by chance, such as a "
    "table or a mask, was split with it. Wrap it in penstock.NoChunk, or in penstock.Chunk if its "
    "rows are on another dim."
)

_MAX_GRADIENT_ROUNDING = 0.2
# Some layers compute in float32 whatever the dtype of the model is, such as the recurrences of
# transformers. A backward that mixes rows makes a difference far above their rounding.
_MIN_GRADIENT_ROUNDING = 1e-5
SMALL_MICROBATCH = 8  # the number of rows below which all of them are compared
_FLOATS = torch.float32, torch.float64
_RARE_LEVELS = 0.01, 0.99  # of uniform numbers
_MAX_ERRORS = 8  # that are tried
_MAX_RELATED = 2  # inputs with an id for each row


class _RandomResultsError(Exception):
    """The results depend on random numbers, so that they cannot be compared."""


class _PartsComparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        problem: How the results of the parts do not combine, or None.
        has_difference: Whether there is a difference, which may be rounding.
        uses_float32: Whether float32 is used inside, so that a difference may be hidden.
    """

    problem: str | None
    has_difference: bool = False
    uses_float32: bool = False


@dataclass(frozen=True)
class _RowsRun:
    """Parts of a batch to run, together and apart, and how.

    Attributes:
        ranges: The rows of the parts.
        whole: The forward of all of them, if it has run already.
        in_training: Whether they run in training.
        with_gradients: Whether to compare the gradients.
        seed_factor: By what the gradients of the losses or outputs are multiplied.
        follows_operations: Whether to find out if each row is computed by itself.
    """

    ranges: Sequence[Rows]
    whole: ReferenceForward | None
    in_training: bool
    with_gradients: bool
    seed_factor: float = 1.0
    follows_operations: bool = False

    @property
    def is_followed(self) -> bool:
        """Whether its operations are followed. Those in eval mode may be others."""
        return self.follows_operations and self.in_training


@dataclass(frozen=True)
class RowsCheck:
    """Compares the results of parts of a batch with those of all together.

    Attributes:
        reference: The unsplit model.
        inputs: The batch of the call, split.
        reduction: How the losses of a step are combined; None for `pipe(x)`.
        microbatch: The micro-batch from which rows are taken.
        parameter_names: The names of the parameters by their ids.
    """

    reference: Reference
    inputs: StageInputs
    reduction: LossReduction | None
    microbatch: int
    parameter_names: Mapping[int, str]
    # What forwards of other numbers of rows did, if the first one may have selected among rows.
    _watches: list[RowWatch] = field(default_factory=list)
    # Whether each comparison without a problem has shown something.
    _informative_comparisons: list[bool] = field(default_factory=list)
    # The operations of two numbers of rows, compared.
    _operations: list[RowOperations] = field(default_factory=list)
    # The parts that could not be compared, as their results depend on random numbers.
    _random_parts: list[Sequence[Rows]] = field(default_factory=list)

    # The dims of the outputs that the rows are on.
    _row_dims: RowDims = field(init=False)

    def __post_init__(self) -> None:
        """Begin with what is known of the outputs."""
        object.__setattr__(self, "_row_dims", RowDims(self.inputs.rows))

    @property
    def shows_nothing(self) -> bool:
        """Whether rows were compared, but never some that differ and count for the loss."""
        return bool(self._informative_comparisons) and not any(self._informative_comparisons)

    def compare_rows(self, whole: ReferenceForward | None = None) -> str | None:
        """Return how the results of a few rows do not combine to those of all of them, or None.

        `whole` is the forward of the micro-batch, if it has run.
        """
        if not self._has_parts():
            return None
        if whole is not None:
            self._row_dims.shapes = [tensor.shape for tensor in flatten_values(whole.values)[0]]
        with_gradients = (
            whole is not None
            and torch.is_grad_enabled()
            and (
                whole.has_own_gradients
                or bool(whole.own_gradients)
                or self.reference.has_hiding_weights
            )
        )
        choices = self._choose_rows(None if with_gradients else whole)
        problem = None
        for ranges, together in choices:
            # The forward that has run has no gradients.
            problem = self._try_modes(
                ranges,
                None if with_gradients else together,
                with_gradients,
                follows_operations=not self._operations,
            )
            if problem is not None:
                return problem
            # A table with an entry for each row may hold equal numbers so far.
            if whole is not None and not with_gradients and self._selects_rows(whole.row_watch):
                with_gradients = torch.is_grad_enabled()
                problem = self._try_modes(ranges, None, with_gradients)
            # A backward may clip only gradients that are larger than those of this step.
            if whole is not None and whole.has_own_backward and torch.is_grad_enabled():
                problem = problem or self._try_modes(ranges, None, True, self._find_large_seed())
                problem = problem or self._compare_scales(ranges, whole)
            if problem is not None:
                return problem
            problem = self._compare_rare_draws(ranges, with_gradients)
            if problem is not None:
                return problem
        # Others may differ, or have targets that the loss counts.
        start, stop = self.reference.rows.find_rows(self.microbatch)
        middle = (start + stop) // 2
        if self.shows_nothing and start < middle:
            problem = self._try_modes([(start, middle), (middle, stop)], None, with_gradients)
        if self.shows_nothing and problem is None:
            problem = self.compare_all_microbatches()
        return problem

    def _compare_rare_draws(self, ranges: Sequence[Rows], with_gradients: bool) -> str | None:
        """Compare rows that draw small and large numbers: a swap where `rand(n) < 0.15`."""
        problem = None
        for level in _RARE_LEVELS if self.reference.draws_uniform else ():
            self.reference.uniform_level = level
            problem = problem or self._try_modes(ranges, None, with_gradients)
        self.reference.uniform_level = 0.5
        return problem

    def _compare_scales(self, ranges: Sequence[Rows], whole: ReferenceForward) -> str | None:
        """Return whose gradient does not grow with that of the loss, if `loss_fn` returns weights.

        Their sum is known only at the end of a step, so backwards run with another scale, and
        gradients get their own afterwards. Targets are counted before.
        """
        has_weight = any(isinstance(v, LossExtras) and v.weight is not None for v in whole.values)
        if not has_weight or self.reduction is None or self.reduction.target_counter is not None:
            return None
        factor = self._find_large_seed()
        rows = self.inputs.rows._replace(counts=tuple([stop - start for start, stop in ranges]))
        try:
            results = [
                self._run_rows(
                    ranges,
                    True,
                    select_seeds(self._build_seeds(rows, [1.0], ranges), 0, ranges, scale),
                )
                for scale in (1.0, factor)
            ]
        except Exception as error:  # not every model runs on so few rows
            close_failed_checkpoints(error)
            return None
        small, large = [result.gradients for result in results]
        if results[0].writes:
            return describe_weighted_write(next(iter(results[0].writes)))
        tolerance = self._find_gradient_tolerance()
        largest = max((d.norm for d in large.values() if math.isfinite(d.norm)), default=0.0)
        zero = Digest(0.0, 0.0)
        for key, name in self.parameter_names.items():
            if large.get(key, zero).find_difference(
                small.get(key, zero), tolerance, factor, tolerance * largest
            ):
                return (
                    f"the gradient of '{name}' does not grow with that of the loss: a hook of a "
                    "tensor or the backward of an autograd.Function clips it, say. The loss has "
                    "weights, so gradients have their final scale only after the backwards. Use "
                    "reduction='sum' and divide by the weight of the whole batch in loss_fn, or "
                    "change the gradients after the step."
                )
        return None

    def _find_large_seed(self) -> float:
        """Return a factor for gradients that lets them grow, and not overflow."""
        return 64.0 if self.reference.has_low_precision else 1e4

    def _find_gradient_tolerance(self, is_strict: bool = False) -> float:
        rounding = self.reference.rounding
        if is_strict and self.reference.has_single_precision:
            rounding = find_split_tolerance(torch.float32, False, rounding, is_strict)
        return min(max(10 * rounding, _MIN_GRADIENT_ROUNDING), _MAX_GRADIENT_ROUNDING)

    def _selects_rows(self, watch: RowWatch) -> bool:
        """Return whether the forward of the micro-batch has selected rows, or by their positions.

        Forwards of other numbers of rows have selected from dims of other sizes then.
        """
        if not watch.may_select_rows:
            return False
        return not self._watches or not all(map(watch.selects_the_same, self._watches))

    def computes_each_row(self) -> bool:
        """Return whether the operations of a few rows are known to compute each row by itself."""
        if self.reference.has_scripted_code:  # it may go by the number of its rows
            return False
        return any(operations.problem is None for operations in self._operations)

    def compare_mixed_rows(self) -> str | None:
        """Return how rows depend on each other if an operation may mix them, or None.

        What is mixed may cancel in the results, and not in the gradients: `x + (a - 1) * mix(x)`
        where a is 1 at first. So the gradients of a few rows are compared, and the whole batch.
        """
        problem = self.compare_groups() or self.compare_all_microbatches()
        if problem is None and self._random_parts and self._operations:
            return (
                f"an operation may mix rows ({self._operations[-1].problem}), and random numbers "
                "keep the rows from being compared: those of random, numpy.random or a "
                "distribution that is not known here. Draw them with torch.rand or torch.randn, or "
                "outside of the model, and pass them as an input."
            )
        return problem

    def record_operations(self) -> RowOperations | None:
        """Return what is to record the operations of the micro-batch, if they are needed.

        That is if parts of it are compared with it. Otherwise the forwards of a few rows suffice.
        """
        start, stop = self.reference.rows.find_rows(self.microbatch)
        if 2 <= stop - start < SMALL_MICROBATCH and self.reference.rows.find_unlike_rows() is None:
            return RowOperations(stop - start)
        return None

    def has_branches(self, whole: ReferenceForward) -> bool:
        """Return whether the forward of the micro-batch did what may depend on the whole batch.

        It has read numbers of its rows, or numbers that the whole batch has others of; or it has
        selected among rows: from a dim with another size in the forwards of `compare_rows`.
        """
        watch = whole.row_watch
        if watch.reads_rows or watch.meets_rows or any(number is None for _, number in watch.reads):
            return True
        if self._selects_rows(watch) or self._catches_errors(watch.raising_count):
            return True
        if not watch.reads:
            return False
        try:
            with self.reference.isolate():
                batch = self.reference.take_batch(*self._list_microbatches())
                numbers = self.reference.read_numbers(batch, self.microbatch, len(watch.reads))
        except Exception as error:  # such as one of memory
            close_failed_checkpoints(error)
            return True
        return numbers != watch.reads

    def _catches_errors(self, raising_count: int) -> bool:
        """Return whether the forward goes on after an error of one of its operations.

        `raising_count` is how many calls there were of operations that raise for some numbers.
        """
        start, stop = self.reference.rows.find_rows(self.microbatch)
        for index in range(min(raising_count, _MAX_ERRORS)):
            with self.reference.isolate():
                batch = self.reference.take_batch((start, min(start + 2, stop)))
                if self.reference.catches_error(batch, self.microbatch, index):
                    return True
        return False

    def _choose_rows(
        self, whole: ReferenceForward | None
    ) -> Iterator[tuple[list[Rows], ReferenceForward | None]]:
        """Yield pairs of parts, and the forward of both together if it has run already.

        At most half of the rows of a micro-batch, or four of them, run for a pair.
        """
        start, stop = self.reference.rows.find_rows(self.microbatch)
        # Those of which a loss may count most differently, wherever they are.
        pair = self.reference.rows.find_unlike_rows()
        if stop - start < 2:
            pair = pair or (0, 1)
        if pair is not None:
            yield [(row, row + 1) for row in pair], None
        for related in self.reference.rows.find_related_rows()[:_MAX_RELATED]:
            yield [(row, row + 1) for row in related], None
        size = (stop - start) // 8
        if pair is None and stop - start < SMALL_MICROBATCH and self._can_reuse(whole):
            middle = (start + stop) // 2
            yield [(start, middle), (middle, stop)], whole
        elif pair is None or size > 1:
            # More rows show what two do not: which one is the largest, an expert that is full.
            size = max(size, 1)
            yield [(start, start + size), (start + size, start + 2 * size)], None

    def _can_reuse(self, whole: ReferenceForward | None) -> bool:
        if whole is None or self.reference.uses_batch_norm():
            return False
        return not (whole.has_drawn or whole.changed_state)

    def compare_groups(self) -> str | None:
        """Return how the results and gradients of two groups of rows do not combine, or None."""
        if not self._has_parts():
            return None
        ranges = []
        for start, stop in self._find_two_microbatches():
            ranges.append((start, start + max(1, (stop - start) // 2)))
        return self._try_modes(ranges, with_gradients=torch.is_grad_enabled())

    @torch.no_grad()
    def compare_all_microbatches(self) -> str | None:
        """Return how all micro-batches do not combine to the results of the batch, or None.

        A layer may mix rows only if there are more of them than a micro-batch has, and a branch or
        a selection may depend on all rows of the batch. If the batch is too large for the memory,
        two micro-batches are compared.
        """
        return self._try_modes(self._list_microbatches()) if self._has_parts() else None

    # ---- random numbers ------------------------------------------------------------------------

    @torch.no_grad()
    def compare_drawn(self, microbatch: int) -> str | None:
        """Return how rows depend on each other with the numbers that a micro-batch draws, or None.

        A layer may mix rows now and then: `if random.random() < 0.1`. Parts of several sizes draw
        different numbers, so as many rows run each time:

            first half of the micro-batch | second half     half of another one | its other half
            first half of the micro-batch | its other half  half of another one | second half

        Each half has the same place in both lines, and each row the same numbers. So the results of
        both lines are the same if no half depends on the one beside it.
        """
        groups = self._exchange_halves(microbatch)
        if not self._has_parts() or groups is None:
            return None
        problem: str | None = None
        precisions = [None, torch.float64]
        if self.reference.has_low_precision:
            precisions = [torch.float32, torch.float64]
        for dtype in precisions:
            try:
                with (
                    nullcontext() if dtype is None else self.reference.in_precision(dtype),
                    self.reference.isolate() if self.reference.is_stateless else nullcontext(),
                ):
                    problem = self._compare_exchanged(groups, microbatch)
            except Exception as error:  # the model insists on its dtypes, or on its rows
                close_failed_checkpoints(error)
                if dtype is not torch.float64:
                    return None
            if problem is None:
                return None
        return problem

    def _exchange_halves(self, microbatch: int) -> list[list[Rows]] | None:
        """Return the halves of two micro-batches, and the same with two of them exchanged."""
        start, stop = self.reference.rows.find_rows(microbatch)
        other, end = self.reference.rows.find_rows((microbatch + 1) % self.inputs.chunks)
        if stop - start < 2:  # the rows of two micro-batches, and of two others
            pieces = [self.reference.rows.find_rows(i) for i in range(self.inputs.chunks)]
            rows = [piece for piece in pieces if piece[1] - piece[0] == 1]
            if len(rows) < 4:
                return None
            first, second, *_ = rows
            third, fourth = rows[2:4]
        else:
            size = (stop - start) // 2
            first, second = (start, start + size), (start + size, stop)
            if end - other < stop - start - size:
                return None
            third, fourth = (other, other + size), (end - (stop - start - size), end)
        return [[first, second], [third, fourth], [first, fourth], [third, second]]

    def _compare_exchanged(self, groups: Sequence[Sequence[Rows]], microbatch: int) -> str | None:
        forwards = []
        modules = [m for m in self.reference.modules if isinstance(m, BatchNormBase)]
        for ranges in groups:
            with self.reference.isolate(), _in_eval_mode(modules):
                forwards.append(
                    self.reference.run_forward(
                        self.reference.take_batch(*ranges),
                        microbatch,
                        self.reference.rows.get_counted_targets(*ranges),
                        fixes_draws=True,
                        keeps_numbers=True,
                    )
                )
        numbers = [forward.numbers for forward in forwards]
        if numbers[0] is None or any(other != numbers[0] for other in numbers):
            return None  # how many it draws depends on the rows
        whole = forwards[0]
        if self.reduction is None:
            columns = zip(*[list_tensors(f.values[0]) for f in forwards], strict=True)
            sums = [(a + b, c + d) for a, b, c, d in columns if a.shape == c.shape == d.shape]
        else:
            if whole.adds_losses and find_weight(whole) is not None:
                return None  # auxiliary losses share the weight of the loss, and not the rows
            count = sum(stop - start for start, stop in groups[0])
            rows = self.inputs.rows._replace(counts=(count, count))
            pairs = forwards[:2], forwards[2:]
            sums = [(self._combine_losses(pairs[0], rows), self._combine_losses(pairs[1], rows))]
        for before, after in sums:
            if not before.dtype.is_floating_point or not bool(before.isfinite().all()):
                continue
            tolerance = find_split_tolerance(
                before.dtype, whole.uses_float32, self.reference.rounding
            )
            if not is_close(before, after, tolerance):
                return (
                    f"the layers go by random numbers, and with those of micro-batch {microbatch} "
                    "its rows depend on each other: with other rows beside them, the results of "
                    "the same rows are others. The unsplit model draws once, and for all rows of "
                    "the batch. Let each row be computed by itself, or use chunks=1."
                )
        return None

    def _list_microbatches(self) -> list[Rows]:
        return [self.reference.rows.find_rows(index) for index in range(self.inputs.chunks)]

    def _has_parts(self) -> bool:
        return self.inputs.chunks >= 2 and sum(self.inputs.rows.counts) >= 2

    def _find_two_microbatches(self) -> list[Rows]:
        """Return the rows of the audited micro-batch and of one beside it, in order."""
        first = min(self.microbatch, self.inputs.chunks - 2)
        return [self.reference.rows.find_rows(first), self.reference.rows.find_rows(first + 1)]

    def _try_modes(
        self,
        ranges: Sequence[Rows],
        whole: ReferenceForward | None = None,
        with_gradients: bool = False,
        seed_factor: float = 1.0,
        follows_operations: bool = False,
    ) -> str | None:
        """Compare parts, in the way of `_try_each_mode`.

        A model may draw from a generator of its own for each row. The rows of a part get the
        numbers that follow those of the part before then, as they do in a pipe.
        """
        arguments = ranges, whole, with_gradients, seed_factor, follows_operations
        problem = self._try_each_mode(*arguments)
        if problem is None or not self.reference.has_own_generators:
            return problem
        self.reference.chains_parts = True
        try:
            return self._try_each_mode(*arguments)
        finally:
            self.reference.chains_parts = False

    def _try_each_mode(
        self,
        ranges: Sequence[Rows],
        whole: ReferenceForward | None,
        with_gradients: bool,
        seed_factor: float,
        follows_operations: bool,
    ) -> str | None:
        """Compare parts in training, or else in eval mode, or else other parts."""
        # Not every model runs on so few rows, and a row by itself has no deviation, say. The
        # micro-batches of the pipe are large enough.
        attempts = (ranges, whole), (self._find_two_microbatches(), None)
        is_random = False
        for in_training in (True, False):
            is_random = False
            for parts, together in attempts:
                run = _RowsRun(
                    parts, together, in_training, with_gradients, seed_factor, follows_operations
                )
                try:
                    return self._try_precisions(run)
                except _RandomResultsError:
                    is_random = True
                    break
                except ShowsNothingError:
                    self._informative_comparisons.append(False)
                except Exception as error:
                    close_failed_checkpoints(error)
        if is_random:
            self._random_parts.append(ranges)
        if is_random or self._informative_comparisons[-1:] == [False]:
            return None
        # It runs on neither. Perhaps an input is no longer what the model expects once it is split.
        try:
            if self._try_precisions(_RowsRun(self._list_microbatches(), None, False, False)):
                return _SPLIT_INPUT_PROBLEM
        except Exception as error:
            close_failed_checkpoints(error)
        return None

    def _try_precisions(self, run: _RowsRun) -> str | None:
        """Return how the results of parts differ, computed in more precision if that is needed."""
        if self.reference.has_low_precision:
            try:
                with self.reference.in_precision(torch.float32):
                    return self._decide(replace(run, whole=None))
            except _RandomResultsError:
                raise
            except Exception as error:  # the model insists on its dtypes
                close_failed_checkpoints(error)
        return self._decide(run)

    def _decide(self, run: _RowsRun) -> str | None:
        """Return how the results of parts differ. In doubt, float64 tells it from rounding."""
        comparison = self._try_split(run)
        is_in_doubt = comparison.problem is not None or comparison.has_difference
        if is_in_doubt and (self.reference.has_single_precision or comparison.uses_float32):
            try:
                with self.reference.in_precision(torch.float64):
                    exact = self._try_split(replace(run, whole=None))
            except Exception as error:  # the model insists on its dtypes
                close_failed_checkpoints(error)
            else:
                if exact.problem is not None or not exact.uses_float32:
                    return exact.problem
        return comparison.problem

    def _try_split(self, run: _RowsRun) -> _PartsComparison:
        """Return how the results of some parts differ from those of all together."""
        ranges, whole = run.ranges, run.whole
        counts = tuple([stop - start for start, stop in ranges])
        part_rows = self.inputs.rows._replace(counts=counts)
        shares = self._find_shares(ranges, part_rows)
        part_seeds = (
            self._build_seeds(part_rows, shares, *[[r] for r in ranges])
            if run.with_gradients
            else None
        )
        whole_seeds = self._build_seeds(part_rows, [1.0], ranges) if run.with_gradients else None
        # In the mode of the forward that they are compared with: x.requires_grad depends on it.
        is_grad_enabled = run.with_gradients or (whole is not None and torch.is_grad_enabled())
        # Each forward begins with the same state. If there is none, they share an isolation.
        is_shared = self.reference.is_stateless
        with (
            torch.set_grad_enabled(is_grad_enabled),
            self.reference.isolate() if is_shared else nullcontext(),
        ):
            host_state = HostRngState()
            used: set[str] = set()  # generators of Python
            recorded = [] if whole is None or whole.operations is None else [whole.operations]

            def begin_again() -> None:
                # A layer that is skipped at random is skipped in each of the forwards, or in none.
                used.update(host_state.find_used())
                host_state.restore()

            def run_rows(rows: Sequence[Rows], seeds: Seeds | None) -> RowsResult:
                count = sum(stop - start for start, stop in rows)
                operations = self._build_operations(count, recorded) if run.is_followed else None
                if operations is not None:
                    begin_again()
                return self._run_rows(rows, run.in_training, seeds, operations)

            parts = []
            with self.reference.in_order() if self.reference.chains_parts else nullcontext():
                for index, rows in enumerate(ranges):
                    seeds = select_seeds(part_seeds, index, [rows], run.seed_factor)
                    parts.append(run_rows([rows], seeds))
            if whole is not None:
                together = RowsResult(whole, {})
            else:
                seeds = select_seeds(whole_seeds, 0, ranges, run.seed_factor)
                together = run_rows(ranges, seeds)
            if run.is_followed:
                begin_again()
                self._compare_three_rows(recorded)
            results = *parts, together
            used.update(host_state.find_used())
            if used or any(result.forward.has_drawn for result in results):
                raise _RandomResultsError
            forwards = [part.forward for part in parts]
            losses = self._measure_losses(forwards, together.forward, part_rows)

            def find_problem(is_strict: bool) -> str | None:
                problem = self._find_problem(
                    forwards, together.forward, losses, part_rows, shares, is_strict
                )
                if problem is not None or part_seeds is None or whole_seeds is None:
                    return problem
                if any(find_weight(part) == 0 for part in forwards):
                    raise ShowsNothingError  # the scale of gradients is another one
                scale = whole_seeds.read_scale() / part_seeds.read_scale()
                tolerance = self._find_gradient_tolerance(is_strict)
                if not math.isfinite(scale) or together.forward.adds_losses:
                    return None
                return compare_gradients(parts, together, self.parameter_names, scale, tolerance)

            problem = find_problem(is_strict=False)
            if problem is not None:
                return _PartsComparison(problem)
            counted = self._find_counted(ranges, forwards, shares)
            self._informative_comparisons.append(self.reference.rows.have_different_inputs(counted))
            has_difference = find_problem(is_strict=True) is not None or self._has_other_outputs(
                forwards, together.forward
            )
            return _PartsComparison(None, has_difference, together.forward.uses_float32)

    def _find_counted(
        self, ranges: Sequence[Rows], parts: Sequence[ReferenceForward], shares: Sequence[float]
    ) -> list[Rows]:
        """Return the parts that the loss depends on. A loss of 0 may have counted no targets."""
        if self.reduction is None:
            shares = shares or [1.0] * len(ranges)
            return [rows for rows, share in zip(ranges, shares, strict=True) if share]
        return [
            rows
            for rows, part in zip(ranges, parts, strict=True)
            if find_weight(part) != 0 and float(find_loss(part)) != 0
        ]

    def _build_operations(
        self, row_count: int, recorded: list[RowOperations]
    ) -> RowOperations | None:
        """Return what compares the operations of a forward with recorded ones, or records them.

        None: the operations of other rows have been compared.
        """
        if self._operations or any(o.row_count == row_count for o in recorded):
            return None
        operations = RowOperations(row_count, recorded[0] if recorded else None)
        recorded.append(operations)
        return operations

    def _compare_three_rows(self, recorded: Sequence[RowOperations]) -> None:
        """Compare the operations of two rows with those of three, if those of one row are others.

        Some models run other operations for a single row: they need not expand positions to it.
        """
        pair = next((operations for operations in recorded if operations.row_count == 2), None)
        is_known = any(o.is_comparison and o.problem is None for o in recorded)
        if pair is None or is_known or sum(self.inputs.rows.counts) < 3:
            return
        rows = [(row, row + 1) for row in range(3)]
        try:
            self._run_rows(rows, True, None, RowOperations(3, pair))
        except Exception as error:  # not every model runs on any rows
            close_failed_checkpoints(error)

    def _run_rows(
        self,
        ranges: Sequence[Rows],
        in_training: bool,
        seeds: Seeds | None,
        operations: RowOperations | None = None,
    ) -> RowsResult:
        modules = self.reference.modules
        switched = [m for m in modules if not in_training or isinstance(m, BatchNormBase)]
        with self.reference.isolate(), _in_eval_mode(switched):
            batch = self.reference.take_batch(*ranges)
            counted = self.reference.rows.get_counted_targets(*ranges)
            forward = self.reference.run_forward(
                batch,
                self.microbatch,
                counted,
                fixes_draws=in_training,
                keeps_output=True,
                operations=operations,
            )
            if operations is not None and operations.is_comparison:
                operations.finish()
                self._operations.append(operations)
            if self.reference.watches_rows:
                count = sum(stop - start for start, stop in ranges)
                if count != self.inputs.rows.counts[self.microbatch]:
                    self._watches.append(forward.row_watch)
            pairs = seeds(forward.values) if seeds is not None else ()
            has_hooks = bool(pairs) and self.reference.may_have_own_gradients
            state = self.reference.digest_backward_state() if has_hooks else {}
            gradients = self.reference.run_backward(pairs) if pairs else {}
            writes = self.reference.find_backward_writes(state)
            for key, digest in forward.own_gradients.items():
                gradients[key] = digest.plus(gradients.get(key))
        input_ids = frozenset(id(tensor) for tensor in list_tensors(batch))
        return RowsResult(forward, gradients, input_ids, writes)

    # ---- losses and outputs --------------------------------------------------------------------

    def _find_shares(self, ranges: Sequence[Rows], rows: MicrobatchRows) -> Sequence[float]:
        """Return the weights of parts in the model's own loss in `pipe(x)`."""
        if not self.inputs.loss_shares:
            return ()
        if self.inputs.counted_labels is None:
            return [1.0] * len(ranges) if self._adds_losses() else rows.fractions()
        labels, count = self.inputs.counted_labels
        counts = [float(count(self.reference.rows.take_labels(labels, [part]))) for part in ranges]
        return [part_count / (sum(counts) or 1.0) for part_count in counts]

    def _find_problem(
        self,
        parts: Sequence[ReferenceForward],
        whole: ReferenceForward,
        losses: Losses | None,
        rows: MicrobatchRows,
        shares: Sequence[float],
        is_strict: bool,
    ) -> str | None:
        """Return how the combined results of the parts differ from that of all together.

        Raise a `ShowsNothingError` if the parts alone are not finite, so that they show nothing.
        """

        def find_tolerance(dtype: torch.dtype) -> float:
            rounding = self.reference.rounding
            return find_split_tolerance(dtype, whole.uses_float32, rounding, is_strict)

        if self.reduction is None:
            outputs = [part.values[0] for part in parts]
            merged = replace(self.inputs, rows=rows, loss_shares=shares).merge_outputs(outputs)
            return compare_outputs(outputs, whole.values[0], merged, self.inputs, find_tolerance)
        problem = None
        if losses is not None:
            problem = compare_losses(losses, find_tolerance(losses.dtype))
        step_outputs = [find_step_output(part) for part in (*parts, whole)]
        if problem is not None or not all(step_outputs):
            return problem
        *outputs, expected = [output for (output,) in step_outputs]
        merged = replace(self.inputs, rows=rows).merge_step_outputs(
            outputs, self._combine_losses(parts, rows)
        )
        return compare_outputs(outputs, expected, merged, self.inputs, find_tolerance)

    def _has_other_outputs(
        self, parts: Sequence[ReferenceForward], whole: ReferenceForward
    ) -> bool:
        """Return whether the rows of the output of a model in a step depend on each other.

        It may be by rounding, and the loss need not use them. A loss shows less than its rows.
        """
        if self.reduction is None or any(forward.output is None for forward in (*parts, whole)):
            return False
        columns = zip(*(list_tensors(forward.output) for forward in (*parts, whole)), strict=False)
        for *pieces, expected in columns:
            rows = [len(piece) if piece.dim() else 0 for piece in pieces]
            if not expected.dim() or len(expected) != sum(rows) or expected.dtype not in _FLOATS:
                continue
            if any(piece.shape[1:] != expected.shape[1:] for piece in pieces):
                continue
            tolerance = find_split_tolerance(
                expected.dtype, whole.uses_float32, self.reference.rounding, is_strict=True
            )
            if not is_close(torch.cat(pieces), expected, tolerance):
                return True
        return False

    def _adds_losses(self) -> bool:
        """Return whether `pipe(x)` adds the losses of micro-batches."""
        return all(share == 1 for share in self.inputs.loss_shares)

    def _measure_losses(
        self, parts: Sequence[ReferenceForward], whole: ReferenceForward, rows: MicrobatchRows
    ) -> Losses | None:
        """Return the losses of a step for parts and for all together, or None."""
        if self.reduction is None:
            return None
        is_counted = self.reduction.target_counter is not None
        if whole.adds_losses and not is_counted and find_weight(whole) is not None:
            return None  # auxiliary losses share the weight of the loss, and not the rows
        losses = [float(self._combine_losses([part], MicrobatchRows((1,)))) for part in parts]
        total = self._combine_losses([whole], MicrobatchRows((1,)))
        combined = float(self._combine_losses(parts, rows))
        # A part whose targets count nothing has a mean of nan, and a weight of 0.
        counted = [x for x, part in zip(losses, parts, strict=True) if find_weight(part) != 0]
        if not all(math.isfinite(x) for x in (float(total), combined, *counted)):
            raise ShowsNothingError
        return Losses(losses, combined, float(total), total.dtype)

    def _combine_losses(self, parts: Sequence[ReferenceForward], rows: MicrobatchRows) -> Tensor:
        assert self.reduction is not None
        accumulator = LossAccumulator(self.reduction, rows.fractions(), [()] * len(parts))
        for index, part in enumerate(parts):
            tensors, layout = flatten_values(part.values)
            accumulator.compute_output_gradients(index, Payload(tuple(tensors), layout))
        return accumulator.compute_total_loss()

    # ---- gradients -----------------------------------------------------------------------------

    def _build_seeds(
        self, rows: MicrobatchRows, shares: Sequence[float], *parts: Sequence[Rows]
    ) -> LossSeeds | OutputSeeds:
        """Return the gradients of parts. For one part, `shares` are those of the whole."""
        if self.reduction is None:
            return OutputSeeds(shares or rows.fractions(), self._row_dims)
        fractions = [1.0] if len(shares) == 1 else rows.fractions()
        targets = [self.reference.rows.take_counted_targets(*ranges) for ranges in parts]
        return LossSeeds(LossAccumulator(self.reduction, fractions, targets))


@contextmanager
def _in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    flags = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
