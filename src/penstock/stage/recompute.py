"""Recomputation of a forward: it sees the state that the forward saw, and leaves none behind.

A cell that is recomputed runs its layers twice. The second run must see the buffers and training
flags of the first, and what it writes to buffers must be dropped, or running statistics would
advance twice. The same goes for Python attributes that a layer sets, such as a counter.

    forward         snapshot_buffers -> run -> find_written, exclude_written
    recomputation   restore_state(written) -> run -> put the current buffers back

What else a layer may depend on cannot be restored: closures, globals, the grad mode. So every
recomputation is compared with its forward (`RepeatCheck`).

Layers can ask which run they are in: `is_checkpointing`, `is_recomputing`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data_parallel.dtensor import to_local
from penstock.device.accelerator import has_double_precision
from penstock.errors import RunError
from penstock.state_copy import SCALARS, StructureCopier, clone_state, get_package
from penstock.torch_compat import NormBase, wait_for_collective

# ---- questions that a layer may ask ------------------------------------------------------------


class _RecomputeState(threading.local):
    """The kind of forward that this thread runs."""

    def __init__(self) -> None:
        self.checkpointing = False
        self.recomputing = False
        self.was_asked = False  # by a layer, since the current run began


_thread_state = _RecomputeState()


def is_checkpointing() -> bool:
    """Return whether the current forward will be recomputed before its backward.

    Layers call it in their forward. Outside of a pipe it returns False.

    Example:

    >>> is_checkpointing()
    False
    """
    _thread_state.was_asked = True
    return _thread_state.checkpointing


def is_recomputing() -> bool:
    """Return whether the current forward is the recomputation of an earlier one.

    Layers call it in their forward, for example to count a batch only once. Outside of a pipe it
    returns False.

    Example:

    >>> class Counter(nn.Module):
    ...     calls = 0
    ...     def forward(self, x: Tensor) -> Tensor:
    ...         if not is_recomputing():
    ...             self.calls += 1
    ...         return x
    """
    _thread_state.was_asked = True
    return _thread_state.recomputing


def in_checkpointed_forward() -> bool:
    """Return the same as `is_checkpointing`, to this library and not to a layer."""
    return _thread_state.checkpointing


def in_recomputation() -> bool:
    """Return the same as `is_recomputing`, to this library and not to a layer."""
    return _thread_state.recomputing


def tells_runs_apart() -> bool:
    """Return whether a layer has asked, in the last marked run of this thread, which run it is."""
    return _thread_state.was_asked


_NULL_CONTEXT = nullcontext()


class _Mark:
    """A context that sets one of the flags above for this thread. It can be entered many times."""

    def __init__(self, flag: str) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        setattr(_thread_state, self._flag, True)
        _thread_state.was_asked = False

    def __exit__(self, *exception: object) -> None:
        setattr(_thread_state, self._flag, False)


# Inside these contexts, `is_checkpointing` or `is_recomputing` returns True.
mark_checkpointing, mark_recomputing = _Mark("checkpointing"), _Mark("recomputing")


def mark_only_run() -> AbstractContextManager[object]:
    """Let both questions be answered with False: what runs here runs once in a training step."""
    # For the loss of each micro-batch, most of which have nothing to change.
    state = _thread_state
    return _mark_only_run() if state.checkpointing or state.recomputing else _NULL_CONTEXT


@contextmanager
def _mark_only_run() -> Iterator[None]:
    checkpointing, recomputing = _thread_state.checkpointing, _thread_state.recomputing
    _thread_state.checkpointing = _thread_state.recomputing = False
    try:
        yield
    finally:
        _thread_state.checkpointing, _thread_state.recomputing = checkpointing, recomputing


# ---- buffers -----------------------------------------------------------------------------------

# Whether a forward writes a buffer without a change of its version counter, by module and name. A
# buffer that is not in the dict has not been compared yet.
SilentWrites = dict[tuple[nn.Module, str], bool]


class BufferSnapshot(NamedTuple):
    """A buffer before a forward: the tensor itself, its version counter and a copy of its value."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor


def has_write_only_buffers(module: nn.Module) -> bool:
    """Return whether training never reads the buffers of a module, but only writes them.

    That is known of the norms of PyTorch and Penstock. A norm of another library may read its
    running statistics in training.
    """
    library = type(module).__module__.partition(".")[0]
    return isinstance(module, NormBase) and library in ("torch", "penstock")


