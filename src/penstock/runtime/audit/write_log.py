"""Parameters that a forward writes to, and generators that it draws from, put back after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.stage.payload import find_memory_address
from penstock.torch_compat import (
    CompileFriendlyDispatchMode,
    FakeTensor,
    get_innermost_dispatch_mode,
    pop_dispatch_mode,
    push_dispatch_mode,
    set_version_counters,
    without_innermost_dispatch_mode,
)

_SMALL_BYTES = 2 << 20  # of all parameters of a model

# By id of an operation, with the operation: its hash is computed in Python, which takes longer than
# all else here. There are about as many entries as PyTorch has operations.
_written_arguments: dict[int, tuple[Any, tuple[tuple[int, str], ...]]] = {}


class WriteLog(CompileFriendlyDispatchMode):
    """Restores parameters that an operation writes to, and generators that it draws from.

    A copy is made at the first write, so a model that writes to none costs no memory. The
    operations of user code are looked at, in `log`, and not those of the audit itself. Small
    parameters are copied before: that takes less time than to look at each operation.

    Attributes:
        generators: The generators that the model has drawn from, and their states before.
    """

    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        # Several parameters may be views of one memory, as the weights of an RNN on a GPU are.
        self._by_storage: dict[int, dict[int, Tensor]] = {}
        for parameter in parameters:
            address = get_storage_address(parameter)
            self._by_storage.setdefault(address, {})[id(parameter)] = parameter
        # By address, of each parameter there: the parameter, a copy, and its version before.
        self._copies: dict[int, list[tuple[Tensor, Tensor, int | None]]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}
        tensors = [p for group in self._by_storage.values() for p in group.values()]
        self._copies_before = all(map(_is_plain_on_cpu, tensors)) and (
            sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Copy the parameters that an operation is about to write to."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None:
            self.generators.setdefault(generator, generator.get_state())
        for tensor in list_written(func, args, kwargs):
            self._copy_before_write(tensor)
        return func(*args, **kwargs)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Run operations that write to no parameter, without the log."""
        is_innermost = get_innermost_dispatch_mode() is self
        with without_innermost_dispatch_mode() if is_innermost else nullcontext():
            yield

    @property
    def is_clean(self) -> bool:
        """Return whether it has looked at each operation, and none could write to a parameter."""
        return not (self._copies_before or self._copies)

    @contextmanager
    def log(self) -> Iterator[None]:
        """Look at each operation, unless the parameters have been copied before.

        For code that draws in a cell, which logs its generators.
        """
        with nullcontext() if self._copies_before else self.watch():
            yield

    # Only the stack of this thread changes: `TorchDispatchMode.__enter__` also sets flags that all
    # threads share.
    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at each operation, also if the parameters have been copied before.

        For code that may draw from generators of its own, and is not in a cell.
        """
        push_dispatch_mode(self)
        try:
            yield
        finally:
            pop_dispatch_mode()

    def _copy_before_write(self, tensor: Any) -> None:
        # A micro-batch of another shape is traced inside the reference, with fake tensors.
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return
        address = get_storage_address(tensor)
        if address in self._by_storage and address not in self._copies:
            self._copy(address)

    def _copy(self, address: int) -> None:
        self._copies[address] = [
            # Tensors of an inference mode have no version.
            (p, p.detach().clone(), None if p.is_inference() else p._version)
            for p in self._by_storage[address].values()
        ]

    def find_written(self) -> set[int]:
        """Return the addresses of the parameters that hold other numbers now."""
        return {
            address
            for address, copies in self._copies.items()
            if not all(is_equal(parameter, copy) for parameter, copy, _ in copies)
        }

    def __enter__(self) -> WriteLog:
        """Copy the parameters if they are small."""
        if self._copies_before:
            for address in self._by_storage:
                self._copy(address)
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the parameters and generators."""
        for generator, state in self.generators.items():
            generator.set_state(state)
        written = self.find_written()
        with torch.no_grad():
            for address in written:
                for parameter, copy, _ in self._copies[address]:
                    parameter.copy_(copy)
        # Autograd counts these writes. An audit may run after the forward of a layer and before its
        # backward, which would find the parameter changed.
        versions = {
            parameter: version
            for copies in self._copies.values()
            for parameter, _, version in copies
            if version is not None and parameter._version != version
        }
        set_version_counters(tuple(versions), tuple(versions.values()))


def is_equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers. A nan equals a nan."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if tensor.layout is not torch.strided:
        tensor, other = tensor.to_dense(), other.to_dense()
    if torch.equal(tensor, other):
        return True
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    is_plain = type(tensor) is nn.Parameter and tensor.layout is torch.strided
    return is_plain and tensor.is_cpu and not is_lazy(tensor)


def list_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    entry = _written_arguments.get(id(func))
    if entry is None or entry[0] is not func:
        entry = _written_arguments[id(func)] = func, _find_written_arguments(func)
    written: list[Any] = []
    for index, name in entry[1]:
        value = args[index] if index < len(args) else kwargs.get(name)
        written += value if isinstance(value, list | tuple) else [value]
    return written


def _find_written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def get_storage_address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins, or its id if it has none of its own."""
    address = find_memory_address(tensor)
    return id(tensor) if address is None else address
