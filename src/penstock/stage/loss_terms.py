"""The terms of a loss: what each of its means counts.

A loss is a sum of terms, and a term is a sum over some numbers, times a coefficient:

    F.cross_entropy(y, t) + 0.1 * w.square().sum()

        term             coefficient
        cross-entropy    1 / the targets that are not ignored, times their class weights
        sum              0.1

A pipe averages the losses of micro-batches by their rows. That is the loss of the batch if the
coefficient of each term, times the rows, is the same for all micro-batches. It is not if a mean
counts other things than rows: targets that are not ignored, or the ones in a mask. (A term that
does not depend on the batch, such as a penalty on weights, has one coefficient in all of them.)

The coefficients are read from the autograd graph, from the loss down to where its terms are summed.
That is a handful of nodes, wherever the loss was computed: in `loss_fn`, in the forward of a traced
model, or inside a layer. Without a graph, only calls of a cross-entropy are seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.device.accelerator import is_captured
from penstock.errors import RunError
from penstock.stage.loss_kinks import (
    GRAPH_ENTRY,
    find_gates_below,
    find_side,
    find_sides_below,
    find_slopes,
    has_kink,
    is_of_one_row,
)
from penstock.stage.recompute import multiply_by_fixed_vector
from penstock.torch_compat import (
    get_input_numel,
    read_saved_number,
    without_dispatch_modes,
)

_MAX_NODES = 256  # a loss may be a loop over thousands of rows
_MAX_SIZES = 16
_ROUNDING = 1e-6
# A number of an earlier stage, or a parameter. Nothing is known of how it was computed. A
# micro-batch of another size may be cut elsewhere, and have the terms themselves in its place.
_RECEIVED = "received"
_MEAN = 1  # the code of reduction="mean" in autograd nodes

# Nodes of functions that add terms up, or reshape one. The sign of a term does not matter.
_SUMS_OF_TERMS = frozenset(
    f"{name}Backward"
    for name in (
        *("Add", "Sub", "Neg", "Clone", "Alias", "ToCopy", "View", "UnsafeView", "ReshapeAlias"),
        *("Squeeze", "Unsqueeze", "Expand", "Stack", "NanToNum"),
    )
)


class Gates(Enum):
    """Which gates of a loss are watched: see loss_kinks.py."""

    NONE = auto()
    UNPROVEN = auto()  # not those below a mean
    ALL = auto()  # rows may be mixed below a mean


class LossTerm(NamedTuple):
    """One term of the loss of a micro-batch.

    Attributes:
        name: What sums it up, as PyTorch calls the node: "MeanBackward".
        factors: The numbers that it is multiplied by.
        divisors: The numbers that it is divided by, that of its mean included.
        is_sum: Whether it is known to be a sum, or a mean. Otherwise it is any other function.
    """

    name: str
    factors: tuple[Tensor | float, ...] = ()
    divisors: tuple[Tensor | float, ...] = ()
    is_sum: bool = True


def is_on_device(number: Tensor) -> bool:
    """Return whether the host would wait for a device if it read a number."""
    return not number.is_cpu


class Coefficient(NamedTuple):
    """The coefficient of a term, and the number that its mean counts."""

    name: str
    value: float
    counted: float
    is_sum: bool


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss of one micro-batch.

    Attributes:
        terms: The terms.
        gates: For each gate that may hide what a term is, which part of its numbers is let through.
    """

    terms: Sequence[LossTerm]
    gates: Sequence[Tensor] = ()

    def list_device_numbers(self) -> list[Tensor]:
        """Return the numbers that cannot be read without waiting for a device."""
        numbers = [gate for gate in self.gates if is_on_device(gate)]
        for term in self.terms:  # loops, as this is for each micro-batch
            for number in term.factors + term.divisors:
                if isinstance(number, Tensor) and is_on_device(number):
                    numbers.append(number)
        return numbers

    def compute_coefficients(self, device_numbers: Iterator[float]) -> _Coefficients:
        """Return the coefficients of all terms, given what `list_device_numbers` returned."""

        def read(number: Tensor | float) -> float:
            if not isinstance(number, Tensor):
                return float(number)
            if is_on_device(number):
                return next(device_numbers)
            # Under a dispatch mode, such as a profiler, a number that came from Python is none.
            with without_dispatch_modes():
                return float(number)

        gates = [*map(read, self.gates)]
        coefficients = []
        for name, factors, divisors, is_sum in self.terms:
            factor = math.prod(map(read, factors))
            values = list(map(read, divisors))
            divisor = math.prod(values)
            value = factor / divisor if divisor else math.inf
            counted = values[-1] if values else 1.0
            coefficients.append(Coefficient(name, value, counted, is_sum))
        return _Coefficients(coefficients, gates)