def snapshot_buffers(modules: Sequence[nn.Module]) -> list[BufferSnapshot]:
    """Return snapshots of all buffers except running statistics, which training never reads."""
    return [
        BufferSnapshot(owner, name, buffer, buffer._version, buffer.clone())
        for owner in modules
        if not has_write_only_buffers(owner)
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def find_changed(snapshots: Sequence[BufferSnapshot]) -> list[BufferSnapshot]:
    """Return the snapshots of buffers that were written or replaced since, by version counter."""
    return [
        snapshot
        for snapshot in snapshots
        if not _is_registered(snapshot) or snapshot.buffer._version != snapshot.version
    ]


def _is_registered(snapshot: BufferSnapshot) -> bool:
    """Return whether the module still has the same tensor as this buffer.

    The `_buffers` of a ScriptModule is not a dict and has no `get`.
    """
    registry = snapshot.module._buffers
    return snapshot.name in registry and registry[snapshot.name] is snapshot.buffer


def find_written(
    snapshots: Sequence[BufferSnapshot], silent_writes: SilentWrites
) -> list[BufferSnapshot]:
    """Return the snapshots of buffers that a forward wrote, silent writes included.

    A silent write does not change the version counter: a write through `.data`, or by PyTorch's
    own `batch_norm`. This function finds silent writes by comparing values, and remembers them in
    `silent_writes`. On a GPU the host has to wait for a comparison, so each buffer there is
    compared in one forward only. If a module writes one buffer silently, all its buffers count as
    written, because a write may leave a value unchanged.
    """
    changed_ids = {id(snapshot) for snapshot in find_changed(snapshots)}
    for snapshot in snapshots:
        key = snapshot.module, snapshot.name
        if id(snapshot) not in changed_ids and (
            key not in silent_writes or snapshot.buffer.device.type == "cpu"
        ):
            # PyTorch does not compare sparse tensors. Their version counters must do.
            is_dense = snapshot.buffer.layout is torch.strided
            differs = is_dense and not torch.equal(snapshot.buffer, snapshot.value)
            silent_writes[key] = differs or silent_writes.get(key, False)
    writers = {
        snapshot.module
        for snapshot in snapshots
        if silent_writes.get((snapshot.module, snapshot.name))
    }
    return [
        snapshot
        for snapshot in snapshots
        if id(snapshot) in changed_ids or snapshot.module in writers
    ]


def exclude_written(
    snapshots: Sequence[BufferSnapshot], written: Sequence[BufferSnapshot]
) -> list[BufferSnapshot]:
    """Return the other snapshots, with the buffer itself as value, so that the copy is freed."""
    keys = {(snapshot.module, snapshot.name) for snapshot in written}
    unwritten = [snapshot for snapshot in snapshots if (snapshot.module, snapshot.name) not in keys]
    return [snapshot._replace(value=snapshot.buffer) for snapshot in unwritten]


def read_buffers(snapshots: Sequence[BufferSnapshot]) -> list[Tensor]:
    """Return what these buffers hold now, without those that are gone or None."""
    registries = [(s.module._buffers, s.name) for s in snapshots]
    values = [registry[name] for registry, name in registries if name in registry]
    return [value for value in values if value is not None]


def checksum(tensor: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bit patterns, or None for a kind of tensor that has none."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = integer.get(tensor.element_size())
    is_known_type = type(tensor) in (Tensor, nn.Parameter)
    is_plain = is_known_type and tensor.layout is torch.strided and not tensor.is_quantized
    if dtype is None or tensor.is_meta or not is_plain:
        return None
    return tensor.detach().view(dtype).sum(dtype=torch.int64)


# ---- Python attributes -------------------------------------------------------------------------

# A layer may count its calls, append to a list, or keep a running mean in a tensor that is not a
# buffer. Its recomputation must find the state of its forward, and must not change it again. So it
# computes with copies that were made before the forward. What only the recomputation sets stays.

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MISSING: Any = object()
# A tensor that a layer assigns may be state, or activations that it leaves for the user. A larger
# one is not kept for each micro-batch.
_MAX_STATE_BYTES = 1 << 20


class WrittenAttribute(NamedTuple):
    """An attribute that a forward sets or changes.

    Attributes:
        module: The module that has it.
        name: Its name.
        is_kept: Whether the recomputation finds its old value. Otherwise the attribute is only put
            back after it.
        has_written_tensors: Whether tensors in it are changed in place.
    """

    module: nn.Module
    name: str
    is_kept: bool
    has_written_tensors: bool


# An attribute and a copy of its value, which is _MISSING where there was none.
AttributeSnapshot = tuple[WrittenAttribute, Any]


_OURS = get_package(StructureCopier)


class AttributeWatch:
    """Finds the attributes of modules that a forward sets or changes."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # `DeferredStatsBatchNorm` collects nothing in a recomputation. A pipe that is a layer has
        # its traces, which refer to the code of the model and so to all variables of its module.
        self._modules = [
            m for m in modules if not (has_write_only_buffers(m) or get_package(type(m)) == _OURS)
        ]
        self._copier = StructureCopier(clone_state)
        self.before = _read_attributes(self._modules)
        for _, _, value in self.before:
            self._copier(value)

    def find_written(self) -> list[WrittenAttribute]:
        """Return the attributes that differ from those at the beginning."""
        before = {(id(module), name): value for module, name, value in self.before}
        written = []
        for module, name, value in _read_attributes(self._modules):
            old = before.pop((id(module), name), _MISSING)
            if type(value) in SCALARS and type(old) is type(value) and old == value:
                continue
            if value is old and self._copier.is_unchanged(value):
                continue
            tensors: list[Tensor] = []
            StructureCopier(lambda tensor, found=tensors: found.append(tensor) or tensor)(value)  # type: ignore[misc]
            has_written_tensors = any(map(self._copier.has_changed, tensors))
            is_small = not isinstance(value, Tensor) or value.nbytes <= _MAX_STATE_BYTES
            is_kept = is_small or has_written_tensors
            written.append(WrittenAttribute(module, name, is_kept, has_written_tensors))
        removed = [(m, name) for m, name, _ in self.before if (id(m), name) in before]
        return written + [WrittenAttribute(m, name, True, False) for m, name in removed]

    def select(self, written: Sequence[WrittenAttribute]) -> list[AttributeSnapshot]:
        """Return snapshots of these attributes at the beginning."""
        before = {(id(module), name): value for module, name, value in self.before}
        values = [before.get((id(w.module), w.name), _MISSING) for w in written]
        copies = [value if value is _MISSING else self._copier(value) for value in values]
        return list(zip(written, copies, strict=True))


def _read_attributes(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Return the attributes of modules that are not PyTorch's own."""
    return [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES
    ]


def snapshot_attributes(attributes: Sequence[WrittenAttribute]) -> list[AttributeSnapshot]:
    """Return snapshots of these attributes."""
    return _copy_snapshots([(a, vars(a.module).get(a.name, _MISSING)) for a in attributes])


def _copy_snapshots(snapshots: Sequence[AttributeSnapshot]) -> list[AttributeSnapshot]:
    """Return copies of the values. A tensor is copied only if forwards change it in place."""
    copiers = StructureCopier(lambda tensor: tensor), StructureCopier(clone_state)
    return [
        (a, value if value is _MISSING else copiers[a.has_written_tensors](value))
        for a, value in snapshots
    ]


@contextmanager
def _restore_attributes(snapshots: Sequence[AttributeSnapshot]) -> Iterator[None]:
    """Let modules find the attributes of an earlier forward in the context, and undo changes."""
    current = [(a, vars(a.module).get(a.name, _MISSING)) for a, _ in snapshots]
    # Copies of the copies: the cell may be recomputed once more.
    for attribute, value in _copy_snapshots(snapshots):
        if attribute.is_kept:
            _set_attribute(attribute, value)
    try:
        yield
    finally:
        for attribute, value in current:
            _set_attribute(attribute, value)


def _set_attribute(attribute: WrittenAttribute, value: Any) -> None:
    if value is _MISSING:
        vars(attribute.module).pop(attribute.name, None)
    else:
        vars(attribute.module)[attribute.name] = value


# ---- the second forward ------------------------------------------------------------------------


@contextmanager
def restore_state(
    modules: Sequence[nn.Module],
    training_flags: list[bool],
    snapshots: Sequence[BufferSnapshot],
    attributes: Sequence[AttributeSnapshot] = (),
) -> Iterator[None]:
    """Let modules find the state of an earlier forward in a recomputation inside the context.

    Inside, modules have the training flags and attributes of that time, changed buffers hold copies
    of the snapshots, and running statistics are copies, too. Afterwards all modules have their
    current state back, and writes inside are gone.
    """
    current_flags = [module.training for module in modules]
    current_buffers = [(owner, name, t) for owner in modules for name, t in owner._buffers.items()]
    if current_flags != training_flags:
        _set_training(modules, training_flags)
    for owner, name, buffer in current_buffers:
        if buffer is not None and has_write_only_buffers(owner):
            owner._buffers[name] = buffer.clone()
    for snapshot in snapshots:
        snapshot.module._buffers[snapshot.name] = snapshot.value.clone()
    try:
        with mark_recomputing, _restore_attributes(attributes):
            yield
    finally:
        if current_flags != training_flags:
            _set_training(modules, current_flags)
        for owner, name, buffer in current_buffers:
            owner._buffers[name] = buffer


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag


# ---- the comparison of every recomputation with its forward ------------------------------------
#
# If the layers of a stage depend on something that changes between the two, the recomputation
# builds the graph of another function, and gradients are wrong. The outputs of the forward are not
# kept for the comparison. Each leaves one number, its product with a fixed vector, and so does the
# output of the recomputation:
#
#     small, on the CPU    its bytes take the place of the number, and are compared at once
#     on the CPU           the numbers are compared when the recomputation is done
#     on an accelerator    they stay on the device, and are read once, when the lanes have run

# How far a recomputation may be from its forward, relative to the norm of a tensor. With a graph
# PyTorch may choose another kernel, and some kernels add in no fixed order.
_TOLERANCES = {
    torch.float64: 4e-9,
    torch.complex128: 4e-9,
    torch.float32: 4e-4,
    torch.complex64: 4e-4,
}
_LOW_PRECISION_TOLERANCE = 0.03
_PRODUCT_DTYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))

