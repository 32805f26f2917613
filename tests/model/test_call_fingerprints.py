from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu

from penstock.fingerprint import build_cost_key

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
