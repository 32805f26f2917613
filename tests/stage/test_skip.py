from __future__ import annotations

import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Namespace, Pipe, pop, skippable, stash, verify_skippables
from tests.support import Do, Pop, Stash, closely, each_checkpoint, each_runtime, same_gradients

Forward = Generator[Any, Any, Tensor]


@skippable(stash=["a", "b"])
class StashTwo(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("a", x + 1)
        yield stash("b", x + 2)
        return x


@skippable(pop=["a", "b"])
class PopTwo(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        b: Tensor = yield pop("b")
        a: Tensor = yield pop("a")
        return x + 10 * a + 100 * b


@skippable(stash=["far"], shared=["far"])
class StashForAll(nn.Module):
    def forward(self, x: Tensor) -> Forward:
        yield stash("far", 2 * x)
        return x


# ---- outside a pipe -----------------------------------------------------------------------


def test_stash_is_popped_by_a_later_nested_layer() -> None:
    model = nn.Sequential(Stash(), nn.Sequential(Do(lambda x: x + 1), Pop()))
    assert model(torch.ones(1)).tolist() == [4]
    assert model(torch.zeros(1)).tolist() == [1]


def test_skip_names_are_popped_in_any_order() -> None:
    model = nn.Sequential(StashTwo(), PopTwo())
    assert model(torch.zeros(1)).tolist() == [210]


def test_shared_skip_is_popped_several_times() -> None:
    model = nn.Sequential(StashForAll(), Pop(), Pop(), Pop())
    verify_skippables(model)
    assert model(torch.ones(1)).tolist() == [7]


def test_skip_popped_twice_at_run_time_is_an_error() -> None:
    model = nn.Sequential(Stash(), Pop(), Pop())
    with pytest.raises(RuntimeError, match="Pop pops 'far', but no layer before it has stashed"):
        model(torch.ones(1))


def test_skippable_forward_without_yield() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert Plain()(torch.zeros(1)).tolist() == [1]


def test_gradients_flow_through_skip_connections() -> None:
    x = torch.ones(2, requires_grad=True)
    nn.Sequential(Stash(), Do(lambda x: 3 * x), Pop())(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5]


def test_skippable_keeps_the_class_name_and_pickles() -> None:
    layer = StashTwo()
    assert type(layer).__name__ == "StashTwo"
    assert isinstance(pickle.loads(pickle.dumps(layer)), StashTwo)
    assert isinstance(copy.deepcopy(layer), nn.Module)


# ---- namespaces ---------------------------------------------------------------------------


def isolated(layer: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    found = layer.isolate(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(found, nn.Module)
    return found


def test_isolate_separates_equal_skip_names() -> None:
    one, two = Namespace(), Namespace()
    tripled = Do(lambda x: 3 * x)
    layers = [isolated(Stash(), one), tripled, isolated(Stash(), two)]
    model = nn.Sequential(*layers, isolated(Pop(), one), isolated(Pop(), two))
    verify_skippables(model)
    assert model(torch.ones(1)).tolist() == [3 + 2 + 6]


def test_isolate_only_some_skip_names() -> None:
    space = Namespace()
    layer = StashTwo()
    assert isolated(layer, space, only=["a"]) is layer
    with pytest.raises(TypeError, match=r"'1' \(PopTwo\) pops 'a', but no layer before it"):
        verify_skippables(nn.Sequential(layer, PopTwo()))
    verify_skippables(nn.Sequential(layer, isolated(PopTwo(), space, only=["a"])))


def test_isolate_of_an_undeclared_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="Stash cannot isolate 'near'"):
        isolated(Stash(), Namespace(), only=["near"])


def test_namespaces_compare_copy_and_pickle() -> None:
    space = Namespace()
    assert space == copy.deepcopy(space) == pickle.loads(pickle.dumps(space))
    assert space != Namespace()
    assert len({space, Namespace(), copy.copy(space)}) == 2


# ---- declared names against yielded names ----------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "does", "message"),
    [
        ({}, lambda: stash("a", None), "Odd has not declared 'a' as a name it stashes"),
        ({}, lambda: pop("a"), "Odd has not declared 'a' as a name it pops"),
        ({"pop": ["a"]}, lambda: stash("a", None), "has not declared 'a' as a name it stashes"),
        ({"stash": ["a"]}, lambda: pop("a"), "has not declared 'a' as a name it pops"),
        ({"stash": ["a", "b"]}, lambda: stash("b", None), "Odd declares 'a', but .* not stashed"),
        ({"pop": ["nowhere"]}, lambda: pop("nowhere"), "Odd pops 'nowhere', but no layer before"),
    ],
)
def test_undeclared_or_missing_skip_names_at_run_time(
    declared: dict[str, list[str]], does: Any, message: str
) -> None:
    @skippable(**declared)
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            yield does()
            return x

    with pytest.raises(RuntimeError, match=message):
        Odd()(torch.ones(1))


def test_declared_skip_that_is_never_popped_is_an_error() -> None:
    @skippable(pop=["far"])
    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(RuntimeError, match="Lazy declares 'far', but its forward has not popped"):
        nn.Sequential(Stash(), Lazy())(torch.ones(1))


@pytest.mark.parametrize("yielded", [None, torch.ones(1), ("a", 1), "a"])
def test_skippable_that_yields_something_else_is_an_error(yielded: Any) -> None:
    @skippable()
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Forward:
            yield yielded
            return x

    with pytest.raises(TypeError, match=r"Yield stash\(name, tensor\) or pop\(name\)"):
        Odd()(torch.ones(1))


@pytest.mark.parametrize("argument", ["stash", "pop", "shared"])
def test_skippable_names_must_be_a_list(argument: str) -> None:
    message = rf"{argument} must be a list of names, not the string 'ab'. Write \['ab'\]"
    with pytest.raises(TypeError, match=message):
        skippable(**{argument: "ab"})


def test_shared_skip_names_must_be_stashed() -> None:
    with pytest.raises(ValueError, match="shared names must also be in stash, but 'b' is not"):
        skippable(stash=["a"], shared=["b"])


def test_skippable_is_only_for_module_classes() -> None:
    with pytest.raises(TypeError, match=r"@skippable is for subclasses of nn\.Module"):
        skippable()(int)  # type: ignore[type-var]


# ---- verify_skippables ------------------------------------------------------------------


def test_verify_skippables_lists_every_mismatch() -> None:
    @skippable(stash=["both"], pop=["both"])
    class Both(nn.Module): ...

    model = nn.Sequential(Pop(), Stash(), Stash(), Both(), nn.Sequential(StashTwo()))
    with pytest.raises(TypeError) as caught:
        verify_skippables(model)
    assert str(caught.value).splitlines() == [
        "the stashed and the popped names do not match:",
        "  '0' (Pop) pops 'far', but no layer before it stashes it",
        "  '2' (Stash) stashes 'far' again: isolate it in a namespace",
        "  '3' (Both) declares 'both' both as stashed and as popped",
        "  no layer pops 'a', which is stashed",
        "  no layer pops 'b', which is stashed",
    ]


def test_verify_skippables_refuses_a_name_popped_twice() -> None:
    with pytest.raises(
        TypeError, match=r"'2' \(Pop\) pops 'far', which an earlier layer pops: isolate"
    ):
        verify_skippables(nn.Sequential(Stash(), Pop(), Pop()))


def test_pipe_verifies_its_skippables() -> None:
    with pytest.raises(TypeError, match="no layer pops 'far', which is stashed"):
        Pipe(nn.Sequential(Stash(), nn.ReLU()))


# ---- in a pipe ----------------------------------------------------------------------------


@each_runtime
@each_checkpoint
@pytest.mark.parametrize("stages", [[7], [1, 6], [2, 2, 3], [1] * 7])
def test_shared_skip_to_several_stages(stages: list[int], checkpoint: str, runtime: str) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        linears = [nn.Linear(3, 3) for _ in range(3)]
        layers = [linears[0], StashForAll(), linears[1], Pop(), Pop(), linears[2], Pop()]
        return nn.Sequential(*layers).double()

    plain, pipe = model(), Pipe(model(), 3, checkpoint, stages=stages, runtime=runtime)
    x = torch.randn(7, 3, dtype=torch.float64)
    for module in (plain, pipe):
        module(x).square().sum().backward()
    assert closely(pipe(x), plain(x))
    assert same_gradients(pipe, plain)


@each_runtime
def test_missing_stash_in_a_pipe_names_its_stage(runtime: str) -> None:
    @skippable(stash=["far"])
    class Forgets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    pipe = Pipe(nn.Sequential(Forgets(), Pop()), 2, stages=2, runtime=runtime)
    with pytest.raises(RuntimeError, match="Forgets declares 'far', but its forward") as caught:
        pipe(torch.ones(4))
    assert caught.value.__notes__ == [
        "in stage 0 (layer 0: Forgets), micro-batch 0, action 0F0 on rank 0 (cpu)"
    ]


def test_skip_is_sent_directly_to_its_stage() -> None:
    """The stages between receive no message about the skip and hold no copy of it."""
    pipe = Pipe(nn.Sequential(Stash(), nn.ReLU(), nn.ReLU(), Pop()), 1, stages=4)
    edges = pipe.forecast().program.graph.edges
    assert edges == ((0, 1), (0, 3), (1, 2), (2, 3))
