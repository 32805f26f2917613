"""What goes from stage to stage: tensors, and how the values they came from are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import KindError


class Layout(NamedTuple):
    """A value with its tensors taken out: `holes[i]` tells which tensor goes where leaf i was."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # with None where a tensor was
    holes: tuple[int | None, ...]


@dataclass(slots=True)
class Parcel:
    """One message's content. Tensors are detached; None where a gradient was not needed.

    `needs` says which tensors want a gradient back; `shared` which have the same memory as a
    tensor in another parcel, so that nobody may change them in place.
    """

    tensors: tuple[Tensor | None, ...]
    layout: Layout | None = None  # None: one tensor, or gradients, which need no putting together
    needs: tuple[bool, ...] = ()
    shared: frozenset[int] = frozenset()

    def moved(self, move: Callable[[Tensor], Tensor]) -> Parcel:
        """The same, with each tensor moved."""
        tensors = tuple(None if t is None else move(t) for t in self.tensors)
        return Parcel(tensors, self.layout, self.needs, self.shared)


def versions(tensors: Iterable[Tensor | None]) -> list[int]:
    """How often each has been changed in place; those made in inference mode do not count."""
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def taken_apart(values: tuple[Any, ...]) -> tuple[list[Tensor], Layout | None]:
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
    return tensors, Layout(spec, tuple(leaves), tuple(holes))


def put_together(tensors: Sequence[Tensor], layout: Layout | None) -> tuple[Any, ...]:
    """The values again."""
    if layout is None:
        return (tensors[0],)
    leaves = [
        leaf if hole is None else tensors[hole]
        for leaf, hole in zip(layout.leaves, layout.holes, strict=True)
    ]
    values: tuple[Any, ...] = pytree.tree_unflatten(leaves, layout.spec)
    return values


def check_open(layout: Layout) -> None:
    """No tensor is hidden in an object that cannot be taken apart: it would get no gradient."""
    for leaf in layout.leaves:
        hidden = [
            name for name, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, Tensor)
        ]
        if hidden:
            raise KindError(
                f"a {type(leaf).__name__} goes from one stage to another with a tensor in its "
                f"'{hidden[0]}', where no gradient can pass: return tuples, lists or dicts, or "
                "register the class with torch.utils._pytree.register_pytree_node"
            )