_BLOCK = 1 << 16  # the length of the fixed vector; longer tensors use it block by block

# Outputs up to this size are kept as bytes. A product takes three operations of PyTorch, which cost
# more than the layers of a tiny stage, and each lets go of the GIL, for which other ranks wait.
_MAX_KEPT_BYTES = 1 << 12

# A number, one that is on a device, the dtype and bytes of a small tensor, or None for no
# comparison.
Product = float | Tensor | tuple[torch.dtype, bytes] | None


class Difference(NamedTuple):
    """A difference between a recomputation and its forward, as two parts of a message."""

    what: str
    consequence: str


OTHER_OUTPUT = Difference("gave another output", "the gradients would be wrong")
OTHER_BUFFER = Difference(
    "left another value in a buffer", "the buffer or the gradients would be wrong"
)


class _Pair(NamedTuple):
    """An output of a forward and of its recomputation, as numbers on a device."""

    microbatch: int
    difference: Difference
    forward: Tensor
    repeated: Tensor
    norm: Tensor
    tolerance: float


class RepeatCheck:
    """Compares the recomputations of one stage in one call with their forwards.

    Args:
        stage: The stage, for the message.
        has_low_precision: Whether autocast lets the layers compute with fewer bits than the dtypes
            of the outputs have.
    """

    def __init__(self, stage: object, has_low_precision: bool) -> None:
        self._stage, self._has_low_precision = stage, has_low_precision
        self._pairs: list[_Pair] = []

    def compare(
        self,
        microbatch: int,
        forward: Sequence[Product],
        outputs: Sequence[Tensor],
        difference: Difference = OTHER_OUTPUT,
    ) -> None:
        """Compare the outputs of a recomputation with the products of those of the forward.

        On an accelerator, `finish` raises if they differ.
        """
        if len(forward) != len(outputs):
            self._raise(microbatch, difference)
        for product, output in zip(forward, outputs, strict=True):
            repeated = compute_product(output)
            if isinstance(product, tuple):
                if product == repeated:
                    continue
                dtype, data = product
                product = _multiply(torch.frombuffer(bytearray(data), dtype=dtype))
            if isinstance(repeated, tuple):
                repeated = _multiply(output)
            if product is None or repeated is None:
                continue
            if isinstance(product, Tensor) and isinstance(repeated, Tensor):
                norm, tolerance = _compute_norm(output), self._get_tolerance(output.dtype)
                self._pairs.append(
                    _Pair(microbatch, difference, product, repeated, norm, tolerance)
                )
            elif product != repeated and not _is_close(
                float(product),
                float(repeated),
                float(_compute_norm(output)),
                self._get_tolerance(output.dtype),
            ):
                self._raise(microbatch, difference)

    def _get_tolerance(self, dtype: torch.dtype) -> float:
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        if self._has_low_precision:
            return _LOW_PRECISION_TOLERANCE
        return _TOLERANCES.get(dtype, _LOW_PRECISION_TOLERANCE)

    def finish(self) -> None:
        """Read the numbers on devices, and raise if a recomputation differs from its forward."""
        if not self._pairs:
            return
        pairs, self._pairs = self._pairs, []
        for device in {pair.forward.device for pair in pairs}:
            on_device = [pair for pair in pairs if pair.forward.device == device]
            dtype = torch.float64 if has_double_precision(device.type) else torch.float32
            numbers = [number.to(dtype) for pair in on_device for number in pair[2:5]]
            values = iter(torch.stack(numbers).tolist())
            for pair in on_device:
                if not _is_close(next(values), next(values), next(values), pair.tolerance):
                    self._raise(pair.microbatch, pair.difference)

    def _raise(self, microbatch: int, difference: Difference) -> None:
        raise RunError(
            f"the recomputation of {self._stage} {difference.what} for micro-batch {microbatch} "
            f"than its forward, so {difference.consequence}. A layer depends on something that "
            "changed in between: on a closure, a generator object or a global, on an attribute "
            "that was set after pipe(x), or on torch.is_grad_enabled() or x.requires_grad, which "
            "are False in a forward that will be recomputed. Keep its state in buffers or in "
            "attributes of the layer, which are put back (is_recomputing() tells the second run), "
            "or set checkpoint='never'."
        )


