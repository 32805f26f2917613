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
from penstock.partition.forward.tables import get_function_name
from penstock.partition.forward.trace import NodeKind, TracedValue, TraceNode
from penstock.partition.forward.trees import iter_hidden_tensors

_DISTRIBUTIONS_PATH = str(Path(torch.distributions.__file__).parent)
_ALL_TRUE_FUNCTIONS = (getattr(torch, "_is_all_true", None), torch.all, Tensor.all)


def build_host_read_error(
    node: TraceNode, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> CutError:
    """The host wanted to look at numbers that only one stage has."""
    makers = (s for v in node.inputs for s in _iter_ancestor_nodes(v, nodes, values))
    unit = next((str(s.func) for s in makers if s.kind is NodeKind.UNIT), "")
    whose = f"unit '{unit}'" if unit else "a parameter"
    return CutError(
        f"at {node.location}, {get_function_name(node.func)} looks at the numbers of a value that follows "
        f"from {whose}, which only one stage has, and what the forward does next, or the "
        "shape of it, depends on them: compute it inside a unit, on tensors (torch.where), or "
        "put all that depends on it into one unit with units="
    )


def is_persistent_update(
    buffer_name: str, value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> bool:
    """Is a buffer's new value more than what was kept for the next time, and can be made again?"""
    if not values[value].input_only or values[value].buffer_name == buffer_name:
        return True
    before = _iter_ancestor_nodes(value, nodes, values)
    return any(values[taken].buffer_name == buffer_name for step in before for taken in step.inputs)


def is_distribution_check(value: TracedValue, nodes: Sequence[TraceNode]) -> bool:
    """Does the host look whether all is well, as distributions do with what they are given?"""
    if value.producer is None or nodes[value.producer].func not in _ALL_TRUE_FUNCTIONS:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS_PATH):
            return True
        frame = frame.f_back
    return False


def _iter_ancestor_nodes(
    value: int, nodes: Sequence[TraceNode], values: Sequence[TracedValue]
) -> Iterator[TraceNode]:
    """All that it follows from, the last ones first."""
    waiting, seen = [values[value].producer], set[int | None]({None})
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        yield nodes[at]
        waiting += [values[taken].producer for taken in nodes[at].inputs]


def check_no_hidden_fakes(leaf: Any, description: str, location: str) -> None:
    """Tensors of units are not in objects that cannot be taken apart."""
    if isinstance(leaf, Tensor | nn.Module):
        return
    for tensor in iter_hidden_tensors(leaf):
        if isinstance(tensor, FakeTensor):
            raise CutError(
                f"at {location}, {description} a {type(leaf).__name__} with a tensor of a unit inside, where "
                "it cannot be followed: pass tuples, lists, dicts or dataclasses, or register the "
                "class with torch.utils._pytree.register_pytree_node; for a cache, use_cache=False"
            )


def check_no_transform(node: TraceNode) -> None:
    """What `vmap` computes is one step; of other transforms, units may be a part."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise CutError(
            f"at {node.location}, the forward computes inside a transform of torch.func (grad, jvp, "
            "...), which cannot be followed between units: put all that is transformed into one "
            "unit with units="
        )


def check_not_nested(tensor: Tensor, location: str) -> None:
    """Can it be told how a tensor looks, and be sent as it is?"""
    if tensor.is_nested:
        raise CutError(
            f"at {location}, the forward makes a nested tensor, which cannot be followed between "
            "units: pad it, or put all that computes with it into one unit with units="
        )
