"""Fingerprints detect every change that a replay or a measurement would not follow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu

from penstock.fingerprint import (
    Fingerprinter,
    ModuleSnapshot,
    build_cost_key,
    fingerprint_attributes,
    fingerprint_tensor,
    fingerprint_tensors_and_hooks,
    fingerprint_tensors_by_column,
)

WAY = {"at": 1}  # held by a closure, and by no module


def chosen_by(way: dict[str, int]) -> Callable[[], int]:
    return lambda: way["at"]


def nothing(*_: Any) -> None:
    """Do nothing, as a hook."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = nn.Sequential(self.linear, nn.ReLU())
        self.norm = nn.BatchNorm1d(2)
        self.rate, self.shape = 0.5, (2, (3, "a"))
        self.sizes: list[Any] = [1, [2]]
        self.mask = torch.ones(2)
        self.masks = [torch.ones(2)]
        self.options = SimpleNamespace(deep={"a": 1})
        self.chosen, self.part = chosen_by(WAY), partial(nothing, [1])
        self.handle = self.inner.register_forward_hook(nothing)
        self.linear.weight.register_hook(nothing)
        self.last = "of all"


def rename(layer: Layer) -> None:
    del layer.last
    setattr(layer, "latest", "of all")  # noqa: B010


def another_hook(layer: Layer) -> None:
    layer.handle.remove()
    layer.inner.register_forward_hook(lambda *_: None)


def other_memory(layer: Layer) -> None:
    layer.linear.weight.data = layer.linear.weight.data.clone()


def transposed(layer: Layer) -> None:
    layer.linear.weight.data = layer.linear.weight.data.t()


