"""What one call of a module costs, measured: seconds of F, I and W, and bytes.

The call is run a few times with copies of its arguments, and leaves no trace: no parameter,
gradient, buffer, attribute, mode or random state is another afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from functools import partial
from statistics import median
from time import perf_counter
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RunError
from penstock.model.isolation import (
    DeviceLike,
    StructureCopier,
    build_tensor_copier,
    isolated_module,
    iter_module_tensors,
    preserve_global_state,
)
from penstock.model.traced.pytrees import IdentityKey
from penstock.model.traced.traced_partition import UnitCost
from penstock.stage.aux_loss import added_losses
from penstock.stage.cell_graph import CellGraph, GraphInputs, find_gradient_edge
from penstock.stage.stage import OUTSIDE
from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral

# -------------------------------------------------------------------------------------------------
# Which calls cost the same: those of modules that are built alike, with arguments alike.
#
# Numbers that only say which block of many this is do not count, nor do fractions, such as how
# likely something is dropped, beyond whether they are zero.
# -------------------------------------------------------------------------------------------------

_IDENTITY_ATTRIBUTE = re.compile(r"(^|_)(idx|index|id|number|name)$")
_MODULE_INTERNALS = frozenset(vars(nn.Module()))  # hooks, and what is named below


def build_cost_key(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Hashable:
    """A key: if it is the same for two calls, one measurement does for both.

    >>> x = torch.ones(2, 4)
    >>> build_cost_key(nn.Linear(4, 4), (x,)) == build_cost_key(nn.Linear(4, 4), (x + 1,))
    True
    >>> build_cost_key(nn.Linear(4, 4), (x,)) == build_cost_key(nn.Linear(4, 4, bias=False), (x,))
    False
    """
    known: dict[int, int] = {}  # modules that were met, by id
    parts = tuple(_fingerprint_module(name, part, known) for name, part in module.named_modules())
    return (
        parts,
        _fingerprint_value(tuple(args), set()),
        _fingerprint_value(dict(kwargs or {}), set()),
    )


def _fingerprint_module(name: str, module: nn.Module, tensor_numbers: dict[int, int]) -> Hashable:
    own = {
        attribute: _fingerprint_value(value, set())
        for attribute, value in vars(module).items()
        if attribute not in _MODULE_INTERNALS and _affects_cost(attribute, value)
    }
    tensors = {**module._parameters, **module._buffers}
    shared = tuple(tensor_numbers.setdefault(id(t), len(tensor_numbers)) for t in tensors.values())
    return (
        name,
        type(module),
        module.training,
        tuple(own.items()),
        tuple((key, _fingerprint_value(tensor, set())) for key, tensor in tensors.items()),
        shared,
        tuple(_fingerprint_hooks(module)),
    )


def _fingerprint_hooks(module: nn.Module) -> Iterator[Hashable]:
    for kind, hooks in vars(module).items():
        if (
            kind in _MODULE_INTERNALS
            and isinstance(hooks, dict)
            and kind.endswith("hooks")
            and hooks
        ):
            yield kind, tuple(_fingerprint_hook(hook) for hook in hooks.values())


def _fingerprint_hook(hook: Any) -> Hashable:
    """A function that was made for each block, with the block's number in it, is one function."""
    return hook.__code__ if isinstance(hook, FunctionType) else _fingerprint_value(hook, set())


def _affects_cost(name: Any, value: Any) -> bool:
    """Does it say more than which one of many this is?"""
    named = isinstance(name, str) and _IDENTITY_ATTRIBUTE.search(name)
    return not (named and isinstance(value, int | str))


