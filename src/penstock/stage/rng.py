"""Random numbers that depend only on the call, the stage and the micro-batch.

All threads of a process share one default generator per device. With several ranks in threads, it
would be chance which stage draws which numbers, and a recomputation could not rewind the generator
without disturbing the other stages.

While a stage that may draw computes a cell, each random operation is redirected to generators of
the cell's own (`DrawRedirect`):

    seed of the call             drawn once from the caller's default generator (`peek_seed`)
    seed of the cell             hash of (call seed, stage, micro-batch)  (`derive_cell_seed`)
    operation takes generator=   it is called with the cell's generator
    dropout on a GPU             its kernel is called with the cell's generator
    operation takes none         the default generator has the cell's state during the operation,
                                 while the operations of other threads wait

The forward and the recomputation of a cell use the same seed, so they draw the same numbers.

Two contexts find the random operations, and run them alike:

    CellRngMode      a dispatch mode: sees every operation, each of which then goes through Python.
                     For the first forward of a stage, and for compiled layers.
    CellRngKernels   a dispatch key with kernels for the operations that draw: the others cost
                     nothing. `F.dropout`, which most draws come from, does not even go through the
                     dispatcher. For all other forwards.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.device.accelerator import get_default_generator, resolve_index
from penstock.errors import RunError
from penstock.stage.caller_context import is_inside_cell
from penstock.stage.compile_support import skip_dynamo_tracing
from penstock.stage.recompute import in_checkpointed_forward
from penstock.torch_compat import (
    TORCH_CHECKPOINT_GLOBALS,
    CompileFriendlyDispatchMode,
    DisableTorchFunction,
    add_draw_kernel,
    can_drop_by_parts,
    drop_by_parts,
    drop_with_generator,
    get_innermost_dispatch_mode,
    get_schema_arguments,
    install_dropout,
    is_under_compiler,
    pop_dispatch_mode,
    push_dispatch_mode,
    pytree,
    register_draw_kernels,
    remove_dropout,
    run_plain_dropout,
    set_draw_key,
    top_saved_tensor_hooks,
    without_innermost_dispatch_mode,
)

F = TypeVar("F", bound=Callable[..., Any])

# Held while a default generator carries the state of a cell: see `replace_shared_generator`. Each
# device has a default generator. The parts of a virtual GPU share one, and so do CPU threads.
_shared_generator_locks: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)
_CPU = torch.device("cpu")
# The latest states of cells that the CPU's default generator has carried. `torch.utils.checkpoint`
# in another thread may read one of them, and set it later: it restores the state that it found.
_carried_states: deque[Tensor] = deque(maxlen=128)
_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
_BERNOULLI = torch.ops.aten.bernoulli_.float


# ---- default generators ------------------------------------------------------------------------


def seed_shared_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of this device, and of no other device."""
    for where in dict.fromkeys((torch.device("cpu"), device)):
        get_default_generator(where).manual_seed(seed)


def read_shared_cpu_state() -> Tensor:
    """Return the state of the CPU's default generator, at a moment when no cell replaces it."""
    with _shared_generator_locks[_CPU]:
        return torch.default_generator.get_state()


def restore_shared_cpu_state(state_before: Tensor, earlier_states: Iterable[Tensor] = ()) -> None:
    """Set the CPU's default generator back if a thread has left the state of a cell there.

    Or one of `earlier_states`: in a backward, `torch.utils.checkpoint` sets the state of the caller
    that it has found in its forward, and two threads that do so may restore that of each other.
    """
    with _shared_generator_locks[_CPU]:  # a cell of another pipe may draw in another thread
        state = torch.default_generator.get_state()
        if torch.equal(state, state_before):
            return
        if _was_carried(state) or any(torch.equal(state, earlier) for earlier in earlier_states):
            torch.default_generator.set_state(state_before)


def _was_carried(state: Tensor) -> bool:
    return any(torch.equal(state, carried) for carried in list(_carried_states))


def _check_not_seeded(state_before: Tensor) -> None:
    """Raise if the CPU's default generator was seeded since it had this state.

    Draws of other threads move it on, too, but do not bring it to the beginning of a seed.
    """
    state = read_shared_cpu_state()
    if torch.equal(state, state_before) or _was_carried(state):
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


