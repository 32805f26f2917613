"""Detect operations that a CUDA graph cannot repeat, and name the layer that calls them.

A replay repeats the kernels that the devices ran. It repeats nothing that the host did. A captured
step must therefore not

- read a value that a device has computed (`item()`, `if x > 0`, `x[mask]`),
- copy between host memory and a device, or compute with tensors in host memory,
- draw random numbers from a generator that the graph does not know.

`CaptureGuard` raises a `CaptureError` at the first such operation, before CUDA sees it. An
operation that reaches CUDA invalidates the capture, and CUDA's own error does not name the layer.
`locate_capture_errors` adds the layer and the source line to whatever was raised.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import MissingExtra, RunError
from penstock.nested_values import iter_tensors
from penstock.stage.compile_support import has_compiled_module, skip_dynamo_tracing
from penstock.stage.rng import is_deterministic_call
from penstock.torch_compat import (
    TO_COPY_OPERATOR,
    CompileFriendlyDispatchMode,
    get_dispatch_modes,
    get_generator_address,
)

# PyTorch marks with these tags the operators that read values on the device: those that return a
# Python number, and those whose output shape depends on values.
_HOST_SYNC_TAGS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape

# A small constant of the code, such as `torch.tensor(0.5, device=...)`, becomes one fill kernel per
# element. More elements than this are refused: they belong in a buffer.
_MAX_CONSTANT_ELEMENTS = 64

_TENSOR_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


class CaptureError(RunError):
    """A step cannot be captured, because a replay would not repeat it.

    `is_transient` is True if the same step may be captured at the next attempt: a layer raised an
    error of its own, or there was too little memory. `__cause__` is then the original error.

    `reason` is the message without parts that differ from one attempt to the next: an out-of-memory
    error tells how much was free. Each reason is warned about once.
    """

    is_transient = False

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class CaptureGuard(CompileFriendlyDispatchMode):
    """A dispatch mode that raises `CaptureError` for operations that a replay would not repeat.

    Tensors in host memory are allowed in one case: if they were computed from constants in the
    code, and from nothing else. Their values are then the same in every replay, and become
    arguments of the recorded kernels.
    """

    def __init__(self, device_types: frozenset[str]) -> None:
        super().__init__()
        self._device_types = device_types  # types of the devices that are captured
        self._host_constants = WeakIdKeyDictionary()  # host tensors computed from constants alone
        # By address: dispatch passes another Python object for the same generator.
        self._generators: dict[int, torch.Generator] = {}
        self._shared_generator_allowed = False

    def register_generator(self, generator: torch.Generator) -> None:
        """Allow a generator from which every replay draws new numbers."""
        self._generators[get_generator_address(generator)] = generator

    @contextmanager
    def allow_shared_generator(self) -> Iterator[None]:
        """Allow draws from PyTorch's default generator, for the duration of the context.

        The caller has replaced the state of that generator by a registered one.
        """
        before, self._shared_generator_allowed = self._shared_generator_allowed, True
        try:
            yield
        finally:
            self._shared_generator_allowed = before

    def __enter__(self) -> CaptureGuard:
        """Enter the mode, for one capture."""
        skip_dynamo_tracing(__name__)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Most operations of a capture are of this kind, and there are tens of thousands of them.
        if not kwargs and _needs_no_check(func) and self._has_device_tensors_only(args):
            return self._note_host_constants(func(*args))
        kwargs = kwargs or {}
        tensors = list(iter_tensors((args, kwargs)))
        device_tensors = [t for t in tensors if t.device.type in self._device_types]
        if device_tensors and _needs_host_sync(func, args, kwargs):
            raise CaptureError(
                f"it waits for a value on the device ({_get_op_name(func)}). Use tensor operations "
                "such as torch.where"
            )
        host_tensors = [t for t in tensors if t.device.type not in self._device_types and t.numel()]
        # `torch.tensor(...)` ends in `lift_fresh`. Its argument is a new tensor, made from Python
        # numbers or from the memory of a NumPy array. Only Python numbers are known constants.
        if (
            func is torch.ops.aten.lift_fresh.default
            and host_tensors
            and _owns_its_memory(host_tensors[0])
        ):
            self._host_constants[host_tensors[0]] = True
        self._check_rng(func, args, kwargs)
        self._check_host_tensors(func, host_tensors, bool(device_tensors), kwargs)
        # A recorded copy would read the host memory again at each replay, after it was freed.
        if (
            func is TO_COPY_OPERATOR
            and host_tensors
            and _get_device_type(kwargs) in self._device_types
        ):
            return fill_constant_on_device(args[0], **kwargs)
        return self._note_host_constants(func(*args, **kwargs))

    def _has_device_tensors_only(self, args: tuple[Any, ...]) -> bool:
        """Return whether there are tensors on the devices, and certainly none in host memory."""
        has_tensors = False
        for value in args:
            if isinstance(value, Tensor):
                if value.device.type not in self._device_types:
                    return False
                has_tensors = True
            elif isinstance(value, tuple | list):  # there may be tensors inside
                return False
        return has_tensors

    def _note_host_constants(self, out: Any) -> Any:
        """Return the outputs of an operation whose host inputs, if there are any, were constants.

        So its host outputs are constants, too.
        """
        for output in (out,) if isinstance(out, Tensor) else iter_tensors(out):
            if output.device.type not in self._device_types:
                self._host_constants[output] = True
        return out

    def _check_rng(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the operation draws from a generator that the graph does not know."""
        if torch.Tag.nondeterministic_seeded not in func.tags or self._shared_generator_allowed:
            return
        generators = [
            leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)
        ]
        if generators and get_generator_address(generators[0]) not in self._generators:
            raise CaptureError(
                "it draws random numbers from its own torch.Generator, which a replay would not "
                "advance. Draw without a generator: the pipe provides one for each layer"
            )
        if not generators and not is_deterministic_call(func, args, kwargs):
            raise CaptureError(
                "it draws random numbers, but drew none in the first step of this kind"
            )

    def _check_host_tensors(
        self, func: Any, host_tensors: list[Tensor], has_device_tensors: bool, kwargs: Any
    ) -> None:
        """Raise if the operation uses host memory, or copies between host and device."""
        if any(tensor not in self._host_constants for tensor in host_tensors):
            raise CaptureError(
                f"it computes with a tensor in host memory ({_get_op_name(func)}). Keep the tensor "
                "on the device, in a buffer"
            )
        targets_host = _get_device_type(kwargs) not in (None, *self._device_types)
        if has_device_tensors and (
            targets_host or (host_tensors and func is torch.ops.aten.copy_.default)
        ):
            raise CaptureError(
                f"it copies between the host and the device ({_get_op_name(func)}). Keep the "
                "tensor on the device"
            )


