"""The record that an auditor keeps of one kind of call, and the values in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.runtime.audit.plain_inputs import PlainInputs
from penstock.runtime.audit.state_check import ModuleModes
from penstock.stage.branches import BranchRecord
from penstock.stage.loss_terms import TermSizes
from penstock.torch_compat import (
    pytree,
)

if TYPE_CHECKING:
    pass


# By stage. None: it has no graph yet, or needs none.
GraphDescriptions = tuple[int | None, ...]


class AuditChoice(NamedTuple):
    """The choice of what is audited in a call.

    Attributes:
        kind: The kind of the call.
        compares_groups: Whether groups of rows are compared together and apart, which takes the
            time of a few micro-batches.
    """

    kind: Any
    compares_groups: bool


class OutputStructure(NamedTuple):
    """The structure of an output, in which what has rows is one tensor, and all else a list.

    Attributes:
        spec: The structure.
        paths: The paths of the tensors.
    """

    spec: pytree.TreeSpec
    paths: set[str]


@dataclass
class KindRecord:
    """The record of what was found out about one kind of call.

    Attributes:
        terms: The terms of the loss in the audited calls. None: it has to be audited.
        branches: What is known of its branches, if it has some.
        row_counts: The numbers of rows of the audited calls, if its forward goes by them.
        loss_counts: Those of calls whose loss was compared with that of the whole batch.
        repeat_at: The call in which weights that were 0 have moved.
        is_repeated: Whether it was or will be audited once more then.
        graphs: Descriptions of the graphs of the stages in calls that were found right, with
            whether a backward of `pipe(x)` has run.
        has_equal_rows: Whether all rows were equal so far, which shows nothing of mixed rows.
        mixing_count: How many calls there were, if its layers are not known to compute each row
            by itself.
        constant_inputs: The inputs whose rows were all equal so far, as those of a mask of ones
            are. They may be no rows at all: a table with as many entries as the batch has rows.
        tested_ids: See `note_state_by_id`.
        plain_inputs: The contents of the inputs that are no tensors.
        structures: The structures of the outputs of `pipe(x)`.
        draws_numbers: Whether its forward draws single random numbers, by which it may go.
        draws_host_random: Whether it draws from `random` or `numpy.random`.
        drawn_ways: The ways of micro-batches whose rows were compared with the numbers that these
            drew: descriptions of their graphs, or what the watch of branches knows of them.
        drawn_count: How many others there were.
    """

    terms: TermSizes | None = None
    branches: BranchRecord | None = None
    row_counts: set[tuple[int, ...]] | None = None
    loss_counts: set[tuple[int, ...]] = field(default_factory=set)
    repeat_at: int | None = None
    is_repeated: bool = False
    graphs: set[tuple[bool, GraphDescriptions]] = field(default_factory=set)
    has_equal_rows: bool = False
    mixing_count: int | None = None
    constant_inputs: list[int] | None = None
    tested_ids: set[int] | None = None
    plain_inputs: PlainInputs = field(default_factory=PlainInputs)
    structures: list[OutputStructure] = field(default_factory=list)
    draws_numbers: bool = False
    draws_host_random: bool = False
    drawn_ways: set[GraphDescriptions] = field(default_factory=set)
    drawn_count: int = 0

    @property
    def is_audited(self) -> bool:
        """Whether calls of this kind were found right."""
        return self.terms is not None


@dataclass
class ModeHistory:
    """The modes of the modules in audited calls.

    Attributes:
        training: Those of a call with gradients.
        evaluation: Those of a call without gradients, or in eval mode, that has left something
            with which training was not compared yet.
        changes: The names of what it has left.
        has_difference: Whether training computes with that.
    """

    training: ModuleModes | None = None
    evaluation: ModuleModes | None = None
    changes: Sequence[str] = ()
    has_difference: bool = False
