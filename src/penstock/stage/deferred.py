"""Weight gradients put off: what splits a backward into I and W.

While the forward of a cell with a W builds its graph, its layers compute with stand-ins for their
weights. Where a stand-in meets an operation of the table below, the operation runs with a
weight that wants no gradient, so that the backward (I) skips it, and a `Pair` keeps the operation's
input until that backward brings the output's gradient. W multiplies them. Everywhere else the
stand-in steps aside for the parameter itself, which gets its gradient in I, as ever.

    linear, matmul, mm, bmm, addmm     gradient and input, multiplied in W
    convolutions                       the same, by the library's own backward
    embedding, or nothing else learns  the operation's whole backward happens in W

Biases and the weights of norms are not put off: their gradients cost next to nothing beside that of
the input, and to put them off would keep two large tensors alive for the sake of a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import RunError
from penstock.stage.compiled import compiled_parts
from penstock.stage.graph import ROOT, accumulate

Formula = Callable[[Tensor, Tensor], Tensor]  # of the output's gradient and the input


class Pair:
    """What the gradient of one use of a weight is made of, when its output's gradient has come."""

    __slots__ = ("_formula", "_input", "_version", "gradient", "weight")

    def __init__(self, weight: Tensor, given: Tensor, formula: Formula) -> None:
        self.weight, self._formula = weight, formula
        self._input = given.detach()
        self._version = given._version
        self.gradient: Tensor | None = None

    def catch(self, gradients: Sequence[Tensor | None]) -> None:
        """As a hook of the operation's node: after all hooks on its output."""
        self.gradient = gradients[0]

    def of_weight(self) -> Tensor | None:
        """The weight's gradient; None if no gradient has come."""
        if self.gradient is None:
            return None
        if self._input._version != self._version:
            raise RunError(
                f"a tensor of shape {tuple(self._input.shape)} that the gradient of a weight needs "
                "has been changed in place by a later operation: clone it before you change it"
            )
        given, gradient = self._input, self.gradient
        if given.dtype is not gradient.dtype:  # under autocast
            given = given.to(gradient.dtype)
        found = self._formula(gradient, given)
        return found if found.dtype is self.weight.dtype else found.to(self.weight.dtype)


class Stopped:
    """An operation whose backward has been put off as a whole."""

    __slots__ = ("gradient", "weight")

    def __init__(self, output: Tensor) -> None:
        self.weight = output  # where the backward goes on
        self.gradient: Tensor | None = None

    def of_weight(self) -> Tensor | None:
        """The output's gradient; None if none has come."""
        return self.gradient


class Gate(torch.autograd.Function):
    """Stops the backward before an operation, whose backward is W's.

    It is not linked to the operation: a backward frees what it comes upon, even without gradients.
    """

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor, stopped: Stopped) -> Tensor:
        """The same memory."""
        ctx.stopped = stopped
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient goes no further."""
        ctx.stopped.gradient = gradients[0]
        return None, None, None


Later = list[Pair | Stopped]


class Ledger:
    """Where a cell's stand-ins write down what they put off."""

    __slots__ = ("later",)

    def __init__(self) -> None:
        self.later: Later = []


def weight_gradients(later: Later) -> None:
    """W: the gradients that were put off, added to `.grad` in one go."""
    with torch.no_grad():
        found = [(one.weight, one.of_weight()) for one in later]
    given = [(weight, gradient) for weight, gradient in found if gradient is not None]
    if given:
        weights, gradients = zip(*given, strict=True)
        accumulate(weights, gradients, retain=False)


# ---- stand-ins ----------------------------------------------------------------------------


class Weight(Tensor):
    """Stands in for a parameter, or for a view of one."""

    _is_param = True  # to isinstance(_, nn.Parameter)
    original: Tensor
    ledger: Ledger  # and not its owner: in a cycle, nodes of the graph would live on

    @staticmethod
    def of(original: Tensor, ledger: Ledger) -> Weight:
        """For operations that no function sees it is the same memory, part of the same graph."""
        made = original.as_subclass(Weight)
        made.original, made.ledger = original, ledger
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operations of the table are put off; others get the parameter itself."""
        kwargs = kwargs or {}
        way = _WAYS.get(func)
        if way is not None and torch.is_grad_enabled() and _keeps_its_own():
            done = way(func, args, kwargs)
            if done is not None:
                return done
        args, kwargs = torch.utils._pytree.tree_map_only(Weight, _original, (args, kwargs))
        return func(*args, **kwargs)


def _original(weight: Weight) -> Tensor:
    return weight.original


def _keeps_its_own() -> bool:
    """Not where somebody else keeps what backwards need, and may compute it anew."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Deferral:
    """Stand-ins for the weights of some modules, and what was put off while they were used."""

    def __init__(
        self, modules: Iterable[nn.Module], learner: Callable[[nn.Parameter], nn.Parameter]
    ) -> None:
        made: dict[nn.Parameter, Weight] = {}
        self._ledger = Ledger()
        self._homes: list[tuple[dict[str, Any], str, Weight]] = []
        modules = list(modules)
        compiled = compiled_parts(modules)
        for module in modules:
            if module in compiled:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and _can_wait(learner(parameter)):
                    if parameter not in made:
                        made[parameter] = Weight.of(learner(parameter), self._ledger)
                    self._homes.append((module._parameters, name, made[parameter]))

    @contextmanager
    def used(self) -> Iterator[Later]:
        """Within, the modules compute with the stand-ins; gives what is put off."""
        later: Later = []
        self._ledger.later = later
        before = []
        for home, name, weight in self._homes:
            before.append(home[name])
            home[name] = weight
        try:
            yield later
        finally:
            self._ledger.later = []  # what was put off is the cell's alone: it goes with its W
            for (home, name, weight), parameter in zip(self._homes, before, strict=True):
                if home.get(name) is weight:
                    home[name] = parameter


