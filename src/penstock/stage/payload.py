"""What goes from stage to stage: tensors, and how the values they came from are put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.data_parallel.dtensor import to_local
from penstock.errors import PenstockTypeError, RunError
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import pytree


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


# -------------------------------------------------------------------------------------------------
# Tensors that several read, and which nobody may change in place.
#
# In one process a message is the sender's own memory. A layer that works in place on what it gets is
# right only if nobody else reads that: not another stage, not another micro-batch, not the caller.
# -------------------------------------------------------------------------------------------------


def _storage_address(tensor: Tensor) -> int:
    """Where it is; of a sparse tensor, where its values are; of one in parts, where its part is."""
    tensor = to_local(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return tensor.untyped_storage().data_ptr()


def storage_addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    """Where they are."""
    return {_storage_address(t) for t in tensors if t is not None and t.numel()}


def mark_shared(payloads: Collection[Payload]) -> None:
    """Tell each parcel which of its tensors have their memory in common with another tensor."""
    homes: dict[int, list[tuple[Payload, int]]] = {}
    for parcel in payloads:
        for at, tensor in enumerate(parcel.tensors):
            if tensor is not None and tensor.numel():
                homes.setdefault(_storage_address(tensor), []).append((parcel, at))
    for places in homes.values():
        if len(places) > 1:
            for parcel, at in places:
                parcel.shared |= {at}


def protect_shared_tensors(
    payload: Payload,
    tensor_indices: Iterable[int],
    stage_addresses: Collection[int],
    read_only_addresses: Collection[int],
) -> None:
    """Mark tensors at these places that are in the stage's `own` memory, or in that of `others`.

    Parameters and buffers that are passed on go as copies.
    """
    tensors = list(payload.tensors)
    for at in tensor_indices:
        tensor = tensors[at]
        if tensor is None or not tensor.numel():
            continue
        home = _storage_address(tensor)
        if home in stage_addresses:
            tensors[at] = tensor.clone()
        if home in stage_addresses or home in read_only_addresses:
            payload.shared |= {at}
    payload.tensors = tuple(tensors)


def check_unchanged(read_only_payloads: Sequence[Payload], versions_before: Sequence[int]) -> None:
    """Nobody may change a tensor in place that others read too."""
    each = iter(versions_before)
    for parcel in read_only_payloads:
        for at, tensor in enumerate(parcel.tensors):
            if tensor is None or tensor.is_inference():
                continue
            if tensor._version != next(each) and at in parcel.shared:
                raise RunError(
                    f"a layer changed a tensor of shape {tuple(tensor.shape)} in place that "
                    "others read too (it was stashed as a skip, given to several stages or "
                    "micro-batches, or belongs to the caller and needs a gradient): clone it "
                    "first, or set inplace=False"
                )


# -------------------------------------------------------------------------------------------------
# What a cell gets from its neighbours and gives to them: values inside, parcels outside.
# -------------------------------------------------------------------------------------------------

NeighborValues = dict[int, tuple[Any, ...]]  # by neighbour
FlatValues = dict[int, tuple[list[Tensor], PayloadLayout | None]]  # the same, taken apart

_detach = Tensor.detach


def unpack_payloads(payloads: Mapping[int, Payload]) -> NeighborValues:
    """What arrived."""
    return {s: unflatten_values(p.tensors, p.layout) for s, p in payloads.items()}  # type: ignore[arg-type]


def unpack_with_graph_inputs(
    payloads: Mapping[int, Payload], graph_tensors: Sequence[Tensor]
) -> NeighborValues:
    """What arrived, with the tensors that begin the graph in their places."""
    if len(payloads) == 1:
        ((source, parcel),) = payloads.items()
        if parcel.layout is None and graph_tensors:
            return {source: (graph_tensors[0],)}
    each = iter(graph_tensors)
    values = {}
    for source, parcel in payloads.items():
        needs = parcel.needs_grad
        tensors: Any = [next(each) if n else t for t, n in zip(parcel.tensors, needs, strict=True)]
        values[source] = unflatten_values(tensors, parcel.layout)
    return values


def clone_payloads(payloads: Mapping[int, Payload]) -> dict[int, Payload]:
    """The same in memory of its own."""
    return {source: parcel.map_tensors(Tensor.clone) for source, parcel in payloads.items()}


def payload_versions(payloads: Iterable[Payload]) -> list[int]:
    """How often each tensor in them has been changed in place."""
    return tensor_versions(t for parcel in payloads for t in parcel.tensors)


def is_differentiable(tensor: Tensor) -> bool:
    """Could it have a gradient?"""
    return tensor.is_floating_point() or tensor.is_complex()


def is_in_graph(tensor: Tensor) -> bool:
    """Will it have one?"""
    return tensor.requires_grad


def flatten_outputs(values: NeighborValues) -> FlatValues:
    """The tensors of each value; to another stage, none that is hidden."""
    found = {neighbour: flatten_values(value) for neighbour, value in values.items()}
    for neighbour, (_, layout) in found.items():
        if layout is not None and neighbour != OUTSIDE:
            check_no_hidden_tensors(layout)
    return found


def build_payloads(outputs: FlatValues, needs_grad: Callable[[Tensor], bool]) -> dict[int, Payload]:
    """What departs; `needs` says which tensors want a gradient back."""
    parcels = {
        dst: Payload(tuple(map(_detach, tensors)), layout, tuple(map(needs_grad, tensors)))
        for dst, (tensors, layout) in outputs.items()
    }
    if sum(len(parcel.tensors) for parcel in parcels.values()) > 1:
        mark_shared(parcels.values())
    return parcels
