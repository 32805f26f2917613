"""What a value came of, and what that means: for the host, and where it cannot be followed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.errors import CutError
from penstock.partition.forward.tables import called
from penstock.partition.forward.trace import Kind, Step, Value
from penstock.partition.forward.trees import hidden_in

_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_ALL_TRUE = (getattr(torch, "_is_all_true", None), torch.all, Tensor.all)


def looked(step: Step, steps: Sequence[Step], values: Sequence[Value]) -> CutError:
    """The host wanted to look at numbers that only one stage has."""
    makers = (s for v in step.takes for s in _steps_before(v, steps, values))
    unit = next((str(s.func) for s in makers if s.kind is Kind.UNIT), "")
    whose = f"unit '{unit}'" if unit else "a parameter"
    return CutError(
        f"at {step.where}, {called(step.func)} looks at the numbers of a value that follows "
        f"from {whose}, which only one stage has, and what the forward does next, or the "
        "shape of it, depends on them: compute it inside a unit, on tensors (torch.where), or "
        "put all that depends on it into one unit with units="
    )


def goes_on(buffer: str, value: int, steps: Sequence[Step], values: Sequence[Value]) -> bool:
    """Is a buffer's new value more than what was kept for the next time, and can be made again?"""
    if not values[value].free or values[value].buffer == buffer:
        return True
    before = _steps_before(value, steps, values)
    return any(values[taken].buffer == buffer for step in before for taken in step.takes)


def is_check(value: Value, steps: Sequence[Step]) -> bool:
    """Does the host look whether all is well, as distributions do with what they are given?"""
    if value.maker is None or steps[value.maker].func not in _ALL_TRUE:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def _steps_before(value: int, steps: Sequence[Step], values: Sequence[Value]) -> Iterator[Step]:
    """All that it follows from, the last ones first."""
    waiting, seen = [values[value].maker], set[int | None]({None})
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        yield steps[at]
        waiting += [values[taken].maker for taken in steps[at].takes]


def check_open(leaf: Any, what: str, where: str) -> None:
    """Tensors of units are not in objects that cannot be taken apart."""
    if isinstance(leaf, Tensor | nn.Module):
        return
    for tensor in hidden_in(leaf):
        if isinstance(tensor, FakeTensor):
            raise CutError(
                f"at {where}, {what} a {type(leaf).__name__} with a tensor of a unit inside, where "
                "it cannot be followed: pass tuples, lists, dicts or dataclasses, or register the "
                "class with torch.utils._pytree.register_pytree_node; for a cache, use_cache=False"
            )


def check_transforms(step: Step) -> None:
    """What `vmap` computes is one step; of other transforms, units may be a part."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CutError(
            f"at {step.where}, the forward computes inside a transform of torch.func (grad, jvp, "
            "...), which cannot be followed between units: put all that is transformed into one "
            "unit with units="
        )


def check_plain(tensor: Tensor, where: str) -> None:
    """Can it be told how a tensor looks, and be sent as it is?"""
    if tensor.is_nested:
        raise CutError(
            f"at {where}, the forward makes a nested tensor, which cannot be followed between "
            "units: pad it, or put all that computes with it into one unit with units="
        )
