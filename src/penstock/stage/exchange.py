"""What a cell gets from its neighbours and gives to them: values inside, parcels outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.stage.parcel import (
    Payload,
    PayloadLayout,
    check_no_hidden_tensors,
    flatten_values,
    tensor_versions,
    unflatten_values,
)
from penstock.stage.sharing import mark_shared
from penstock.stage.stage import OUTSIDE

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
