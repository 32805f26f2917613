"""Tests of models built on meta: needed layers get memory, and all of it is initialized."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ArgumentError, Pipe, RunError
from penstock.model.meta_init import materialize

CPU = torch.device("cpu")


def build() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    model[4].weight = model.get_parameter("0.0.weight")
    return model


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return build()


def piped(model: nn.Sequential, stages: int = 2) -> Pipe:
    return Pipe(model, chunks=2, stages=stages, devices=["cpu"] * stages, loss_fn=nn.MSELoss())


class Table(nn.Module):
    """A layer whose parameter only a checkpoint initializes."""

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.register_buffer("order", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[self.order]


class Allocated(TorchDispatchMode):
    """A dispatch mode that counts the bytes allocated on real devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.name() and not result.is_meta:
            self.bytes += result.nbytes
        return result


def test_meta_model_is_initialized_and_trains() -> None:
    torch.manual_seed(3)
    pipe = piped(on_meta())
    assert not any(t.is_meta for t in (*pipe.parameters(), *pipe.buffers()))
    model = copy.deepcopy(nn.Sequential(*pipe.children()))
    x = torch.randn(8, 6, dtype=torch.float64)
    result = pipe.step(x, target=x)
    out = model[0](x)
    assert out.isfinite().all()
    assert result.loss.isfinite()
    assert pipe[4].weight is pipe[0][0].weight
    assert torch.equal(model.get_buffer("3.running_var"), torch.ones(6, dtype=torch.float64))


def test_meta_model_initial_weights_do_not_depend_on_the_stages() -> None:
    found = []
    for stages in (1, 2, 5):
        torch.manual_seed(3)
        pipe = piped(on_meta(), stages)
        found.append({**pipe.state_dict(), "after": torch.rand(3)})
    for name, value in found[0].items():
        assert all(torch.equal(other[name], value) for other in found), name
    weights = [found[0][f"{n}.0.weight"] for n in range(3)]
    assert not torch.equal(weights[0], weights[1])  # equal layers get different weights
    torch.manual_seed(4)
    assert not torch.equal(piped(on_meta()).state_dict()["0.0.weight"], weights[0])


def test_materialize_allocates_memory_only_for_the_given_layers() -> None:
    torch.manual_seed(3)
    whole = piped(on_meta()).state_dict()
    model = on_meta()
    torch.manual_seed(3)
    with Allocated() as allocated:
        materialize(model, [(name, model.get_submodule(name), CPU) for name in ("1", "4")])
    held = {*model[1].parameters(), *model[4].parameters()}
    assert allocated.bytes == sum(p.nbytes for p in held)
    assert all(t.is_meta for n in (0, 2, 3) for t in model[n].state_dict().values())
    for name in model[1].state_dict():
        assert torch.equal(model[1].state_dict()[name], whole[f"1.{name}"])


def test_meta_model_keeps_attributes_of_parameters() -> None:
    model = on_meta()
    model.get_parameter("1.0.weight").decays = False  # type: ignore[attr-defined]
    model.get_parameter("1.0.bias").requires_grad_(False)
    piped(model)
    weight, bias = model.get_parameter("1.0.weight"), model.get_parameter("1.0.bias")
    assert weight.decays is False  # type: ignore[attr-defined]
    assert weight.requires_grad
    assert not bias.requires_grad


def test_meta_model_initializes_multihead_attention_as_its_constructor_does() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 8))
    pipe = piped(model)
    pipe.step(torch.randn(4, 3, 8), target=torch.randn(4, 3, 8))
    attention = model[0].self_attn
    assert isinstance(attention, nn.MultiheadAttention)
    assert not attention.out_proj.bias.any()  # initialized by MultiheadAttention, not by Linear


def test_uninitialized_meta_tensors_are_an_error_until_loaded(tmp_path: Path) -> None:
    real = nn.Sequential(nn.Linear(6, 6).double(), Table())
    piped(real).save(tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6).double(), Table())
    pipe = piped(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    for call in (lambda: pipe(x), lambda: pipe.step(x, target=x)):
        with pytest.raises(RunError, match=r"nothing has set 1.weight, 1.order yet. Load a check"):
            call()
    pipe.load(tmp_path)
    torch.testing.assert_close(pipe(x), real(x), rtol=0, atol=1e-12)
    assert differing(pipe, real) == []


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    expected = other.state_dict()
    return [name for name, t in one.state_dict().items() if not torch.equal(t, expected[name])]


def test_meta_tensors_may_be_set_by_hand_or_by_load_state_dict() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    for assign in (False, True):
        with torch.device("meta"):
            pipe = piped(nn.Sequential(Table(), Table()))
        for table in pipe:
            table.load_state_dict(Table().state_dict(), assign=assign)
        assert torch.equal(pipe(x), x)
    with torch.device("meta"):
        pipe = piped(nn.Sequential(Table(), Table()))
    for table in pipe:
        table.get_parameter("weight").data.normal_()
        table.get_buffer("order").copy_(torch.arange(6))
    assert pipe(x).isfinite().all()


def test_materialized_layers_of_a_meta_model_are_kept() -> None:
    model = on_meta()
    model[2] = nn.Linear(6, 6).double()
    mixed = nn.Linear(6, 6).double()
    mixed.bias = nn.Parameter(torch.zeros(6, device="meta", dtype=torch.float64))
    model[3] = mixed
    before = model.get_parameter("2.weight").clone(), mixed.weight.clone()
    pipe = piped(model)
    assert torch.equal(model.get_parameter("2.weight"), before[0])
    assert torch.equal(mixed.weight, before[1])
    with pytest.raises(RunError, match=r"nothing has set 3.bias yet"):
        pipe(torch.zeros(2, 6, dtype=torch.float64))


class Positions(nn.Module):
    """A layer with a table that is not in any checkpoint."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Recomputed(Positions):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(6))


def test_non_persistent_meta_buffers_are_recomputed_or_refused() -> None:
    with torch.device("meta"):
        lost, again = Positions(), Recomputed()
        linear = nn.Linear(6, 6)
    with pytest.raises(ArgumentError, match=r"the values of 1.table are lost. A buffer with"):
        piped(nn.Sequential(linear, lost))
    piped(nn.Sequential(nn.ReLU(), again))
    assert torch.equal(again.table, Positions().table)


def test_meta_tensors_that_cannot_be_initialized_are_refused() -> None:
    with torch.device("meta"):
        model = on_meta()
        model[1].scale = torch.ones(3)
    with pytest.raises(ArgumentError, match=r"1.scale is a tensor on meta that is neither"):
        piped(model)
    with torch.device("meta"):
        lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ArgumentError, match=r"'0.weight' has no shape yet, and is on meta"):
        Pipe(lazy, stages=[1, 1], devices=["cpu"] * 2)


def test_balance_by_time_of_a_meta_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="balance='time' runs the layers, but the model was"):
        Pipe(on_meta(), stages=2, devices=["cpu"] * 2, example=torch.zeros(2, 6))
