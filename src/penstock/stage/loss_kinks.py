"""Functions with a kink, above the means of a loss.

A function that is linear on both sides of a kink is a mean over rows only if all micro-batches are
on the same side: free bits (`kl.mean(0).clamp(min=b).sum()`), flooding (`(l - b).abs()`), the
larger one of two losses (`torch.maximum(l1, l2)`). The sides are read from the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from penstock.torch_compat import is_number, read_saved_tensor

_MAX_DEPTH = 8  # operations between a term and the means over rows below it
_MAX_NODES = 24
# The names of nodes that take several paths to the means: each of them is followed.
_FOLLOWED = frozenset(
    f"{name}Backward" for name in ("Add", "Sub", "Stack", "Cat", "Maximum", "Minimum", "Where")
)

# Layers. What is below them has rows: a mean over dim 0 is one over time, say.
_LAYERS = frozenset(
    f"{name}Backward" for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution")
)
# `x[i]` and `for row in x`.
_ROW_SELECTIONS = frozenset(("SelectBackward", "UnbindBackward"))
GRAPH_ENTRY = "_GraphEntryBackward"  # a value of an earlier stage, which is like a leaf

Side = Callable[[Any, Tensor], Tensor | None]


def _is_positive(node: Any, value: Tensor) -> Tensor:
    return (value > 0).to(value.dtype)


def _is_within_limits(node: Any, value: Tensor) -> Tensor:
    """Return 0 where a number is below the limits of a clamp, 1 within, and 2 above."""
    side = torch.ones_like(value)
    for limit_name, is_outside, outside in (("min", torch.lt, 0.0), ("max", torch.gt, 2.0)):
        for name in (limit_name, f"{limit_name}_val"):
            limit = getattr(node, f"_saved_{name}", None)
            if limit is not None:
                side = side.masked_fill(is_outside(value, limit), outside)
    return side


def _is_above_threshold(node: Any, value: Tensor) -> Tensor:
    threshold: float = node._saved_threshold
    return (value > threshold).to(value.dtype)


def _is_shrunk(node: Any, value: Tensor) -> Tensor:
    threshold: float = node._saved_lambd
    return (value.abs() > threshold) * value.sign()


def _is_larger(node: Any, value: Tensor) -> Tensor | None:
    """Return 1 where the first input is larger than the second one, and 0 where it is smaller."""
    other = read_saved_tensor(node, "other")
    return None if other is None else ((value - other).sign() + 1) / 2


def _is_smaller(node: Any, value: Tensor) -> Tensor | None:
    side = _is_larger(node, value)
    return None if side is None else 1 - side


def _is_result(node: Any, value: Tensor) -> Tensor | None:
    """Return 1 for the entry that the maximum of all entries is."""
    result = read_saved_tensor(node, "result")
    if result is None or result.dim():
        return None
    return (value == result).to(value.dtype)


# By the name of a node, the tensor that it has saved, and a function from it to the side of the
# kink. For a function of one number, the side is its slope; above the upper limit of a clamp it is
# 2. For a function of two numbers, it is the slope in the first one; the slope in the second is 1
# minus that.
_SIDES: dict[str, tuple[str, Side]] = {
    "AbsBackward": ("self", lambda _, value: value.sign()),
    "ReluBackward": ("result", _is_positive),
    "ThresholdBackward": ("self", _is_above_threshold),
    "ClampBackward": ("self", _is_within_limits),
    "ClampMinBackward": ("self", _is_within_limits),
    "ClampMaxBackward": ("self", _is_within_limits),
    "HardtanhBackward": ("self", _is_within_limits),
    "MaximumBackward": ("self", _is_larger),
    "FmaxBackward": ("self", _is_larger),
    "MinimumBackward": ("self", _is_smaller),
    "FminBackward": ("self", _is_smaller),
    "WhereBackward": ("condition", lambda _, value: value.float()),
    "MaskedFillBackward": ("mask", lambda _, value: 1 - value.float()),
}
# The same, but the slope is another number.
_OTHER_SIDES: dict[str, tuple[str, Side]] = {
    "LeakyReluBackward": ("self", _is_positive),
    "PreluKernelBackward": ("self", _is_positive),
    "SoftshrinkBackward": ("self", _is_shrunk),
    "HardshrinkBackward": ("self", _is_shrunk),
    "MaxBackward": ("self", _is_result),
    "MinBackward": ("self", _is_result),
    "AmaxBackward": ("self", _is_result),
    "AminBackward": ("self", _is_result),
    "MedianBackward": ("self", _is_result),
}
# Those that select entries by their size, along a dim.
_SELECTING = frozenset(
    f"{name}Backward" for name in ("Max", "Min", "Median", "Kthvalue", "Sort", "Topk", "Cummax")
)


def has_kink(name: str) -> bool:
    """Return whether a node, by its name without the number, is a function with a kink."""
    return name in _SIDES or name in _OTHER_SIDES or name in _SELECTING


def find_side(node: Any, name: str) -> Tensor | None:
    """Return numbers that tell on which side of a kink a function was, or None."""
    saved_name, compute = _SIDES.get(name) or _OTHER_SIDES.get(name, ("", _is_result))
    value = read_saved_tensor(node, saved_name) if saved_name else None
    if value is not None:
        return compute(node, value)
    indices = read_saved_tensor(node, "indices") if name in _SELECTING else None
    return None if indices is None else indices.float()


def find_slopes(side: Tensor | None, name: str, input_count: int) -> list[Tensor | float]:
    """Return the slopes of a function in its inputs, at one number; nan if they are not known."""
    if side is None and name in ("WhereBackward", "MaskedFillBackward"):
        return [1.0] * input_count  # it selects some of the terms
    if side is None or side.numel() != 1 or name not in _SIDES:
        return [torch.nan] * input_count
    slope = side.reshape(()).masked_fill(side.reshape(()) > 1, 0.0)  # above the limit of a clamp
    slopes: list[Tensor | float] = [slope, 1 - slope, *[torch.nan] * input_count]
    return slopes[:input_count]


class _Entries(Enum):
    """The source of the numbers of a node of a loss."""

    CONSTANTS = auto()  # parameters, and tensors without a gradient
    ONE_ROW = auto()  # in a loop over rows: `[relu(1 - x[i].norm()) for i in range(n)]`
    TOTALS = auto()  # means over rows
    ROWS = auto()  # each number from one row, or not known


def is_of_one_row(node: Any) -> bool:
    """Return whether the numbers of a node are computed from one row, in a loop over rows."""
    return _KinkFinder().visit(node, _MAX_DEPTH) is _Entries.ONE_ROW


def find_sides_below(node: Any) -> list[Tensor]:
    """Return the sides of each kink between a term of a loss and the means over rows below it."""
    finder = _KinkFinder()
    finder.visit(node, _MAX_DEPTH)
    return finder.sides


class _KinkFinder:
    """Looks for kinks of means over rows, from a node of a loss down.

    Attributes:
        sides: The sides of the kinks that were found.
    """

    def __init__(self) -> None:
        self.sides: list[Tensor] = []
        self._node_count = 0

    def visit(self, node: Any, depth: int) -> _Entries:
        """Return what the numbers of a node are computed from. Note the kinks of means."""
        if node is None:
            return _Entries.CONSTANTS
        name = node.name().rstrip("0123456789")
        if not node.next_functions or name == GRAPH_ENTRY:
            # What an earlier stage has sent is a leaf, too, and has rows.
            is_parameter = isinstance(getattr(node, "variable", None), nn.Parameter)
            return _Entries.CONSTANTS if is_parameter else _Entries.ROWS
        self._node_count += 1
        if name in ("MeanBackward", "SumBackward"):
            if not _takes_first_dim(node):
                return _Entries.ROWS
            # Columns may have kinks of their own: `x.mean(0).clamp(min=b).sum()`.
            below = self.visit(node.next_functions[0][0], depth - 1) if depth else _Entries.ROWS
            # A mean counts as one over rows. In `h[-1].mean()`, dim 0 may be time.
            is_of_row = name == "SumBackward" and below is _Entries.ONE_ROW
            return _Entries.ONE_ROW if is_of_row else _Entries.TOTALS
        if getattr(node, "_saved_reduction", 0):
            return _Entries.TOTALS
        if name in _LAYERS or not depth or self._node_count > _MAX_NODES:
            return _Entries.ROWS
        entries = _Entries.CONSTANTS
        for function, index in node.next_functions:
            below = self.visit(function, depth - 1)
            if below is _Entries.ROWS and is_number(function, index):
                below = _Entries.TOTALS
            entries = max(entries, below, key=lambda entry: entry.value)
            if entries is _Entries.ROWS and name not in _FOLLOWED:
                break
        if entries is _Entries.TOTALS and has_kink(name):
            side = find_side(node, name)
            if side is not None:
                self.sides.append(side)
        if entries is _Entries.ROWS and name in _ROW_SELECTIONS and _takes_first_dim(node):
            return _Entries.ONE_ROW
        return entries


# ---- gates ---------------------------------------------------------------------------------------
#
# A function with a kink above the numbers of rows may be closed at first, as a hinge without
# violations is. Then it hides what is done with its numbers: a sum over rows, a table of pairs.

_GATES = frozenset(_SIDES) - {"AbsBackward"}  # which lets all numbers through
_MAX_GATES = 8


def find_gates_below(node: Any) -> list[Tensor]:
    """Return for each gate below a term of a loss which part of its numbers is let through."""
    gates: list[Tensor] = []
    visited: set[Any] = set()
    todo = [node]
    while todo and len(visited) < _MAX_NODES and len(gates) < _MAX_GATES:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        name = node.name().rstrip("0123456789")
        if name in _LAYERS:
            continue
        if name in _GATES:
            side = find_side(node, name)
            if side is not None and side.numel():
                gates.append((side == 1).double().mean())
        todo += [function for function, _ in node.next_functions]
    return gates


def _takes_first_dim(node: Any) -> bool:
    """Return whether a sum, a mean or a selection is one over dim 0.

    A negative dim is an unsigned number.
    """
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return True
    signed = [
        dim - 2**64 if dim >= 2**63 else dim for dim in ((dims,) if isinstance(dims, int) else dims)
    ]
    return 0 in signed or -len(getattr(node, "_saved_self_sym_sizes", ())) in signed
