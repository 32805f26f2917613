"""What goes from stage to stage: tensors, and how the values they came from are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import PenstockTypeError


class PayloadLayout(NamedTuple):
    """A value with its tensors taken out: `holes[i]` tells which tensor goes where leaf i was."""

    tree_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # with None where a tensor was
    tensor_indices: tuple[int | None, ...]


@dataclass(slots=True)
class Payload:
    """One message's content. Tensors are detached; None where a gradient was not needed.

    `needs` says which tensors want a gradient back; `shared` which have the same memory as a
    tensor in another parcel, so that nobody may change them in place.
    """

    tensors: tuple[Tensor | None, ...]
    layout: PayloadLayout | None = (
        None  # None: one tensor, or gradients, which need no putting together
    )
    needs_grad: tuple[bool, ...] = ()
    shared: frozenset[int] = frozenset()

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Payload:
        """The same, with each tensor moved."""
        tensors = tuple(None if t is None else function(t) for t in self.tensors)
        return Payload(tensors, self.layout, self.needs_grad, self.shared)


def tensor_versions(tensors: Iterable[Tensor | None]) -> list[int]:
    """How often each has been changed in place; those made in inference mode do not count."""
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def flatten_values(values: tuple[Any, ...]) -> tuple[list[Tensor], PayloadLayout | None]:
    """The different tensors in the values, in order, and what is left."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return [values[0]], None
    leaves, spec = pytree.tree_flatten(values)
    tensors: list[Tensor] = []
    seen: dict[int, int] = {}
    holes: list[int | None] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in seen:
                seen[id(leaf)] = len(tensors)
                tensors.append(leaf)
            holes.append(seen[id(leaf)])
            leaves[at] = None
        else:
            holes.append(None)
    return tensors, PayloadLayout(spec, tuple(leaves), tuple(holes))


def unflatten_values(tensors: Sequence[Tensor], layout: PayloadLayout | None) -> tuple[Any, ...]:
    """The values again."""
    if layout is None:
        return (tensors[0],)
    leaves = [
        leaf if hole is None else tensors[hole]
        for leaf, hole in zip(layout.leaves, layout.tensor_indices, strict=True)
    ]
    values: tuple[Any, ...] = pytree.tree_unflatten(leaves, layout.tree_spec)
    return values


def check_no_hidden_tensors(layout: PayloadLayout) -> None:
    """No tensor is hidden in an object that cannot be taken apart: it would get no gradient."""
    for leaf in layout.leaves:
        hidden = [
            name for name, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, Tensor)
        ]
        if hidden:
            raise PenstockTypeError(
                f"a {type(leaf).__name__} goes from one stage to another with a tensor in its "
                f"'{hidden[0]}', where no gradient can pass: return tuples, lists or dicts, or "
                "register the class with torch.utils._pytree.register_pytree_node"
            )
