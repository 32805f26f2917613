"""A proof that a loss function is a mean over rows, from the operations that it runs.

The loss of a batch is the mean of the losses of its micro-batches only if the function is a sum of
terms, each of which depends on one row. Trying it on some rows shows that for these rows. A weight
that is normalised over the batch may be the same for all of them, a quantile of two rows is their
mean, and a branch may be taken later. So the operations of a micro-batch are followed:

    outputs, targets            ROWS        a number, or several, for each row
    sigmoid, log_softmax(1)     ROWS        operations that compute each row by itself
    mean, cross_entropy         MEAN        a mean over rows
    MEAN + MEAN, 0.1 * MEAN     MEAN        linear operations
    sum                         SUM         a sum over rows
    SUM + SUM                   SUM         linear operations, but for factors
    MEAN + SUM, 0.1 * SUM       MIXED       linear operations
    anything else               OTHER       no proof

A loss that is a MEAN is a mean over rows. (`loss_terms.py` compares what it counts.) With
reduction='sum', it has to be a SUM. A MIXED loss may be either: 0.1 may be 1 / rows. Its sums may
be 0 in the first steps, which shows nothing, so it is compared with the loss of the whole batch
until each was a part of the loss that shows. So is a loss that goes by the number of its rows. Of
any other loss nothing is known, and it is compared in each step (`Audit.check_whole_loss`). So it
is enough to know the operations of common losses.

The operations are those of a micro-batch. A loss that goes by the number of its rows may run others
for the whole batch (row_counts.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.nested_values import list_operands
from penstock.stage.branches import RAISING_FUNCTIONS
from penstock.stage.row_counts import RowCounts
from penstock.torch_compat import pytree


def split_names(text: str) -> frozenset[str]:
    """Return the names in a text, for a table of functions or operations."""
    return frozenset(text.split())


class Kind(Enum):
    """A description of how a tensor depends on the rows of the batch."""

    CONSTANT = auto()
    ROWS = auto()
    MEAN = auto()
    SUM = auto()
    MIXED = auto()
    OTHER = auto()


_TOTALS = frozenset((Kind.MEAN, Kind.SUM, Kind.MIXED))


# The names of functions, methods and operators, without underscores.
_ELEMENTWISE = split_names(
    """
    add radd sub rsub subtract mul rmul multiply div rdiv truediv rtruediv divide neg negative abs
    absolute exp expm1 log log1p log2 sqrt rsqrt square pow rpow reciprocal sign sigmoid logsigmoid
    tanh relu gelu silu softplus elu leaky_relu clamp clip where masked_fill nan_to_num minimum
    maximum xlogy erf cos sin eq ne lt le gt ge and or xor invert logical_and logical_or logical_not
    isnan isfinite to type_as float double half bfloat16 long int bool detach clone contiguous
    zeros_like ones_like full_like
    """
)
_CONVERSIONS = split_names("to type_as")
_LINEAR = split_names(
    """
    add radd sub rsub subtract neg negative sum mean stack to float double half bfloat16 clone
    contiguous view reshape squeeze
    """
)
_ADDITIONS = split_names("add radd sub rsub subtract")
_OPERANDS = ("other", "alpha", "input")  # the names of operands
_SCALING = split_names("mul rmul multiply div truediv divide")
_SUMS = split_names("sum mean")
_RESHAPES = split_names("view reshape flatten unflatten")
# The position of the argument `dim`, and its default.
_DIMS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        split_names(
            """
            sum mean amax amin max min argmax argmin softmax log_softmax logsumexp var std cumsum
            unsqueeze squeeze gather
            """
        ),
        (1, None),
    ),
    "norm": (2, None),
    "vector_norm": (2, None),
    "normalize": (2, 1),
    "cosine_similarity": (2, 1),
    "topk": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
}
_CLASS_LOSSES = split_names("cross_entropy nll_loss")  # targets may have one dim less
_LOSSES = _CLASS_LOSSES | split_names(
    """
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy soft_margin_loss
    binary_cross_entropy_with_logits poisson_nll_loss
    """
)
_IN_PLACE_OPERATORS = split_names(
    """
    __setitem__ __set__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__
    """
)
# They return no number that depends on data.
_METADATA = split_names(
    """
    get size dim ndimension numel len stride is_floating_point is_complex is_contiguous get_device
    element_size backward retain_grad hash
    """
)


class RowMeanProver(TorchFunctionMode):
    """Follows the operations of a loss function on one micro-batch.

    Args:
        batch: The values that have rows: the outputs of the model, and the targets.
        row_counts: The numbers of rows of all micro-batches.

    Attributes:
        goes_by_row_count: Whether it may run other operations for another number of rows.
        function_names: The names of the functions that it has called on the batch.
        totals: The means and sums over rows that it has computed.
    """

    def __init__(self, *batch: Any, row_counts: Sequence[int] = ()) -> None:
        super().__init__()
        self.function_names: list[str] = []
        self.totals: list[Tensor] = []
        self._kinds: dict[int, tuple[weakref.ref[Tensor], Kind]] = {}  # by id of a tensor
        # Whether Python has read a number, and may go by it, or an operation in place has changed
        # other tensors with the same memory. What follows is not known.
        self._is_lost = False
        tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        for tensor in tensors:
            self._mark(tensor, Kind.ROWS if tensor.dim() else Kind.OTHER)
        self._row_count = math.gcd(*(len(t) for t in tensors if t.dim()))
        rows = next((rows for rows in row_counts if rows and not self._row_count % rows), 0)
        self._row_counts = RowCounts(rows, {*row_counts, sum(row_counts)})

    @property
    def goes_by_row_count(self) -> bool:  # noqa: D102 (see the class)
        return self._row_counts.is_decisive

    def proves(self, loss: Any, is_sum: bool = False) -> bool:
        """Return whether a tensor is a mean over rows, or with `is_sum` a sum over rows.

        Not if Python has read a number, even after the tensor was computed: it may choose among
        tensors by it, as in `2 * loss if target.std() > 5 else loss`.
        """
        kinds = (Kind.SUM,) if is_sum else (Kind.MEAN, Kind.CONSTANT)
        return not self._is_lost and isinstance(loss, Tensor) and self._find_kind(loss) in kinds

    def adds_up(self, loss: Any) -> bool:
        """Return whether a tensor is linear in means and sums over rows."""
        return not self._is_lost and isinstance(loss, Tensor) and self._find_kind(loss) in _TOTALS

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note the kind of what it returns."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        try:
            result = func(*args, **kwargs)
        except Exception:
            self._is_lost = True  # Python may catch the error, and go by it
            raise
        # Of the second tensor of `number.to(output)`, only the dtype and the device count.
        tensors = list_operands(args[:1] if name in _CONVERSIONS else (*args, *kwargs.values()))
        kinds = {self._find_kind(tensor) for tensor in tensors} - {Kind.CONSTANT}
        outputs = list_operands((result,))
        kind = Kind.OTHER if kinds else Kind.CONSTANT
        if kinds:
            if outputs:
                self.function_names.append(name)
            self._is_lost |= not outputs and name.strip("_") not in _METADATA
            self._is_lost |= _works_in_place(name) or "out" in kwargs
            self._is_lost |= name in RAISING_FUNCTIONS  # it may raise for other rows
            if outputs and not self._is_lost and (len(kinds) == 1 or kinds <= _TOTALS):
                common_kind = kinds.pop() if len(kinds) == 1 else Kind.MIXED
                kind = self._derive(name.strip("_"), common_kind, tensors, args, kwargs, outputs)
        for output in outputs:
            self._mark(output, kind)
        self._row_counts.note_sizes(name, args, result)
        return result

    def _mark(self, tensor: Tensor, kind: Kind) -> None:
        self._kinds[id(tensor)] = weakref.ref(tensor), kind

    def _find_kind(self, tensor: Any) -> Kind:
        reference, kind = self._kinds.get(id(tensor), (None, Kind.CONSTANT))
        if reference is not None and reference() is tensor:
            return kind
        # It has a graph, and was not computed here: a layer may have left it somewhere.
        return Kind.CONSTANT if tensor.is_leaf else Kind.OTHER

    def _derive(
        self,
        name: str,
        kind: Kind,
        tensors: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
    ) -> Kind:
        """Return the kind of what a function returns for arguments of one kind and constants."""
        if kind in _TOTALS:
            return self._derive_total(name, kind, args, kwargs)
        if kind is not Kind.ROWS or not args or not isinstance(args[0], Tensor | list | tuple):
            return Kind.OTHER
        source = tensors[0]
        if name in _LOSSES:
            return self._derive_loss(name, args, kwargs, outputs[0])
        if name in _ELEMENTWISE and all(self._is_aligned(t, outputs[0]) for t in tensors):
            return Kind.ROWS
        if name in _SUMS and not outputs[0].dim():
            return self._note_total(outputs[0], is_sum=name == "sum")
        if name in _RESHAPES:
            has_rows = outputs[0].dim() and not len(outputs[0]) % max(self._row_count, 1)
            return Kind.ROWS if has_rows else Kind.OTHER
        if name in _DIMS and all(self._find_kind(t) is Kind.ROWS for t in tensors):
            position, default = _DIMS[name]
            dims = kwargs.get("dim", args[position] if position < len(args) else default)
            dims = dims if isinstance(dims, tuple | list) else [dims]
            sizes = {len(t) if t.dim() else 0 for t in (*tensors, *outputs)}
            is_by_row = all(type(dim) is int and dim % source.dim() for dim in dims)
            return Kind.ROWS if is_by_row and len(sizes) == 1 else Kind.OTHER
        if name == "getitem" and self._keeps_rows(source, args[1]):
            return Kind.ROWS
        if name == "transpose" and all(dim % source.dim() for dim in args[1:]):
            return Kind.ROWS
        return Kind.OTHER

    def _note_total(self, total: Tensor, is_sum: bool) -> Kind:
        self.totals.append(total.detach())
        return Kind.SUM if is_sum else Kind.MEAN

    def _derive_total(
        self, name: str, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Kind:
        """Return the kind of what a function returns for means, sums or both, and constants."""
        if not args or any(isinstance(kwargs.get(key), Tensor | int | float) for key in _OPERANDS):
            return Kind.OTHER
        operands = [a for a in list_operands(args) if self._find_kind(a) is not Kind.CONSTANT]
        if name in _LINEAR:
            is_averaged = name == "mean" and kind is Kind.SUM
            if kind is Kind.MEAN or is_averaged:
                return Kind.MIXED if is_averaged else Kind.MEAN
            # What is added to a sum counts once for each micro-batch, and may be 0 at first.
            values: Sequence[Any] = list_operands(args[:1])
            if name in _ADDITIONS:  # `sum(terms)` begins with the number 0
                values = [v for v in args if isinstance(v, Tensor) or v != 0]
            return kind if len(values) == len(operands) else Kind.OTHER
        # Not the product of two totals, nor a constant that is divided by a total.
        if (
            name in _SCALING
            and len(operands) == 1
            and (operands[0] is args[0] or "div" not in name)
        ):
            return Kind.MEAN if kind is Kind.MEAN else Kind.MIXED
        return Kind.OTHER

    def _derive_loss(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Kind:
        """Return the kind of one of PyTorch's losses. Its weights must be constant."""
        batch, others = args[:2], (*args[2:], *kwargs.values())
        if any(isinstance(v, Tensor) and self._find_kind(v) is not Kind.CONSTANT for v in others):
            return Kind.OTHER
        if len(batch) < 2 or not all(self._find_kind(t) is Kind.ROWS and t.dim() for t in batch):
            return Kind.OTHER
        # A prediction of shape (rows, 1) and a target of shape (rows) would be combined row by row.
        if batch[0].dim() != batch[1].dim() and name not in _CLASS_LOSSES:
            return Kind.OTHER
        if len(batch[0]) != len(batch[1]):
            return Kind.OTHER
        if output.dim():
            return Kind.ROWS
        if any(type(value) is int for value in args[2:]):  # of a function of C++: a reduction
            return Kind.OTHER
        reduction = kwargs.get("reduction", "mean")
        if any(kwargs.get(name) is not None for name in ("size_average", "reduce")):
            return Kind.OTHER
        return self._note_total(output, is_sum=reduction == "sum")

    def _is_aligned(self, tensor: Tensor, output: Tensor) -> bool:
        """Return whether each row of an elementwise result is computed from the same row."""
        if self._find_kind(tensor) is Kind.ROWS:
            return tensor.dim() == output.dim() and len(tensor) == len(output)
        # A constant with an entry for each row depends on where the batch is split.
        return tensor.dim() < output.dim() or not tensor.dim() or len(tensor) == 1

    def _keeps_rows(self, source: Tensor, index: Any) -> bool:
        """Return whether `source[index]` has all rows, or those where a mask is true."""
        if isinstance(index, Tensor):
            is_mask = index.dtype is torch.bool and self._find_kind(index) is Kind.ROWS
            return is_mask and len(index) == len(source)
        indices = index if isinstance(index, tuple) else (index,)
        # An array of NumPy selects as a tensor does.
        if not all(i is None or isinstance(i, int | slice | type(Ellipsis)) for i in indices):
            return False
        is_behind_rows = indices[0] is Ellipsis and len(indices) <= source.dim()
        return is_behind_rows or indices[0] == slice(None)


def _works_in_place(name: str) -> bool:
    """Return whether a function is `add_`, `__iadd__` or `__setitem__`, say."""
    if name.startswith("__"):
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_")