class ConstantFillMode(TorchFunctionMode):
    """A function mode that writes the constants of `torch.tensor(0.5, device=...)` with kernels.

    PyTorch builds such a tensor on the host and copies it to the device with dispatch modes
    switched off. `CaptureGuard` does not see that copy, and the capture would fail.
    """

    def __init__(self, device_types: frozenset[str]) -> None:
        super().__init__()
        self._device_types = device_types

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            like, *remaining_args = args
            func, args = torch.tensor, tuple(remaining_args)
            kwargs = {"device": like.device, "dtype": like.dtype} | kwargs
        if func not in _TENSOR_CONSTRUCTORS or (args and isinstance(args[0], Tensor)):
            return func(*args, **kwargs)
        # By name, for arrays and scalars alike: NumPy may not be installed.
        if args and type(args[0]).__module__ == "numpy":
            raise CaptureError(
                "it creates a tensor from a NumPy array in every step. Create it once, as a buffer "
                "on the device"
            )
        if _get_device_type(kwargs) not in self._device_types:
            return func(*args, **kwargs)
        device, requires_grad = kwargs.pop("device"), kwargs.pop("requires_grad", False)
        return fill_constant_on_device(
            func(*args, **kwargs, device="cpu"), device=device
        ).requires_grad_(requires_grad)


def build_constant_fill_mode(
    modules: Iterable[nn.Module], device_types: frozenset[str]
) -> AbstractContextManager[object]:
    """Return a `ConstantFillMode`, or an empty context if a module is compiled.

    The compiler guards on the active function modes: it would recompile the modules under the mode.
    """
    return nullcontext() if has_compiled_module(modules) else ConstantFillMode(device_types)


def fill_constant_on_device(
    constant: Tensor, device: Any = None, dtype: Any = None, **_: Any
) -> Tensor:
    """Return a small host tensor on the device, written by one fill kernel per element."""
    if constant.numel() > _MAX_CONSTANT_ELEMENTS:
        raise CaptureError(
            f"it copies {constant.numel()} numbers from host memory in every step, and at most "
            f"{_MAX_CONSTANT_ELEMENTS} can be part of a CUDA graph. Create the tensor once, as a "
            "buffer on the device"
        )
    filled = torch.empty(constant.shape, dtype=dtype or constant.dtype, device=device)
    with torch.no_grad():
        for element, number in zip(filled.view(-1), constant.reshape(-1).tolist(), strict=True):
            element.fill_(number)
    return filled


