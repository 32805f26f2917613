"""The precision in which rows are compared, and the difference that counts as rounding.

Whether rows depend on each other is a question about the function that a model computes, and
rounding must not hide the answer: a layer that mixes rows a little moves the loss of a float32
model by a thousandth, and training goes elsewhere. Some rows together and apart are computed by
kernels for other shapes, which round differently.

    float64             A difference above 1e-8 of the size is one.
    float32             Below 3e-6 there is none. If there is one, the rows run once more in
                        float64, and that decides.
    bfloat16, float16,  The rows run in float32 in the first place.
    autocast

An operation that computes in one dtype only, whatever it is given, cannot run in another one. The
results of a model with such an operation differ above 2e-3 in float32, and a twentieth or a tenth
in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.microbatch import list_tensors
from penstock.torch_compat import DisableTorchFunction, pytree

LOW_PRECISION_DTYPES = frozenset((torch.float16, torch.bfloat16))
_BITS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}

LEAST_DIFFERENCE = 3e-6  # in float32, below it there is none
_REPETITION = 1e-5  # in float32, between two runs on the same rows
# A difference above it is one, whatever rounds.
_ROUNDING = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_DOUBLE = 1e-8
# TF32 has the precision of float16, and its rounding is no reason to compute in float64.
_MAX_SINGLE_ROUNDING = 1e-3

# Weights up to this size may hide what they are multiplied with, as the results are compared.
HIDING_SIZE = 1e-3
HIDING_SIZE_IN_DOUBLE = 1e-6

# Functions that draw numbers of the default dtype, by name.
_DRAWS = frozenset(("rand", "randn", "normal"))
# Methods that convert to a dtype, by name.
_CONVERSIONS = {"bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32}


def widen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, if it has one with fewer bits.

    >>> widen(torch.zeros(1), torch.float64).dtype
    torch.float64
    >>> widen(torch.zeros(1), torch.bfloat16).dtype
    torch.float32
    """
    return tensor.to(dtype) if _BITS.get(tensor.dtype, 64) < _BITS[dtype] else tensor


class WideMode(TorchFunctionMode):
    """Lets a model that asks for a dtype with fewer bits compute in a wide one.

    `x.float()`, `softmax(x, dtype=torch.float32)` and `torch.zeros(3)` have the wide dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._bits = dtype, _BITS[dtype]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function with the wide dtype in place of one with fewer bits."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if name in _CONVERSIONS and self._is_narrow(_CONVERSIONS[name]):
            return args[0].to(self._dtype)
        args = tuple([self._dtype if self._is_narrow(value) else value for value in args])
        kwargs = {k: self._dtype if self._is_narrow(v) else v for k, v in kwargs.items()}
        if name in _DRAWS and not any(isinstance(value, Tensor) for value in args):
            kwargs.setdefault("dtype", self._dtype)
        result = func(*args, **kwargs)
        narrow = [t for t in list_tensors(result) if self._is_narrow(t.dtype)]
        if not narrow:
            return result
        if not any(t.is_floating_point() for t in list_tensors((args, kwargs))):
            return pytree.tree_map_only(Tensor, lambda t: widen(t, self._dtype), result)
        if any(t.dtype in LOW_PRECISION_DTYPES for t in narrow):
            raise TypeError(f"{name} computes in {narrow[0].dtype}, whatever it is given")
        return result

    def _is_narrow(self, value: Any) -> bool:
        return isinstance(value, torch.dtype) and _BITS.get(value, 64) < self._bits


@contextmanager
def widened_units(
    units: Iterable[nn.Module],
    dtype: torch.dtype,
    note_parameter: Callable[[nn.Parameter, nn.Parameter], None],
) -> Iterator[None]:
    """Convert the parameters of each unit before it runs in this context, and put them back after.

    So there is no second copy of the model. With gradients there is, as a backward may recompute
    a unit: then its parameters stay until the caller puts back the old ones.

    Args:
        units: The units.
        dtype: The dtype to which parameters with fewer bits are converted.
        note_parameter: Is called with each parameter that stays, and the one it stands in for.
    """
    replaced: list[list[tuple[nn.Module, str, nn.Parameter]]] = []  # by unit that is running

    def widen_parameters(unit: nn.Module, _: object) -> None:
        replaced.append([])
        with DisableTorchFunction():  # the watch looks for operations in float32
            for module in unit.modules():
                for name, parameter in list(module._parameters.items()):
                    if type(parameter) is not nn.Parameter:
                        continue
                    values = widen(parameter.detach(), dtype)
                    if values.dtype == parameter.dtype:
                        continue
                    wide = nn.Parameter(values, parameter.requires_grad)
                    wide.__dict__.update(parameter.__dict__)  # such as `weight.scale` of a user
                    setattr(module, name, wide)  # an RNN has a list of them, too
                    if torch.is_grad_enabled():
                        note_parameter(wide, parameter)
                    else:
                        replaced[-1].append((module, name, parameter))

    def restore_parameters(*_: object) -> None:
        for module, name, parameter in replaced.pop():
            setattr(module, name, parameter)

    with ExitStack() as hooks:
        for unit in units:
            before = unit.register_forward_pre_hook(widen_parameters, prepend=True)
            after = unit.register_forward_hook(restore_parameters, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def find_split_tolerance(
    dtype: torch.dtype, uses_float32: bool = False, rounding: float = 0.0, is_strict: bool = False
) -> float:
    """Return the relative difference that is rounding, for results of this dtype.

    Args:
        dtype: The dtype of the results.
        uses_float32: Whether float32 is used inside.
        rounding: The relative difference between two runs on the same rows.
        is_strict: Whether to return the difference from which on there may be one.
    """
    is_single = dtype is torch.float32 or (uses_float32 and dtype is torch.float64)
    if is_strict and is_single and rounding <= _MAX_SINGLE_ROUNDING:
        return LEAST_DIFFERENCE
    inner = _ROUNDING[torch.float32] if uses_float32 else 0.0
    return max(_ROUNDING.get(dtype, _DOUBLE), inner, rounding)


def find_repetition_rounding(rounding: float) -> float:
    """Return the relative difference that is rounding between two runs on the same rows.

    The same kernels compute both, but a GPU may add numbers in another order.

    Args:
        rounding: The relative difference that counts as rounding elsewhere.
    """
    return min(rounding, _REPETITION) if rounding <= _MAX_SINGLE_ROUNDING else rounding
