"""Operations whose weight gradient can be deferred to W, and the weight proxies that detect them.

While the forward of a cell with a W builds its graph, its layers compute with a `WeightProxy` in
the place of each weight. The proxy's `__torch_function__` sees every operation that uses it:

1. An operation of the table below runs with the detached weight. Autograd then computes no weight
   gradient in the backward (I), and a `PendingWeightGrad` waits for the gradient of the output.
2. Any other operation gets the parameter itself, which receives its gradient in I as usual.

    operation                          in W
    linear, matmul, mm, bmm, addmm     output gradient times input
    convolutions                       aten.convolution_backward, for the weight only
    embedding, and any operation       the whole backward of the operation
      whose input needs no gradient
    views (t, view, chunk, ...)        nothing: a view of a weight proxy is a weight proxy

Biases and the weights of norms are not deferred. Their gradients cost little beside that of the
input, and to defer them would keep two large tensors alive for the sake of a small one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from penstock.torch_compat import (
    call_without_dispatch,
    is_any_autocast_enabled,
    mark_as_parameter,
    peek_functorch_stack,
    pytree,
    read_convolution_settings,
    top_saved_tensor_hooks,
)

# ---- weight proxies ----------------------------------------------------------------------------


class WeightProxy(Tensor):
    """A tensor subclass that replaces a parameter, or a view of one, during a forward.

    Attributes:
        original: The parameter, or the view of it.
        parameter: The parameter itself.
        recorder: The recorder of the forward to which deferred gradients go.
    """

    original: Tensor
    parameter: nn.Parameter
    recorder: WeightGradRecorder
    _stands_for: nn.Parameter  # read by `unwrap_proxy` when another thread finds this proxy

    @staticmethod
    def wrap(
        original: Tensor, parameter: nn.Parameter, recorder: WeightGradRecorder
    ) -> WeightProxy:
        """Return a proxy for a parameter or for a view of it.

        It has the same memory and is part of the same autograd graph. Operations that never reach
        `__torch_function__` therefore compute the same result, with the usual gradient.
        """
        proxy = original.as_subclass(WeightProxy)
        if original.__dict__:  # attributes of the user's own, such as `weight.main_grad`
            proxy.__dict__.update(original.__dict__)
        proxy.original, proxy.parameter, proxy.recorder = original, parameter, recorder
        proxy._stands_for = unwrap_proxy(parameter)
        return proxy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Defer the weight gradient of a known operation; give any other the parameter itself."""
        kwargs = kwargs or {}
        handler = _OP_HANDLERS.get(func)
        if handler is not None and torch.is_grad_enabled() and _is_interception_safe(types):
            result = handler(func, args, kwargs)
            if result is not None:
                return result
        if func is torch.autograd.grad:
            _check_not_recording(args, kwargs)
        return func(*_unwrap_weights(args), **_unwrap_weights(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy of the parameter.

        `Tensor.__deepcopy__` refuses tensors that are not leaves, and a proxy is not one.
        """
        return copy.deepcopy(self.original, memo)


mark_as_parameter(WeightProxy)  # layers may ask isinstance(weight, nn.Parameter)


def _is_interception_safe(types: Iterable[type]) -> bool:
    """Return whether nothing else intercepts this operation or its backward.

    That is: no compiler traces it, no other tensor subclass takes part in it, no hooks on saved
    tensors are set (PyTorch's checkpoint and offloading use them), and no transform of `torch.func`
    is active.
    """
    return (
        not torch.compiler.is_compiling()
        and _SUPPORTED_TYPES.issuperset(types)
        and top_saved_tensor_hooks(True) is None
        and peek_functorch_stack() is None
    )


def _unwrap_weights(value: Any) -> Any:
    """Return the arguments with the original tensors in place of their proxies."""
    kind = type(value)
    if kind is WeightProxy:
        return value.original
    if kind is tuple or kind is list:
        return kind([_unwrap_weights(item) for item in value])
    if kind is dict:
        return {key: _unwrap_weights(item) for key, item in value.items()}
    if isinstance(value, tuple | list | dict):  # a subclass, such as a named tuple
        return pytree.tree_map_only(WeightProxy, _unwrap_weights, value)
    return value


def _check_not_recording(*values: Any) -> None:
    """Raise if `torch.autograd.grad` is called with a weight of the forward that is recorded."""
    for leaf in pytree.tree_leaves(values):
        if type(leaf) is WeightProxy:
            leaf.recorder.check_not_recording()


# ---- operations --------------------------------------------------------------------------------

# A handler runs an operation with its arguments and returns its result. It returns None without
# running it if the weight gradient of this call cannot be deferred.
OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _defer(
    weight: WeightProxy,
    op_input: Tensor,
    bias: Tensor | None,
    formula: WeightGradFormula,
    operation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run an operation on an input and a weight, and leave the weight's gradient for W."""
    recorder, original = weight.recorder, weight.original
    if is_any_autocast_enabled():
        op_input, original = _autocast(op_input, original, recorder)
    if not op_input.requires_grad and not (bias is not None and bias.requires_grad):
        # With a detached weight the output would have no graph at all. Nothing of this operation
        # is needed in I, so its whole backward moves to W.
        output, pending_grad = stop_backward(
            weight.parameter, operation(op_input, original), recorder
        )
    else:
        output = operation(op_input, original.detach())
        root = original if original is weight.parameter else find_gradient_edge(original)
        assert root is not None
        pending_grad = PendingWeightGrad(weight.parameter, root, op_input, formula, recorder)
        # If the output is a view and a later operation changes it in place, autograd replaces the
        # node of the view and leaves the node of its base in the graph. So the base is hooked.
        base = output._base
        node = output.grad_fn if base is None else base.grad_fn
        assert node is not None
        node.register_hook(pending_grad.receive_output_grad)
    recorder.add(pending_grad)
    return output


def _autocast(
    op_input: Tensor, weight: Tensor, recorder: WeightGradRecorder
) -> tuple[Tensor, Tensor]:
    """Cast an input and a weight as autocast does.

    The operation runs with a detached weight. Autocast would cast that in each use, and its cast
    would not be in the graph. Here a weight is cast once in a forward, with a graph, as autocast's
    own cache does for leaves.
    """
    device_type = op_input.device.type
    dtypes = torch.float32, torch.float16, torch.bfloat16
    if not torch.is_autocast_enabled(device_type) or op_input.dtype not in dtypes:
        return op_input, weight
    dtype = torch.get_autocast_dtype(device_type)
    cast_weight = recorder.autocast_weights.get(weight)
    if cast_weight is None or cast_weight.dtype is not dtype:
        cast_weight = weight.to(dtype)
        if weight.is_leaf and torch.is_autocast_cache_enabled():
            recorder.autocast_weights[weight] = cast_weight
    return op_input.to(dtype), cast_weight


_SUPPORTED_TYPES = frozenset((Tensor, nn.Parameter, WeightProxy))
_PLAIN_TYPES = _SUPPORTED_TYPES - {WeightProxy}


def _can_defer(weight: Any, op_input: Any, bias: Any = None) -> bool:
    """Return whether the weight is a proxy in use, and input and bias are plain tensors."""
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
    op_input, weight, bias = (
        args if len(args) == 3 else _bind_arguments(args, kwargs, "input", "weight", "bias")
    )
    if not _can_defer(weight, op_input, bias) or weight.original.dim() != 2:
        return None
    if bias is None:
        return _defer(weight, _ensure_foldable(op_input), None, _linear_weight_grad, func)
    if op_input.dim() > 2 and not op_input.is_contiguous():
        # PyTorch computes this case as a product, and then adds the bias in place. With a
        # contiguous input it would use one fused operation, which rounds differently.
        op_input = op_input.contiguous()
        return _defer(
            weight, op_input, bias, _linear_weight_grad, lambda x, w: func(x, w).add_(bias)
        )
    return _defer(weight, op_input, bias, _linear_weight_grad, lambda x, w: func(x, w, bias))


def _ensure_foldable(op_input: Tensor) -> Tensor:
    """Return the input in a layout for which PyTorch computes the usual product.

    With three or more dims, PyTorch decides by `weight.requires_grad` whether to fold the input
    into one matrix or to multiply batch by batch, and the two round differently. The weight is
    detached here. PyTorch folds a contiguous input in either case, and to fold another one it would
    copy it, too.
    """
    return op_input if op_input.dim() < 3 or op_input.is_contiguous() else op_input.contiguous()


def _defer_matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op_input, weight = _bind_arguments(args, kwargs, "input", "other")
    if weight is None:
        weight = kwargs.get("mat2")
    if not _can_defer(weight, op_input) or "out" in kwargs:
        return None
    original = weight.original
    if original.dim() == 2 and op_input.dim() > 1:
        op_input, formula = _ensure_foldable(op_input), _matmul_weight_grad
    elif original.dim() == op_input.dim() == 3 and original.shape[0] == op_input.shape[0]:
        formula = _bmm_weight_grad
    else:
        return None
    return _defer(weight, op_input, None, formula, func)


def _defer_rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, op_input = args
    return _defer_matmul(torch.matmul, (op_input, weight), {})


def _defer_addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:  # the factors alpha and beta are not supported
        return None
    bias, op_input, weight = args
    if not _can_defer(weight, op_input, bias):
        return None
    return _defer(weight, op_input, bias, _matmul_weight_grad, lambda x, w: func(bias, x, w))


def _defer_convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op_input, weight, bias = _bind_arguments(args, kwargs, "input", "weight", "bias")
    if not _can_defer(weight, op_input, bias) or op_input.is_complex():
        return None
    padding = args[4] if len(args) > 4 else kwargs.get("padding")
    # An input without a batch dim, or with padding="same", is reshaped or padded by PyTorch before
    # the convolution. The formula below would need that tensor, and it has only the original.
    if op_input.dim() != weight.original.dim() or padding == "same":
        return None
    options = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    # The arguments of convolution_backward between the input and the mask, known after the forward:
    # the weight, the size of the bias (not needed), and the settings that autograd has saved.
    backward_args: list[Any] = []

    def run_convolution(op_input: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = func(op_input, weight, bias, *args[3:], **options)
        backward_args.extend([weight, None, *read_convolution_settings(output.grad_fn)])
        return output

    def convolution_weight_grad(output_grad: Tensor, op_input: Tensor) -> Tensor:
        mask = [False, True, False]  # the gradients of input, weight and bias
        weight_grad: Tensor = torch.ops.aten.convolution_backward(
            output_grad, op_input, *backward_args, mask
        )[1]
        return weight_grad

    return _defer(weight, op_input, bias, convolution_weight_grad, run_convolution)


def _defer_embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices, weight = _bind_arguments(args, kwargs, "input", "weight")
    if not _can_defer(weight, indices):
        return None
    options = {k: v for k, v in kwargs.items() if k not in ("input", "weight")}
    # Indices need no gradient, so the whole backward moves to W and the formula is not used.
    return _defer(
        weight, indices, None, _linear_weight_grad, lambda i, w: func(i, w, *args[2:], **options)
    )


def _wrap_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operation on a weight proxy, and return a proxy, or several, for the result."""
    if not args or type(args[0]) is not WeightProxy or not args[0].recorder.is_recording:
        return None
    weight: WeightProxy = args[0]

    def wrap_if_trainable(view: Tensor) -> Tensor:
        if not view.requires_grad:
            return view
        return WeightProxy.wrap(view, weight.parameter, weight.recorder)

    views = func(weight.original, *args[1:], **kwargs)
    if isinstance(views, Tensor):
        return wrap_if_trainable(views)
    return tuple(map(wrap_if_trainable, views))


def _bind_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Return the first arguments of a call by name, given by position or by keyword."""
    return [
        args[index] if index < len(args) else kwargs.get(name) for index, name in enumerate(names)
    ]


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
    # Otherwise the function dispatches to the proxies, and they do not reach its `F.linear`.
    functional.multi_head_attention_forward: call_without_dispatch,
}


# ---- a forward with weight proxies -------------------------------------------------------------


class WeightGradDeferral:
    """Weight proxies for the modules of a stage, and the recorder of their pending gradients.

    Args:
        modules: The modules whose weights get proxies. Compiled modules are left out: the compiler
            would recompile for each proxy.
        wrappers: Modules around them. If one of these is compiled, so is everything inside it.
    """

    def __init__(self, modules: Sequence[nn.Module], wrappers: Sequence[nn.Module] = ()) -> None:
        self._recorder = WeightGradRecorder()
        self._proxied_entries: list[tuple[dict[str, Any], str, nn.Parameter, WeightProxy]] = []
        proxies: dict[nn.Parameter, WeightProxy] = {}
        compiled = find_compiled_modules([*wrappers, *modules])
        for module in modules:
            if module in compiled:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and _is_deferrable_parameter(parameter):
                    if parameter not in proxies:
                        proxies[parameter] = WeightProxy.wrap(parameter, parameter, self._recorder)
                    self._proxied_entries.append(
                        (module._parameters, name, parameter, proxies[parameter])
                    )

    @contextmanager
    def activate(self) -> Iterator[list[PendingWeightGrad]]:
        """Let the modules compute with the proxies, and yield the list of pending gradients."""
        # An entry that is not the parameter any more has been replaced since. It is left alone.
        for registry, name, parameter, weight in self._proxied_entries:
            if registry.get(name) is parameter:
                registry[name] = weight
        try:
            yield self._recorder.start()
        finally:
            self._recorder.stop()
            for registry, name, parameter, weight in self._proxied_entries:
                if registry.get(name) is weight:
                    registry[name] = parameter


def _is_deferrable_parameter(parameter: nn.Parameter) -> bool:
    """Return whether the gradient of a parameter may be deferred.

    It must be a plain dense parameter with two or more dims. Its hooks expect its whole gradient in
    one piece, so it must not have any.
    """
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dim() > 1
        and parameter.layout is torch.strided
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )
