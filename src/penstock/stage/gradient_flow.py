"""Which tensors would need a gradient, in a forward that builds no graph.

A forward that will be recomputed has no graph to ask. An output of it may need no gradient: the
layers return an input that needs none, or compute with such inputs only, or detach the result. The
next stage must know, because PyTorch refuses some operations in place on what needs a gradient. So
the functions of the forward are followed:

    inputs and parameters    known before
    a new result             needs a gradient if an argument does
    a view of an argument    is in the family of the argument
    a change in place        lets the family need a gradient if an argument does
    a change without a call  lets the family need a gradient
    `detach`                 begins a family that needs none
    in an autograd.Function  a result needs a gradient if an argument does, and otherwise perhaps:
                             the function may have a gradient for an argument that it has not used
    anything else            needs a gradient

A change without a call is one that only the version counter shows: by scripted code, by another
thread, or by a kernel of another library. The last line is for what compiled code returns, and for
what PyTorch shows to no mode. Where the answer is "perhaps", the stage runner builds a graph once
and asks it. The recomputation, which has a graph, raises an error if a tensor needs a gradient in
spite of all that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.nested_values import iter_tensors
from penstock.stage.payload import find_memory_address
from penstock.torch_compat import is_inside_autograd_function, outside_autograd_function

_DETACHING = frozenset((Tensor.detach, torch.detach, Tensor.data.__get__))  # type: ignore[attr-defined]


class GradientNeed(IntEnum):
    """Whether a tensor needs a gradient. Of several tensors together, the maximum is true."""

    NO = 0
    PERHAPS = 1
    YES = 2


class _Family:
    """A tensor and its views, which need a gradient together.

    Attributes:
        need: Whether they need one.
        version: The version counter of their memory when a function was last seen to write to it.
    """

    __slots__ = ("need", "version")

    def __init__(self, need: GradientNeed) -> None:
        self.need = need
        self.version = 0


class GradientFlow(TorchFunctionMode):
    """Follows which tensors of a forward without a graph would need a gradient.

    Args:
        constants: Tensors that need none. All others from outside count as such that need one.
    """

    def __init__(self, constants: Iterable[Tensor]) -> None:
        super().__init__()
        self._counts_all = False
        self._families: dict[int, tuple[weakref.ref[Tensor], _Family]] = {}  # by id of a tensor
        for tensor in constants:
            self._mark(tensor, _Family(GradientNeed.NO))

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Follow the functions that are called in the context."""
        # `pipe(x)` runs its layers inside of an `autograd.Function`.
        with outside_autograd_function(), self:
            yield

    def count_all(self) -> None:
        """Let every tensor count as one that needs a gradient."""
        self._counts_all = True

    def find_need(self, tensor: Tensor) -> GradientNeed:
        """Return whether a tensor needs a gradient, as far as is known."""
        family = self._find_family(tensor)
        if family is None or self._counts_all:
            return GradientNeed.YES
        # A write that this mode has not seen has put unknown numbers into the tensor.
        if tensor.requires_grad or _read_version(tensor) != family.version:
            family.need = GradientNeed.YES
        return family.need

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note the families of what it returns and changes."""
        kwargs = kwargs or {}
        # Dynamo traces this method along with the function that it compiles, and fails at weak
        # references and version counters. The results of compiled code are in no family.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        arguments = list(iter_tensors((args, kwargs)))
        versions = [_read_version(tensor) for tensor in arguments]
        # Before the call, so that writes without a call are told from those of this one.
        needs = list(map(self.find_need, arguments))
        result = func(*args, **kwargs)
        outputs = list(iter_tensors(result))
        # Below a dispatch mode of Python, operators for lists of tensors count up no version.
        name = getattr(func, "__name__", "")
        writes_all = name.startswith("_foreach_") and name.endswith("_")
        written = [
            tensor
            for tensor, version in zip(arguments, versions, strict=True)
            if writes_all or _read_version(tensor) != version
        ]
        if not outputs and not written:
            return result
        need = max(needs, default=GradientNeed.NO)
        # Also for a view: an argument beside its base may have a gradient for it. And a kernel of
        # another library may write to what the function has allocated.
        is_inside_function = is_inside_autograd_function()
        if is_inside_function:
            need = max(need, GradientNeed.PERHAPS)
        for tensor in written:
            family = self._find_family(tensor)
            if family is not None:
                family.need = max(family.need, need)
                family.version = _read_version(tensor)
        for output in outputs:
            if self._find_family(output) is not None:
                continue  # an argument itself
            if is_inside_function:
                family = None
            elif func in _DETACHING:
                family = _Family(GradientNeed.NO)
            else:
                family = self._find_viewed(output, arguments)
            self._mark(output, family or _Family(need))
        return result

    def _find_viewed(self, output: Tensor, arguments: Sequence[Tensor]) -> _Family | None:
        """Return the family of an argument of which the output is a view, or None."""
        if not output._is_view():
            return None
        address = _find_storage(output)
        viewed = [t for t in arguments if address is None or _find_storage(t) == address]
        families = [self._find_family(t) or _Family(GradientNeed.YES) for t in viewed]
        return max(families, key=lambda family: family.need, default=None)

    def _mark(self, tensor: Tensor, family: _Family) -> None:
        family.version = _read_version(tensor)
        self._families[id(tensor)] = weakref.ref(tensor), family

    def _find_family(self, tensor: Tensor) -> _Family | None:
        reference, family = self._families.get(id(tensor), (None, None))
        return family if reference is not None and reference() is tensor else None


def _read_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _find_storage(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory, or None for a kind of tensor that has several."""
    is_plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    if not is_plain or tensor.layout is not torch.strided:
        return None
    return find_memory_address(tensor)
