"""An emulated CUDA graph on the host: it records operations with the tensors they used.

As in a CUDA graph, a replay reads and writes the memory of the capture, and no Python code of the
body runs again. Unlike a CUDA graph, the capture itself computes; what it has changed outside is
restored when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from penstock.device.recorded_graph import GraphMemoryPools
from penstock.stage.rng import SeededRng

Made = TypeVar("Made")

# arguments that batch norm writes without declaring it in its schema
_UNDECLARED_WRITES = ("running_mean", "running_var")


class _Op(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    lent: torch.Generator | None


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Op] = []
        self.lent: torch.Generator | None = None
        self.made: set[int] = set()
        self.held: list[Tensor] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._keep_what_is_written(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self.held.append(tensor)
            if not any(_place(tensor) == _place(given) for given in _tensors((args, kwargs))):
                self.made.add(_place(tensor))
        kept: Any = tree_map_only(Tensor, _same_memory, (args, kwargs, out))
        self.ops.append(_Op(func, kept[0], kept[1], kept[2], self.lent))
        return out

    def _keep_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for at, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written and argument.name not in _UNDECLARED_WRITES:
                continue
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                place = _place(tensor)
                if place not in self.made and place not in self.before:
                    whole = tensor.detach().as_strided((_size(tensor),), (1,), 0)
                    self.before[place] = whole, whole.clone()


class EmulatedGraph:
    """A replacement for `RecordedCudaGraph`."""

    def __init__(self, devices: Sequence[torch.device], pools: GraphMemoryPools) -> None:
        self._recorder = _Recorder()
        self.replays = 0

    def create_generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device)

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        self._recorder.lent = generator
        try:
            with SeededRng(0).replace_shared_generator(generator):
                yield
        finally:
            self._recorder.lent = None

    def capture(self, body: Callable[[], Made]) -> Made:
        try:
            with self._recorder:
                return body()
        finally:
            with torch.no_grad():
                for whole, before in self._recorder.before.values():
                    whole.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        # casts are part of the recording
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self._again()

    def _again(self) -> None:
        for func, args, kwargs, out, lent in self._recorder.ops:
            if lent is None:
                new = func(*args, **kwargs)
            else:
                with SeededRng(0).replace_shared_generator(lent):
                    new = func(*args, **kwargs)
            for old, fresh in zip(_tensors(out), _tensors(new), strict=True):
                if _place(old) != _place(fresh):
                    old.detach().copy_(fresh)


def _same_memory(tensor: Tensor) -> Tensor:
    """Return an alias of the tensor: a graph knows addresses, and `.data` may be replaced later."""
    return tensor.detach() if tensor.layout is torch.strided else tensor


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
