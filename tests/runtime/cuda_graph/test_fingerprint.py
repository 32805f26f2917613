"""The fingerprint of modules detects every change that a replay would not follow."""

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

from penstock.fingerprint import (
    ModuleSnapshot,
    fingerprint_attributes,
    fingerprint_tensor,
    fingerprint_tensors_and_hooks,
    fingerprint_tensors_by_column,
)
from tests.runtime.cuda_graph.support import batch, emulate, pipe_pair, recordings, stack


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
    "an equal number of another type": lambda m: setattr(m, "rate", torch.tensor(0.5)),
    "a tuple": lambda m: setattr(m, "shape", (2, (3, "b"))),
    "a new attribute": lambda m: setattr(m, "more", None),
    "a removed attribute": lambda m: delattr(m, "rate"),
    "a renamed attribute": rename,
    "a value in a list": lambda m: m.sizes[1].append(3),
    "a value in an object": lambda m: m.options.deep.update(a=2),
    "a value in a closure": lambda m: m.way.update(at=2),
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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by[0]


def test_change_inside_an_attribute_selects_another_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate(monkeypatch)
    pair = pipe_pair(stack(Scaled()))
    for number, by in enumerate([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 2.0]):
        for pipe in pair.both:
            pipe[1].by[0] = by
        x, y = batch(number)
        pair.step(x, target=y)
    assert recordings(pair.graph) == [3, 3]


def twice(_: Any, given: Any, *made: Any) -> Any:
    """Double what a hook may replace: the output of a forward, or the gradients of a backward."""
    if made and isinstance(made[0], Tensor):
        return made[0] * 2
    return tuple(None if one is None else one * 2 for one in given)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": for_all.register_module_forward_hook,
    "forward pre": for_all.register_module_forward_pre_hook,
    "backward": for_all.register_module_full_backward_hook,
    "backward pre": for_all.register_module_full_backward_pre_hook,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("which", HOOKS)
def test_global_module_hooks_select_another_recording(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    pair = pipe_pair(stack())
    for number in range(6):
        handle = HOOKS[which](twice) if number > 2 else None
        try:
            x, y = batch(number)
            pair.step(x, target=y)
        finally:
            if handle is not None:
                handle.remove()


def test_fingerprint_tensors_by_column_matches_fingerprint_tensor() -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(4, 3).t(), nn.Parameter(torch.zeros(2).double())]
    assert [*zip(*fingerprint_tensors_by_column(tensors), strict=True)] == [
        *map(fingerprint_tensor, tensors)
    ]
    sparse = [*tensors, torch.zeros(2, 2).to_sparse()]
    assert fingerprint_tensors_by_column(sparse) == [*map(fingerprint_tensor, sparse)]
