"""Tests of variables outside of layers through which one stage leaves something for another."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Pipe, RunError
from penstock.model.traced.shared_state import find_shared_state
from tests.model.traced import splitting  # a module whose attributes a layer may set

BOX: dict[str, Any] = {"n": 0.0}
NUMBER = 0.0
NAMESPACE = SimpleNamespace(n=0.0)
HISTORY: deque[float] = deque([0.0], maxlen=1)
TENSOR = torch.zeros(())
NESTED: dict[str, Any] = {"inner": {"n": 0.0}}
LOG: list[float] = []
COUNTS: Counter[str] = Counter()
CALLS = 0
CACHE: dict[int, float] = {}
MASK: Tensor | None = None
SIZES = {"width": 1.0}
LOGGER = logging.getLogger(__name__)


class Settings:
    """A class whose attributes are variables."""

    n = 0.0
    calls = 0

    @classmethod
    def put(cls, n: float) -> None:
        cls.n = n


class Store:
    """An object with methods."""

    def __init__(self) -> None:
        self.n = 0.0

    def put(self, n: float) -> None:
        self.n = n

    def get(self) -> float:
        return self.n


class DerivedStore(Store):
    """An object of a class with a base."""


STORE = Store()
DERIVED = DerivedStore()


def put_into_box(n: float) -> None:
    BOX["n"] = n


def put_into(box: dict[str, Any], n: float) -> None:
    box["n"] = n


class Layer(nn.Module):
    """A layer that leaves whether its input is large somewhere, or scales its output by that."""

    n = 0.0

    def __init__(self, role: str) -> None:
        super().__init__()
        self.linear, self.role = nn.Linear(4, 4).double(), role

    def forward(self, x: Tensor) -> Tensor:
        if self.role == "put":
            self.put(float(x.detach().abs().max() > 1))
        x = self.linear(x)
        return x * (1 + self.get()) if self.role == "get" else x

    def put(self, n: float) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        raise NotImplementedError


class Item(Layer):
    def put(self, n: float) -> None:
        BOX["n"] = n

    def get(self) -> Any:
        return BOX["n"]


class Rebinding(Layer):
    def put(self, n: float) -> None:
        global NUMBER
        NUMBER = n

    def get(self) -> Any:
        return NUMBER


class Method(Layer):
    def put(self, n: float) -> None:
        BOX.update(n=n)

    def get(self) -> Any:
        return BOX.get("n")


class Attribute(Layer):
    def put(self, n: float) -> None:
        NAMESPACE.n = n

    def get(self) -> Any:
        return NAMESPACE.n


class ClassAttribute(Layer):
    def put(self, n: float) -> None:
        Settings.n = n

    def get(self) -> Any:
        return Settings.n


class ClassMethod(Layer):
    def put(self, n: float) -> None:
        Settings.put(n)

    def get(self) -> Any:
        return Settings.n


class OwnClass(Layer):
    def put(self, n: float) -> None:
        type(self).n = n

    def get(self) -> Any:
        return self.n


class OwnClassByName(Layer):
    def put(self, n: float) -> None:
        Layer.n = n

    def get(self) -> Any:
        return self.n


class OfAModule(Layer):
    def put(self, n: float) -> None:
        splitting.LEFT = n  # type: ignore[attr-defined]

    def get(self) -> Any:
        return splitting.LEFT  # type: ignore[attr-defined]


class Queue(Layer):
    def put(self, n: float) -> None:
        HISTORY.append(n)

    def get(self) -> Any:
        return HISTORY[-1]


class InPlace(Layer):
    def put(self, n: float) -> None:
        TENSOR.fill_(n)

    def get(self) -> Any:
        return TENSOR


class Nested(Layer):
    def put(self, n: float) -> None:
        NESTED["inner"]["n"] = n

    def get(self) -> Any:
        return NESTED["inner"]["n"]


class Helper(Layer):
    def put(self, n: float) -> None:
        put_into_box(n)

    def get(self) -> Any:
        return BOX["n"]


class Argument(Layer):
    def put(self, n: float) -> None:
        put_into(BOX, n)

    def get(self) -> Any:
        return BOX["n"]


class Alias(Layer):
    def put(self, n: float) -> None:
        box = BOX
        box["n"] = n

    def get(self) -> Any:
        return BOX["n"]


class Object(Layer):
    def put(self, n: float) -> None:
        STORE.put(n)

    def get(self) -> Any:
        return STORE.get()


class DerivedObject(Layer):
    def put(self, n: float) -> None:
        DERIVED.n = n

    def get(self) -> Any:
        return DERIVED.n


def _make_closure() -> type[Layer]:
    left = 0.0

    class Closure(Layer):
        def put(self, n: float) -> None:
            nonlocal left
            left = n

        def get(self) -> Any:
            return left

    return Closure


WAYS = [
    *(Item, Rebinding, Method, Attribute, ClassAttribute, ClassMethod, OwnClass, OwnClassByName),
    *(OfAModule, Queue, InPlace, Nested, Helper, Argument, Alias, Object, DerivedObject),
]
SMALL = torch.full((4, 4), 1e-3).double()
LARGE = torch.cat([SMALL[:2], SMALL[2:] * 1e6])


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    _set_all(0.0)
    yield
    _set_all(0.0)


def _set_all(n: float) -> None:
    for way in WAYS:
        way("put").put(n)
    for kind in (*WAYS, Layer):
        kind.n = n


class Model(nn.Module):
    """The layers in a model that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _pipe(kind: type[nn.Module], *layers: nn.Module, **options: Any) -> Pipe:
    options = {"devices": ["cpu"] * 2, "runtime": "inline", "loss_fn": torch.sum, **options}
    if kind is Model:
        options |= {"balance": "parameters", "example": SMALL}
    return Pipe(kind(*layers), 2, stages=2, **options)