class _Coefficients(NamedTuple):
    """The coefficients of the terms of a micro-batch, and the parts that its gates let through."""

    coefficients: list[Coefficient]
    gates: list[float]


def find_loss_terms(loss: Tensor, gates: Gates = Gates.NONE) -> LossTerms:
    """Return the terms of a loss that has a graph, and of those gates that are to be watched."""
    terms: list[LossTerm] = []
    gated: list[Any] = []  # the nodes of terms below which gates are looked for
    todo: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [(loss.grad_fn, (), ())]
    for _ in range(_MAX_NODES):
        if not todo:
            break
        node, factors, divisors = todo.pop()
        if node is None:
            continue
        name = node.name().rstrip("0123456789")
        inputs = [function for function, _ in node.next_functions]
        if name in _SUMS_OF_TERMS:
            todo += [(function, factors, divisors) for function in reversed(inputs)]
        elif name == "MulBackward":
            # If both sides have a gradient, each is the factor of the other.
            for function, other_side in zip(inputs, ("other", "self"), strict=False):
                if function is not None:
                    number = read_saved_number(node, other_side)
                    todo.append((function, (*factors, number), divisors))
        elif name == "DivBackward":
            todo.append((inputs[0], factors, (*divisors, read_saved_number(node, "other"))))
        elif name in ("MeanBackward", "SumBackward") or hasattr(node, "_saved_reduction"):
            if name.startswith("NllLoss") and node._saved_reduction == _MEAN:
                divisors = *divisors, read_saved_number(node, "total_weight")
            elif name == "MeanBackward" or getattr(node, "_saved_reduction", 0) == _MEAN:
                divisors = *divisors, get_input_numel(node)
            terms += map(_build_kink_term, find_sides_below(inputs[0]))
            if gates is Gates.ALL or name == "SumBackward":
                gated.append(inputs[0])
            # The losses of several heads: `torch.stack(losses).mean()`.
            if inputs[0] is not None and inputs[0].name() == "StackBackward0":
                todo.append((inputs[0], factors, divisors))
            else:
                terms.append(LossTerm(name, factors, divisors))
        elif has_kink(name):
            side = find_side(node, name)
            if side is None or side.numel() != 1:
                terms += map(_build_kink_term, find_sides_below(node))
            elif not is_of_one_row(node):
                terms.append(_build_kink_term(side))
            slopes = find_slopes(side, name, len(inputs))
            if all(isinstance(slope, float) and math.isnan(slope) for slope in slopes):
                terms.append(LossTerm(name, factors, divisors, is_sum=False))
            todo += [
                (function, (*factors, slope), divisors)
                for function, slope in zip(inputs, slopes, strict=True)
                if function is not None
            ]
        elif not inputs or name == GRAPH_ENTRY:
            terms.append(LossTerm(_RECEIVED))
        else:
            for function in inputs:
                terms += map(_build_kink_term, find_sides_below(function))
            terms.append(LossTerm(name, factors, divisors, is_sum=False))
            gated.append(node)
    if gates is Gates.NONE:
        return LossTerms(terms)
    return LossTerms(terms, [gate for node in gated for gate in find_gates_below(node)])


def find_added_terms(losses: Sequence[Tensor]) -> LossTerms | None:
    """Return the terms of the losses that layers have added, or None if they have no graph."""
    terms: list[LossTerm] = []
    for loss in losses:
        if loss.grad_fn is not None:
            terms += find_loss_terms(loss).terms
    return LossTerms(terms) if terms else None