CHANGES: dict[str, Callable[[Layer], object]] = {
    "a number": lambda m: setattr(m, "rate", 0.25),
    "an equal number of another type": lambda m: setattr(m, "rate", torch.tensor(0.5)),
    "a tuple": lambda m: setattr(m, "shape", (2, (3, "b"))),
    "a new attribute": lambda m: setattr(m, "more", None),
    "a removed attribute": lambda m: delattr(m, "rate"),
    "a renamed attribute": rename,
    "a value in a list": lambda m: m.sizes[1].append(3),
    "a value in an object": lambda m: m.options.deep.update(a=2),
    "a value in a closure": lambda m: WAY.update(at=WAY["at"] + 1),
    "an argument of a partial": lambda m: m.part.args[0].append(1),
    "a tensor in a list": lambda m: m.masks.__setitem__(0, torch.ones(2)),
    "a tensor": lambda m: setattr(m, "mask", torch.ones(2)),
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.zeros(2)),
    "a parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(2))),
    "a parameter set to None": lambda m: setattr(m.norm, "weight", None),
    "the memory of a parameter": other_memory,
    "the strides of a parameter": transposed,
    "requires_grad of a parameter": lambda m: m.norm.weight.requires_grad_(False),
    "the training mode": lambda m: m.norm.eval(),
    "a replaced layer": lambda m: m.inner.__setitem__(1, nn.ReLU()),
    "an added layer": lambda m: m.inner.append(nn.ReLU()),
    "a first hook": lambda m: m.norm.register_forward_pre_hook(nothing),
    "another hook": another_hook,
    "a replaced dict of hooks": lambda m: setattr(
        m.norm, "_forward_hooks", OrderedDict({0: nothing})
    ),
    "a first hook on a parameter": lambda m: m.norm.weight.register_hook(nothing),
    "one more hook on a parameter": lambda m: m.linear.weight.register_hook(nothing),
    "a post-accumulate-grad hook": lambda m: m.norm.weight.register_post_accumulate_grad_hook(
        nothing
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_module_snapshot_detects_change(change: str) -> None:
    layer = Layer()
    modules = list(layer.modules())
    snapshot = ModuleSnapshot(modules)
    assert snapshot.is_unchanged()
    CHANGES[change](layer)
    assert not snapshot.is_unchanged()


class Configured(nn.Module):
    """A layer with a configuration, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(deep={"a": [1, 2]}, names={"x"}, rate=0.5)
        self.act, self.method = chosen_by(WAY), self.extra_repr


CONFIGURATION_CHANGES: dict[str, Callable[[Configured], object]] = {
    "a value in an object": lambda m: setattr(m.config, "rate", 0.25),
    "a new attribute of an object": lambda m: setattr(m.config, "more", 1),
    "a value in a list in a dict": lambda m: m.config.deep["a"].append(3),
    "a key of a dict": lambda m: m.config.deep.update(b=m.config.deep.pop("a")),
    "a value in a set": lambda m: m.config.names.add("y"),
    "a value in a closure": lambda m: WAY.update(at=WAY["at"] + 1),
    "the default of a function": lambda m: setattr(m.act, "__defaults__", (1,)),
}


@pytest.mark.parametrize("change", CONFIGURATION_CHANGES)
def test_unchanged_configuration_needs_no_fingerprint(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Configured()
    snapshot = ModuleSnapshot([layer])
    with monkeypatch.context() as patch:
        patch.delattr(Fingerprinter, "__call__")
        assert snapshot.is_unchanged()
    CONFIGURATION_CHANGES[change](layer)
    assert not snapshot.is_unchanged()


def test_equal_configuration_is_unchanged() -> None:
    layer = Configured()
    snapshot = ModuleSnapshot([layer])
    layer.config.deep["a"] = [1, 2]
    assert snapshot.is_unchanged()


def test_fingerprint_ignores_values_in_tensors() -> None:
    layer = Layer()
    modules = list(layer.modules())
    snapshot, fingerprints = (
        ModuleSnapshot(modules),
        (fingerprint_tensors_and_hooks(modules), fingerprint_attributes(modules)),
    )
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers(), layer.mask, *layer.masks):
            tensor.add_(1)
    layer.norm.weight.grad = torch.ones(2)
    assert snapshot.is_unchanged()
    assert (fingerprint_tensors_and_hooks(modules), fingerprint_attributes(modules)) == fingerprints


def test_fingerprint_tells_a_float_from_an_int() -> None:
    assert Fingerprinter()([1, 2]) != Fingerprinter()([1.0, 2])


def test_fingerprint_tensors_by_column_matches_fingerprint_tensor() -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(4, 3).t(), nn.Parameter(torch.zeros(2).double())]
    assert [*zip(*fingerprint_tensors_by_column(tensors), strict=True)] == [
        *map(fingerprint_tensor, tensors)
    ]
    sparse = [*tensors, torch.zeros(2, 2).to_sparse()]
    assert fingerprint_tensors_by_column(sparse) == [*map(fingerprint_tensor, sparse)]


# ---- cost keys ----

CONFIG = object()


@dataclass
class Options:
    fast: bool


class Block(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = CONFIG
        self.method = self.act
        for name, value in attributes.items():
            setattr(self, name, value)

    def act(self) -> None: ...


def tied() -> Block:
    return Block(other=(linear := nn.Linear(4, 4)), again=linear)


def hooked(hook: Callable[..., Any]) -> Block:
    block = Block()
    block.linear.register_forward_hook(hook)
    return block


def hook(*_: Any) -> None: ...


def numbered(number: int) -> Callable[..., None]:
    """Return a hook with a number of its own, as transformers makes one for each block."""

    def hook(*_: Any) -> None:
        assert number >= 0

    return hook


def loop(length: int) -> list[Any]:
    found: list[Any] = [None] * length
    found[0] = found
    return found


x = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Block(), Block()),
        (Block(layer_idx=3), Block(layer_idx=4)),
        (Block(index=3, name="a"), Block(index=4, name="b")),
        (Block(given={"target_name": "a"}), Block(given={"target_name": "b"})),
        (Block(drop=0.1), Block(drop=0.2)),
        (Block(act_fn=gelu), Block(act_fn=gelu)),
        (Block(act_fn=partial(gelu, approximate="tanh")),) * 2,
        (
            Block(act_fn=partial(gelu, approximate="tanh")),
            Block(act_fn=partial(gelu, approximate="tanh")),
        ),
        (Block(options=Options(True)), Block(options=Options(True))),
        (Block(sizes=[1, {"a": {2}}]), Block(sizes=[1, {"a": {2}}])),
        (Block(ring=loop(2)), Block(ring=loop(2))),
        (hooked(hook), hooked(hook)),
        (hooked(numbered(0)), hooked(numbered(1))),
        (tied(), tied()),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(4)),
    ],
)
def test_cost_key_is_equal_for_similar_blocks(one: nn.Module, other: nn.Module) -> None:
    assert build_cost_key(one, (x,)) == build_cost_key(other, (x + 1,))
    assert hash(build_cost_key(one, (x,))) == hash(build_cost_key(other, (x + 1,)))


@pytest.mark.parametrize(
    "other",
    [
        nn.Linear(4, 4),
        Block().eval(),
        Block().double(),
        Block().requires_grad_(False),
        Block(linear=nn.Linear(4, 4, bias=False)),
        Block(linear=nn.Linear(4, 5)),
        Block(heads=3),
        Block(layer_idx=torch.ones(3)),
        Block(drop=0.0),
        Block(config=object()),
        Block(act_fn=relu),
        Block(act_fn=partial(gelu, approximate="tanh")),
        Block(sizes=[1, 2]),
        Block(options=Options(False)),
        tied(),
        hooked(hook),
        hooked(lambda *_: None),
    ],
)
def test_cost_key_differs_for_different_blocks(other: nn.Module) -> None:
    first = Block(heads=2, drop=0.1, act_fn=gelu, sizes=[1, 3], options=Options(True))
    assert build_cost_key(Block(), (x,)) != build_cost_key(other, (x,))
    assert build_cost_key(first, (x,)) != build_cost_key(other, (x,))
    assert build_cost_key(other, (x,)) == build_cost_key(other, (x,))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(3, 4),), {}),
        ((x.double(),), {}),
        ((x.clone().requires_grad_(),), {}),
        ((torch.ones(4, 2).t(),), {}),
        ((x.to("meta"),), {}),
        ((x, None), {}),
        ((x,), {"mask": None}),
        ((x,), {"mask": x}),
        ((x,), {"mask": [x, (x,)]}),
        ((x,), {"causal": True}),
        ((x,), {"causal": 1}),
        ((x,), {"causal": False}),
        (((x,),), {}),
        (([x],), {}),
        ((x.to_sparse(),), {}),
    ],
)
def test_cost_key_differs_for_different_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    block = Block()
    assert build_cost_key(block, (x,)) != build_cost_key(block, args, kwargs)
    assert build_cost_key(block, args, kwargs) == build_cost_key(Block(), args, dict(kwargs))