@pytest.mark.parametrize("kind", [nn.Sequential, Model])
@pytest.mark.parametrize("way", [*WAYS, _make_closure()])
def test_variable_that_a_layer_leaves_for_another_stage(
    way: type[Layer], kind: type[nn.Module]
) -> None:
    """The other stage found what another micro-batch had left."""
    way("put").put(0.0)  # a closure is not reset
    pipe = _pipe(kind, way("put"), way("get"))
    if way is not InPlace:  # which may differ even if it writes the same number
        pipe.step(SMALL)
    with pytest.raises(RunError, match=r"the layers of a stage change the variable '\w+', which"):
        pipe.step(LARGE)


def test_variable_that_layers_of_one_stage_share() -> None:
    layers = [Item("put"), Item("get"), nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    for x in (SMALL, LARGE):
        _pipe(nn.Sequential, *copy.deepcopy(layers)).step(x)


def test_variable_that_a_hook_leaves_for_another_stage() -> None:
    first = nn.Linear(4, 4).double()
    first.register_forward_hook(lambda module, args, output: put_into_box(float(args[0].max())))
    with pytest.raises(RunError, match="the layers of a stage change the variable 'BOX', which"):
        _pipe(nn.Sequential, first, Item("get")).step(LARGE)


def test_copy_of_a_pipe_watches_the_same_variables() -> None:
    pipe = _pipe(nn.Sequential, Item("put"), Item("get"))
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        with pytest.raises(
            RunError, match="the layers of a stage change the variable 'BOX', which"
        ):
            other.step(LARGE)
        BOX["n"] = 0.0


# ---- objects that layers of two stages hold ------------------------------------------------------


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0.0


class OwnDict(dict[str, Any]):
    """A dict of a class of its own."""


def _set_attribute(held: Any, n: float) -> None:
    held.n = n


def _set_item(held: Any, n: float) -> None:
    held["n"] = n


def _set_first(held: Any, n: float) -> None:
    held[0] = n


def _get_attribute(held: Any) -> Any:
    return held.n


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, float], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"n": 0.0}, _set_item, lambda held: held["n"]),
    "dict of a class": (lambda: OwnDict(n=0.0), _set_item, lambda held: held["n"]),
    "namespace": (lambda: argparse.Namespace(n=0.0), _set_attribute, _get_attribute),
    "object": (DerivedStore, _set_attribute, _get_attribute),
    "object by method": (DerivedStore, lambda held, n: held.put(n), lambda held: held.get()),
    "object by setattr": (DerivedStore, lambda held, n: setattr(held, "n", n), _get_attribute),
    "object with slots": (Slotted, _set_attribute, _get_attribute),
    "object in a dict": (
        lambda: {"inner": DerivedStore()},
        lambda held, n: _set_attribute(held["inner"], n),
        lambda held: held["inner"].n,
    ),
    "list in a tuple": (
        lambda: ([0.0],),
        lambda held, n: _set_first(held[0], n),
        lambda held: held[0][0],
    ),
    "array": (lambda: np.zeros(1), _set_first, lambda held: float(held[0])),
    "tensor": (lambda: torch.zeros(1), _set_first, lambda held: held),
}