def _fingerprint_value(value: Any, enclosing_ids: set[int]) -> Hashable:
    """What counts of it; `around` are the containers that it is in."""
    if isinstance(value, Tensor):
        return _fingerprint_tensor(value)
    if isinstance(value, float):
        return float, value == 0
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, MethodType):
        return IdentityKey(value.__func__)
    if isinstance(value, partial):
        return (
            IdentityKey(value.func),
            _fingerprint_value(value.args, enclosing_ids),
            _fingerprint_value(value.keywords, enclosing_ids),
        )
    if is_dataclass(value) and not isinstance(value, type | dict) and hasattr(value, "__dict__"):
        return type(value), _fingerprint_value(vars(value), enclosing_ids)
    if isinstance(value, list | tuple | dict | set | frozenset):
        if id(value) in enclosing_ids:
            return type(value), len(value)
        inside = enclosing_ids | {id(value)}
        if isinstance(value, dict):
            own = ((k, v) for k, v in value.items() if _affects_cost(k, v))
            return type(value), tuple(
                (_fingerprint_value(k, inside), _fingerprint_value(v, inside)) for k, v in own
            )
        if isinstance(value, set | frozenset):
            return type(value), frozenset(_fingerprint_value(entry, inside) for entry in value)
        return type(value), tuple(_fingerprint_value(entry, inside) for entry in value)
    if isinstance(value, nn.Module):
        return type(value), IdentityKey(value)
    return IdentityKey(value)


def _fingerprint_tensor(tensor: Tensor) -> Hashable:
    layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return (
        type(tensor),
        tuple(tensor.shape),
        layout,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


# -------------------------------------------------------------------------------------------------

ModuleCall = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]
StorageSizes = dict[int, int]  # bytes, by where


def profile_calls(calls: Iterable[ModuleCall], device: DeviceLike = None) -> list[UnitCost]:
    """What each call costs; those that are alike are measured once."""
    known: dict[Hashable, UnitCost] = {}
    found = []
    for module, args, kwargs in calls:
        key = build_cost_key(module, args, kwargs)
        if key not in known:
            known[key] = profile_call(module, args, kwargs, device)
        found.append(known[key])
    return found


def profile_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    device: DeviceLike = None,
    *,
    runs: int = 5,
    timeout: float = 0.5,
    optimizer_state_scale: int = 2,
) -> UnitCost:
    """What the call `module(*args, **kwargs)` costs, on the device or where things are.

    After one run to warm up the median of some counts: of `runs`, or of as many as start before
    `timeout`. What has no memory (`meta`) gets some for the while. A parameter that is trained
    counts with its gradient and `state` more of its size: 2 for Adam.

    >>> profile_call(nn.Linear(4, 8), (torch.ones(10, 4),)).resident_bytes
    640
    >>> profile_call(nn.Linear(4, 8), (torch.ones(10, 4),)).activation_bytes
    160
    """
    given = tuple(args), dict(kwargs or {})
    tensors: list[Tensor] = []
    StructureCopier(_append_to(tensors))(given)
    tensors += iter_module_tensors(module)
    holds = sum(
        t.nbytes * (2 + optimizer_state_scale if t.requires_grad else 1)
        for t in iter_module_tensors(module)
    )
    if device is None and any(t.is_meta for t in tensors):
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    end = perf_counter() + timeout
    try:
        with (
            preserve_global_state(tensors, device) as synchronize,
            isolated_module(module, device) as own,
        ):
            trial = _CallProfiler(own, given, build_tensor_copier(device), synchronize)
            keeps = trial.measure_saved_bytes()
            seconds: list[tuple[float, float, float]] = []
            while not seconds or (len(seconds) < runs and perf_counter() < end):
                seconds.append(trial.measure_seconds())
    except Exception as error:
        error.add_note(f"This was a {type(module).__name__}, run on an example to measure it.")
        raise
    forward, inputs, weights = map(median, zip(*seconds, strict=True))
    return UnitCost(forward, inputs, weights, keeps, holds)


