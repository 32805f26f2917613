"""Traced models over processes compute what the unsplit model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from penstock import Chunk, NoChunk, Pipe
from tests.distributed.rank import Raised
from tests.distributed.ranks import ranks
from tests.distributed.speakers import (
    WIDE,
    Numbers,
    Speaker,
    built,
    expected,
    group,
    inputs,
    numbers,
    spoken,
    unsplit,
)
from tests.oracle import first_names
from tests.oracle import same_or_none as same


def check(of_ranks: list[list[Numbers]], kind: str, chunks: int) -> None:
    names = first_names(built(kind))
    wanted = expected(kind, chunks)
    for step, each in enumerate(zip(*of_ranks, strict=True)):
        found: Numbers = {}
        for mine in each:
            for told, value in mine.items():
                what, space, name = told.rpartition(" ")
                told = what + space + names.get(name, name)
                assert same(found.setdefault(told, value), value), told
        torch.testing.assert_close(found, wanted[step], rtol=1e-10, atol=1e-10)


def trained(kind: str, schedule: str, data: str, stages: int) -> list[Numbers]:
    example = next(iter(inputs(kind)))
    pipe = Pipe(
        built(kind), 2, stages=stages, example=example, schedule=schedule, data=data, group=group()
    )
    found = []
    for given in inputs(kind):
        here = data == "all" or distributed.get_rank() == 0
        result = pipe.step(**given) if here else pipe.step()
        found.append(numbers(pipe, result.loss))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", ["layer", "glue", "translator"])
@pytest.mark.parametrize("size", [2, 3])
def test_traced_model_over_processes_matches_the_unsplit_model(
    size: int, kind: str, schedule: str
) -> None:
    check(ranks(size).run(trained, kind, schedule, "all", size), kind, 2)


@pytest.mark.parametrize("kind", ["layer", "translator"])
def test_traced_model_with_batch_on_the_first_rank_only(kind: str) -> None:
    check(ranks(2).run(trained, kind, "1f1b", "first", 2), kind, 2)


def test_traced_model_with_several_stages_per_rank() -> None:
    check(ranks(2).run(trained, "layer", "interleaved", "all", 4), "layer", 2)


# ---- optional arguments, dropout, casts ---------------------------------------------------


def with_and_without_labels() -> list[Any]:
    model = built("layer")
    pipe = Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())
    pipe.eval()
    with torch.no_grad():
        found = [pipe(spoken(4, 5)), pipe(ids=spoken(3, 6), labels=spoken(3, 6))]
    assert not any(module.training for module in pipe.modules())
    return found


def test_traced_model_with_and_without_optional_labels() -> None:
    found = ranks(2).run(with_and_without_labels)
    model = built("layer").eval()
    assert found[0] == [None, None]
    torch.testing.assert_close(found[1][0]["scores"], model(spoken(4, 5))["scores"])
    torch.testing.assert_close(found[1][1]["scores"], model(spoken(3, 6))["scores"])


def dropped(where: dict[str, Any]) -> list[Numbers]:
    torch.manual_seed(7)
    model = Speaker(drop=0.3).double()
    pipe = Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), schedule="1f1b", **where)
    found = []
    for step, given in enumerate(inputs("layer")):
        torch.manual_seed(step)
        found.append(numbers(pipe, pipe.step(**given).loss))
    return found


def dropped_here() -> list[Numbers]:
    return dropped({"group": group()})


def test_traced_model_dropout_equals_the_inline_runtime() -> None:
    of_ranks = ranks(2).run(dropped_here)
    expected = dropped({"devices": ["cpu", "cpu"], "runtime": "inline"})
    names = first_names(built("layer"))
    for each, wanted in zip(zip(*of_ranks, strict=True), expected, strict=True):
        found = {
            what + space + names.get(name, name): value
            for mine in each
            for what, space, name, value in ((*t.rpartition(" "), v) for t, v in mine.items())
        }
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def cast_and_clipped() -> tuple[list[str], Tensor, Tensor]:
    pipe = Pipe(built("glue"), 2, stages=2, example=next(iter(inputs("glue"))), group=group())
    pipe.float()
    given = next(iter(inputs("glue")))
    loss = pipe.step(**given).loss
    norm = pipe.clip_grad_norm_(0.1)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    return sorted({str(p.dtype) for p in pipe.parameters()}), loss, norm


def test_traced_model_cast_to_float32_and_clipped() -> None:
    found = ranks(2).run(cast_and_clipped)
    model = built("glue").float()
    given = next(iter(inputs("glue")))
    unsplit(model, 2, given)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for dtypes, _, told in found:
        assert dtypes == ["torch.float32"]
        torch.testing.assert_close(told, norm, check_dtype=False)


# ---- data on the first rank, replicas -----------------------------------------------------


class Shifted(Speaker):
    """A model whose `shift` is split along its second dim.

    Other side inputs go whole to every micro-batch.
    """

    def forward(self, x: Tensor, shift: Tensor, whole: Tensor, late: Tensor) -> Tensor:  # type: ignore[override]
        x = x + shift.mT
        for block in self.blocks:
            x = block(x) * whole
        found: Tensor = self.norm(x) + late
        return found


def shifts(wants: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    x, shift, whole, late = (
        torch.randn(*sizes, generator=made, dtype=torch.float64)
        for sizes in ((6, WIDE), (WIDE, 6), (WIDE,), (6, WIDE))
    )
    x.requires_grad_(wants == "x")
    late.requires_grad_(wants == "late")
    return x, shift, whole, late


def shifted(wants: str, data: str) -> list[Tensor | None]:
    torch.manual_seed(7)
    x, shift, whole, late = shifts(wants)
    given = x, Chunk(shift, 1), NoChunk(whole), late
    pipe = Pipe(
        Shifted().double(), 3, stages=2, example=given, loss_fn=mse_loss, data=data, group=group()
    )
    first = distributed.get_rank() == 0
    target = torch.zeros(6, WIDE, dtype=torch.float64)
    pipe.step(*given, target=target) if first or data == "all" else pipe.step()
    return [x.grad, late.grad]


def test_traced_model_input_gradient_on_the_first_rank() -> None:
    found = ranks(2).run(shifted, "x", "first")
    torch.manual_seed(7)
    model = Shifted().double()
    x, shift, whole, late = shifts("x")
    mse_loss(model(x, shift, whole, late), torch.zeros(6, WIDE, dtype=torch.float64)).backward()
    torch.testing.assert_close(found[0][0], x.grad, rtol=1e-10, atol=1e-10)


def test_traced_model_input_gradient_on_another_rank_is_refused() -> None:
    for answer in ranks(2).answers(shifted, "late", "first"):
        assert isinstance(answer, Raised)
        assert "an input that requires grad is used on stage 1" in answer.traceback
    late = ranks(2).run(shifted, "late", "all")
    assert late[0][1] is None
    assert late[1][1] is not None


def in_copies() -> Numbers:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = Pipe(built("layer"), 2, stages=2, example=next(iter(inputs("layer"))), mesh=mesh)
    given = next(iter(inputs("layer")))
    copy = distributed.get_rank() // 2
    mine = {name: tensor.chunk(2)[copy] for name, tensor in given.items()}
    return numbers(pipe, pipe.step(**mine).loss)


def test_traced_model_with_replicas_averages_gradients() -> None:
    found = ranks(4).run(in_copies)
    model = built("layer")
    loss = unsplit(model, 4, next(iter(inputs("layer"))))
    names = first_names(model)
    expected = numbers(model, loss)
    for mine in found:
        for told, value in mine.items():
            what, space, name = told.rpartition(" ")
            torch.testing.assert_close(
                value, expected[what + space + names.get(name, name)], rtol=1e-10, atol=1e-10
            )
