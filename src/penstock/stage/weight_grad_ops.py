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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.stage.cell_graph import find_gradient_edge
from penstock.stage.compile_support import find_compiled_modules
from penstock.stage.parameter_proxies import unwrap_proxy
from penstock.stage.weight_grad import (
    PendingWeightGrad,
    WeightGradFormula,
    WeightGradRecorder,
    stop_backward,
)

# ---- stand-ins ----------------------------------------------------------------------------


class WeightProxy(Tensor):
    """Stands in for a parameter, or for a view of one."""

    _is_param = True  # to isinstance(_, nn.Parameter)
    original: Tensor
    parameter: nn.Parameter
    recorder: WeightGradRecorder
    _stands_for: nn.Parameter  # to other calls, in other threads

    @staticmethod
    def wrap(
        original: Tensor, parameter: nn.Parameter, recorder: WeightGradRecorder
    ) -> WeightProxy:
        """For operations that no function sees it is the same memory, part of the same graph."""
        made = original.as_subclass(WeightProxy)
        made.original, made.parameter, made.recorder = original, parameter, recorder
        made._stands_for = unwrap_proxy(parameter)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operations of the table are put off; others get the parameter itself."""
        kwargs = kwargs or {}
        way = _OP_HANDLERS.get(func)
        if way is not None and torch.is_grad_enabled() and _is_interception_safe(types):
            done = way(func, args, kwargs)
            if done is not None:
                return done
        if func is torch.autograd.grad:
            _check_not_recording(args, kwargs)
        return func(*_unwrap_weights(args), **_unwrap_weights(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Of the parameter: that of a tensor would not do for it."""
        return copy.deepcopy(self.original, memo)


