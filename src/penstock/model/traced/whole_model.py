"""Run a method of the model, such as `generate`, on a model that is cut into stages.

Such a method calls the forward many times and computes between the calls, so its code runs as it
is. Each unit runs where its weights are, and what it keeps for later calls, such as a cache of keys
and values, stays there:

    stages                   the method runs
    -------                  ---------------
    on one device            on the model itself
    on several devices       on copies of the parents; each unit gets its arguments on its device
    in several processes     in every process, on copies of the parents; see `ProcessForward`

Units run one after the other. That is no loss: a method that makes one token at a time has no work
for two stages at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import RunError
from penstock.model.partition import TensorExchange
from penstock.model.traced.interception import OpInterceptor, without_interception
from penstock.model.traced.proxies import NO_VALUE, ProxyModel, build_unit_proxy, copy_module_tree
from penstock.model.traced.remote_tensor import RemoteTensor
from penstock.model.traced.torch_functions import METADATA_ONLY, is_in_place
from penstock.model.unsplit import gather_operands
from penstock.nested_values import (
    flatten,
    iter_tensors,
    map_call_tensors,
    map_tensors,
    unflatten,
)
from penstock.tensor_spec import TensorSpec
from penstock.torch_compat import force_eager


@dataclass(frozen=True)
class UnitLocations:
    """The devices and ranks of the units and parameters of a model.

    Attributes:
        device: The device of the first stage in this process.
        unit_devices: The devices of the units, if they are on several.
        mixed_units: Units that have tensors on several devices: a shared weight is on the first.
        unit_ranks: The rank of each unit, if there are several processes.
        parameter_ranks: The first rank of each parameter that not all processes have.
    """

    device: torch.device
    unit_devices: Mapping[str, torch.device] = field(default_factory=dict)
    mixed_units: Collection[str] = ()
    unit_ranks: Mapping[str, int] = field(default_factory=dict)
    parameter_ranks: Mapping[str, int] = field(default_factory=dict)


def run_model_method(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    locations: UnitLocations,
    exchange: TensorExchange | None,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the result of a method of a model whose units are on several devices or ranks."""
    proxies = {id(unit): build_unit_proxy(name, unit) for name, unit in units.items()}
    proxy_model = ProxyModel(model, proxies, disables_kv_cache=False).model
    args, kwargs = map_tensors((args, dict(kwargs)), lambda tensor: tensor.to(locations.device))
    forward: DeviceForward | ProcessForward
    if exchange is None:
        forward = DeviceForward(locations)
        _return_to_device(proxy_model, locations.device)
    else:
        forward = ProcessForward(locations, exchange, units, proxy_model)
    # Compiled code would call no unit proxy.
    with force_eager(), forward:
        result = getattr(proxy_model, method)(*args, **kwargs)
    return forward.finish(result)


