"""The payload of a message between stages: its tensors, and the layout of the values around them.

A stage returns Python values: a tensor, or tuples, lists and dicts of tensors and other objects.
A message carries them flattened:

    values  -- flatten_values -->  [tensor, tensor, ...] + PayloadLayout  -- unflatten -->  values

The module has three parts: flattening, protection of tensors that several readers share, and the
conversion between the values inside a cell and the payloads outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data_parallel.dtensor import to_local
from penstock.errors import PenstockTypeError, RunError
from penstock.nested_values import iter_hidden_tensors
from penstock.stage.stage import OUTSIDE
from penstock.torch_compat import REGISTER_PYTREE_NODE, pytree, wait_for_collective


class PayloadLayout(NamedTuple):
    """A value without its tensors.

    Attributes:
        tree_spec: The containers of the value.
        leaves: The leaves, with None in place of each tensor.
        tensor_indices: For each leaf the index of its tensor, or None if it is not a tensor.
    """

    tree_spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    tensor_indices: tuple[int | None, ...]


@dataclass(slots=True)
class Payload:
    """The content of one message: activations, or gradients.

    Attributes:
        tensors: The detached tensors. A gradient that is not needed is None.
        layout: The values around the tensors. None for a single tensor, and for gradients.
        needs_grad: For each tensor, whether the sender expects its gradient.
        shared: The indices of tensors whose memory others read, too: another payload, a parameter
            or buffer, or the caller. The receiver must not change these in place.
    """

    tensors: tuple[Tensor | None, ...]
    layout: PayloadLayout | None = None
    needs_grad: tuple[bool, ...] = ()
    shared: frozenset[int] = frozenset()

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Payload:
        """Return the payload with the function applied to each tensor."""
        tensors = [None if t is None else function(t) for t in self.tensors]
        return Payload(tuple(tensors), self.layout, self.needs_grad, self.shared)


# ---- flattening --------------------------------------------------------------------------------

FlatValue = tuple[Sequence[Tensor], PayloadLayout | None]  # the tensors of a value, and the rest


def tensor_versions(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the version counters of the tensors. Inference tensors have none and are left out."""
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def flatten_values(values: tuple[Any, ...]) -> FlatValue:
    """Return the tensors in the values, each once and in order, and the layout around them.

    A single tensor has the layout None. Most stages send just that, so it is handled first. Several
    tensors are next: taking a tree apart costs as much as a small layer.
    """
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values, None
    for value in values:  # no generator, which takes twice as long
        if not isinstance(value, Tensor):
            break
    else:
        if len(set(map(id, values))) == len(values):
            return values, _get_tuple_layout(len(values))
    leaves, spec = pytree.tree_flatten(values)
    tensors: list[Tensor] = []
    index_by_id: dict[int, int] = {}
    tensor_indices: list[int | None] = []
    for leaf_index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if id(leaf) not in index_by_id:
                index_by_id[id(leaf)] = len(tensors)
                tensors.append(leaf)
            tensor_indices.append(index_by_id[id(leaf)])
            leaves[leaf_index] = None
        else:
            tensor_indices.append(None)
    return tensors, PayloadLayout(spec, tuple(leaves), tuple(tensor_indices))


def unflatten_values(tensors: Sequence[Tensor], layout: PayloadLayout | None) -> tuple[Any, ...]:
    """Return the values that `flatten_values` has taken apart, with these tensors."""
    if layout is None:
        return (tensors[0],)
    if layout is _get_tuple_layout(len(tensors)):
        return tuple(tensors)
    leaves = [
        leaf if index is None else tensors[index]
        for leaf, index in zip(layout.leaves, layout.tensor_indices, strict=True)
    ]
    values: tuple[Any, ...] = pytree.tree_unflatten(leaves, layout.tree_spec)
    return values


@cache
def _get_tuple_layout(count: int) -> PayloadLayout:
    """Return the layout of a tuple of so many tensors."""
    spec = pytree.tree_structure((0,) * count)
    return PayloadLayout(spec, (None,) * count, tuple(range(count)))


