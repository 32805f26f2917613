"""Operations that put off the gradient of a weight, and the weights they know by.

While the forward of a cell with a W builds its graph, its layers compute with stand-ins for their
weights. Where a stand-in meets an operation of the table, the operation runs with a weight that
wants no gradient, so that the backward (I) skips it, and a `Pair` waits for the gradient of its
output. Everywhere else the stand-in steps aside for the parameter itself, which gets its gradient
in I, as ever.

    linear, matmul, mm, bmm, addmm     gradient and input, multiplied in W
    convolutions                       the same, by the library's own backward
    embedding, or nothing else learns  the operation's whole backward happens in W
    views                              of a weight, they are weights

Biases and the weights of norms are not put off: their gradients cost next to nothing beside that of
the input, and to put them off would keep two large tensors alive for the sake of a small one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.stage.graph import edge
from penstock.stage.later import Formula, Pair, Shelf, stopped
from penstock.stage.stand_ins import real

# ---- stand-ins ----------------------------------------------------------------------------


class Weight(Tensor):
    """Stands in for a parameter, or for a view of one."""

    _is_param = True  # to isinstance(_, nn.Parameter)
    original: Tensor
    leaf: nn.Parameter
    shelf: Shelf
    _stands_for: nn.Parameter  # to other calls, in other threads

    @staticmethod
    def of(original: Tensor, leaf: nn.Parameter, shelf: Shelf) -> Weight:
        """For operations that no function sees it is the same memory, part of the same graph."""
        made = original.as_subclass(Weight)
        made.original, made.leaf, made.shelf = original, leaf, shelf
        made._stands_for = real(leaf)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operations of the table are put off; others get the parameter itself."""
        kwargs = kwargs or {}
        way = _WAYS.get(func)
        if way is not None and torch.is_grad_enabled() and _undisturbed(types):
            done = way(func, args, kwargs)
            if done is not None:
                return done
        if func is torch.autograd.grad:
            _check_closed(args, kwargs)
        return func(*_plain(args), **_plain(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the parameter: that of a tensor would not do for it."""
        return copy.deepcopy(self.original, memo)


def _undisturbed(types: Iterable[type]) -> bool:
    """Does nobody else look at functions, keep what backwards need, or differentiate by himself?"""
    return (
        not torch.compiler.is_compiling()
        and _USUAL.issuperset(types)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _plain(value: Any) -> Any:
    """The parameters themselves in the place of stand-ins."""
    kind = type(value)
    if kind is Weight:
        return value.original
    if kind is tuple or kind is list:
        return kind([_plain(one) for one in value])
    if kind is dict:
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list | dict):  # of another kind
        return torch.utils._pytree.tree_map_only(Weight, _plain, value)
    return value


def _check_closed(*values: Any) -> None:
    for leaf in torch.utils._pytree.tree_leaves(values):
        if type(leaf) is Weight:
            leaf.shelf.check_closed()


# ---- operations ---------------------------------------------------------------------------

# From the function and its arguments to its result; None if it is not to be put off.
Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _put_off(
    weight: Weight,
    given: Tensor,
    bias: Tensor | None,
    formula: Formula,
    operation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run an operation of an input and a weight, and leave the weight's gradient for later."""
    shelf, original = weight.shelf, weight.original
    if torch._C._is_any_autocast_enabled():
        given, original = _cast(given, original, shelf)
    if not given.requires_grad and not (bias is not None and bias.requires_grad):
        output, pair = stopped(weight.leaf, operation(given, original), shelf)
    else:
        output = operation(given, original.detach())
        root = original if original is weight.leaf else edge(original)
        assert root is not None
        pair = Pair(weight.leaf, root, given, formula, shelf)
        base = output._base  # a change in place of a view goes around the view's own node
        node = output.grad_fn if base is None else base.grad_fn
        assert node is not None
        node.register_hook(pair.catch)
    shelf.put(pair)
    return output


def _cast(given: Tensor, weight: Tensor, shelf: Shelf) -> tuple[Tensor, Tensor]:
    """As autocast does: the input anew each time, the weight once."""
    kind = given.device.type
    dtypes = torch.float32, torch.float16, torch.bfloat16
    if not torch.is_autocast_enabled(kind) or given.dtype not in dtypes:
        return given, weight
    dtype = torch.get_autocast_dtype(kind)
    found = shelf.casts.get(weight)
    if found is None or found.dtype is not dtype:
        found = weight.to(dtype)
        if weight.is_leaf and torch.is_autocast_cache_enabled():
            shelf.casts[weight] = found
    return given.to(dtype), found


_USUAL = frozenset((Tensor, nn.Parameter, Weight))


_GIVEN = _USUAL - {Weight}


def _ready(weight: Any, given: Any, bias: Any = None) -> bool:
    """Is it a weight that can be put off, and are the others no weights?"""
    return (
        type(weight) is Weight
        and weight.shelf.is_open
        and type(given) in _GIVEN
        and (bias is None or type(bias) in _GIVEN)
        and weight.original.requires_grad
    )


def _rows(tensor: Tensor) -> Tensor:
    dimensions = tensor.dim()
    if dimensions == 2:
        return tensor
    return tensor.unsqueeze(0) if dimensions == 1 else tensor.flatten(0, -2)


def _of_linear(gradient: Tensor, given: Tensor) -> Tensor:
    return _rows(gradient).t().mm(_rows(given).conj())


def _of_matmul(gradient: Tensor, given: Tensor) -> Tensor:
    return _rows(given).mH.mm(_rows(gradient))


def _of_bmm(gradient: Tensor, given: Tensor) -> Tensor:
    return given.mH.bmm(gradient)


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = (
        args if len(args) == 3 else _named(args, kwargs, "input", "weight", "bias")
    )
    if not _ready(weight, given, bias) or weight.original.dim() != 2:
        return None
    if bias is None:
        return _put_off(weight, _foldable(given), None, _of_linear, func)
    if given.dim() > 2 and not given.is_contiguous():
        given = given.contiguous()
        return _put_off(weight, given, bias, _of_linear, lambda x, w: func(x, w).add_(bias))
    return _put_off(weight, given, bias, _of_linear, lambda x, w: func(x, w, bias))


def _foldable(given: Tensor) -> Tensor:
    """PyTorch takes another way to the product, with other roundings, if a weight does not learn.

    Unless it can see the input as rows, which is what it copies it to if the weight learns.
    """
    return given if given.dim() < 3 or given.is_contiguous() else given.contiguous()


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight = _named(args, kwargs, "input", "other")
    if weight is None:
        weight = kwargs.get("mat2")
    if not _ready(weight, given) or "out" in kwargs:
        return None
    original = weight.original
    if original.dim() == 2 and given.dim() > 1:
        given, formula = _foldable(given), _of_matmul
    elif original.dim() == given.dim() == 3 and original.shape[0] == given.shape[0]:
        formula = _of_bmm
    else:
        return None
    return _put_off(weight, given, None, formula, func)


def _rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, given = args
    return _matmul(torch.matmul, (given, weight), {})


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:  # with factors
        return None
    bias, given, weight = args
    if not _ready(weight, given, bias):
        return None
    return _put_off(weight, given, bias, _of_matmul, lambda x, w: func(bias, x, w))


def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = _named(args, kwargs, "input", "weight", "bias")
    if not _ready(weight, given, bias) or given.is_complex():
        return None
    padding = args[4] if len(args) > 4 else kwargs.get("padding")
    if given.dim() != weight.original.dim() or padding == "same":
        return None  # it would be changed before it is convolved
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    used: list[Any] = []

    def operation(given: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = func(given, weight, bias, *args[3:], **rest)
        settings = [getattr(output.grad_fn, f"_saved_{name}") for name in _SETTINGS]
        used.extend([weight, None, *settings])
        return output

    def of_weight(gradient: Tensor, given: Tensor) -> Tensor:
        mask = [False, True, False]
        found: Tensor = torch.ops.aten.convolution_backward(gradient, given, *used, mask)[1]
        return found

    return _put_off(weight, given, bias, of_weight, operation)


_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices, weight = _named(args, kwargs, "input", "weight")
    if not _ready(weight, indices):
        return None
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight")}
    return _put_off(weight, indices, None, _of_linear, lambda i, w: func(i, w, *args[2:], **rest))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a weight: a weight again, or several."""
    if not args or type(args[0]) is not Weight or not args[0].shelf.is_open:
        return None
    weight: Weight = args[0]

    def stand_in(found: Tensor) -> Tensor:
        return Weight.of(found, weight.leaf, weight.shelf) if found.requires_grad else found

    found = func(weight.original, *args[1:], **kwargs)
    return stand_in(found) if isinstance(found, Tensor) else tuple(map(stand_in, found))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's own hands its weights on to `linear`, which must see the stand-ins.

    So it must not ask whether one of its arguments has a mind of its own.
    """
    known = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened(*args, **kwargs)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


_CONVOLUTIONS = (
    *(getattr(torch, f"conv{n}d") for n in (1, 2, 3)),
    *(getattr(torch, f"conv_transpose{n}d") for n in (1, 2, 3)),
)
_VIEWS = (
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute),
    *(Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.__getitem__, Tensor.to),
    *(Tensor.chunk, torch.chunk, Tensor.split, torch.split, Tensor.unbind, torch.unbind),
)

_WAYS: dict[Any, Way] = {
    functional.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    torch.addmm: _addmm,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    functional.embedding: _embedding,
    **dict.fromkeys(_VIEWS, _view),
    functional.multi_head_attention_forward: _attention,
}