def _is_interception_safe(types: Iterable[type]) -> bool:
    """Does nobody else look at functions, keep what backwards need, or differentiate by himself?"""
    return (
        not torch.compiler.is_compiling()
        and _SUPPORTED_TYPES.issuperset(types)
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _unwrap_weights(value: Any) -> Any:
    """The parameters themselves in the place of stand-ins."""
    kind = type(value)
    if kind is WeightProxy:
        return value.original
    if kind is tuple or kind is list:
        return kind([_unwrap_weights(one) for one in value])
    if kind is dict:
        return {key: _unwrap_weights(one) for key, one in value.items()}
    if isinstance(value, tuple | list | dict):  # of another kind
        return torch.utils._pytree.tree_map_only(WeightProxy, _unwrap_weights, value)
    return value


def _check_not_recording(*values: Any) -> None:
    for leaf in torch.utils._pytree.tree_leaves(values):
        if type(leaf) is WeightProxy:
            leaf.recorder.check_not_recording()


# ---- operations ---------------------------------------------------------------------------

# From the function and its arguments to its result; None if it is not to be put off.
OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _defer(
    weight: WeightProxy,
    op_input: Tensor,
    bias: Tensor | None,
    formula: WeightGradFormula,
    operation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run an operation of an input and a weight, and leave the weight's gradient for later."""
    shelf, original = weight.recorder, weight.original
    if torch._C._is_any_autocast_enabled():
        op_input, original = _autocast(op_input, original, shelf)
    if not op_input.requires_grad and not (bias is not None and bias.requires_grad):
        output, pair = stop_backward(weight.parameter, operation(op_input, original), shelf)
    else:
        output = operation(op_input, original.detach())
        root = original if original is weight.parameter else find_gradient_edge(original)
        assert root is not None
        pair = PendingWeightGrad(weight.parameter, root, op_input, formula, shelf)
        base = output._base  # a change in place of a view goes around the view's own node
        node = output.grad_fn if base is None else base.grad_fn
        assert node is not None
        node.register_hook(pair.receive_output_grad)
    shelf.add(pair)
    return output


def _autocast(
    op_input: Tensor, weight: Tensor, recorder: WeightGradRecorder
) -> tuple[Tensor, Tensor]:
    """As autocast does: the input anew each time, the weight once."""
    kind = op_input.device.type
    dtypes = torch.float32, torch.float16, torch.bfloat16
    if not torch.is_autocast_enabled(kind) or op_input.dtype not in dtypes:
        return op_input, weight
    dtype = torch.get_autocast_dtype(kind)
    found = recorder.autocast_weights.get(weight)
    if found is None or found.dtype is not dtype:
        found = weight.to(dtype)
        if weight.is_leaf and torch.is_autocast_cache_enabled():
            recorder.autocast_weights[weight] = found
    return op_input.to(dtype), found


_SUPPORTED_TYPES = frozenset((Tensor, nn.Parameter, WeightProxy))


_PLAIN_TYPES = _SUPPORTED_TYPES - {WeightProxy}


def _can_defer(weight: Any, op_input: Any, bias: Any = None) -> bool:
    """Is it a weight that can be put off, and are the others no weights?"""
    return (
        type(weight) is WeightProxy
        and weight.recorder.is_recording
        and type(op_input) in _PLAIN_TYPES
        and (bias is None or type(bias) in _PLAIN_TYPES)
        and weight.original.requires_grad
    )


def _flatten_to_rows(tensor: Tensor) -> Tensor:
    dimensions = tensor.dim()
    if dimensions == 2:
        return tensor
    return tensor.unsqueeze(0) if dimensions == 1 else tensor.flatten(0, -2)


def _linear_weight_grad(output_grad: Tensor, op_input: Tensor) -> Tensor:
    return _flatten_to_rows(output_grad).t().mm(_flatten_to_rows(op_input).conj())


def _matmul_weight_grad(output_grad: Tensor, op_input: Tensor) -> Tensor:
    return _flatten_to_rows(op_input).mH.mm(_flatten_to_rows(output_grad))


def _bmm_weight_grad(output_grad: Tensor, op_input: Tensor) -> Tensor:
    return op_input.mH.bmm(output_grad)


def _defer_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = (
        args if len(args) == 3 else _bind_arguments(args, kwargs, "input", "weight", "bias")
    )
    if not _can_defer(weight, given, bias) or weight.original.dim() != 2:
        return None
    if bias is None:
        return _defer(weight, _ensure_foldable(given), None, _linear_weight_grad, func)
    if given.dim() > 2 and not given.is_contiguous():
        given = given.contiguous()
        return _defer(weight, given, bias, _linear_weight_grad, lambda x, w: func(x, w).add_(bias))
    return _defer(weight, given, bias, _linear_weight_grad, lambda x, w: func(x, w, bias))


def _ensure_foldable(op_input: Tensor) -> Tensor:
    """PyTorch takes another way to the product, with other roundings, if a weight does not learn.

    Unless it can see the input as rows, which is what it copies it to if the weight learns.
    """
    return op_input if op_input.dim() < 3 or op_input.is_contiguous() else op_input.contiguous()


def _defer_matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight = _bind_arguments(args, kwargs, "input", "other")
    if weight is None:
        weight = kwargs.get("mat2")
    if not _can_defer(weight, given) or "out" in kwargs:
        return None
    original = weight.original
    if original.dim() == 2 and given.dim() > 1:
        given, formula = _ensure_foldable(given), _matmul_weight_grad
    elif original.dim() == given.dim() == 3 and original.shape[0] == given.shape[0]:
        formula = _bmm_weight_grad
    else:
        return None
    return _defer(weight, given, None, formula, func)


def _defer_rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, given = args
    return _defer_matmul(torch.matmul, (given, weight), {})


def _defer_addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:  # with factors
        return None
    bias, given, weight = args
    if not _can_defer(weight, given, bias):
        return None
    return _defer(weight, given, bias, _matmul_weight_grad, lambda x, w: func(bias, x, w))


def _defer_convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = _bind_arguments(args, kwargs, "input", "weight", "bias")
    if not _can_defer(weight, given, bias) or given.is_complex():
        return None
    padding = args[4] if len(args) > 4 else kwargs.get("padding")
    if given.dim() != weight.original.dim() or padding == "same":
        return None  # it would be changed before it is convolved
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    used: list[Any] = []

    def run_convolution(op_input: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = func(op_input, weight, bias, *args[3:], **rest)
        settings = [getattr(output.grad_fn, f"_saved_{name}") for name in _CONVOLUTION_ATTRIBUTES]
        used.extend([weight, None, *settings])
        return output

    def convolution_weight_grad(output_grad: Tensor, op_input: Tensor) -> Tensor:
        mask = [False, True, False]
        found: Tensor = torch.ops.aten.convolution_backward(output_grad, op_input, *used, mask)[1]
        return found

    return _defer(weight, given, bias, convolution_weight_grad, run_convolution)


_CONVOLUTION_ATTRIBUTES = (
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
)


def _defer_embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices, weight = _bind_arguments(args, kwargs, "input", "weight")
    if not _can_defer(weight, indices):
        return None
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight")}
    return _defer(
        weight, indices, None, _linear_weight_grad, lambda i, w: func(i, w, *args[2:], **rest)
    )


def _wrap_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a weight: a weight again, or several."""
    if not args or type(args[0]) is not WeightProxy or not args[0].recorder.is_recording:
        return None
    weight: WeightProxy = args[0]

    def wrap_if_trainable(view: Tensor) -> Tensor:
        return (
            WeightProxy.wrap(view, weight.parameter, weight.recorder)
            if view.requires_grad
            else view
        )

    found = func(weight.original, *args[1:], **kwargs)
    return (
        wrap_if_trainable(found)
        if isinstance(found, Tensor)
        else tuple(map(wrap_if_trainable, found))
    )


def _run_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch's own hands its weights on to `linear`, which must see the stand-ins.

    So it must not ask whether one of its arguments has a mind of its own.
    """
    known = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened(*args, **kwargs)


def _bind_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
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

_OP_HANDLERS: dict[Any, OpHandler] = {
    functional.linear: _defer_linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.mm, Tensor.mm), _defer_matmul),
    **dict.fromkeys((Tensor.__matmul__, torch.bmm, Tensor.bmm), _defer_matmul),
    Tensor.__rmatmul__: _defer_rmatmul,
    torch.addmm: _defer_addmm,
    **dict.fromkeys(_CONVOLUTIONS, _defer_convolution),
    functional.embedding: _defer_embedding,
    **dict.fromkeys(_VIEWS, _wrap_view),
    functional.multi_head_attention_forward: _run_attention,
}


# -------------------------------------------------------------------------------------------------
# A forward whose weights wait: its modules compute with stand-ins for them.
# -------------------------------------------------------------------------------------------------


class WeightGradDeferral:
    """Stand-ins for the weights of some modules, and a shelf for what they put off.

    What is `around` them may be compiled.
    """

    def __init__(self, modules: Sequence[nn.Module], wrappers: Sequence[nn.Module] = ()) -> None:
        self._recorder = WeightGradRecorder()
        self._proxied_entries: list[tuple[dict[str, Any], str, nn.Parameter, WeightProxy]] = []
        made: dict[nn.Parameter, WeightProxy] = {}
        closed = find_compiled_modules([*wrappers, *modules])
        for module in modules:
            if module in closed:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and _is_deferrable_parameter(parameter):
                    if parameter not in made:
                        made[parameter] = WeightProxy.wrap(parameter, parameter, self._recorder)
                    self._proxied_entries.append(
                        (module._parameters, name, parameter, made[parameter])
                    )

    @contextmanager
    def activate(self) -> Iterator[list[PendingWeightGrad]]:
        """Within, the modules compute with the stand-ins; gives what is put off."""
        for home, name, parameter, weight in self._proxied_entries:
            if home.get(name) is parameter:
                home[name] = weight
        try:
            yield self._recorder.start()
        finally:
            self._recorder.stop()
            for home, name, parameter, weight in self._proxied_entries:
                if home.get(name) is weight:
                    home[name] = parameter


def _is_deferrable_parameter(parameter: nn.Parameter) -> bool:
    """A matrix or more, of the usual kind; hooks of its own want its whole gradient at once."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dim() > 1
        and parameter.layout is torch.strided
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )
