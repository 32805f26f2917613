"""What cannot be captured, found before the device is asked for it, and the layer that asks.

A replay repeats what devices did, and nothing of what the host did: what the host reads of them, a
copy from its memory, random numbers of its own, numbers that a layer counts in Python. None of it
may be part of a captured step.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import RunError
from penstock.stage.compile_support import has_compiled_module, skip_dynamo_tracing
from penstock.stage.rng import is_deterministic_call
from penstock.torch_compat import pytree

_HOST_SYNC_TAGS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_MAX_CONSTANT_ELEMENTS = (
    64  # so many numbers may come from the host, each as a part of the recording
)
_DEVICE_ERRORS = (
    ()
    if (_accelerator_error := getattr(torch, "AcceleratorError", None)) is None
    else (_accelerator_error,)
)
_TENSOR_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


class CaptureError(RunError):
    """A step that a replay would not repeat.

    If it is `passing`, something went wrong that need not do so again: its cause says what.
    """

    is_transient = False


class CaptureGuard(TorchDispatchMode):
    """Within, an operation that a replay would not repeat is an error."""

    def __init__(self, device_types: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_types = device_types  # of the devices that are captured
        self._host_constants = (
            WeakIdKeyDictionary()
        )  # tensors of the host, made of nothing but code
        self._generators: dict[int, torch.Generator] = {}  # dispatch makes other objects
        self._shared_generator_allowed = False

    def register_generator(self, generator: torch.Generator) -> None:
        """A replay draws new numbers from this one."""
        self._generators[_get_generator_address(generator)] = generator

    @contextmanager
    def allow_shared_generator(self) -> Iterator[None]:
        """Within, the generator that all threads share gives numbers that a replay repeats."""
        before, self._shared_generator_allowed = self._shared_generator_allowed, True
        try:
            yield
        finally:
            self._shared_generator_allowed = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled layer does inside is seen when it is done."""
        return True

    def __enter__(self) -> CaptureGuard:
        """For a capture."""
        skip_dynamo_tracing(__name__)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in given if tensor.device.type in self._device_types]
        if there and _needs_host_sync(func, args, kwargs):
            raise CaptureError(f"it waits for what the device has computed ({_get_op_name(func)})")
        host = [t for t in given if t.device.type not in self._device_types and t.numel()]
        if func is torch.ops.aten.lift_fresh.default and host and _owns_its_memory(host[0]):
            self._host_constants[host[0]] = True
        self._check_rng(func, args, kwargs)
        self._check_host_tensors(func, host, bool(there), kwargs)
        if (
            func is torch.ops.aten._to_copy.default
            and host
            and self._targets_captured_device(kwargs)
        ):
            return fill_constant_on_device(args[0], **kwargs)
        out = func(*args, **kwargs)
        for made in pytree.tree_iter(out):
            if isinstance(made, Tensor) and made.device.type not in self._device_types:
                self._host_constants[made] = True
        return out

    def _targets_captured_device(self, kwargs: Mapping[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type in self._device_types

    def _check_rng(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags or self._shared_generator_allowed:
            return
        own = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
        if own and _get_generator_address(own[0]) not in self._generators:
            raise CaptureError(
                "it draws random numbers from a generator of its own: draw without one, and the "
                "pipe gives the layer its own"
            )
        if not own and not is_deterministic_call(func, args, kwargs):
            raise CaptureError("it draws random numbers, which it had not done before")

    def _check_host_tensors(
        self, func: Any, host_tensors: list[Tensor], has_device_tensors: bool, kwargs: Any
    ) -> None:
        if any(tensor not in self._host_constants for tensor in host_tensors):
            raise CaptureError(
                f"it computes with a tensor in the host's memory ({_get_op_name(func)}): keep it on the "
                "device, in a buffer"
            )
        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type not in self._device_types
        if has_device_tensors and (
            leaves or (host_tensors and func is torch.ops.aten.copy_.default)
        ):
            raise CaptureError(f"it copies between the host and the device ({_get_op_name(func)})")


class ConstantFillMode(TorchFunctionMode):
    """Within, `torch.tensor(0.5, device=...)` writes the number there, and copies nothing."""

    def __init__(self, device_types: frozenset[str]) -> None:
        super().__init__()
        self._device_types = device_types

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            like, *args_of_it = args
            func, args = torch.tensor, tuple(args_of_it)
            kwargs = {"device": like.device, "dtype": like.dtype} | kwargs
        device = kwargs.get("device")
        if func not in _TENSOR_CONSTRUCTORS or (args and isinstance(args[0], Tensor)):
            return func(*args, **kwargs)
        if args and type(args[0]).__module__ == "numpy":
            raise CaptureError(
                "it makes a tensor of a numpy array in every step: keep it on the device, in a "
                "buffer"
            )
        if device is None or torch.device(device).type not in self._device_types:
            return func(*args, **kwargs)
        del kwargs["device"]
        wants = kwargs.pop("requires_grad", False)
        return fill_constant_on_device(
            func(*args, **kwargs, device="cpu"), device=device
        ).requires_grad_(wants)


def build_constant_fill_mode(
    modules: Iterable[nn.Module], device_types: frozenset[str]
) -> AbstractContextManager[object]:
    """Not if some are compiled: under such a mode they would be compiled anew, and for it."""
    return nullcontext() if has_compiled_module(modules) else ConstantFillMode(device_types)


def fill_constant_on_device(
    constant: Tensor, device: Any = None, dtype: Any = None, **_: Any
) -> Tensor:
    """A small tensor of the host's on the device, each number in a launch of its own."""
    if constant.numel() > _MAX_CONSTANT_ELEMENTS:
        raise CaptureError(
            f"it copies {constant.numel()} numbers from the host's memory in every step: keep them "
            "on the device, in a buffer"
        )
    made = torch.empty(constant.shape, dtype=dtype or constant.dtype, device=device)
    with torch.no_grad():
        for place, number in zip(made.view(-1), constant.reshape(-1).tolist(), strict=True):
            place.fill_(number)
    return made


def _needs_host_sync(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Does the host have to know numbers before it can go on?"""
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


def _owns_its_memory(tensor: Tensor) -> bool:
    """Has torch.tensor made it of numbers? Else its memory is numpy's."""
    return bool(tensor.untyped_storage().resizable())


def _get_generator_address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


def _get_op_name(func: Any) -> str:
    return str(func).removesuffix(".default")


# ---- which layer ---------------------------------------------------------------------------


def is_capturing() -> bool:
    """Is this thread in the middle of a capture?"""
    return any(isinstance(mode, CaptureGuard) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def locate_capture_errors(get_layer_names: Callable[[], Mapping[nn.Module, str]]) -> Iterator[None]:
    """Within, what goes wrong is a `CaptureError` that names the layer and its line."""
    try:
        yield
    except Exception as error:
        where = _describe_error_location(error.__traceback__, get_layer_names())
        what = str(error).partition("\n")[0]
        if isinstance(error, CaptureError):
            raise CaptureError(f"{where}{what}") from error
        found = CaptureError(f"{where}{type(error).__name__}: {what}")
        found.is_transient = not isinstance(error, _DEVICE_ERRORS) and "captur" not in what
        raise found from error


def _describe_error_location(
    error_traceback: TracebackType | None, layer_names: Mapping[nn.Module, str]
) -> str:
    layer, line = "", ""
    for frame, number in traceback.walk_tb(error_traceback):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in layer_names:
            layer, line = f"layer {layer_names[module]} ({type(module).__name__})", ""
        if _is_user_module(frame.f_globals.get("__name__", "")):
            line = f"{frame.f_code.co_filename}:{number}"
    return ", ".join(part for part in (layer, line) if part) + ": " * bool(layer or line)


def _is_user_module(module_name: str) -> bool:
    return module_name.partition(".")[0] not in ("torch", "penstock", *sys.stdlib_module_names)