def _can_wait(parameter: nn.Parameter) -> bool:
    """A matrix or more, of the usual kind; hooks of its own want its whole gradient at once."""
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad
        and parameter.dim() > 1
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


# ---- operations ---------------------------------------------------------------------------

# From the function and its arguments to its result; None if it is not to be put off.
Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _waiting(output: Tensor, weight: Weight, given: Tensor, formula: Formula) -> Tensor:
    node = output.grad_fn
    assert node is not None
    pair = Pair(weight.original, given, formula)
    node.register_prehook(pair.catch)
    weight.ledger.later.append(pair)
    return output


def _stopped(weight: Weight, output: Tensor) -> Tensor:
    stopped = Stopped(output)
    weight.ledger.later.append(stopped)
    gated: Tensor = Gate.apply(ROOT, output.detach(), stopped)  # type: ignore[no-untyped-call]
    return gated


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and type(value) is not Weight


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _of_linear(gradient: Tensor, given: Tensor) -> Tensor:
    return _rows(gradient).t().mm(_rows(given).conj())


def _of_matmul(gradient: Tensor, given: Tensor) -> Tensor:
    return _rows(given).mH.mm(_rows(gradient))


def _of_bmm(gradient: Tensor, given: Tensor) -> Tensor:
    return given.mH.bmm(gradient)


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = _named(args, kwargs, "input", "weight", "bias")
    if type(weight) is not Weight or type(given) is Weight or type(bias) is Weight:
        return None
    if not _learns(given) and not _learns(bias):
        return _stopped(weight, func(given, weight.original, bias))
    output = func(given, weight.original.detach(), bias)
    return _waiting(output, weight, given, _of_linear)


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight = _named(args, kwargs, "input", "other", "mat2")[:2]
    if type(weight) is not Weight or not _learns(given) or type(given) is Weight:
        return None
    if weight.dim() == 2 and given.dim() > 1:
        formula = _of_matmul
    elif weight.dim() == given.dim() == 3 and weight.shape[0] == given.shape[0]:
        formula = _of_bmm
    else:
        return None
    return _waiting(func(given, weight.original.detach()), weight, given, formula)


def _rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, given = args
    return _matmul(torch.matmul, (given, weight), {})


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:  # with factors
        return None
    bias, given, weight = args
    if type(weight) is not Weight or type(given) is Weight or type(bias) is Weight:
        return None
    if not _learns(given) and not _learns(bias):
        return None
    return _waiting(func(bias, given, weight.original.detach()), weight, given, _of_matmul)


def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, weight, bias = _named(args, kwargs, "input", "weight", "bias")
    if type(weight) is not Weight or not _learns(given) or type(given) is Weight:
        return None
    if given.dim() != weight.dim() or "same" in args or "same" in kwargs.values():
        return None  # it would be changed before it is convolved
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight", "bias")}
    output = func(given, weight.original.detach(), bias, *args[3:], **rest)
    node = output.grad_fn
    settings = [
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    ]
    kernel = weight.original.detach()

    def of_weight(gradient: Tensor, given: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, given, kernel.to(given.dtype), None, *settings, [False, True, False]
        )[1]
        return found

    return _waiting(output, weight, given, of_weight)


def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices, weight = _named(args, kwargs, "input", "weight")
    rest = {k: v for k, v in kwargs.items() if k not in ("input", "weight")}
    return _stopped(weight, func(indices, weight.original, *args[2:], **rest))


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a weight: a weight again, or several."""
    weight = args[0]
    found = func(weight.original, *args[1:], **kwargs)
    if isinstance(found, Tensor):
        return Weight.of(found, weight.ledger)
    return tuple(Weight.of(one, weight.ledger) for one in found)


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It hands its weights on to `linear`, which must see the stand-ins."""
    return _open_attention()(*args, **kwargs)


@cache
def _open_attention() -> Any:
    """PyTorch's own, but it does not ask whether an argument has a mind of its own."""
    whole = functional.multi_head_attention_forward
    opened = FunctionType(
        whole.__code__,
        {**whole.__globals__, "has_torch_function": lambda tensors: False},
        whole.__name__,
        whole.__defaults__,
        whole.__closure__,
    )
    opened.__kwdefaults__ = whole.__kwdefaults__
    return opened


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


_CONVOLUTIONS = (
    *(getattr(torch, f"conv{n}d") for n in (1, 2, 3)),
    *(getattr(torch, f"conv_transpose{n}d") for n in (1, 2, 3)),
)
_VIEWS = (
    *(Tensor.t, torch.t, Tensor.transpose, torch.transpose, Tensor.permute),
    *(Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    *(Tensor.view, Tensor.reshape, Tensor.__getitem__),
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
