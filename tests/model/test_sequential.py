from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from penstock import (
    ArgumentError,
    Namespace,
    Pipe,
    RunError,
    WithDevice,
    pop,
    skippable,
    stash,
)
from penstock.model.sequential import (
    check_children,
    cut_sequential,
    find_layer_device,
    group_by_device,
)
from tests.support import Pop, Stash

CPU, META = torch.device("cpu"), torch.device("meta")


def on(device: torch.device) -> nn.Module:
    return nn.Linear(2, 2, device=device)


# ---- children -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList([nn.ReLU()]), None, [nn.ReLU()]])
def test_check_children_refuses_other_modules(module: Any) -> None:
    with pytest.raises(TypeError, match=f"an nn.Sequential, not {type(module).__name__}"):
        check_children(module)


def test_check_children_refuses_empty_and_duplicate_layers() -> None:
    with pytest.raises(ArgumentError, match="the Sequential is empty"):
        check_children(nn.Sequential())
    a, b = nn.ReLU(), nn.Tanh()
    with pytest.raises(ValueError, match="several places, 0 and 2, 1 and 3: duplicate children"):
        check_children(nn.Sequential(a, b, a, b))
    check_children(nn.Sequential(nn.Sequential(a), b, nn.ReLU()))


# ---- devices of layers --------------------------------------------------------------------


class Doubled(nn.Sequential):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


class WithLastTanh(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self._modules.values(), nn.Tanh()])


@pytest.mark.parametrize("kind", [Doubled, WithLastTanh])
def test_sequential_that_runs_its_children_in_another_way_is_traced(kind: Any) -> None:
    model, x = kind(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 3)
    with pytest.raises(ArgumentError, match="has to be traced once"):
        Pipe(model, stages=2, devices=["cpu"] * 2)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x, balance="parameters")
    torch.testing.assert_close(pipe(x), model(x))


def test_embedding_that_counts_the_indices_of_a_batch_is_refused() -> None:
    """PyTorch divides its gradient by counts of the micro-batch instead of the batch."""
    model = nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True), nn.Linear(3, 3))
    with pytest.raises(ArgumentError, match=r"'0' \(Embedding\) has scale_grad_by_freq=True"):
        Pipe(model, chunks=2, stages=2)
    Pipe(model, chunks=1, stages=2)


def test_find_layer_device() -> None:
    assert find_layer_device(on(META)) == META
    assert find_layer_device(nn.ReLU()) is None
    assert find_layer_device(WithDevice(nn.ReLU(), "meta")) == META
    assert find_layer_device(nn.Sequential(nn.ReLU(), on(META))) == META


def test_find_layer_device_refuses_a_layer_on_two_devices() -> None:
    mixed = nn.Sequential(on(CPU), on(META))
    with pytest.raises(ValueError, match="one child has parameters on several devices, cpu, meta"):
        find_layer_device(mixed)
    halves = nn.BatchNorm1d(2)
    halves.running_mean = torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="several devices, cpu, meta"):
        find_layer_device(halves)


def test_group_by_device_joins_neighbours_on_one_device() -> None:
    """A layer without parameters stays with the one before it, or goes with the first."""
    layers = [on(CPU), on(CPU), on(META), nn.ReLU(), on(CPU)]
    assert group_by_device(layers) == ([2, 2, 1], [CPU, META, CPU])
    layers = [nn.Flatten(), nn.ReLU(), on(META), nn.ReLU()]
    assert group_by_device(layers) == ([4], [META])
    assert group_by_device([nn.ReLU(), nn.Tanh()]) == ([2], [CPU])
    placed = [on(CPU), WithDevice(nn.ReLU(), "meta"), nn.Tanh(), on(CPU)]
    assert group_by_device(placed) == ([1, 2, 1], [CPU, META, CPU])


def test_with_device_forwards_arguments_and_names() -> None:
    def both(a: int, *, b: int) -> int:
        return a - b

    inner = nn.Module()
    inner.forward = both
    assert WithDevice(inner, "cpu")(5, b=3) == 2
    assert list(WithDevice(nn.Linear(1, 1), "cpu").state_dict()) == ["module.weight", "module.bias"]


# ---- stages -------------------------------------------------------------------------------


def test_cut_sequential_stages_have_layers_and_names() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.GELU())
    stages = cut_sequential(model, [1, 3]).stages
    assert [stage.names for stage in stages] == [("0",), ("1", "2", "3")]
    assert [stage.layers for stage in stages] == [(model[0],), tuple(list(model)[1:])]
    assert [str(stage) for stage in stages] == [
        "stage 0 (layer 0: ReLU)",
        "stage 1 (layers 1 to 3: Tanh, Sigmoid, GELU)",
    ]
    (long,) = cut_sequential(nn.Sequential(*(nn.ReLU() for _ in range(6))), [6]).stages
    assert str(long) == "stage 0 (layers 0 to 5: ReLU, ReLU, ReLU, ReLU, ...)"


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        yield stash("b", x)
        return x


@skippable(pop=["a"])
class PopA(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("a"))


@skippable(pop=["b"])
class PopB(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("b"))


def test_cut_sequential_adds_an_edge_for_each_skip() -> None:
    """A skip is an edge from the stage that stashes to the stage that pops, unless they are one.

    0  StashTwo ─┬─ a ──────────┐
    1  Stash ──┐ └── b ─┐       │
    2  ReLU    │        PopB    │
    3  Pop ────┘                PopA
    """
    model = nn.Sequential(StashTwo(), Stash(), nn.ReLU(), PopB(), Pop(), PopA())
    partition = cut_sequential(model, [1, 1, 2, 2])
    assert [(key.name, src, dst) for key, src, dst in partition.skip_routes] == [
        ("b", 0, 2),
        ("far", 1, 3),
        ("a", 0, 3),
    ]
    assert partition.graph.edges == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    assert cut_sequential(model, [6]).skip_routes == ()


