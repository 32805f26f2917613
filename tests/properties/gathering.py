"""A case over processes: what each rank has, put together as the unsplit model has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed, nn

from tests.distributed.ranks import ranks
from tests.properties.cases import Case
from tests.properties.oracle import Numbers
from tests.properties.running import piped, trained

INPUT, ITS_GRADIENT = "the input ", "the gradient of the input "


def gathered(case: Case) -> list[Numbers]:
    """Of each step, and of eval mode: as if there were one process."""
    of_ranks = ranks(case.ranks).run(on_rank, case)
    names, first = first_names(case.model.build()), case.first_rank
    ordered = [of_ranks[first], *of_ranks[:first], *of_ranks[first + 1 :]]
    return [as_one(each, names) for each in zip(*ordered, strict=True)]


def on_rank(case: Case) -> list[Numbers]:
    """What one of the processes does."""
    pipe = piped(case, case.model.build().train(case.training), processes=True)
    given_here = case.data == "all" or distributed.get_rank() == case.first_rank
    return list(trained(case, pipe, given_here))


def first_names(model: nn.Module) -> dict[str, str]:
    """The name under which the model lists each parameter and buffer: of tied ones, the first."""
    found: dict[str, str] = {}
    for listed in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in listed(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def as_one(of_ranks: Sequence[Numbers], names: Mapping[str, str]) -> Numbers:
    """Whoever has a number has the same; gradients of inputs are parts of a sum.

    The rank of the first stage comes first: what its layers do to an input is what the model does.
    """
    found: Numbers = {}
    for numbers in of_ranks:
        for told, value in numbers.items():
            what, space, name = told.rpartition(" ")
            told = what + space + names.get(name, name)
            if told.startswith(ITS_GRADIENT):
                found[told] = plus(found.get(told), value)
            elif told not in found:
                found[told] = value
            elif not told.startswith(INPUT):  # each rank has its own
                assert same(found[told], value), f"{told} is another on another rank"
    return found


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """To the last bit, also if it is no number."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Their sum; None is nothing."""
    return (a if b is None else b) if a is None or b is None else a + b