def _is_close(forward: float, repeated: float, norm: float, tolerance: float) -> bool:
    """Return whether two products differ by rounding only. One that is not finite says nothing."""
    if not (math.isfinite(forward) and math.isfinite(repeated)):
        return math.isfinite(forward) == math.isfinite(repeated)
    return abs(forward - repeated) <= tolerance * max(norm, abs(forward), abs(repeated))


# ---- products with a fixed vector ----------------------------------------------------------------


def compute_product(tensor: Tensor) -> Product:
    """Return the product of a tensor with a fixed vector, or None for a kind that has none.

    The entries of the vector differ, so rows that change places give another product. A sum, or a
    norm, would be the same for all outputs of a LayerNorm. The bytes of a small
    tensor on the CPU are copied instead.
    """
    if (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and 0 < (size := tensor.nbytes) <= _MAX_KEPT_BYTES
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    ):
        return tensor.dtype, ctypes.string_at(tensor.data_ptr(), size)
    return _multiply(tensor)


def _multiply(tensor: Tensor) -> float | Tensor | None:
    """Return the product of a tensor of any kind with a fixed vector."""
    if type(tensor) is not Tensor:
        tensor = wait_for_collective(to_local(tensor))
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return None
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    product = multiply_by_fixed_vector(_flatten(tensor))
    return product.item() if product.is_cpu else product


