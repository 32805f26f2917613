"""Random numbers that depend only on the call, the stage and the micro-batch.

All threads of a process share one default generator per device. With several ranks in threads, it
would be chance which stage draws which numbers, and a recomputation could not rewind the generator
without disturbing the other stages.

While a stage that may draw computes a cell, a dispatch mode (`CellRngMode`) is active. It redirects
each random operation to generators of the cell's own:

    seed of the call             drawn once from the caller's default generator (`peek_seed`)
    seed of the cell             hash of (call seed, stage, micro-batch)  (`derive_cell_seed`)
    operation takes generator=   it is called with the cell's generator
    operation takes none         the default generator has the cell's state during the operation

The forward and the recomputation of a cell use the same seed, so they draw the same numbers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch

from penstock.device.accelerator import get_default_generator, resolve_index
from penstock.errors import RunError
from penstock.stage.compile_support import skip_dynamo_tracing
from penstock.stage.recompute import is_checkpointing
from penstock.torch_compat import (
    TORCH_CHECKPOINT_GLOBALS,
    CompileFriendlyDispatchMode,
    DisableTorchFunction,
    get_innermost_dispatch_mode,
    get_schema_arguments,
    pop_dispatch_mode,
    push_dispatch_mode,
    pytree,
    without_innermost_dispatch_mode,
)

F = TypeVar("F", bound=Callable[..., Any])

# Held while a default generator carries the state of a cell: see `replace_shared_generator`.
_shared_generator_lock = threading.Lock()


# ---- default generators ------------------------------------------------------------------------


def seed_shared_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of this device, and of no other device."""
    for where in dict.fromkeys((torch.device("cpu"), device)):
        get_default_generator(where).manual_seed(seed)


def read_shared_cpu_state() -> torch.Tensor:
    """Return the state of the CPU's default generator, at a moment when no cell replaces it."""
    with _shared_generator_lock:
        return torch.default_generator.get_state()


def _check_not_seeded(state_before: torch.Tensor) -> None:
    """Raise if the CPU's default generator was seeded since it had this state.

    Draws of other threads move it on, too, but do not bring it to the beginning of a seed.
    """
    state = read_shared_cpu_state()
    if torch.equal(state, state_before):
        return
    before, now = torch.Generator(), torch.Generator()
    before.set_state(state_before)
    now.set_state(state)
    is_fresh = torch.equal(state, torch.Generator().manual_seed(now.initial_seed()).get_state())
    if is_fresh or before.initial_seed() != now.initial_seed():
        raise RunError(
            f"this layer calls torch.manual_seed({now.initial_seed()}), but in a pipe the layers "
            "of each stage and micro-batch draw from generators of their own, which that does not "
            "seed. Seed before you call the pipe, or draw with "
            "generator=torch.Generator().manual_seed(...) and checkpoint='never'."
        )


# ---- seeds -------------------------------------------------------------------------------------


def peek_seed() -> int:
    """Return a seed from the caller's default generator, and leave the generator as it is.

    A pipe that is a layer of another pipe draws its seed from the cell of the other pipe, so that
    it is recomputed with the same seed.
    """
    if is_inside_cell():
        return int(torch.randint(2**62, (), device="cpu"))
    peek = torch.Generator()
    peek.set_state(torch.default_generator.get_state())
    return _draw_seed(peek)


def advance_caller_rng() -> None:
    """Advance the caller's default generator past the seed that `peek_seed` returned."""
    if not is_inside_cell():
        _draw_seed(torch.default_generator)


def is_inside_cell() -> bool:
    """Return whether this thread computes a cell of a pipe, with random numbers of its own."""
    return isinstance(get_innermost_dispatch_mode(), CellRngMode)


@contextmanager
def suspend_cell_rng() -> Iterator[None]:
    """Let random numbers come from the default generators again, as outside of any cell.

    The tracer needs it, as it finds a draw by the state of these generators. A pipe that is a layer
    of another pipe may be traced inside a cell.
    """
    with ExitStack() as suspended:
        while is_inside_cell():
            suspended.enter_context(without_innermost_dispatch_mode())
        yield


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def derive_cell_seed(seed: int, stage: int, microbatch: int) -> int:
    """Return the seed of one cell of a call."""
    return hash((seed, stage, microbatch)) & (2**63 - 1)


# ---- sources of random numbers -----------------------------------------------------------------


class RngSource(Protocol):
    """A source of the random numbers of one computation of a cell."""

    @property
    def has_drawn(self) -> bool:
        """Return whether any number has been drawn.

        An operation that may draw, such as attention, draws nothing without dropout.
        """

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Return the cell's generator on a device."""

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Let the default generator draw the numbers of `generator` inside the context."""


class SeededRng:
    """A source whose generators start from a seed, one generator per device."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._initial_states: dict[torch.device, torch.Tensor] = {}

    @property
    def has_drawn(self) -> bool:
        """Return whether any generator has left its initial state."""
        generators = self._generators.items()
        return any(
            not torch.equal(g.get_state(), self._initial_states[device]) for device, g in generators
        )

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device. The first call creates it."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
            self._initial_states[device] = self._generators[device].get_state()
        return self._generators[device]

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """Give the default generator the state of `generator` inside the context.

        Only one thread can be in such a context, as the default generator belongs to all threads.
        The new state goes back to `generator`, and the default generator gets its old state again.
        """
        with _shared_generator_lock:
            shared = get_default_generator(generator.device)
            before = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                yield
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(before)