_KINK = "kink"


def _build_kink_term(side: Tensor) -> LossTerm:
    """Return a term whose coefficient depends on which numbers are on which side of a kink."""
    return LossTerm(_KINK, (multiply_by_fixed_vector(side.reshape(-1).float()),))


# ---- comparison ----------------------------------------------------------------------------------


# The size of the k-th term of a name, by name and k. It tells losses with other terms apart.
TermSizes = dict[tuple[str, int], float]
# The key of a loss with a term that is no sum, such as a root or a variance of all rows. It has no
# coefficient that shows whether it is a mean over rows.
OTHER_TERMS = "other", 0
# The keys of the gates of a loss: the parts of the numbers that they let through, and hold back.
_OPEN, _CLOSED = "open gate", "closed gate"


def is_gate(key: tuple[str, int]) -> bool:
    """Return whether a key of `TermSizes` is that of a gate, which may hide what a term is."""
    return key[0] in (_OPEN, _CLOSED)


def has_half_open_gate(sizes: TermSizes) -> bool:
    """Return whether a gate lets some of its numbers through, and holds others back."""
    gates = (index for name, index in sizes if name == _OPEN)
    return any(sizes[_OPEN, index] and sizes[_CLOSED, index] for index in gates)


class TermComparison:
    """Compares the terms of the losses of micro-batches, which are averaged by rows.

    Numbers on a GPU are read once, at the end of the step.
    """

    def __init__(
        self,
        row_shares: Sequence[float],
        keeps_outputs: bool = False,
        row_counts: Sequence[int] = (),
        knows_row_counts: bool = False,
        gates: Gates = Gates.NONE,
    ) -> None:
        self.gates = gates  # those of the model's own loss that are watched
        self._row_shares, self.row_counts = row_shares, row_counts
        # Whether a loss that goes by the number of its rows was compared for these numbers.
        self._knows_row_counts = knows_row_counts
        self.has_new_row_counts = False
        self.function_names: Sequence[str] = ()  # the functions that the loss function has called
        self._other_totals: Sequence[Tensor] = ()  # see `note_functions`
        # Whether outputs and targets are kept, so that the loss of the whole batch can be computed.
        # A proof that the loss is a mean over rows sets it to False.
        self.keeps_outputs = keeps_outputs
        self.kept_outputs: dict[int, tuple[Any, ...]] = {}  # by micro-batch
        self._latest_output: tuple[Any, ...] | None = None
        # Whether the numbers are known after the replay of a captured step only.
        self.is_deferred = False
        self._latest: LossTerms | None = None
        self._waiting: dict[int, LossTerms] = {}  # by micro-batch
        self._coefficients: dict[int, list[Coefficient]] = {}
        self._gate_sizes: TermSizes = {}
        self._device_numbers: Tensor | None = None
        # Of the losses that layers add, by stage and micro-batch.
        self.added_terms: dict[tuple[int, int], LossTerms] = {}
        self._added: list[TermComparison] = []
        self._stage: int | None = None  # the stage whose layers add these losses

    def note(self, terms: LossTerms | None, output: tuple[Any, ...] | None = None) -> None:
        """Note the terms of the micro-batch that is running, for which `add` is called next.

        `output` are the arguments of its loss function, if they are kept.
        """
        self._latest, self._latest_output = terms, output

    def note_functions(
        self, names: Sequence[str], goes_by_row_count: bool, other_totals: Sequence[Tensor]
    ) -> None:
        """Note the functions that the loss function calls for one micro-batch.

        Args:
            names: Their names.
            goes_by_row_count: Whether it may call others for another number of rows.
            other_totals: Means and sums over rows of which it is not known whether they are
                divided by the number of rows as they have to be.
        """
        self.function_names, self._other_totals = names, other_totals
        needs_counts = goes_by_row_count or bool(other_totals)
        self.has_new_row_counts = needs_counts and not self._knows_row_counts

    def shows_totals(self, least_size: float) -> bool:
        """Return whether each of the other totals is large enough to show how it is divided."""
        return all(float(total.abs()) > least_size for total in self._other_totals)

    def add(self, microbatch: int) -> None:
        """Compare the terms of a micro-batch with those of others, at once if that is possible."""
        terms, self._latest = self._latest, None
        if self._latest_output is not None:
            self.kept_outputs[microbatch], self._latest_output = self._latest_output, None
        if terms is None:  # the loss has a weight, or is a sum
            return
        if terms.list_device_numbers():
            self._waiting[microbatch] = terms
        else:
            self._compare(microbatch, terms.compute_coefficients(iter(())))

    def finish(self, has_weights: bool = False) -> TermSizes:
        """Compare the terms of added losses, and those whose numbers are on a GPU, at the end.

        Added losses share the weights that a loss function returns, and are not compared then.

        This waits for the GPU. It cannot do so in a capture, so `compare_device_numbers` has to be
        called after each replay then.

        Returns:
            The largest coefficient of each term.
        """
        if self.added_terms and not has_weights:
            self._added = self._compare_added_terms()
        numbers = [n for terms in self._waiting.values() for n in terms.list_device_numbers()]
        if numbers:
            self._device_numbers = torch.stack(
                [n.to(numbers[0].device, torch.float64).reshape(()) for n in numbers]
            )
            self.is_deferred = is_captured(numbers[0].device)
        self.is_deferred |= any(comparison.is_deferred for comparison in self._added)
        return {} if self.is_deferred else self.compare_device_numbers()

    def _compare_added_terms(self) -> list[TermComparison]:
        """Compare the losses that the layers of each stage add. Return the comparisons."""
        comparisons: dict[int, TermComparison] = {}
        for (stage, microbatch), terms in sorted(self.added_terms.items(), key=itemgetter(0)):
            comparison = comparisons.setdefault(stage, TermComparison(self._row_shares))
            comparison._stage = stage
            comparison.note(terms)
            comparison.add(microbatch)
        for comparison in comparisons.values():
            comparison.finish()
        return list(comparisons.values())

    def compare_device_numbers(self) -> TermSizes:
        """Compare the terms whose numbers are on a GPU. Return the sizes of all terms."""
        for comparison in self._added:
            comparison.compare_device_numbers()
        if self._device_numbers is not None:
            numbers = iter(self._device_numbers.tolist())
            for microbatch, terms in self._waiting.items():
                self._compare(microbatch, terms.compute_coefficients(numbers))
        sizes: TermSizes = dict(self._gate_sizes)
        for coefficients in self._coefficients.values():
            counts: dict[str, int] = {}  # in every step, and a `Counter` is slow to make
            for name, value, _, is_sum in coefficients[:_MAX_SIZES]:
                if not is_sum:
                    sizes[OTHER_TERMS] = 1.0
                key = name, counts.get(name, 0)
                counts[name] = key[1] + 1
                if not math.isnan(value):
                    sizes[key] = max(abs(value), sizes.get(key, 0.0))
        return sizes

    def measure_cross_entropies(self, row_count: float) -> float:
        """Return a number that depends on how many targets for each row cross-entropies count.

        It is the same for replicas that count the same. `row_count` is the rows of this one.
        """
        for microbatch, coefficients in self._coefficients.items():
            rows = self._row_shares[microbatch] * row_count
            values = [c.value * rows for c in coefficients if c.name.startswith("NllLoss")]
            return math.fsum(value * math.cos(index) for index, value in enumerate(values))
        return 0.0

    def check_replicas(self, numbers: Sequence[float]) -> None:
        """Raise if `measure_cross_entropies` has returned different numbers on the replicas."""
        for index, number in enumerate(numbers):
            if number != numbers[0] and not math.isclose(number, numbers[0], rel_tol=_ROUNDING):
                raise _build_error(
                    "a cross-entropy in it averages over more targets for each row in replica 0 "
                    f"than in replica {index}, or over fewer"
                )

    def _note_gates(self, gates: Sequence[float]) -> None:
        for index, part in enumerate(gates):
            for key, size in (((_OPEN, index), part), ((_CLOSED, index), 1 - part)):
                self._gate_sizes[key] = max(size, self._gate_sizes.get(key, 0.0))

    def _compare(self, microbatch: int, computed: _Coefficients) -> None:
        coefficients, gates = computed
        self._note_gates(gates)
        self._coefficients[microbatch] = coefficients
        first_microbatch = next(iter(self._coefficients))
        if microbatch == first_microbatch:
            return
        expected = self._coefficients[first_microbatch]
        rows = self._row_shares[microbatch] / self._row_shares[first_microbatch]
        if len(expected) != len(coefficients):
            if any(term.name == _RECEIVED for term in (*expected, *coefficients)):
                return
            # A loop over rows has a term for each of them.
            counts, other_counts = Counter(expected), Counter(coefficients)
            are_as_many = len(counts) == len(other_counts) and all(
                other_counts[actual] in (counts[term], round(counts[term] * rows))
                for term, actual in zip(counts, other_counts, strict=True)
            )
            if not are_as_many:
                raise self._build_error(
                    f"it has {len(expected)} terms in micro-batch {first_microbatch} and "
                    f"{len(coefficients)} in micro-batch {microbatch}"
                )
            expected, coefficients = list(counts), list(other_counts)
        for term, actual in zip(expected, coefficients, strict=True):
            if not _is_mean_over_rows(term, actual, rows):
                raise self._build_error(
                    _describe_difference(term, actual, first_microbatch, microbatch)
                )

    def _build_error(self, problem: str) -> RunError:
        if self._stage is None:
            return _build_error(problem)
        return RunError(
            f"the losses that stage {self._stage} adds with penstock.add_loss are not means over "
            f"the rows of a micro-batch: {problem}. So their mean by rows is not that of the "
            "batch. Divide by the number of rows, or by a number that is the same for all "
            "micro-batches, or use chunks=1."
        )


