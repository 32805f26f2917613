"""Skip connections of the old libraries: what `penstock.compat` promises of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from penstock.compat.torchgpipe.skip import (
    Namespace,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe


def layer(stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> Skippable:
    """Return a layer that stashes its input under some names, and adds what it pops."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for name in stashes:
                yield stash(name, x)
            for name in pops:
                x = x + (yield pop(name))
            return x

    return skippable(stash=stashes, pop=pops)(Layer)()


def layer_with(declared: dict[str, list[str]], forward: Callable[..., Any]) -> Skippable:
    kind = type("Layer", (nn.Module,), {"forward": lambda self, x: forward(x)})
    return skippable(**declared)(kind)()


@pytest.mark.parametrize(
    "layers",
    [
        [layer(("a",), ("a",))],
        [layer(("a",)), layer(("a",)), layer((), ("a",))],
        [layer(("a",)), layer((), ("a",)), layer((), ("a",))],
        [layer((), ("a",))],
        [layer((), ("a",)), layer(("a",))],
        [layer(("a",))],
        [layer(("a",)).isolate(Namespace()), layer((), ("a",))],
    ],
    ids=[
        "both ways",
        "stashed twice",
        "popped twice",
        "never stashed",
        "late",
        "never popped",
        "ns",
    ],
)
def test_verify_skippables_refuses_names_that_do_not_match(layers: list[nn.Module]) -> None:
    with pytest.raises(TypeError, match="do not match"):
        verify_skippables(nn.Sequential(*layers))


def test_verify_skippables_lists_every_mismatch() -> None:
    with pytest.raises(TypeError, match=r"(?s)'b'.*'a'"):
        verify_skippables(nn.Sequential(layer(("a",)), layer((), ("b",))))


def stash_undeclared(x: Tensor) -> Any:
    yield stash("b", x)


def pop_undeclared(x: Tensor) -> Any:
    yield pop("b")


def yield_something(x: Tensor) -> Any:
    yield "a"


def return_only(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("in_pipe", [False, True])
@pytest.mark.parametrize(
    ("declared", "forward", "error"),
    [
        ({"stash": ["a"]}, stash_undeclared, RuntimeError),
        ({"pop": ["a"]}, pop_undeclared, RuntimeError),
        ({"stash": ["a"]}, return_only, RuntimeError),
        ({"pop": ["a"]}, return_only, RuntimeError),
        ({"stash": ["a"]}, yield_something, TypeError),
    ],
)
def test_skippable_layers_raise_the_old_types_of_errors(
    declared: dict[str, list[str]],
    forward: Callable[..., Any],
    error: type[Exception],
    in_pipe: bool,
) -> None:
    wrong = layer_with(declared, forward)
    other = layer((), ("a",)) if "stash" in declared else layer(("a",))
    layers = nn.Sequential(wrong, other) if "stash" in declared else nn.Sequential(other, wrong)
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2) if in_pipe else layers
    with pytest.raises(error):
        model(torch.ones(2))


def test_popping_what_nobody_stashed_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="no layer before it has stashed it"):
        layer((), ("missing",))(torch.ones(2))


def test_none_can_be_stashed_and_namespaces_keep_equal_names_apart() -> None:
    def stash_none(x: Tensor) -> Any:
        yield stash("a", None)
        return x

    def pop_none(x: Tensor) -> Any:
        return x if (yield pop("a")) is None else x * torch.nan

    first, second = Namespace(), Namespace()
    model = nn.Sequential(
        layer_with({"stash": ["a"]}, stash_none).isolate(first),
        layer(("a",)).isolate(second),
        layer_with({"pop": ["a"]}, pop_none).isolate(first),
        layer((), ("a",)).isolate(second, only=["a"]),
    )
    assert model(torch.ones(2)).tolist() == [2, 2]
    assert GPipe(model, [2, 2], devices=["cpu"] * 2)(torch.ones(2)).tolist() == [2, 2]


def test_skippable_names_and_dispatch() -> None:
    space = Namespace()
    both = layer(("a",), ("b",)).isolate(space, only=["a"])
    assert isinstance(both, Skippable)
    assert both.stashable_names == {"a"}
    assert both.poppable_names == {"b"}
    assert both.namespaces == {"a": space}
    assert [*both.stashable(), *both.poppable()] == [(space, "a"), (None, "b")]
    assert both.namespaced("a") == (space, "a")
    stashed: dict[str, Any] = {}
    output = both.dispatch(torch.ones(2), stashed.__setitem__, lambda name: torch.full((2,), 3.0))
    assert output.tolist() == [4, 4]
    assert stashed["a"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="neither a stash nor a pop"):
        layer_with({"stash": ["a"]}, yield_something).dispatch(torch.ones(2), print, print)
    assert layer_with({}, return_only).dispatch(torch.ones(1), print, print).tolist() == [1]
