"""What is seen at a glance: every change of layers that a replay would not follow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as for_all

from penstock.runtime.cuda_graph.fingerprint import (
    ModuleSnapshot,
    fingerprint_attributes,
    fingerprint_tensor,
    fingerprint_tensors_and_hooks,
    fingerprint_tensors_by_column,
)
from tests.runtime.cuda_graph.support import batch, emulate, recordings, stack, twins


def chosen_by(way: dict[str, int]) -> Callable[[], int]:
    return lambda: way["at"]


def nothing(*_: Any) -> None:
    """A hook."""


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
        self.way = {"at": 1}
        self.chosen, self.part = chosen_by(self.way), partial(nothing, self.sizes)
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
    "a number that is equal, of another kind": lambda m: setattr(m, "rate", torch.tensor(0.5)),
    "a tuple": lambda m: setattr(m, "shape", (2, (3, "b"))),
    "a new attribute": lambda m: setattr(m, "more", None),
    "one less": lambda m: delattr(m, "rate"),
    "the same by another name": rename,
    "in a list": lambda m: m.sizes[1].append(3),
    "in an object": lambda m: m.options.deep.update(a=2),
    "in what a function has around it": lambda m: m.way.update(at=2),
    "in what was given to a function": lambda m: m.part.args[0].append(1),
    "a tensor in a list": lambda m: m.masks.__setitem__(0, torch.ones(2)),
    "a tensor": lambda m: setattr(m, "mask", torch.ones(2)),
    "a buffer": lambda m: setattr(m.norm, "running_mean", torch.zeros(2)),
    "a parameter": lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(2))),
    "no parameter": lambda m: setattr(m.norm, "weight", None),
    "its memory": other_memory,
    "its strides": transposed,
    "whether it learns": lambda m: m.norm.weight.requires_grad_(False),
    "the mode": lambda m: m.norm.eval(),
    "a layer": lambda m: m.inner.__setitem__(1, nn.ReLU()),
    "one more layer": lambda m: m.inner.append(nn.ReLU()),
    "a first hook": lambda m: m.norm.register_forward_pre_hook(nothing),
    "another hook": another_hook,
    "a table of hooks": lambda m: setattr(m.norm, "_forward_hooks", OrderedDict({0: nothing})),
    "a first hook on a parameter": lambda m: m.norm.weight.register_hook(nothing),
    "one more hook on a parameter": lambda m: m.linear.weight.register_hook(nothing),
    "a hook after a gradient": lambda m: m.norm.weight.register_post_accumulate_grad_hook(nothing),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(change: str) -> None:
    layer = Layer()
    modules = list(layer.modules())
    glance = ModuleSnapshot(modules)
    assert glance.is_unchanged()
    CHANGES[change](layer)
    assert not glance.is_unchanged()


def test_numbers_in_tensors_may_change() -> None:
    layer = Layer()
    modules = list(layer.modules())
    glance, told = (
        ModuleSnapshot(modules),
        (fingerprint_tensors_and_hooks(modules), fingerprint_attributes(modules)),
    )
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers(), layer.mask, *layer.masks):
            tensor.add_(1)
    layer.norm.weight.grad = torch.ones(2)
    assert glance.is_unchanged()
    assert (fingerprint_tensors_and_hooks(modules), fingerprint_attributes(modules)) == told


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


def test_a_replay_follows_what_is_changed_inside_between_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch)
    pair = twins(stack(Scaled()))
    for number, by in enumerate([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0]):
        for pipe in pair.both:
            pipe[1].by[0] = by
        x, y = batch(number)
        pair.step(x, target=y)
    assert recordings(pair.graph) == [3, 3]


def twice(_: Any, given: Any, *made: Any) -> Any:
    """Of what a hook may replace: what comes last of a forward, what comes first of a backward."""
    if made and isinstance(made[0], Tensor):
        return made[0] * 2
    return tuple(None if one is None else one * 2 for one in given)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": for_all.register_module_forward_hook,
    "before it": for_all.register_module_forward_pre_hook,
    "backward": for_all.register_module_full_backward_hook,
    "before that": for_all.register_module_full_backward_pre_hook,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("which", HOOKS)
def test_a_replay_follows_hooks_on_all_modules(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    pair = twins(stack())
    for number in range(6):
        handle = HOOKS[which](twice) if number > 2 else None
        try:
            x, y = batch(number)
            pair.step(x, target=y)
        finally:
            if handle is not None:
                handle.remove()


def test_places_in_columns_are_the_places() -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(4, 3).t(), nn.Parameter(torch.zeros(2).double())]
    assert [*zip(*fingerprint_tensors_by_column(tensors), strict=True)] == [
        *map(fingerprint_tensor, tensors)
    ]
    sparse = [*tensors, torch.zeros(2, 2).to_sparse()]
    assert fingerprint_tensors_by_column(sparse) == [*map(fingerprint_tensor, sparse)]