def time_call(function: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """How long it takes, until the devices are done with it."""
    synchronize()
    start = perf_counter()
    function()
    synchronize()
    return perf_counter() - start


class _CallProfiler:
    """A module that may be run with copies of what is given to it."""

    def __init__(
        self,
        module: nn.Module,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        copy_tensor: Callable[[Tensor], Tensor],
        synchronize: Callable[[], None],
    ) -> None:
        self._module, self._arguments, self._copy_tensor = module, arguments, copy_tensor
        self._synchronize = synchronize
        self._deferral = WeightGradDeferral(list(module.modules()))
        self._can_split_backward = True

    def measure_saved_bytes(self) -> int:
        """Bytes that a forward leaves for the backward, which is then run, too."""
        saved: StorageSizes = {}

        def pack(tensor: Tensor) -> Tensor:
            _record_storage(saved, tensor)
            return tensor

        args, kwargs, beginning = self._build_graph_inputs()
        inputs: list[Tensor] = []
        StructureCopier(_append_to(inputs))((args, kwargs))
        entered = [ref(tensor) for tensor in inputs]
        with saved_tensors_hooks(pack, lambda tensor: tensor), added_losses():
            graph, ones = _build_graph(self._module(*args, **kwargs), beginning)
        del args, kwargs
        inputs.clear()
        # what a checkpoint will compute again from, which it does not save as autograd does
        for tensor in (found() for found in entered):
            if tensor is not None:
                _record_storage(saved, tensor)
        self._time_backward(graph, ones, [])
        for tensor in iter_module_tensors(self._module):
            saved.pop(_storage_key(tensor), None)
        return sum(saved.values())

    def measure_seconds(self) -> tuple[float, float, float]:
        """Of F, I and W. If the weights cannot wait, W takes none and I all of the backward."""
        if self._can_split_backward:
            try:
                return self._time_run(split_backward=True)
            except RunError:
                self._can_split_backward = False
        return self._time_run(split_backward=False)

    def _time_run(self, split_backward: bool) -> tuple[float, float, float]:
        args, kwargs, beginning = self._build_graph_inputs()
        outputs: list[Any] = []
        later: list[PendingWeightGrad] = []
        with ExitStack() as stack:
            stack.enter_context(added_losses())
            if split_backward:
                later = stack.enter_context(self._deferral.activate())
            forward = time_call(
                lambda: outputs.append(self._module(*args, **kwargs)), self._synchronize
            )
        graph, ones = _build_graph(outputs.pop(), beginning)
        return forward, *self._time_backward(graph, ones, later)

    def _time_backward(
        self,
        graph: CellGraph,
        output_gradients: tuple[Tensor | None, ...],
        pending_weight_grads: list[PendingWeightGrad],
    ) -> tuple[float, float]:
        with _preserve_gradients(graph.find_leaves()):
            inputs = time_call(
                lambda: graph.backward_accumulate({OUTSIDE: output_gradients}, False),
                self._synchronize,
            )
            return inputs, time_call(
                lambda: accumulate_weight_grads(pending_weight_grads), self._synchronize
            )

    def _build_graph_inputs(self) -> tuple[Sequence[Any], Mapping[str, Any], GraphInputs]:
        """What is given, copied, as the beginning of a graph."""
        fresh = StructureCopier(self._copy_tensor)(self._arguments)
        tensors: list[Tensor] = []
        StructureCopier(_append_to(tensors))(fresh)
        outer = [tensor for tensor in tensors if tensor.requires_grad]
        beginning = GraphInputs.from_entry(outer) if outer else GraphInputs.from_leaves(())
        inside = dict(zip(map(id, outer), beginning.tensors, strict=True))
        args, kwargs = StructureCopier(lambda tensor: inside.get(id(tensor), tensor))(fresh)
        beginning.tensors = ()
        return args, kwargs, beginning


def _build_graph(
    output: Any, graph_inputs: GraphInputs
) -> tuple[CellGraph, tuple[Tensor | None, ...]]:
    """The graph that ends in the output, and a gradient for each of its ends."""
    tensors: list[Tensor] = []
    StructureCopier(_append_to(tensors))(output)
    exits = [tensor for tensor in tensors if tensor.requires_grad]
    entered = (True,) * len(graph_inputs.inputs)
    graph = CellGraph(
        {OUTSIDE: tuple(map(find_gradient_edge, exits))}, {OUTSIDE: entered}, graph_inputs
    )
    return graph, tuple(map(torch.ones_like, exits))


def _append_to(tensors: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def append(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return append


def _record_storage(storages: StorageSizes, tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storages[_storage_key(tensor)] = tensor.untyped_storage().nbytes()


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


@contextmanager
def _preserve_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within, they have none; after, as before. Some may not be copies: a closure has them."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient
