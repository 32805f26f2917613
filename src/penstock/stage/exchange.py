"""What a cell gets from its neighbours and gives to them: values inside, parcels outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.stage.parcel import Layout, Parcel, check_open, put_together, taken_apart, versions
from penstock.stage.sharing import mark_shared
from penstock.stage.stage import OUTSIDE

Values = dict[int, tuple[Any, ...]]  # by neighbour
Apart = dict[int, tuple[list[Tensor], Layout | None]]  # the same, taken apart

_detached = Tensor.detach


def plain_values(arrived: Mapping[int, Parcel]) -> Values:
    """What arrived."""
    return {s: put_together(p.tensors, p.layout) for s, p in arrived.items()}  # type: ignore[arg-type]


def values_inside(arrived: Mapping[int, Parcel], inside: Sequence[Tensor]) -> Values:
    """What arrived, with the tensors that begin the graph in their places."""
    if len(arrived) == 1:
        ((source, parcel),) = arrived.items()
        if parcel.layout is None and inside:
            return {source: (inside[0],)}
    each = iter(inside)
    values = {}
    for source, parcel in arrived.items():
        needs = parcel.needs
        tensors: Any = [next(each) if n else t for t, n in zip(parcel.tensors, needs, strict=True)]
        values[source] = put_together(tensors, parcel.layout)
    return values


def cloned(arrived: Mapping[int, Parcel]) -> dict[int, Parcel]:
    """The same in memory of its own."""
    return {source: parcel.moved(Tensor.clone) for source, parcel in arrived.items()}


def versions_in(parcels: Iterable[Parcel]) -> list[int]:
    """How often each tensor in them has been changed in place."""
    return versions(t for parcel in parcels for t in parcel.tensors)


def differentiable(tensor: Tensor) -> bool:
    """Could it have a gradient?"""
    return tensor.is_floating_point() or tensor.is_complex()


def in_graph(tensor: Tensor) -> bool:
    """Will it have one?"""
    return tensor.requires_grad


def apart(values: Values) -> Apart:
    """The tensors of each value; to another stage, none that is hidden."""
    found = {neighbour: taken_apart(value) for neighbour, value in values.items()}
    for neighbour, (_, layout) in found.items():
        if layout is not None and neighbour != OUTSIDE:
            check_open(layout)
    return found


def parcels_of(outputs: Apart, needs: Callable[[Tensor], bool]) -> dict[int, Parcel]:
    """What departs; `needs` says which tensors want a gradient back."""
    parcels = {
        dst: Parcel(tuple(map(_detached, tensors)), layout, tuple(map(needs, tensors)))
        for dst, (tensors, layout) in outputs.items()
    }
    if sum(len(parcel.tensors) for parcel in parcels.values()) > 1:
        mark_shared(parcels.values())
    return parcels
