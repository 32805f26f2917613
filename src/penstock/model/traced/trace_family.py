"""Families: traces of micro-batches that are alike but for their sizes.

A model is traced in full for the first two sizes of a family. Then its units run on symbolic sizes
(`unit_shapes`), and micro-batches of other sizes are traced without them:

    size    in the first step that has it
    1st     a full trace
    2nd     a full trace, and a run of the units on symbols
    others  a trace without units: milliseconds. A full one if a condition of the units does not
            hold, or if the forward around them is not as before

Sizes that come with one batch, such as the smaller last micro-batch, count as one size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from operator import mul
from typing import Any

import torch

from penstock.model.traced.trace import NodeKind, Trace, TraceNode
from penstock.model.traced.unit_shapes import UnitShapes

_log = logging.getLogger("penstock")

MAX_REFERENCES = 4  # traces that the shapes of units are learned from
MAX_ATTEMPTS = 3  # at learning them: with other batch sizes, other lengths, both
TOLERATED_TRACES = 4  # full traces of one family before the user is told


@dataclass
class TraceFamily:
    """The traces of micro-batches that are alike but for their sizes, and what was learned.

    Attributes:
        references: Full traces, each with the number of its call and the digest of its kind.
        shapes: The shapes of what units return, once they are learned.
        kind: The digest of the trace with which they were learned first. Traces without units
            share it, as far as they differ in sizes only.
        attempts: How often that was tried.
        input_shapes: The shapes of the inputs in the full traces.
    """

    references: list[tuple[int, Trace, str]] = field(default_factory=list)
    shapes: UnitShapes | None = None
    kind: str = ""
    attempts: int = 0
    input_shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    def add_reference(self, call: int, trace: Trace, kind: str) -> None:
        """Remember a full trace of a call. The first ones stay."""
        if len(self.references) < MAX_REFERENCES:
            self.references.append((call, trace, kind))
        self.input_shapes.append(list_input_shapes(trace))

    def learn(self, learn_shapes: Callable[[Sequence[Trace]], UnitShapes | None]) -> None:
        """Learn the shapes of what units return from the references, if these are enough."""
        calls = {call for call, _, _ in self.references}
        if len(calls) < 2 or self.attempts >= MAX_ATTEMPTS:
            return
        self.attempts += 1
        shapes = learn_shapes([trace for _, trace, _ in self.references])
        if shapes is not None:
            self.shapes, self.kind = shapes, self.kind or self.references[-1][2]

    def find_kind(self, trace: Trace) -> str:
        """Return the digest of the kind of a trace without units, or "" if it is of a new kind.

        It is of the kind of the references if it differs from them in sizes only: each number in
        the forward is that of the references, or follows the size of an input as it does in them.
        """
        traces = [reference for _, reference, _ in self.references]
        return self.kind if differ_in_sizes_only([*traces, trace]) else ""

    def describe_changes(self, names: Sequence[str]) -> str:
        """Return which sizes of the inputs keep changing, and what to pad them to."""
        lines = []
        for index, name in enumerate(names):
            for dim, sizes in enumerate(zip(*(s[index] for s in self.input_shapes), strict=True)):
                multiple = find_padding(min(sizes), max(sizes))
                # A few sizes need no padding: each has one dry run.
                if len(set(sizes)) > 2 and multiple > 1:
                    lines.append(
                        f"dim {dim} of {name} (now {min(sizes)} to {max(sizes)}) to a multiple of "
                        f"{multiple}"
                    )
        return " and ".join(lines)


def find_padding(least: int, largest: int) -> int:
    """Return the smallest power of two with at most four multiples between two sizes.

    >>> find_padding(17, 93)
    32
    """
    multiple = 1
    while -(-largest // multiple) - -(-least // multiple) >= 4:
        multiple *= 2
    return multiple


def warn_of_changes(family: TraceFamily, names: Sequence[str]) -> None:
    """Tell the user once that each new size costs a dry run, and what to pad to."""
    padding = family.describe_changes(names)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if len(family.input_shapes) != TOLERATED_TRACES or not padding or not is_first:
        return
    _log.warning(
        "penstock: the sizes of the batches keep changing, and each new size costs a dry run of "
        "the whole model, because what the model does depends on its sizes. Pad %s.",
        padding,
    )


def list_input_shapes(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the inputs."""
    return tuple(trace.values[value].tensor_spec.shape for value in trace.inputs)


# ---- traces that differ in sizes only ------------------------------------------------------------


def differ_in_sizes_only(traces: Sequence[Trace]) -> bool:
    """Return whether traces have the same nodes, and numbers that follow the sizes of the inputs.

    The last trace is compared with those before it.
    """
    if len({len(trace.nodes) for trace in traces}) > 1:
        return False
    shapes = [list_input_shapes(trace) for trace in traces]
    # The sizes of the inputs that change, each as a column over the traces; and their products: an
    # operation may take rows and positions as one dim.
    columns = [
        column for inputs in zip(*shapes, strict=True) for column in zip(*inputs, strict=True)
    ]
    changing = sorted({column for column in columns if len(set(column)) > 1})
    products = [tuple(map(mul, *pair)) for pair in combinations(changing, 2)]
    sizes = {*changing, *products}
    return all(
        _is_same_but_numbers(nodes)
        and all(_follows_sizes(numbers, sizes) for numbers in _zip_numbers(nodes))
        for nodes in zip(*(trace.nodes for trace in traces), strict=True)
    )


def _is_same_but_numbers(nodes: Sequence[TraceNode]) -> bool:
    first_node = nodes[0]
    return all(
        node.kind is first_node.kind
        and node.func == first_node.func
        and node.inputs == first_node.inputs
        and node.mutations == first_node.mutations
        and (node.output is None) == (first_node.output is None)
        and (node.input_only, node.is_guard) == (first_node.input_only, first_node.is_guard)
        and (node.has_side_effect, node.uses_rng)
        == (first_node.has_side_effect, first_node.uses_rng)
        and (node.output is None or node.output.value_indices == first_node.output.value_indices)  # type: ignore[union-attr]
        for node in nodes
    )


def _zip_numbers(nodes: Sequence[TraceNode]) -> list[tuple[Any, ...]]:
    """Return the plain arguments and what the host has read, each as a column over the traces."""
    literals = [node.literals.split() for node in nodes]
    if len(set(map(len, literals))) > 1:
        return [tuple(literals)]
    columns: list[tuple[Any, ...]] = list(zip(*literals, strict=True))
    if nodes[0].kind is NodeKind.HOST_READ:
        columns.append(tuple([repr(node.recorded_result) for node in nodes]))
    return columns


def _follows_sizes(column: tuple[Any, ...], sizes: set[tuple[int, ...]]) -> bool:
    """Return whether a number is the same in all traces, or a linear function of a size."""
    if len(set(map(str, column))) == 1:
        return True
    try:
        numbers = [int(number) for number in column]
    except (TypeError, ValueError):
        return False
    return any(_is_linear(numbers, size) for size in sizes)


def _is_linear(numbers: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether numbers follow from sizes as the first two different sizes say."""
    other = next((i for i, size in enumerate(sizes[:-1]) if size != sizes[0]), None)
    if other is None:
        return False
    rise, run = numbers[other] - numbers[0], sizes[other] - sizes[0]
    return all(
        (number - numbers[0]) * run == rise * (size - sizes[0])
        for number, size in zip(numbers, sizes, strict=True)
    )
