"""Tensors that several read, and which nobody may change in place.

In one process a message is the sender's own memory. A layer that works in place on what it gets is
right only if nobody else reads that: not another stage, not another micro-batch, not the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.gradients.shards import to_local
from penstock.stage.parcel import Payload


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