# ---- the dispatch mode -------------------------------------------------------------------------


_EMPTY_OPS = frozenset(
    [
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    ]
)


class CellRngMode(CompileFriendlyDispatchMode):
    """A dispatch mode that redirects random operations to a source, or to a seed.

    With `detect_seeding` it raises if a layer seeds the default generator, from which it would then
    not draw. With `fill_empty`, the contents of `torch.empty` are zeros, so that two runs can be
    compared.

    Attributes:
        used_own_generator: Whether a layer has drawn from a generator of its own.
        used_empty: Whether a layer has called `torch.empty`, if its contents are filled.
    """

    # Such as `flex_attention`, which PyTorch otherwise refuses under a mode. They draw nothing.
    supports_higher_order_operators = True

    def __init__(
        self, source: RngSource | int, detect_seeding: bool = False, fill_empty: bool = False
    ) -> None:
        super().__init__()
        self._fill_empty = fill_empty
        self._source = SeededRng(source) if isinstance(source, int) else source
        self._shared_state = read_shared_cpu_state() if detect_seeding else None
        self.used_own_generator = self.used_empty = False

    @property
    def has_drawn(self) -> bool:
        """Return whether any number has been drawn."""
        return self._source.has_drawn

    # `TorchDispatchMode.__enter__` also sets flags that all threads share. Stages that enter and
    # leave the mode at the same time would leave them wrong, so only this thread's stack is used.
    def __enter__(self) -> CellRngMode:
        """Enter the mode in this thread."""
        skip_dynamo_tracing(__name__)
        push_dispatch_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        pop_dispatch_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A function mode sees the calls that Python makes, not the ATen operators that these lead
        # to. Here Python calls an ATen operator, and without the guard a mode would see it as well.
        with DisableTorchFunction():
            draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            if not draws or is_deterministic_call(func, args, kwargs):
                result = func(*args, **kwargs)
                if self._fill_empty and func in _EMPTY_OPS:
                    self.used_empty = True
                    result.zero_()
                return result
            return self._run_random_op(func, args, kwargs)

    def _run_random_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A pipe that is a layer of another pipe runs under the modes of both. The inner cell
        # handles the draw, so the mode of the outer cell must not see it.
        if is_inside_cell():
            with without_innermost_dispatch_mode():
                return self._run_random_op(func, args, kwargs)
        if kwargs.get("generator") is not None:
            self.used_own_generator = True
            if is_checkpointing():
                raise RunError(
                    "this layer draws random numbers from its own generator, which the "
                    "recomputation cannot rewind. Draw without generator= (the pipe then provides "
                    "one), or set checkpoint='never'."
                )
            return func(*args, **kwargs)  # the layer manages its own generator
        _reject_inside_torch_checkpoint()
        if self._shared_state is not None:
            _check_not_seeded(self._shared_state)
        cell_generator = self._source.generator_for(_find_device(args, kwargs))
        if any(argument.name == "generator" for argument in get_schema_arguments(func)):
            return func(*args, **{**kwargs, "generator": cell_generator})
        # Some operations, such as native_dropout, take no generator= and read the default one.
        with self._source.replace_shared_generator(cell_generator):
            return func(*args, **kwargs)


def _find_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which an operation draws."""
    for leaf in pytree.tree_iter((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return resolve_index(torch.device(kwargs.get("device") or "cpu"))


def is_deterministic_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation that may draw random numbers draws none in this call.

    Attention and cuDNN's LSTM draw nothing without dropout. A backward that takes `philox_seed`
    repeats the numbers that its forward has drawn.
    """
    for index, argument in enumerate(get_schema_arguments(func)):
        if argument.name == "philox_seed":
            return True
        if argument.name in ("dropout_p", "dropout"):
            if index < len(args):
                return not args[index]
            return not kwargs.get(argument.name, argument.default_value)
    return False


# ---- torch.utils.checkpoint --------------------------------------------------------------------
#
# `torch.utils.checkpoint` inside a layer repeats that part of the forward during the backward. By
# then `CellRngMode` is gone, and the repetition would draw other numbers from the default
# generator. A draw inside such a checkpoint is therefore an error.
#
# A draw looks for a frame of `torch.utils.checkpoint` on the stack. The search must stop at the
# cell: a checkpoint around the whole pipe is harmless, as PyTorch restores the default generator
# for the repetition, and the pipe draws its seed from that. Functions that run the layers of a cell
# register their code object for this.

# The registered code objects by id. Code objects with the same content compare equal, so only their
# identity tells them apart. The dict keeps them alive, so that no id is reused.
_cell_boundaries: dict[int, CodeType] = {}


def mark_cell_boundary(function: F) -> F:
    """Register a function that runs the layers of one cell, and return it unchanged."""
    code: CodeType = function.__code__
    _cell_boundaries[id(code)] = code
    return function


def _reject_inside_torch_checkpoint() -> None:
    """Raise if the cell's layers have called the current function by `torch.utils.checkpoint`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in _cell_boundaries:
            return
        if frame.f_globals is TORCH_CHECKPOINT_GLOBALS:
            raise RunError(
                "this layer draws random numbers inside torch.utils.checkpoint, whose "
                "recomputation would draw different ones. Remove that checkpoint, and let the pipe "
                "recompute the layer instead (checkpoint='always')."
            )
        frame = frame.f_back
