"""What is known of PyTorch's functions: which only look, need no numbers, or are checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_METADATA_PROPERTIES = (
    *("shape", "device", "dtype", "layout", "ndim", "itemsize", "nbytes", "names", "output_nr"),
    *("grad_fn", "_version", "_base", "retains_grad", "volatile"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *("is_mps", "is_xpu", "is_xla", "is_ipu", "is_maia", "is_vulkan", "is_mtia", "is_sparse_csr"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "name", "grad"),
)
_METADATA_METHODS = (
    *("size", "dim", "ndimension", "nelement", "numel", "stride", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_conj"),
    *("is_neg", "is_inference", "is_pinned", "is_shared", "is_coalesced", "get_device", "type"),
    *("__len__", "__hash__", "dim_order", "_is_view", "is_set_to", "__repr__", "__format__"),
    *("is_distributed", "_is_zerotensor", "__dir__", "has_names"),
)
_METADATA_FUNCTIONS = (
    *("is_tensor", "is_floating_point", "is_complex", "is_conj", "is_neg", "is_signed", "numel"),
    *("is_inference", "result_type", "can_cast", "promote_types", "is_same_size"),
    *("broadcast_shapes", "is_storage", "_has_compatible_shallow_copy_type"),
)
_LIKE_FACTORIES = ("zeros_like", "ones_like", "full_like", "empty_like")
_NEW_FACTORIES = (
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
    "new_empty_strided",
)


def _tensor_attributes(names: tuple[str, ...], as_getters: bool = False) -> list[Any]:
    found = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    return [attribute.__get__ for attribute in found] if as_getters else found


# They look at a tensor, and not at its numbers. `type` looks only if it is asked for nothing.
METADATA_ONLY = frozenset(
    [
        *_tensor_attributes(_METADATA_PROPERTIES, as_getters=True),
        *_tensor_attributes(_METADATA_METHODS),
        *(getattr(torch, name) for name in _METADATA_FUNCTIONS if hasattr(torch, name)),
    ]
)

# They look at how large it is.
SIZE_QUERIES = frozenset(
    [
        *_tensor_attributes(("shape", "nbytes"), as_getters=True),
        *_tensor_attributes(("size", "nelement", "numel", "stride", "__len__", "is_contiguous")),
        torch.numel,
    ]
)

# They look at what differs between a forward and its recomputation: answered as in the dry run.
MODE_DEPENDENT = frozenset(_tensor_attributes(("requires_grad", "is_leaf"), as_getters=True))

# Of their first argument they need no numbers: what they make is known wherever that is known.
SHAPE_ONLY = frozenset(
    [*(getattr(torch, name) for name in _LIKE_FACTORIES), *_tensor_attributes(_NEW_FACTORIES)]
)

# They look at numbers to complain about them, and give nothing.
ASSERTIONS = frozenset(
    getattr(torch, name)
    for name in ("_assert", "_assert_async", "_check", "_check_with")
    if hasattr(torch, name)
)

# They tie something to a tensor: where the tensor is, they run.
HOOK_REGISTRATION = frozenset([Tensor.register_hook, Tensor.retain_grad])

# They compare numbers, or tell the host what came of it.
COMPARISONS = frozenset(
    [
        *_tensor_attributes(("lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__")),
        *_tensor_attributes(("__bool__", "__float__", "item", "all", "any", "squeeze")),
        *(getattr(torch, name) for name in ("lt", "gt", "le", "ge", "all", "any", "squeeze")),
    ]
)

# They go backward inside the forward.
BACKWARD_CALLS = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])

# Python asks the right side first, if its class is derived from that of the left one.
REFLECTED_COMPARISONS = {
    Tensor.lt: Tensor.gt,
    Tensor.gt: Tensor.lt,
    Tensor.le: Tensor.ge,
    Tensor.ge: Tensor.le,
}

# They draw numbers from 0 up to 1.
UNIFORM_RANDOM = frozenset([torch.rand, torch.rand_like])

# They count up to the largest number that they find, but at least as far as they are told.
BINCOUNT = frozenset([torch.bincount, Tensor.bincount])


def is_metadata_only(func: Any, args: tuple[Any, ...]) -> bool:
    """Does it need nothing but what an absent value can tell?"""
    if func not in METADATA_ONLY:
        return False
    return func is not Tensor.type or len(args) == 1


def find_unversioned_writes(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Running statistics that it changes, of which no version tells."""
    if func not in _BATCH_NORM_PARAMETERS:
        return []
    given = {**dict(zip(_BATCH_NORM_PARAMETERS[func], args, strict=False)), **kwargs}
    found = (given.get("running_mean"), given.get("running_var"))
    return [one for one in found if given.get("training") and isinstance(one, Tensor)]


_RUNNING_STATS = ("running_mean", "running_var")
_BATCH_NORM_PARAMETERS = {
    functional.batch_norm: ("input", *_RUNNING_STATS, "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", *_RUNNING_STATS, "training"),
    torch.native_batch_norm: ("input", "weight", "bias", *_RUNNING_STATS, "training"),
}


def get_function_name(func: Any) -> str:
    """A function's name, for people."""
    if isinstance(func, str):
        return func
    own = getattr(func, "__name__", None) or type(func).__name__
    if own in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '?')} ({own})"
    return str(own)


def is_in_place(func: Any) -> bool:
    """By its name."""
    name = get_function_name(func)
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")
)