def _return_to_device(model: nn.Module, device: torch.device) -> None:
    """Let the forward of a copied model return tensors on the device of its inputs.

    A method that samples from the output draws from the generator of that device, as with the
    unsplit model. Objects with tensors inside, such as caches, stay as they are.
    """
    forward = model.forward

    @wraps(forward)
    def forward_and_return(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten(forward(*args, **kwargs))
        leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return unflatten(leaves, spec)

    model.__dict__["forward"] = forward_and_return


class _MethodInterceptor(OpInterceptor):
    """Runs the units of a method, and the operations between them, where their tensors are."""

    @abstractmethod
    def finish(self, result: Any) -> Any:
        """Return the result of the method as the caller gets it."""


# ---- several devices -----------------------------------------------------------------------------


class DeviceForward(_MethodInterceptor):
    """Runs each unit on its device. Operations between units run on the device of the last one."""

    def __init__(self, locations: UnitLocations) -> None:
        super().__init__()
        self._locations, self._device = locations, locations.device

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Move the arguments to the device of the unit, and run it."""
        self._device = self._locations.unit_devices[name]
        args, kwargs = map_call_tensors(args, kwargs, lambda tensor: tensor.to(self._device))
        if name in self._locations.mixed_units:
            return target(*args, **kwargs)
        with without_interception(self):
            return target(*args, **kwargs)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Move operands that are on several devices to one, and run the operation."""
        args, kwargs = gather_operands(func, args, kwargs, self._device)
        return call(*args, **kwargs)

    def finish(self, result: Any) -> Any:
        """Return the result as it is."""
        return result


# ---- several processes ---------------------------------------------------------------------------

_OWNER, _SHARED = "_owner_rank", "_shared_value"  # attributes of the outputs of units


class ProcessForward(_MethodInterceptor):
    """Runs the same method in every process, each with the units that it has.

    Every process runs the code of the method and of the parents. Of the units it runs its own; for
    those of other processes it computes shapes, on copies without memory:

        unit of rank 0      rank 0: the output        rank 1: a placeholder with its metadata
        unit of rank 1      rank 0: a placeholder     rank 1: the output

    The output of a unit stays on its rank until something else needs its numbers: a unit of another
    rank, or an operation between units, which all ranks run. Its rank then sends it to all others.
    All ranks run the same operations in the same order, so each knows when that happens, and no
    other messages are needed.

    The copies without memory do what the units do to objects that the model passes around: a cache
    of keys and values has tensors of the right shapes on every rank, and numbers where the layer
    is.
    """

    def __init__(
        self,
        locations: UnitLocations,
        exchange: TensorExchange,
        units: Mapping[str, nn.Module],
        model: nn.Module,
    ) -> None:
        super().__init__()
        self._locations, self._exchange = locations, exchange
        self._shape_units = {
            name: copy_module_tree(unit, _make_meta)
            for name, unit in units.items()
            if locations.unit_ranks[name] != exchange.rank
        }
        self._shape_cache = ShapeCache()
        # Parameters that an operation between units may use: they are sent once.
        self._parameter_ranks: dict[int, int] = {}
        self._parameters: dict[int, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in locations.parameter_ranks:
                self._parameter_ranks[id(parameter)] = locations.parameter_ranks[name]

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run an operation between units, on all ranks and with the same numbers."""
        args, kwargs = map_tensors((args, kwargs), self._fetch)
        return call(*args, **kwargs)

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a unit of this rank, or the copy without memory of another rank's unit."""
        rank = self._locations.unit_ranks[name]
        with without_interception(self):
            args, kwargs = map_call_tensors(args, kwargs, partial(self._fetch, reader=rank))
            if rank == self._exchange.rank:
                output = self._run_unit(name, target, args, kwargs)
                mark: Callable[[Tensor], Tensor] = partial(_mark_output, rank)
            else:
                output = self._compute_shapes(name, rank, args, kwargs)
                mark = partial(self._make_placeholder, rank)
            leaves, spec = flatten(output)
            leaves = [mark(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return unflatten(leaves, spec)

    def _run_unit(self, name: str, target: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        versions = [None if leaf.is_inference() else leaf._version for leaf in leaves]
        call = partial(target, *args, **kwargs)
        output, has_drawn = self._exchange.find_draws(call) if target.training else (call(), False)
        if has_drawn:
            raise RunError(
                f"unit '{name}' drew random numbers on rank {self._exchange.rank}, and the other "
                "ranks did not, so they would sample other tokens. Call pipe.eval() before you "
                "generate over several processes."
            )
        for leaf, version in zip(leaves, versions, strict=True):
            if version is not None and leaf._version != version:
                raise RunError(
                    f"unit '{name}' changed one of its arguments in place, which the other ranks "
                    "would not see. To generate, load pipe.export(file) into a new model."
                )
        return output

    def _compute_shapes(self, name: str, rank: int, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_call_tensors(args, kwargs, _make_meta)
        try:
            with self._shape_cache:
                return self._shape_units[name](*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise RunError(
                f"unit '{name}' of rank {rank} cannot be followed on rank {self._exchange.rank}, "
                f"which has only the shapes of its tensors: {error}. To generate, load "
                "pipe.export(file) into a new model."
            ) from error

    def _make_placeholder(self, rank: int, shape: Tensor) -> Tensor:
        if not shape.is_meta:
            raise RunError(
                f"a unit of rank {rank} returned a tensor that is not computed from its inputs and "
                "weights, so the ranks may have different ones. To generate, load "
                "pipe.export(file) into a new model."
            )
        spec = TensorSpec.from_tensor(shape)._replace(requires_grad=False)
        placeholder = RemoteTensor.from_spec(spec, self._locations.device, NO_VALUE)
        setattr(placeholder, _OWNER, rank)
        return placeholder

    def _fetch(self, tensor: Tensor, reader: int | None = None) -> Tensor:
        """Return a tensor with its numbers, where one rank (or None: each rank) reads them.

        If the tensor is on one rank only, it is sent to all.
        """
        attributes = tensor.__dict__
        owner = attributes.get(_OWNER)
        if owner is None:
            owner = self._parameter_ranks.get(id(tensor))
            if owner is None or owner == reader:
                return tensor
            if id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = self._exchange.broadcast(owner, tensor)
            return self._parameters[id(tensor)]
        if _SHARED not in attributes:
            if owner == reader:
                return tensor
            attributes[_SHARED] = self._exchange.broadcast(owner, tensor)
        shared: Tensor = attributes[_SHARED]
        return shared

    def finish(self, result: Any) -> Any:
        """Return the result with its numbers on every rank."""
        leaves, spec = flatten(result)
        leaves = [self._fetch(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            raise RunError(
                "the result has tensors that were taken from inside units, such as attentions or a "
                "cache, and each rank has only those of its own. Ask for tokens, scores or logits."
            )
        self._exchange.check_same(leaves)
        return unflatten(leaves, spec)


class ShapeCache(TorchFunctionMode):
    """Remembers the shapes of the results of operations on tensors without memory.

    PyTorch computes many of these shapes in Python, which takes longer than the operation itself.
    All layers of a model compute the same shapes, and most are the same for each token.
    """

    def __init__(self) -> None:
        super().__init__()
        # The specs of the results by function and arguments. None: it has to run.
        self._results: dict[Any, _ResultSpecs | None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return tensors of the shapes that the function returned before, or run it."""
        kwargs = kwargs or {}
        if func in METADATA_ONLY:
            return func(*args, **kwargs)
        try:
            key = func, _make_key(args), _make_key(kwargs) if kwargs else ()
            specs = self._results.get(key, _UNKNOWN)
        except TypeError:  # an argument that cannot be hashed
            return func(*args, **kwargs)
        if specs is None or specs is _UNKNOWN:
            result = func(*args, **kwargs)
            if specs is _UNKNOWN:
                self._results[key] = _read_result(func, args, kwargs, result)
            return result
        tensors = [torch.empty_strided(*spec, dtype=t, device="meta") for *spec, t in specs.specs]
        return tensors[0] if specs.container is None else specs.container(tensors)


class _ResultSpecs(NamedTuple):
    """The shapes, strides and dtypes of tensors, and the type that holds them (None: one alone)."""

    specs: tuple[tuple[Any, ...], ...]
    container: type | None


_UNKNOWN: Any = object()


def _make_key(value: Any) -> Any:
    """Return a hashable key for an argument. Raise a TypeError if there is none."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    kind = type(value)
    if kind in (int, float, bool, str):
        return kind, value  # 1, 1.0 and True are equal
    if kind is tuple or kind is list:
        return kind, *[_make_key(item) for item in value]
    if kind is dict:
        return kind, *[(name, _make_key(item)) for name, item in value.items()]
    if kind is slice:
        return kind, _make_key((value.start, value.stop, value.step))
    if value is None or value is Ellipsis or kind in (torch.dtype, torch.device, torch.Size):
        return kind, value
    raise TypeError(kind)


def _read_result(func: Any, args: Any, kwargs: Any, result: Any) -> _ResultSpecs | None:
    """Return the specs of a result of new tensors without memory, or None for any other."""
    kind = type(result)
    tensors = list(result) if kind in (tuple, list) else [result]
    arguments = {id(tensor) for tensor in iter_tensors((args, kwargs))}
    is_new = all(
        type(tensor) is Tensor and tensor.is_meta and id(tensor) not in arguments
        for tensor in tensors
    )
    if not is_new or not tensors or is_in_place(func) or "out" in kwargs:
        return None
    specs = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
    return _ResultSpecs(specs, kind if kind in (tuple, list) else None)


def _mark_output(rank: int, tensor: Tensor) -> Tensor:
    """Return the output of a unit as a new object that says which rank has it.

    A unit may return an argument, or the same tensor in two calls. The other ranks have different
    placeholders for these, and must see the same difference as this one.
    """
    marked = tensor.detach()
    setattr(marked, _OWNER, rank)
    return marked


def _make_meta(tensor: Tensor) -> Tensor:
    """Return a tensor without memory of the same shape, strides and dtype."""
    meta = TensorSpec.from_tensor(tensor).allocate("meta")
    return nn.Parameter(meta, False) if isinstance(tensor, nn.Parameter) else meta
