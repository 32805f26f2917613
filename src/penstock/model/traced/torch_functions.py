"""Sets of PyTorch functions that the tracer and the stages treat specially.

set                    the functions                          treatment
METADATA_ONLY          read metadata (shape, dtype)           run everywhere, not recorded
METADATA_QUERIES       those of them that read the shape,     note what Python knows
                       the number of dims or the dtype
MODE_DEPENDENT         requires_grad, is_leaf                 answered as in the trace
SHAPE_ONLY             zeros_like, new_zeros, ...             need only the shape of an argument
ASSERTIONS             raise, or do nothing                   run where the tensor is
HOOK_REGISTRATION      register_hook, retain_grad             run where the tensor is
COMPARISONS            compare, or read a comparison          may read random values, within limits
BACKWARD_CALLS         run a backward inside the forward      one stage must have the whole graph
REFLECTED_COMPARISONS  a < b, which may be called as b > a    count as the same operation
UNIFORM_RANDOM         draw from [0, 1)                       give the bounds for COMPARISONS
BINCOUNT               bincount                               the size is taken to be `minlength`
VALUE_CHECKS           raise for some tensor contents         taken to pass; they run on stages, too

Names that a PyTorch release lacks are left out.
"""

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
    """Return attributes of `Tensor` as a function mode sees them.

    A function mode receives the read of a property as a call of the property's `__get__`.
    """
    attributes = [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]
    return [attribute.__get__ for attribute in attributes] if as_getters else attributes


# They read metadata of a tensor and never its contents. `Tensor.type` is one of them only without
# an argument: `t.type()` returns a name, `t.type(dtype)` converts (see `is_metadata_only`).
METADATA_ONLY = frozenset(
    [
        *_tensor_attributes(_METADATA_PROPERTIES, as_getters=True),
        *_tensor_attributes(_METADATA_METHODS),
        *(getattr(torch, name) for name in _METADATA_FUNCTIONS if hasattr(torch, name)),
    ]
)

_SIZE_METHODS = ("size", "nelement", "numel", "stride", "__len__", "is_contiguous")
_DTYPE_METHODS = ("type", "element_size", "is_floating_point", "is_complex", "is_signed")

# They read the shape, the number of dims or the dtype of a tensor. Stages that skip the tensor must
# then know it exactly.
METADATA_QUERIES = {
    **dict.fromkeys(_tensor_attributes(("shape", "nbytes"), as_getters=True), "shape"),
    **dict.fromkeys([*_tensor_attributes(_SIZE_METHODS), torch.numel], "shape"),
    **dict.fromkeys(_tensor_attributes(("ndim",), as_getters=True), "ndim"),
    **dict.fromkeys(_tensor_attributes(("dim", "ndimension")), "ndim"),
    **dict.fromkeys(_tensor_attributes(("dtype", "itemsize"), as_getters=True), "dtype"),
    **dict.fromkeys(_tensor_attributes(_DTYPE_METHODS), "dtype"),
    **dict.fromkeys([torch.is_floating_point, torch.is_complex, torch.is_signed], "dtype"),
}

# Their answer differs between a forward and its recomputation, because a checkpointed forward runs
# without a graph. The stages return what the trace recorded, so that both take the same path.
MODE_DEPENDENT = frozenset(_tensor_attributes(("requires_grad", "is_leaf"), as_getters=True))
IS_LEAF: Any = next(iter(_tensor_attributes(("is_leaf",), as_getters=True)))

# They need the shape and dtype of their first argument, but not its contents. So every stage can
# run them, wherever that argument is.
SHAPE_ONLY = frozenset(
    [*(getattr(torch, name) for name in _LIKE_FACTORIES), *_tensor_attributes(_NEW_FACTORIES)]
)

# They raise or return nothing, depending on tensor contents.
ASSERTIONS = frozenset(
    getattr(torch, name)
    for name in ("_assert", "_assert_async", "_check", "_check_with")
    if hasattr(torch, name)
)

# They attach something to a tensor, and run on the stage that has it.
HOOK_REGISTRATION = frozenset([Tensor.register_hook, Tensor.retain_grad])

# They compare tensors, or turn the result of a comparison into a Python value.
COMPARISONS = frozenset(
    [
        *_tensor_attributes(("lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__")),
        *_tensor_attributes(("__bool__", "__float__", "item", "all", "any", "squeeze")),
        *(getattr(torch, name) for name in ("lt", "gt", "le", "ge", "all", "any", "squeeze")),
    ]
)

# They run a backward inside the forward.
BACKWARD_CALLS = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])

# For `a < b` Python calls `b.__gt__(a)` first if the class of `b` is derived from that of `a`.
# `RemoteTensor` is derived from `Tensor`, so a stage may see `gt` where the trace has `lt`.
REFLECTED_COMPARISONS = {
    Tensor.lt: Tensor.gt,
    Tensor.gt: Tensor.lt,
    Tensor.le: Tensor.ge,
    Tensor.ge: Tensor.le,
}

# They draw from the interval [0, 1).
UNIFORM_RANDOM = frozenset([torch.rand, torch.rand_like])

# Their output has as many elements as the largest input plus one, but at least `minlength`.
BINCOUNT = frozenset([torch.bincount, Tensor.bincount])


# They raise for some contents of tensors. Nothing else depends on what they read.
VALUE_CHECKS = frozenset([functional.gaussian_nll_loss])


def is_metadata_only(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call reads metadata only. A remote tensor can answer such a call."""
    if func not in METADATA_ONLY:
        return False
    return func is not Tensor.type or len(args) == 1


def find_unversioned_writes(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the running statistics that a batch norm updates.

    The kernels write them without incrementing the tensors' version counters, by which other
    in-place changes are found.
    """
    if func not in _BATCH_NORM_PARAMETERS:
        return []
    arguments = {**dict(zip(_BATCH_NORM_PARAMETERS[func], args, strict=False)), **kwargs}
    stats = (arguments.get("running_mean"), arguments.get("running_var"))
    return [stat for stat in stats if arguments.get("training") and isinstance(stat, Tensor)]


_RUNNING_STATS = ("running_mean", "running_var")
_BATCH_NORM_PARAMETERS = {
    functional.batch_norm: ("input", *_RUNNING_STATS, "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", *_RUNNING_STATS, "training"),
    torch.native_batch_norm: ("input", "weight", "bias", *_RUNNING_STATS, "training"),
}


def get_function_name(func: Any) -> str:
    """Return the name of a function for error messages and value names."""
    if isinstance(func, str):
        return func
    name = getattr(func, "__name__", None) or type(func).__name__
    if name in ("__get__", "__set__"):  # a property: add which one
        return f"{getattr(getattr(func, '__self__', None), '__name__', '?')} ({name})"
    return str(name)


def is_in_place(func: Any) -> bool:
    """Return whether a function changes its first argument, judging by its name.

    Used for inference tensors only: they have no version counter.
    """
    name = get_function_name(func)
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


_IN_PLACE_DUNDERS = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor")
)