@cache
def _needs_no_check(func: Any) -> bool:
    """Return whether only host memory among its arguments could make a replay of it wrong."""
    special = (torch.ops.aten.lift_fresh.default, TO_COPY_OPERATOR)
    tags = (*_HOST_SYNC_TAGS, torch.Tag.nondeterministic_seeded)
    return func not in special and not any(tag in func.tags for tag in tags)


def _needs_host_sync(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the host needs values of the device to run the operator.

    Three operators carry the tag, and need the values only with some of their arguments.
    """
    if not any(tag in func.tags for tag in _HOST_SYNC_TAGS):
        return False
    if func is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is torch.ops.aten.one_hot.default:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0)
    return True


def _get_device_type(kwargs: Mapping[str, Any]) -> str | None:
    """Return the type of the device in the arguments of a call, or None if they name none."""
    device = kwargs.get("device")
    return None if device is None else torch.device(device).type


def _owns_its_memory(tensor: Tensor) -> bool:
    """Return whether PyTorch allocated the memory; the memory of a NumPy array is not resizable."""
    return bool(tensor.untyped_storage().resizable())


def _get_op_name(func: Any) -> str:
    return str(func).removesuffix(".default")


# ---- the layer and line of an error ---------------------------------------------------------


def is_capturing() -> bool:
    """Return whether this thread is capturing a step."""
    return any(isinstance(mode, CaptureGuard) for mode in get_dispatch_modes())


@contextmanager
def locate_capture_errors(get_layer_names: Callable[[], Mapping[nn.Module, str]]) -> Iterator[None]:
    """Turn every error in the context into a `CaptureError` that names the layer and its line."""
    try:
        yield
    except Exception as error:
        location = _describe_error_location(error.__traceback__, get_layer_names())
        first_line = str(error).partition("\n")[0]
        if isinstance(error, CaptureError):
            raise CaptureError(f"{location}{first_line}") from error
        # Memory may run out in another layer at the next attempt, and the cause is the same.
        place = "" if isinstance(error, torch.OutOfMemoryError) else location
        located = CaptureError(
            f"{location}{type(error).__name__}: {first_line}", f"{place}{type(error).__name__}"
        )
        located.is_transient = not _is_caused_by_capture(error, first_line)
        raise located from error


# Errors during a capture come from four sources:
#
#   1. CUDA forbids the call, and invalidates the capture:     torch.AcceleratorError
#   2. PyTorch forbids the call while a stream is capturing,   RuntimeError, "... during CUDA graph
#      for example `torch.cuda.initial_seed()`:                capture. If you need this call ..."
#   3. Penstock refuses, because of the capture alone:         MissingExtra, or a RunError that says
#                                                              "... in a captured step ..."
#   4. the layer raises an error of its own, or there is       any class, RuntimeError and RunError
#      too little memory:                                      included
#
# The first three will come again at the next attempt, so the step is refused at once. The fourth
# may not: the step is attempted once more, and with runtime="graph" the caller gets the error as
# the layer raised it.
#
# Only the text tells 2 from 4. PyTorch's check (`at::cuda::assertNotCapturing`) is a TORCH_CHECK:
# it raises the same RuntimeError as any failed operation, such as a shape mismatch. The capture
# status of the stream does not help: the check raises before CUDA is called, so the capture is
# still active afterwards, as it is after an error of a layer. If PyTorch rewords its message, such
# a step is attempted twice instead of once, and runtime="graph" raises PyTorch's error instead of a
# `CaptureError`. No number changes.


def _is_caused_by_capture(error: Exception, first_line: str) -> bool:
    """Return whether the error comes from the capture itself, and will come again."""
    return isinstance(error, torch.AcceleratorError | MissingExtra) or "captur" in first_line


def _describe_error_location(
    error_traceback: TracebackType | None, layer_names: Mapping[nn.Module, str]
) -> str:
    """Return "layer 3 (Router), model.py:12: " for the innermost layer and line of user code.

    Frames of PyTorch, Penstock and the standard library are not user code. Lines of frames outside
    the innermost layer are not shown.
    """
    layer, line = "", ""
    for frame, line_number in traceback.walk_tb(error_traceback):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in layer_names:
            layer, line = f"layer {layer_names[module]} ({type(module).__name__})", ""
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "penstock", *sys.stdlib_module_names):
            line = f"{frame.f_code.co_filename}:{line_number}"
    return ", ".join(part for part in (layer, line) if part) + ": " * bool(layer or line)