def test_cut_sequential_separates_skips_by_namespace() -> None:
    one, two = Namespace(), Namespace()
    layers = [Stash().isolate(one), Stash().isolate(two), Pop().isolate(two), Pop().isolate(one)]  # type: ignore[operator]
    routes = cut_sequential(nn.Sequential(*layers), [1, 1, 1, 1]).skip_routes
    assert [(src, dst) for _, src, dst in routes] == [(1, 2), (0, 3)]


class _Leaving(nn.Linear):
    """A layer that leaves its input where another layer finds it."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        super().__init__(4, 4)
        self.held, self.left = held, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.held["left"] = self.left = x
        return super().forward(x)


class _Finding(nn.Linear):
    """A layer that adds what another layer has left."""

    def __init__(self, held: Any) -> None:
        super().__init__(4, 4)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        left = self.held["left"] if isinstance(self.held, dict) else self.held[0].left
        return torch.add(super().forward(x), left)


@pytest.mark.parametrize("way", ["dict", "layer"])
def test_layer_that_reads_what_a_layer_of_another_stage_left_is_refused(way: str) -> None:
    """In inference the outputs were silently those of another micro-batch."""
    held: dict[str, Tensor] = {}
    first = _Leaving(held if way == "dict" else {})
    last = _Finding(held if way == "dict" else [first])
    model, x = nn.Sequential(first, last), torch.randn(4, 4)
    with torch.no_grad():
        expected = model(x)
        assert torch.allclose(Pipe(model, 2, stages=1, devices=["cpu"])(x), expected)
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2)
    with torch.no_grad(), pytest.raises(RunError, match="that a layer of another stage holds"):
        pipe(x)


def test_call_inside_the_cache_of_parametrizations_is_refused() -> None:
    """A recomputation found the weight of its forward, which has no graph."""
    model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    pipe, x = Pipe(model, 2, stages=2, devices=["cpu"] * 2), torch.randn(4, 4)
    with parametrize.cached(), pytest.raises(RunError, match=r"inside .*parametrize\.cached\(\)"):
        pipe.step(x, loss_fn=lambda y: y.square().mean())
    assert pipe.step(x, loss_fn=lambda y: y.square().mean()).loss > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")  # PyTorch scripts its own functions
def test_forward_mode_derivatives_are_refused() -> None:
    """The tangent was lost between the stages, and the output had none."""
    pipe, x = Pipe(nn.Sequential(nn.Linear(4, 4)), chunks=2), torch.ones(4, 4)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RunError, match="forward-mode AD"):
        pipe(forward_ad.make_dual(x, x))
    pipe(x)


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.jacrev,
        lambda function: torch.func.grad(lambda x: function(x).sum()),
    ],
)
def test_transforms_of_torch_func_are_refused(transform: Any) -> None:
    """PyTorch's own errors spoke of the autograd.Function of a pipe, or of `.data`."""
    pipe, x = Pipe(nn.Sequential(nn.Linear(4, 4)), chunks=2), torch.ones(4, 4)
    with pytest.raises(RunError, match=r"inside a transform of torch\.func"):
        transform(pipe)(x)
    pipe(x)


# ---- what is added to the Sequential or to the pipe later ----------------------------------------


def _double(*args: Any) -> Any:
    return args[-1] * 2


HOOKS = {
    "forward": lambda module: module.register_forward_hook(_double),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "backward": lambda module: module.register_full_backward_hook(lambda *args: None),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda *args: None),
}


def _two_stages() -> tuple[nn.Sequential, Pipe]:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return layers, Pipe(layers, stages=2, devices=["cpu"] * 2, loss_fn=torch.sum)


@pytest.mark.parametrize("kind", HOOKS)
def test_hook_on_the_sequential_after_the_pipe_was_made(kind: str) -> None:
    """It did not run, in silence."""
    layers, pipe = _two_stages()
    handle = HOOKS[kind](layers)
    for call in (pipe, pipe.step):
        with pytest.raises(RunError, match="the Sequential itself has got hooks after the pipe"):
            call(torch.ones(2, 4))
    handle.remove()
    pipe.step(torch.ones(2, 4))


@pytest.mark.parametrize("kind", HOOKS)
def test_hook_on_the_pipe_is_refused_by_step(kind: str) -> None:
    """It ran in `pipe(x)` only."""
    _, pipe = _two_stages()
    handle = HOOKS[kind](pipe)
    with pytest.raises(
        RunError, match=r"the pipe itself has hooks, which pipe\.step would not run"
    ):
        pipe.step(torch.ones(2, 4))
    handle.remove()
    pipe.step(torch.ones(2, 4))


def test_hook_on_the_pipe_runs_in_a_call() -> None:
    layers, pipe = _two_stages()
    pipe.register_forward_hook(_double)
    assert torch.equal(pipe(torch.ones(2, 4)), layers(torch.ones(2, 4)) * 2)


def test_forward_that_was_assigned_to_a_sequential() -> None:
    """The layers ran one after the other, whatever the forward was."""
    layers, pipe = _two_stages()
    layers.forward = lambda x: layers[1](layers[0](x)) * 2  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the forward of the Sequential was replaced after the pipe"):
        pipe.step(torch.ones(2, 4))
    x = torch.ones(2, 4)
    traced = Pipe(layers, stages=2, devices=["cpu"] * 2, example=x, balance="parameters")
    assert torch.equal(traced(x), layers(x))