@contextmanager
def suspend_cell_rng() -> Iterator[None]:
    """Let random numbers come from the default generators again, as outside of any cell.

    The tracer needs it, as it finds a draw by the state of these generators. A pipe that is a layer
    of another pipe may be traced inside a cell.
    """
    had_key = set_draw_key(False)
    try:
        with ExitStack() as suspended:
            while isinstance(get_innermost_dispatch_mode(), CellRngMode):
                suspended.enter_context(without_innermost_dispatch_mode())
            yield
    finally:
        set_draw_key(had_key)


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

    @property
    def has_drawn(self) -> bool:
        """Return whether any generator has left its initial state."""
        return any(
            not torch.equal(generator.get_state(), self._create(device).get_state())
            for device, generator in self._generators.items()
        )

    def generator_for(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device. The first call creates it."""
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = self._create(device)
        return generator

    def _create(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed)

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """Give the default generator the state of `generator` inside the context.

        Only one thread can be in such a context, as the default generator belongs to all threads.
        The new state goes back to `generator`, and the default generator gets its old state again.
        """
        shared = get_default_generator(generator.device)
        with _shared_generator_locks[generator.device]:
            if generator.device.type == "cuda":
                # Both refer to one state, which costs less than to copy it forth and back.
                shared_state = shared.graphsafe_get_state()
                shared.graphsafe_set_state(generator)
                try:
                    yield
                finally:
                    shared.graphsafe_set_state(shared_state)
                return
            before, begin = shared.get_state(), generator.get_state()
            _carried_states.append(begin)
            shared.set_state(begin)
            try:
                yield
            finally:
                end = shared.get_state()
                _carried_states.append(end)
                generator.set_state(end)
                shared.set_state(before)


# ---- random operations -------------------------------------------------------------------------


class DrawRedirect:
    """Runs the random operations of one computation of a cell, with numbers from its source.

    Args:
        source: The source, or a seed.
        detect_seeding: Whether to raise if a layer seeds the default generator, from which it would
            then not draw.
        own_states: A dict that gets the states of the layers' own generators before their first
            draws.

    Attributes:
        used_own_generator: Whether a layer has drawn from a generator of its own.
    """

    def __init__(
        self,
        source: RngSource | int,
        detect_seeding: bool = False,
        own_states: dict[torch.Generator, Tensor] | None = None,
    ) -> None:
        self._own_states = own_states
        self._source = SeededRng(source) if isinstance(source, int) else source
        self._shared_state = read_shared_cpu_state() if detect_seeding else None
        self.used_own_generator = False

    @property
    def has_drawn(self) -> bool:
        """Return whether any number has been drawn."""
        return self._source.has_drawn

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that draws. Neither the key nor a mode of a cell sees it."""
        generator = kwargs.get("generator")
        if generator is not None:
            self.used_own_generator = True
            if self._own_states is not None:
                self._own_states.setdefault(generator, generator.get_state())
            if in_checkpointed_forward():
                raise RunError(
                    "this layer draws random numbers from its own generator, which the "
                    "recomputation cannot rewind. Draw without generator= (the pipe then provides "
                    "one), or set checkpoint='never'."
                )
            return func(*args, **kwargs)  # the layer manages its own generator
        if self._shared_state is not None:
            _reject_inside_torch_checkpoint()
            _check_not_seeded(self._shared_state)
        elif _may_be_inside_torch_checkpoint():
            _reject_inside_torch_checkpoint()
        cell_generator = self._source.generator_for(_find_device(args, kwargs))
        if func is _BERNOULLI and not kwargs:
            # The operation of most dropouts on a CPU. As a method it takes half the time.
            return Tensor.bernoulli_(*args, generator=cell_generator)
        if _takes_generator(func):
            return func(*args, **{**kwargs, "generator": cell_generator})
        if func is _NATIVE_DROPOUT:
            dropped = drop_with_generator(cell_generator, *args)
            if dropped is not None:
                return dropped
        # Some operations, such as attention, take no generator= and read the default one.
        with self._source.replace_shared_generator(cell_generator):
            return func(*args, **kwargs)

    def drop(self, tensor: Tensor, probability: float) -> Tensor | None:
        """Return what dropout in training returns, or None if `run` has to find its draw.

        Neither the key nor a mode of a cell sees it.
        """
        if (
            self._shared_state is not None
            or _may_be_inside_torch_checkpoint()
            or not can_drop_by_parts(tensor, probability)
        ):
            return None
        return drop_by_parts(self._source.generator_for(tensor.device), tensor, probability)


def _run_suspended(
    run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that draws, without the modes of cells.

    A pipe that is a layer of another pipe runs under the modes of both. The inner cell handles the
    draw, so the mode of the outer cell must not see it.
    """
    if isinstance(get_innermost_dispatch_mode(), CellRngMode):
        with without_innermost_dispatch_mode():
            return _run_suspended(run, func, args, kwargs)
    return run(func, args, kwargs)


@cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in get_schema_arguments(func))


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


# The namespaces of PyTorch's own operators. Those that draw have a tag.
_PLAIN_NAMESPACES = ("aten", "prims", "higher_order")


class CellRngMode(CompileFriendlyDispatchMode):
    """A dispatch mode that redirects random operations to a source, a seed or a `DrawRedirect`.

    With `detect_seeding` it raises if a layer seeds the default generator, from which it would then
    not draw. With `fill_empty`, the contents of `torch.empty` are zeros, so that two runs can be
    compared.

    Attributes:
        redirect: Runs the random operations.
        used_empty: Whether a layer has called `torch.empty`, if its contents are filled.
    """

    belongs_to_cell = True  # for `is_inside_cell`
    # Such as `flex_attention`, which PyTorch otherwise refuses under a mode. They draw nothing.
    supports_higher_order_operators = True

    def __init__(
        self,
        source: RngSource | DrawRedirect | int,
        detect_seeding: bool = False,
        fill_empty: bool = False,
    ) -> None:
        super().__init__()
        self._fill_empty = fill_empty
        if not isinstance(source, DrawRedirect):
            source = DrawRedirect(source, detect_seeding)
        self.redirect = source
        self.used_empty = False
        self._had_key = False

    @property
    def has_drawn(self) -> bool:
        """Return whether any number has been drawn."""
        return self.redirect.has_drawn

    # `TorchDispatchMode.__enter__` also sets flags that all threads share. Stages that enter and
    # leave the mode at the same time would leave them wrong, so only this thread's stack is used.
    def __enter__(self) -> CellRngMode:
        """Enter the mode in this thread."""
        skip_dynamo_tracing(__name__)
        # The key of an outer cell comes before all modes, and would redirect what this one draws.
        self._had_key = set_draw_key(False)
        push_dispatch_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        pop_dispatch_mode()
        set_draw_key(self._had_key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A function mode sees the calls that Python makes, not the ATen operators that these lead
        # to. Here Python calls an ATen operator, and without the guard a mode would see it as well.
        with DisableTorchFunction():
            draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
            if not draws or is_deterministic_call(func, args, kwargs):
                if getattr(func, "namespace", "aten") not in _PLAIN_NAMESPACES:
                    return self._run_custom_op(func, args, kwargs)
                result = func(*args, **kwargs)
                if self._fill_empty and func in _EMPTY_OPS:
                    self.used_empty = True
                    result.zero_()
                return result
            add_draw_kernel(func, _run_draw)
            return _run_suspended(self.redirect.run, func, args, kwargs)

    def _run_custom_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of a user or of another library, which may draw inside.

        PyTorch switches the mode off meanwhile. The kernels see what the operator draws.
        """
        if not CellRngKernels.are_available():
            return func(*args, **kwargs)
        with CellRngKernels(self.redirect):
            return func(*args, **kwargs)


# ---- the kernels -------------------------------------------------------------------------------


class CellRngKernels:
    """A context that redirects random operations to a source, and leaves all others alone.

    Where PyTorch lacks what it takes, `are_available` is False, and `CellRngMode` does the same.
    """

    def __init__(self, redirect: DrawRedirect) -> None:
        self.redirect = redirect
        self._outer: DrawRedirect | None = None
        self._had_key = False
        self._thread = 0

    @staticmethod
    def are_available() -> bool:
        """Return whether PyTorch has all that the kernels need. The first call registers them."""
        return register_draw_kernels(_run_draw)

    def __enter__(self) -> CellRngKernels:
        """Redirect the draws of this thread."""
        skip_dynamo_tracing(__name__)
        self._thread = threading.get_ident()
        self._outer = _redirects.get(self._thread)
        _redirects[self._thread] = self.redirect
        install_dropout(_drop)
        self._had_key = set_draw_key(True)
        return self

    def __exit__(self, *_: object) -> None:
        set_draw_key(self._had_key)
        remove_dropout()
        if self._outer is None:
            del _redirects[self._thread]
        else:
            _redirects[self._thread] = self._outer


def redirect_draws(redirect: DrawRedirect) -> CellRngKernels | CellRngMode:
    """Return a context that redirects random operations, at the least cost that PyTorch allows."""
    return CellRngKernels(redirect) if CellRngKernels.are_available() else CellRngMode(redirect)


# The innermost redirection of each thread that is in a `CellRngKernels`, by the thread's id.
_redirects: dict[int, DrawRedirect] = {}


def _run_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that may draw, in a thread whose operations have the key of the kernels."""
    set_draw_key(False)
    try:
        with DisableTorchFunction():
            if is_under_compiler() or is_deterministic_call(func, args, kwargs):
                return func(*args, **kwargs)
            return _run_suspended(_find_redirect().run, func, args, kwargs)
    finally:
        set_draw_key(True)


def _drop(input: Tensor, p: float, train: bool) -> Tensor:
    """Run the dropout of `F.dropout`, in any thread. The arguments are those of `torch.dropout`."""
    redirect = _redirects.get(threading.get_ident())
    # Without the key, the thread is in a part of the cell that draws from the default generators.
    if redirect is not None and train and set_draw_key(False):
        try:
            output = redirect.drop(input, p)
        finally:
            set_draw_key(True)
        if output is not None:
            return output
    return run_plain_dropout(input, p, train)


def _find_redirect() -> DrawRedirect:
    """Return the redirection of this thread.

    A layer may call `torch.autograd.grad`. On a GPU, that backward runs in a thread of autograd,
    which has the key of the thread that has called it, but is not the one that computes the cell.
    """
    redirect = _redirects.get(threading.get_ident())
    if redirect is None and len(_redirects) == 1:
        # Worker threads run their backwards themselves, so the cell is that of the only thread.
        redirect = next(iter(_redirects.values()))
    if redirect is None:
        raise RunError(
            f"this layer draws random numbers in the thread '{threading.current_thread().name}', "
            "while several threads compute stages, so it is not known whose numbers they are. "
            "Draw them in the forward of the layer, in the thread that calls it."
        )
    return redirect


def _find_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which an operation draws."""
    if args and isinstance(args[0], Tensor):
        return args[0].device
    for leaf in pytree.tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf.device
    return resolve_index(torch.device(kwargs.get("device") or "cpu"))


def is_deterministic_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation that may draw random numbers draws none in this call.

    Attention and cuDNN's LSTM draw nothing without dropout. A backward that takes `philox_seed`
    repeats the numbers that its forward has drawn.
    """
    decisive = _find_decisive_argument(func)
    if decisive is None:
        return False
    index, argument = decisive
    if argument.name == "philox_seed":
        return True
    if index < len(args):
        return not args[index]
    return not kwargs.get(argument.name, argument.default_value)


@cache
def _find_decisive_argument(func: Any) -> tuple[int, Any] | None:
    """Return the argument that decides whether an operation draws, with its index."""
    for index, argument in enumerate(get_schema_arguments(func)):
        if argument.name in ("philox_seed", "dropout_p", "dropout"):
            return index, argument
    return None


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


def _may_be_inside_torch_checkpoint() -> bool:
    """Return False if no `torch.utils.checkpoint` of this thread is running a forward.

    A reentrant one runs it without grad, the other one under hooks on saved tensors. The search on
    the stack takes longer than all else that a draw costs, so only the first forward of a stage
    does it for every draw: that also finds a reentrant one whose layers switch grad on again.
    """
    return not torch.is_grad_enabled() or top_saved_tensor_hooks(True) is not None


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
