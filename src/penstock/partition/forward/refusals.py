"""What cannot be followed, said so that somebody can find it and do something about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.errors import CutError
from penstock.partition.forward.tables import called
from penstock.partition.forward.trace import Kind, Step, Value
from penstock.partition.forward.trees import hidden_in


def looked(step: Step, steps: Sequence[Step], values: Sequence[Value]) -> CutError:
    """The host wanted to look at numbers that only one stage has."""
    unit = _unit_before([values[at].maker for at in step.takes], steps, values)
    whose = f"unit '{unit}'" if unit else "a parameter"
    return CutError(
        f"at {step.where}, {called(step.func)} looks at the numbers of a value that follows "
        f"from {whose}, which only one stage has, and what the forward does next, or the "
        "shape of it, depends on them: compute it inside a unit, on tensors (torch.where), or "
        "put all that depends on it into one unit with units="
    )


def _unit_before(
    makers: Sequence[int | None], steps: Sequence[Step], values: Sequence[Value]
) -> str:
    waiting, seen = list(makers), set[int | None]({None})
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        if steps[at].kind is Kind.UNIT:
            return str(steps[at].func)
        waiting += [values[value].maker for value in steps[at].takes]
    return ""


def check_open(leaf: Any, what: str, where: str) -> None:
    """No tensor of a unit is in an object that cannot be taken apart."""
    if isinstance(leaf, Tensor | nn.Module):
        return
    for tensor in hidden_in(leaf):
        if isinstance(tensor, FakeTensor):
            raise CutError(
                f"at {where}, {what} a {type(leaf).__name__} with a tensor of a unit inside, where "
                "it cannot be followed: pass tuples, lists, dicts or dataclasses, or register the "
                "class with torch.utils._pytree.register_pytree_node; for a cache, use_cache=False"
            )
