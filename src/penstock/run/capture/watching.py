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
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from penstock.errors import RunError
from penstock.stage.compiled import keep_out, some_compiled
from penstock.stage.randomness import draws_nothing

_ASKS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_SMALL = 64  # so many numbers may come from the host, each as a part of the recording
_REFUSED = () if (_of_device := getattr(torch, "AcceleratorError", None)) is None else (_of_device,)
_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


class Uncapturable(RunError):
    """A step that a replay would not repeat.

    If it is `passing`, something went wrong that need not do so again: its cause says what.
    """

    passing = False


class Watch(TorchDispatchMode):
    """Within, an operation that a replay would not repeat is an error."""

    def __init__(self, kinds: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kinds = kinds  # of the devices that are captured
        self._constant = WeakIdKeyDictionary()  # tensors of the host, made of nothing but code
        self._generators: dict[int, torch.Generator] = {}  # dispatch makes other objects
        self._lending = False

    def repeats(self, generator: torch.Generator) -> None:
        """A replay draws new numbers from this one."""
        self._generators[_address(generator)] = generator

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Within, the generator that all threads share gives numbers that a replay repeats."""
        before, self._lending = self._lending, True
        try:
            yield
        finally:
            self._lending = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled layer does inside is seen when it is done."""
        return True

    def __enter__(self) -> Watch:
        """For a capture."""
        keep_out(__name__)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in given if tensor.device.type in self._kinds]
        if there and _waits(func, args, kwargs):
            raise Uncapturable(f"it waits for what the device has computed ({_name(func)})")
        host = [t for t in given if t.device.type not in self._kinds and t.numel()]
        if func is torch.ops.aten.lift_fresh.default and host and _is_fresh(host[0]):
            self._constant[host[0]] = True
        self._check_draws(func, args, kwargs)
        self._check_host(func, host, bool(there), kwargs)
        if func is torch.ops.aten._to_copy.default and host and self._goes_there(kwargs):
            return written_out(args[0], **kwargs)
        out = func(*args, **kwargs)
        for made in tree_iter(out):
            if isinstance(made, Tensor) and made.device.type not in self._kinds:
                self._constant[made] = True
        return out

    def _goes_there(self, kwargs: Mapping[str, Any]) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type in self._kinds

    def _check_draws(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags or self._lending:
            return
        own = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
        if own and _address(own[0]) not in self._generators:
            raise Uncapturable(
                "it draws random numbers from a generator of its own: draw without one, and the "
                "pipe gives the layer its own"
            )
        if not own and not draws_nothing(func, args, kwargs):
            raise Uncapturable("it draws random numbers, which it had not done before")

    def _check_host(self, func: Any, host: list[Tensor], there: bool, kwargs: Any) -> None:
        if any(tensor not in self._constant for tensor in host):
            raise Uncapturable(
                f"it computes with a tensor in the host's memory ({_name(func)}): keep it on the "
                "device, in a buffer"
            )
        device = kwargs.get("device")
        leaves = device is not None and torch.device(device).type not in self._kinds
        if there and (leaves or (host and func is torch.ops.aten.copy_.default)):
            raise Uncapturable(f"it copies between the host and the device ({_name(func)})")


class Constants(TorchFunctionMode):
    """Within, `torch.tensor(0.5, device=...)` writes the number there, and copies nothing."""

    def __init__(self, kinds: frozenset[str]) -> None:
        super().__init__()
        self._kinds = kinds

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            like, *args_of_it = args
            func, args = torch.tensor, tuple(args_of_it)
            kwargs = {"device": like.device, "dtype": like.dtype} | kwargs
        device = kwargs.get("device")
        if func not in _MAKERS or (args and isinstance(args[0], Tensor)):
            return func(*args, **kwargs)
        if args and type(args[0]).__module__ == "numpy":
            raise Uncapturable(
                "it makes a tensor of a numpy array in every step: keep it on the device, in a "
                "buffer"
            )
        if device is None or torch.device(device).type not in self._kinds:
            return func(*args, **kwargs)
        del kwargs["device"]
        wants = kwargs.pop("requires_grad", False)
        return written_out(func(*args, **kwargs, device="cpu"), device=device).requires_grad_(wants)


def constants_for(
    modules: Iterable[nn.Module], kinds: frozenset[str]
) -> AbstractContextManager[object]:
    """Not if some are compiled: under such a mode they would be compiled anew, and for it."""
    return nullcontext() if some_compiled(modules) else Constants(kinds)


def written_out(constant: Tensor, device: Any = None, dtype: Any = None, **_: Any) -> Tensor:
    """A small tensor of the host's on the device, each number in a launch of its own."""
    if constant.numel() > _SMALL:
        raise Uncapturable(
            f"it copies {constant.numel()} numbers from the host's memory in every step: keep them "
            "on the device, in a buffer"
        )
    made = torch.empty(constant.shape, dtype=dtype or constant.dtype, device=device)
    with torch.no_grad():
        for place, number in zip(made.view(-1), constant.reshape(-1).tolist(), strict=True):
            place.fill_(number)
    return made


def _waits(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Does the host have to know numbers before it can go on?"""
    if not any(tag in func.tags for tag in _ASKS):
        return False
    if func is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func is torch.ops.aten.one_hot.default:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0)
    return True


def _is_fresh(tensor: Tensor) -> bool:
    """Has torch.tensor made it of numbers? Else its memory is numpy's."""
    return bool(tensor.untyped_storage().resizable())


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]


def _name(func: Any) -> str:
    return str(func).removesuffix(".default")


# ---- which layer ---------------------------------------------------------------------------


def captured_around() -> bool:
    """Is this thread in the middle of a capture?"""
    return any(isinstance(mode, Watch) for mode in _get_current_dispatch_mode_stack())


@contextmanager
def naming(names: Callable[[], Mapping[nn.Module, str]]) -> Iterator[None]:
    """Within, what goes wrong is an `Uncapturable` that names the layer and its line."""
    try:
        yield
    except Exception as error:
        where = _where(error.__traceback__, names())
        what = str(error).partition("\n")[0]
        if isinstance(error, Uncapturable):
            raise Uncapturable(f"{where}{what}") from error
        found = Uncapturable(f"{where}{type(error).__name__}: {what}")
        found.passing = not isinstance(error, _REFUSED) and "captur" not in what
        raise found from error


def _where(found: TracebackType | None, names: Mapping[nn.Module, str]) -> str:
    layer, line = "", ""
    for frame, number in traceback.walk_tb(found):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            layer, line = f"layer {names[module]} ({type(module).__name__})", ""
        if _is_users(frame.f_globals.get("__name__", "")):
            line = f"{frame.f_code.co_filename}:{number}"
    return ", ".join(part for part in (layer, line) if part) + ": " * bool(layer or line)


def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in ("torch", "penstock", *sys.stdlib_module_names)