def _build_error(problem: str) -> RunError:
    return RunError(
        f"the loss is not a mean over the rows of a micro-batch: {problem}. So the mean of the "
        "micro-batches by their rows is not the loss of the batch. Pass nn.CrossEntropyLoss("
        "...) or functools.partial(cross_entropy, ...) itself as loss_fn, which Penstock "
        "weighs by its targets; or return penstock.Weighted(loss, weight), whose weight is "
        "what the mean counts, or the number of rows if all of them count the same; or sum, "
        "divide by a number of the whole batch, and set reduction='sum'."
    )


def _describe_difference(one: Coefficient, other: Coefficient, first: int, second: int) -> str:
    if one.name != other.name:
        return (
            f"it contains {one.name} in micro-batch {first} and {other.name} in its place in "
            f"micro-batch {second}"
        )
    if one.name == _KINK:
        return (
            "it is a function with a kink of a mean over rows, such as a clamp, and micro-batches "
            f"{first} and {second} are on different sides of it"
        )
    if one.name.startswith("NllLoss") and one.counted != other.counted:
        return (
            f"a cross-entropy in it averages over targets that count {one.counted:g} in "
            f"micro-batch {first} and {other.counted:g} in micro-batch {second}"
        )
    return (
        f"a sum in it ({one.name}) is divided by {1 / one.value if one.value else 0:g} in "
        f"micro-batch {first} and by {1 / other.value if other.value else 0:g} in micro-batch "
        f"{second}"
    )


def _is_mean_over_rows(one: Coefficient, other: Coefficient, rows: float) -> bool:
    """Return whether two coefficients are those of a mean over rows, or of something constant.

    `rows` says how many times the rows of the one the other one has.
    """
    if _RECEIVED in (one.name, other.name):
        return True
    if one.name != other.name:
        return False
    # The factor of a learned number, such as `scale.exp()`, is a loss, and that may be any number.
    if not one.is_sum:
        return True
    if math.isnan(one.value + other.value) or one.value == other.value * rows:
        return True
    distance = abs(one.value - other.value * rows)
    if not one.name.startswith("NllLoss"):  # a cross-entropy does depend on the batch
        distance = min(distance, abs(one.value - other.value))
    return distance <= _ROUNDING * abs(one.value) < math.inf
