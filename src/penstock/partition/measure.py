"""What one call of a module costs, measured: seconds of F, I and W, and bytes.

The call is run a few times with copies of its arguments, and leaves no trace: no parameter,
gradient, buffer, attribute, mode or random state is another afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RunError
from penstock.partition.alike import alike
from penstock.partition.aside import Again, Device, aside, copier, leaving_no_trace, own_tensors
from penstock.partition.forward.survey import UnitCost
from penstock.stage.added import added_losses
from penstock.stage.deferred import Deferral
from penstock.stage.graph import Beginning, Graph, edge
from penstock.stage.later import Pair, weight_gradients
from penstock.stage.stage import OUTSIDE

Call = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]
Storages = dict[int, int]  # bytes, by where


def measure_each(calls: Iterable[Call], device: Device = None) -> list[UnitCost]:
    """What each call costs; those that are alike are measured once."""
    known: dict[Hashable, UnitCost] = {}
    found = []
    for module, args, kwargs in calls:
        key = alike(module, args, kwargs)
        if key not in known:
            known[key] = measure(module, args, kwargs, device)
        found.append(known[key])
    return found


def measure(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    device: Device = None,
    *,
    runs: int = 5,
    timeout: float = 0.5,
    state: int = 2,
) -> UnitCost:
    """What the call `module(*args, **kwargs)` costs, on the device or where things are.

    After one run to warm up the median of some counts: of `runs`, or of as many as start before
    `timeout`. What has no memory (`meta`) gets some for the while. A parameter that is trained
    counts with its gradient and `state` more of its size: 2 for Adam.

    >>> measure(nn.Linear(4, 8), (torch.ones(10, 4),)).holds
    640
    >>> measure(nn.Linear(4, 8), (torch.ones(10, 4),)).keeps
    160
    """
    given = tuple(args), dict(kwargs or {})
    tensors: list[Tensor] = []
    Again(_into(tensors))(given)
    tensors += own_tensors(module)
    holds = sum(t.nbytes * (2 + state if t.requires_grad else 1) for t in own_tensors(module))
    if device is None and any(t.is_meta for t in tensors):
        device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    end = perf_counter() + timeout
    try:
        with (
            leaving_no_trace(tensors, device) as synchronize,
            aside(module, device) as own,
        ):
            trial = _Trial(own, given, copier(device), synchronize)
            keeps = trial.keeps()
            seconds: list[tuple[float, float, float]] = []
            while not seconds or (len(seconds) < runs and perf_counter() < end):
                seconds.append(trial.seconds())
    except Exception as error:
        error.add_note(f"This was a {type(module).__name__}, run on an example to measure it.")
        raise
    forward, inputs, weights = map(median, zip(*seconds, strict=True))
    return UnitCost(forward, inputs, weights, keeps, holds)


def timed(work: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """How long it takes, until the devices are done with it."""
    synchronize()
    start = perf_counter()
    work()
    synchronize()
    return perf_counter() - start


class _Trial:
    """A module that may be run with copies of what is given to it."""

    def __init__(
        self,
        module: nn.Module,
        given: tuple[Sequence[Any], Mapping[str, Any]],
        copied: Callable[[Tensor], Tensor],
        synchronize: Callable[[], None],
    ) -> None:
        self._module, self._given, self._copied = module, given, copied
        self._synchronize = synchronize
        self._deferral = Deferral(list(module.modules()))
        self._splits = True

    def keeps(self) -> int:
        """Bytes that a forward leaves for the backward, which is then run, too."""
        saved: Storages = {}

        def pack(tensor: Tensor) -> Tensor:
            _add(saved, tensor)
            return tensor

        args, kwargs, beginning = self._entered()
        inputs: list[Tensor] = []
        Again(_into(inputs))((args, kwargs))
        entered = [ref(tensor) for tensor in inputs]
        with saved_tensors_hooks(pack, lambda tensor: tensor), added_losses():
            graph, ones = _graph(self._module(*args, **kwargs), beginning)
        del args, kwargs
        inputs.clear()
        # what a checkpoint will compute again from, which it does not save as autograd does
        for tensor in (found() for found in entered):
            if tensor is not None:
                _add(saved, tensor)
        self._backward(graph, ones, [])
        for tensor in own_tensors(self._module):
            saved.pop(_where(tensor), None)
        return sum(saved.values())

    def seconds(self) -> tuple[float, float, float]:
        """Of F, I and W. If the weights cannot wait, W takes none and I all of the backward."""
        if self._splits:
            try:
                return self._timed(split=True)
            except RunError:
                self._splits = False
        return self._timed(split=False)

    def _timed(self, split: bool) -> tuple[float, float, float]:
        args, kwargs, beginning = self._entered()
        outputs: list[Any] = []
        later: list[Pair] = []
        with ExitStack() as stack:
            stack.enter_context(added_losses())
            if split:
                later = stack.enter_context(self._deferral.used())
            forward = timed(
                lambda: outputs.append(self._module(*args, **kwargs)), self._synchronize
            )
        graph, ones = _graph(outputs.pop(), beginning)
        return forward, *self._backward(graph, ones, later)

    def _backward(
        self, graph: Graph, ones: tuple[Tensor | None, ...], later: list[Pair]
    ) -> tuple[float, float]:
        with _gradients_kept(graph.leaves()):
            inputs = timed(lambda: graph.accumulate({OUTSIDE: ones}, False), self._synchronize)
            return inputs, timed(lambda: weight_gradients(later), self._synchronize)

    def _entered(self) -> tuple[Sequence[Any], Mapping[str, Any], Beginning]:
        """What is given, copied, as the beginning of a graph."""
        fresh = Again(self._copied)(self._given)
        tensors: list[Tensor] = []
        Again(_into(tensors))(fresh)
        outer = [tensor for tensor in tensors if tensor.requires_grad]
        beginning = Beginning.entry(outer) if outer else Beginning.leaves(())
        inside = dict(zip(map(id, outer), beginning.inside, strict=True))
        args, kwargs = Again(lambda tensor: inside.get(id(tensor), tensor))(fresh)
        beginning.inside = ()
        return args, kwargs, beginning


def _graph(output: Any, beginning: Beginning) -> tuple[Graph, tuple[Tensor | None, ...]]:
    """The graph that ends in the output, and a gradient for each of its ends."""
    tensors: list[Tensor] = []
    Again(_into(tensors))(output)
    exits = [tensor for tensor in tensors if tensor.requires_grad]
    entered = (True,) * len(beginning.inputs)
    graph = Graph({OUTSIDE: tuple(map(edge, exits))}, {OUTSIDE: entered}, beginning)
    return graph, tuple(map(torch.ones_like, exits))


def _into(found: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    return note


def _add(storages: Storages, tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storages[_where(tensor)] = tensor.untyped_storage().nbytes()


def _where(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


@contextmanager
def _gradients_kept(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within, they have none; after, as before. Some may not be copies: a closure has them."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient
