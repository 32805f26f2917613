"""Run a case over processes, and merge the numbers of the ranks into those of one process."""

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
    """Return the numbers of each step and of eval mode, as if there were one process."""
    of_ranks = ranks(case.ranks).run(on_rank, case)
    names, first = first_names(case.model.build()), case.first_rank
    ordered = [of_ranks[first], *of_ranks[:first], *of_ranks[first + 1 :]]
    return [as_one(each, names) for each in zip(*ordered, strict=True)]


def on_rank(case: Case) -> list[Numbers]:
    """Run the case in one of the processes."""
    pipe = piped(case, case.model.build().train(case.training), processes=True)
    given_here = case.data == "all" or distributed.get_rank() == case.first_rank
    return list(trained(case, pipe, given_here))


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer to the first name of the same tensor."""
    found: dict[str, str] = {}
    for listed in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, tensor in listed(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def as_one(of_ranks: Sequence[Numbers], names: Mapping[str, str]) -> Numbers:
    """Merge the numbers of all ranks, which must agree; gradients of inputs are summed.

    The rank of the first stage comes first: only its layers change an input as the model does.
    """
    found: Numbers = {}
    for numbers in of_ranks:
        for key, value in numbers.items():
            what, space, name = key.rpartition(" ")
            key = what + space + names.get(name, name)
            if key.startswith(ITS_GRADIENT):
                found[key] = plus(found.get(key), value)
            elif key not in found:
                found[key] = value
            elif not key.startswith(INPUT):  # each rank has its own copy
                assert same(found[key], value), f"{key} is another on another rank"
    return found


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are bitwise equal, counting NaN as equal to NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum, where None counts as zero."""
    return (a if b is None else b) if a is None or b is None else a + b