def check_no_hidden_tensors(layout: PayloadLayout) -> None:
    """Raise if an object that pytree does not know holds a tensor: it would get no gradient."""
    for leaf in layout.leaves:
        if _may_hide_tensors(leaf) and next(iter_hidden_tensors(leaf), None) is not None:
            raise PenstockTypeError(
                f"a {type(leaf).__name__} that goes from one stage to another has a tensor inside, "
                "which would get no gradient. Return tuples, lists or dicts, or register the class "
                f"with {REGISTER_PYTREE_NODE}."
            )


def check_no_hidden_outputs(layout: PayloadLayout, has_graph: bool) -> None:
    """Raise if the caller gets a tensor whose backward would end in the last stage.

    Without a graph, in a forward that will be recomputed, any tensor that is not an integer may be
    one.
    """
    for leaf in layout.leaves:
        if _may_hide_tensors(leaf) and any(
            tensor.grad_fn is not None or (not has_graph and is_differentiable(tensor))
            for tensor in iter_hidden_tensors(leaf)
        ):
            raise PenstockTypeError(
                f"the model returned a {type(leaf).__name__} with a tensor inside, and a backward "
                "from it would reach the last stage only. Return tuples, lists or dicts, register "
                f"the class with {REGISTER_PYTREE_NODE}, or call pipe.step with a loss_fn, which "
                "gets the object."
            )


def _may_hide_tensors(leaf: Any) -> bool:
    return leaf is not None and not isinstance(leaf, int | float | str | nn.Module)


# ---- shared memory -----------------------------------------------------------------------------
#
# Inside one process a message is the sender's own memory, not a copy. A layer may change its input
# in place only if it is the only reader of that memory: no other stage, no other micro-batch and
# not the caller. Tensors that others read are marked in `Payload.shared`. After a forward their
# version counters are compared, and a change is an error.