def multiply_by_fixed_vector(flat: Tensor) -> Tensor:
    """Return the product of a tensor of one dimension with a fixed vector, on its device."""
    length = flat.numel()
    if length <= _BLOCK:
        return torch.dot(flat, get_fixed_vector(length, flat.dtype, flat.device))
    count = length // _BLOCK
    vector = get_fixed_vector(_BLOCK, flat.dtype, flat.device)
    sums = flat[: count * _BLOCK].view(count, _BLOCK) @ vector
    sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
    remainder = flat[count * _BLOCK :]
    # Blocks that change places give another product, too.
    weights = torch.arange(count, 2 * count, dtype=sums.dtype, device=sums.device) / count
    return sums @ weights + remainder @ vector[: len(remainder)]


def _flatten(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, in a dtype that has products."""
    # Each operation lets go of the GIL, for which the threads of other ranks wait.
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dtype not in _PRODUCT_DTYPES:
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        else:
            flat = flat.to(torch.float32)
    return flat.flatten()


def _compute_norm(tensor: Tensor) -> Tensor:
    local = wait_for_collective(to_local(tensor))
    flat = _flatten(local)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=dtype)
    return norm


@lru_cache(maxsize=64)
def get_fixed_vector(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed vector of products, up to a length."""
    if length < _BLOCK:
        return get_fixed_vector(_BLOCK, dtype, device)[:length]
    # Copied from the host, and not computed on the device: the copy is done when this returns, so
    # the streams of all ranks can use it.
    with torch.inference_mode(False):
        # With cosines alone, the product of a constant tensor would be close to 0.
        vector = torch.arange(_BLOCK, dtype=torch.float64, device="cpu").mul_(0.7).cos_().add_(0.1)
        return vector.to(dtype).to(device)
