"""What W does: the gradients of weights that a backward (I) has left.

A `Pair` keeps what one use of a weight needs: what went into it, until the backward brings the
gradient of what came out. W makes the weight's gradient of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.stage.graph import ROOT, Input, accumulate, edge

Formula = Callable[[Tensor, Tensor], Tensor]  # of the output's gradient and the input


class Shelf:
    """Where a forward puts what it leaves for W. It is open while that forward runs."""

    __slots__ = ("_thread", "casts", "later")

    def __init__(self) -> None:
        self.later: list[Pair] | None = None
        self.casts: dict[Tensor, Tensor] = {}  # weights under autocast
        self._thread = 0

    def open(self) -> list[Pair]:
        """For the forward of this thread."""
        self.later, self._thread = [], get_ident()
        return self.later

    def close(self) -> None:
        """What is used from now on is not put off."""
        self.later = None
        self.casts.clear()

    def put(self, pair: Pair) -> None:
        """Leave it for W."""
        assert self.later is not None
        self.later.append(pair)

    @property
    def is_open(self) -> bool:
        """To this thread: others may compute with the same module, for other stages."""
        return self.later is not None and self._thread == get_ident()

    def check_closed(self) -> None:
        """Gradients that a forward asks for would lack what it has put off."""
        if self.later is not None:
            raise RunError(
                "a layer computes gradients in its forward, but the part of its weights in them is "
                "put off until W: use a schedule without W, such as '1f1b', or call that part of "
                "the layer by torch.utils.checkpoint"
            )


class Pair:
    """One use of a weight, of which a formula gives a gradient.

    It goes to the `root`: the weight itself, or where the backward goes on from there.
    """

    __slots__ = ("_formula", "_gradient", "_input", "_of_gradient", "_of_input", "_part", "_shelf",
                 "leaf", "root")  # fmt: skip

    def __init__(
        self, leaf: Tensor, root: Input, given: Tensor, formula: Formula, shelf: Shelf
    ) -> None:
        self.leaf, self.root = leaf, root  # the parameter, and what was made of it
        self._formula, self._shelf = formula, shelf
        self._part = _is_small_part(given)
        self._input, self._of_input = given.detach(), given._version
        self._gradient: Tensor | None = None
        self._of_gradient = 0

    def catch(self, _: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """As a hook of the operation's node: when all that may change the gradient have done so."""
        if self._shelf.later is not None:
            self._shelf.check_closed()
        gradient = gradients[0]
        if gradient is None:
            return
        if self._part:
            if self._input._version != self._of_input:
                raise _changed(self._input)
            self._input, self._of_input, self._part = self._input.clone(), 0, False
        if _is_small_part(gradient):
            gradient = gradient.clone()
        self._gradient, self._of_gradient = gradient, gradient._version

    def of_root(self) -> Tensor | None:
        """The gradient; None if none has come."""
        gradient, given = self._gradient, self._input
        if gradient is None:
            return None
        if given._version != self._of_input:
            raise _changed(given)
        if gradient._version != self._of_gradient:
            raise _changed(gradient)
        return self._formula(gradient, given)


def _is_small_part(tensor: Tensor) -> bool:
    """Of something large, which would stay alive with it?"""
    base = tensor._base
    return base is not None and base.numel() > 2 * tensor.numel()


def _changed(tensor: Tensor) -> RunError:
    return RunError(
        f"a tensor of shape {tuple(tensor.shape)} that the gradient of a weight needs has been "
        "changed in place by a later operation: clone it before you change it"
    )


class Gate(torch.autograd.Function):
    """Stops the backward before an operation, whose whole backward is W's."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor, pair: Pair) -> Tensor:
        """The same memory; the root makes it part of a graph, not of the operation's."""
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """The gradient goes no further."""
        ctx.pair.catch((), gradients)
        return None, None, None


_NOTHING = torch.empty(0)
_AT_ONCE = 1 << 20  # this many numbers may wait to be added


def stopped(leaf: Tensor, output: Tensor, shelf: Shelf) -> tuple[Tensor, Pair]:
    """An operation's output, behind a gate, and what waits for its gradient."""
    root = edge(output)
    assert root is not None
    pair = Pair(leaf, root, _NOTHING, _as_it_is, shelf)
    gated: Tensor = Gate.apply(ROOT, output.detach(), pair)  # type: ignore[no-untyped-call]
    return gated, pair


def _as_it_is(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def weight_gradients(later: list[Pair]) -> None:
    """W: the gradients that were put off, added to `.grad`; the list is emptied.

    Small ones go in one backward, as each has its price, but large ones do not wait for others.
    """
    later.reverse()
    roots: list[Input] = []
    gradients: list[Tensor] = []
    numbers = 0
    with torch.no_grad():
        while later:
            pair = later.pop()
            gradient = pair.of_root()
            if gradient is not None:
                roots.append(pair.root)
                gradients.append(gradient)
                numbers += gradient.numel()
            if numbers > _AT_ONCE and not (later and later[-1].leaf is pair.leaf):
                accumulate(roots, gradients, retain=True)  # a root may come again
                roots, gradients, numbers = [], [], 0
        if roots:
            accumulate(roots, gradients, retain=True)