def find_memory_address(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins, or None if it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper, such as one of torch.func
        return None


def _storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory.

    For a sparse tensor it is the address of the values, for a DTensor that of the local shard.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        tensor = wait_for_collective(to_local(tensor))
    layout = tensor.layout
    if layout is not torch.strided:
        tensor = tensor._values() if layout is torch.sparse_coo else tensor.values()
    address = find_memory_address(tensor)
    # A wrapper without memory may be a tensor that another stage computes.
    return id(tensor) if address is None else address


def storage_addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    """Return the addresses of the tensors' memory. Empty tensors have none."""
    addresses: set[int] = set()
    for tensor in tensors:  # for each cell, so without a call for a plain tensor
        if tensor is not None and tensor.numel():
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
            addresses.add(
                tensor.untyped_storage().data_ptr() if is_plain else _storage_address(tensor)
            )
    return addresses


def mark_shared(payloads: Collection[Payload]) -> None:
    """Mark all tensors that have their memory in common with another tensor of the payloads."""
    by_address: dict[int, list[tuple[Payload, int]]] = {}
    for payload in payloads:
        for index, tensor in enumerate(payload.tensors):
            if tensor is not None and tensor.numel():
                by_address.setdefault(_storage_address(tensor), []).append((payload, index))
    for entries in by_address.values():
        if len(entries) > 1:
            for payload, index in entries:
                payload.shared |= {index}


def protect_shared_tensor(
    payload: Payload,
    index: int,
    stage_addresses: Collection[int],
    read_only_addresses: Collection[int],
) -> None:
    """Mark a tensor of a payload if it is in memory which others read.

    Args:
        payload: The payload to change.
        index: The index of the tensor.
        stage_addresses: The addresses of the stage's parameters and buffers. A tensor there is
            copied, as a later forward may change a buffer before the receiver reads it.
        read_only_addresses: The addresses of inputs that others read, too.
    """
    tensor = payload.tensors[index]
    if tensor is None or not tensor.numel():
        return
    address = _storage_address(tensor)
    if address in stage_addresses:
        payload.tensors = (*payload.tensors[:index], tensor.clone(), *payload.tensors[index + 1 :])
        payload.shared |= {index}
    elif address in read_only_addresses:
        payload.shared |= {index}


def check_unchanged(read_only_payloads: Sequence[Payload], versions_before: Sequence[int]) -> None:
    """Raise if a forward changed a shared tensor in place."""
    remaining_versions = iter(versions_before)
    for payload in read_only_payloads:
        for index, tensor in enumerate(payload.tensors):
            if tensor is None or tensor.is_inference():
                continue
            if tensor._version != next(remaining_versions) and index in payload.shared:
                raise RunError(
                    f"a layer changed a shared tensor of shape {tuple(tensor.shape)} in place. It "
                    "was stashed as a skip, given to several stages or micro-batches, or it "
                    "belongs to the caller and needs a gradient. Clone it first, or set "
                    "inplace=False."
                )


# ---- values inside a cell, payloads outside ----------------------------------------------------

NeighborValues = dict[int, tuple[Any, ...]]  # values by stage index of the neighbour
FlatValues = dict[int, FlatValue]  # the same values, flattened


def unpack_payloads(payloads: Mapping[int, Payload]) -> NeighborValues:
    """Return the values of the payloads by source stage."""
    values: NeighborValues = {}
    for source, payload in payloads.items():  # no comprehension, which is a call in Python 3.11
        layout, tensors = payload.layout, payload.tensors
        values[source] = tensors if layout is None else unflatten_values(tensors, layout)  # type: ignore[arg-type]
    return values


def unpack_with_graph_inputs(
    payloads: Mapping[int, Payload], graph_tensors: Sequence[Tensor]
) -> NeighborValues:
    """Return the values by source stage, with graph inputs for the tensors that need a gradient."""
    remaining = iter(graph_tensors)
    values = {}
    for source, payload in payloads.items():
        needs = payload.needs_grad
        tensors: Any = [
            next(remaining) if need else t for t, need in zip(payload.tensors, needs, strict=True)
        ]
        values[source] = unflatten_values(tensors, payload.layout)
    return values


def clone_payloads(payloads: Mapping[int, Payload]) -> dict[int, Payload]:
    """Return copies of the payloads in new memory."""
    return {source: payload.map_tensors(Tensor.clone) for source, payload in payloads.items()}


def payload_versions(payloads: Iterable[Payload]) -> list[int]:
    """Return the version counters of all tensors of the payloads."""
    versions: list[int] = []
    for payload in payloads:
        for tensor in payload.tensors:
            if tensor is not None and not tensor.is_inference():
                versions.append(tensor._version)
    return versions


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether a tensor of this dtype can have a gradient. An inference tensor cannot."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()


def needs_no_grad(tensor: Tensor) -> bool:
    """Return False: in a call without a backward, no tensor needs a gradient."""
    return False


# Returns whether a tensor requires grad.
is_in_graph: Callable[[Tensor], bool] = attrgetter("requires_grad")


def flatten_outputs(values: NeighborValues) -> FlatValues:
    """Flatten the values for each destination, and check those that go to another stage."""
    flat_values: FlatValues = {}
    for dst, value in values.items():
        if len(value) == 1 and isinstance(value[0], Tensor):  # as in `flatten_values`, but no call
            flat_values[dst] = value, None
            continue
        flat_values[dst] = flat = flatten_values(value)
        if dst != OUTSIDE and flat[1] is not None:
            check_no_hidden_tensors(flat[1])
    return flat_values


def build_payloads(
    outputs: FlatValues, needs_grad: Callable[[Tensor], bool]
) -> tuple[dict[int, Payload], int, bool]:
    """Return the payloads for each destination; `needs_grad` says which tensors get a gradient.

    Also return the number of their tensors, and whether one may be in memory that was there before
    the forward.
    """
    payloads, tensor_count, may_alias = {}, 0, False
    for dst, (tensors, layout) in outputs.items():
        detached = tuple(map(Tensor.detach, tensors))
        for tensor in tensors:
            tensor_count += 1
            if type(tensor) is not Tensor:
                detached = tuple(map(wait_for_collective, detached))
            # A freshly computed tensor has memory of its own. Only a leaf (a parameter, a buffer,
            # an input) or a view has perhaps not. Without a graph every tensor is a leaf.
            if tensor.is_leaf or tensor._is_view():
                may_alias = True
        payloads[dst] = Payload(detached, layout, tuple(map(needs_grad, tensors)))
    if tensor_count > 1:
        mark_shared(payloads.values())
    return payloads, tensor_count, may_alias