class Holding(Layer):
    """A layer that leaves something in an object that it shares."""

    def __init__(self, role: str, held: Any, leave: Any, find: Any) -> None:
        super().__init__(role)
        self.held, self.leave, self.find = held, leave, find

    def put(self, n: float) -> None:
        self.leave(self.held, n)

    def get(self) -> Any:
        return self.find(self.held)


@pytest.mark.parametrize("kind", [nn.Sequential, Model])
@pytest.mark.parametrize("held", HELD)
def test_object_in_which_a_layer_leaves_something_for_another_stage(
    held: str, kind: type[nn.Module]
) -> None:
    make, leave, find = HELD[held]
    shared = make()
    layers = [Holding(role, shared, leave, find) for role in ("put", "get")]
    pipe = _pipe(kind, *layers)
    if held == "dict" and kind is Model:  # each stage has a copy of a plain dict
        expected = torch.cat([nn.Sequential(*layers)(rows) for rows in LARGE.chunk(2)])
        torch.testing.assert_close(pipe(LARGE), expected)
        return
    with pytest.raises(
        RunError, match=r"the layers of a stage change a .* that a layer of another"
    ):
        pipe.step(LARGE)


@dataclass
class Config:
    """What layers only read."""

    n: float = 1.0


def test_configuration_that_layers_only_read_is_not_watched() -> None:
    config = Config()
    layers = [Holding("get", config, None, _get_attribute) for _ in range(2)]
    assert not any(find_shared_state([list(layer.modules()) for layer in layers]))


# ---- what may be shared --------------------------------------------------------------------------


class Harmless(nn.Module):
    """A layer that logs, counts, caches and reads configuration."""

    calls = 0

    def __init__(self, use: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.use, self.seen = nn.Linear(4, 4).double(), use, 0

    def forward(self, x: Tensor) -> Tensor:
        factor = self.use(self, x)
        x = self.linear(x)
        return x if factor is None else x * factor


def _append(layer: nn.Module, x: Tensor) -> None:
    LOG.append(float(x.mean()))


def _count(layer: nn.Module, x: Tensor) -> None:
    COUNTS["calls"] += 1


def _count_calls(layer: nn.Module, x: Tensor) -> None:
    global CALLS
    CALLS += len(x)


def _count_in_a_class(layer: nn.Module, x: Tensor) -> None:
    Settings.calls += 1


def _count_itself(layer: Any, x: Tensor) -> None:
    layer.seen += 1


def _cache(layer: nn.Module, x: Tensor) -> float:
    if x.shape[1] not in CACHE:
        CACHE[x.shape[1]] = 1.0 / x.shape[1]
    return CACHE[x.shape[1]]


def _cache_mask(layer: nn.Module, x: Tensor) -> Tensor:
    global MASK
    if MASK is None:
        MASK = torch.ones(4).double()
    return MASK


def _read_configuration(layer: nn.Module, x: Tensor) -> float:
    x[..., 0] = x[..., 0] * SIZES["width"]
    LOGGER.debug("read %s", SIZES)
    return SIZES["width"]


@pytest.mark.parametrize("kind", [nn.Sequential, Model])
@pytest.mark.parametrize(
    "use",
    [
        *(_append, _count, _count_calls, _count_in_a_class, _count_itself),
        *(_cache, _cache_mask, _read_configuration),
    ],
)
def test_logs_counters_caches_and_configuration_may_be_shared(
    use: Callable[[nn.Module, Tensor], Any], kind: type[nn.Module]
) -> None:
    layers = Harmless(use), Harmless(use)
    unsplit = nn.Sequential(*copy.deepcopy(layers))
    pipe = _pipe(kind, *layers, checkpoint="never")
    for x in (SMALL, LARGE, SMALL):
        with torch.no_grad():
            torch.testing.assert_close(pipe(x.clone()), unsplit(x.clone()))


def test_layers_of_pytorch_share_no_variables() -> None:
    blocks = [nn.TransformerEncoderLayer(4, 1) for _ in range(2)]
    shared = find_shared_state([list(block.modules()) for block in blocks])
    assert not any(shared)
