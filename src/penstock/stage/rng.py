"""Random numbers that depend on the stage and the micro-batch, and on nothing else.

All threads of a process share one generator per device, so which thread draws what is chance,
and to rewind it for a recomputation would disturb the others. While a stage that draws computes,
its draws come from generators of its own, seeded for the cell.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

from penstock.errors import RunError
from penstock.stage.compile_support import skip_dynamo_tracing
from penstock.stage.recompute import is_checkpointing
from penstock.torch_compat import pytree

_shared_generator_lock = threading.Lock()


def get_shared_rng_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Where the generators stand that all threads share: the host's and the devices'."""
    different = sorted({*map(str, devices), "cpu"})
    return [get_shared_generator(torch.device(device)).get_state() for device in different]


def peek_seed() -> int:
    """What the caller's generator would give next, without moving it on.

    A pipe in a layer of another is seeded by the other's cell, so that it is recomputed alike.
    """
    if _is_inside_cell():
        return int(torch.randint(2**62, (), device="cpu"))
    peek = torch.Generator()
    peek.set_state(torch.default_generator.get_state())
    return _draw_seed(peek)


def advance_caller_rng() -> None:
    """Past that seed."""
    if not _is_inside_cell():
        _draw_seed(torch.default_generator)


def _is_inside_cell() -> bool:
    return isinstance(_get_current_dispatch_mode(), CellRngMode)


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def derive_cell_seed(seed: int, stage: int, microbatch: int) -> int:
    """Different for every cell of every call."""
    return hash((seed, stage, microbatch)) & (2**63 - 1)


class RngSource(Protocol):
    """Where the random numbers of one computation of a cell come from."""

    @property
    def has_drawn(self) -> bool:
        """Has anything been drawn? (Attention without dropout could have, and has not.)"""

    def generator_for(self, device: torch.device) -> torch.Generator:
        """The generator of its own on a device."""

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Within, the generator that all threads share gives the numbers of `mine`."""


class SeededRng:
    """Generators that begin with a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._initial_states: dict[torch.device, torch.Tensor] = {}

    @property
    def has_drawn(self) -> bool:
        """Is any of them further on than at its beginning?"""
        found = self._generators.items()
        return any(
            not torch.equal(g.get_state(), self._initial_states[device]) for device, g in found
        )

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Made when it is first needed."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            self._initial_states[device] = self._generators[device].get_state()
        return self._generators[device]

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """One thread at a time."""
        with _shared_generator_lock:
            shared = get_shared_generator(generator.device)
            before = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                yield
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(before)


class CellRngMode(TorchDispatchMode):
    """Draws below it come from a source: by default, one that begins with a seed."""

    def __init__(self, source: RngSource | int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = SeededRng(source) if isinstance(source, int) else source

    @property
    def has_drawn(self) -> bool:
        """Has anything been drawn?"""
        return self._source.has_drawn

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or a compiled layer that was called below this once is never run compiled again."""
        return True

    def __enter__(self) -> CellRngMode:
        """For this thread. PyTorch's own way also sets flags that all threads share."""
        skip_dynamo_tracing(__name__)
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # what no function mode has seen, it need not see now
            draws = torch.Tag.nondeterministic_seeded in func.tags
            if not draws or is_deterministic_call(func, args, kwargs):
                return func(*args, **kwargs)
            return self._run_random_op(func, args, kwargs)

    def _run_random_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_inside_cell():  # of a pipe around this one: what is drawn here is not its affair
            with _pop_mode_temporarily():
                return self._run_random_op(func, args, kwargs)
        if kwargs.get("generator") is not None:
            if is_checkpointing():
                raise RunError(
                    "this layer draws from a generator of its own, which is not rewound for the "
                    "recomputation: draw without a generator (the pipe then gives the layer one), "
                    "or set checkpoint='never'"
                )
            return func(*args, **kwargs)  # its own affair
        _reject_inside_torch_checkpoint()
        mine = self._source.generator_for(_find_device(args, kwargs))
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": mine})
        with self._source.replace_shared_generator(mine):  # it reads the shared generator
            return func(*args, **kwargs)


def _find_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for leaf in pytree.tree_iter((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def seed_shared_generators(seed: int, device: torch.device) -> None:
    """Those that all threads share: the host's and this device's, and no other device's."""
    for where in dict.fromkeys((torch.device("cpu"), device)):
        get_shared_generator(where).manual_seed(seed)


def get_shared_generator(device: torch.device) -> torch.Generator:
    """The one that all threads share."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


def is_deterministic_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention could draw, and does not without dropout; nor does an LSTM of cuDNN's.

    A backward that is given what its forward has drawn repeats that.
    """
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "philox_seed":
            return True
        if argument.name in ("dropout_p", "dropout"):
            given = (
                args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            )
            return not given
    return False


def _reject_inside_torch_checkpoint() -> None:
    """Its repetition, in the backward, would be outside of this mode and draw other numbers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")  # code that a compiler made has none
        if module == "penstock.stage.stage_runner":
            return
        if module == "torch.utils.checkpoint":
            raise RunError(
                "this layer draws random numbers inside torch.utils.checkpoint, which could not "
                "draw the same ones again beside the other stages: leave that checkpoint out, and "
                "let the pipe recompute instead (checkpoint='always')"
            )
        frame = frame.f_back
