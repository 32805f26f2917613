"""Tensors that several read, and which nobody may change in place.

In one process a message is the sender's own memory. A layer that works in place on what it gets is
right only if nobody else reads that: not another stage, not another micro-batch, not the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.gradients.shards import local
from penstock.stage.parcel import Parcel


def _home(tensor: Tensor) -> int:
    """Where it is; of a sparse tensor, where its values are; of one in parts, where its part is."""
    tensor = local(tensor)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return tensor.untyped_storage().data_ptr()


def memory(tensors: Iterable[Tensor | None]) -> set[int]:
    """Where they are."""
    return {_home(t) for t in tensors if t is not None and t.numel()}


def mark_shared(parcels: Collection[Parcel]) -> None:
    """Tell each parcel which of its tensors have their memory in common with another tensor."""
    homes: dict[int, list[tuple[Parcel, int]]] = {}
    for parcel in parcels:
        for at, tensor in enumerate(parcel.tensors):
            if tensor is not None and tensor.numel():
                homes.setdefault(_home(tensor), []).append((parcel, at))
    for places in homes.values():
        if len(places) > 1:
            for parcel, at in places:
                parcel.shared |= {at}


def protect(
    parcel: Parcel, places: Iterable[int], own: Collection[int], others: Collection[int]
) -> None:
    """Mark tensors at these places that are in the stage's `own` memory, or in that of `others`.

    Parameters and buffers that are passed on go as copies.
    """
    tensors = list(parcel.tensors)
    for at in places:
        tensor = tensors[at]
        if tensor is None or not tensor.numel():
            continue
        home = _home(tensor)
        if home in own:
            tensors[at] = tensor.clone()
        if home in own or home in others:
            parcel.shared |= {at}
    parcel.tensors = tuple(tensors)


def check_unchanged(read_only: Sequence[Parcel], before: Sequence[int]) -> None:
    """Nobody may change a tensor in place that others read too."""
    each = iter(before)
    for parcel in read_only:
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
