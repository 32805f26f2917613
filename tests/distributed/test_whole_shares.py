"""Traced models over processes: the parameters each rank keeps and saves, and its errors."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from penstock import Pipe
from tests.distributed.rank import Raised
from tests.distributed.ranks import ranks
from tests.distributed.speakers import WIDE, Block, Speaker, built, group, inputs, spoken, unsplit

# ---- parameters kept by a rank ------------------------------------------------------------


def holdings(kind: str) -> tuple[list[str], list[str], int]:
    """Return the names this rank has, and how many parameters of other ranks survive the model."""
    model = built(kind)
    pipe = Pipe(model, 2, stages=3, example=next(iter(inputs(kind))), group=group())
    names = [name for name, _ in pipe.named_parameters(remove_duplicate=False)]
    mine = {id(p) for p in pipe.parameters()}
    others = [weakref.ref(p) for p in model.parameters() if id(p) not in mine]
    del model
    gc.collect()
    return names, list(pipe.state_dict()), sum(one() is not None for one in others)


@pytest.mark.parametrize("kind", ["layer", "glue", "translator"])
def test_rank_keeps_only_its_own_parameters_under_the_model_names(kind: str) -> None:
    found = ranks(3).run(holdings, kind)
    model = built(kind)
    assert {n for names, _, _ in found for n in names} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert {n for _, state, _ in found for n in state} == set(model.state_dict())
    assert [left for _, _, left in found] == [0, 0, 0]
    own = [set(names) for names, _, _ in found]
    assert own[0] & own[1] & own[2] == set()
    if kind == "glue":  # the last rank also uses the embedding of the first
        assert [("words.weight" in names) for names in own] == [True, False, True]


# ---- checkpoints --------------------------------------------------------------------------


def trained_and_saved(folder: Path) -> None:
    pipe = Pipe(built("layer"), 2, stages=3, example=next(iter(inputs("layer"))), group=group())
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    pipe.step(**next(iter(inputs("layer"))))
    optimizer.step()
    pipe.save(folder, optimizer)
    pipe.export(folder / "all.safetensors")


def loaded(folder: Path, meta: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Speaker().double()
    pipe = Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    pipe.load(folder, optimizer)
    assert not any(p.is_meta for p in pipe.parameters())
    pipe.zero_grad()
    pipe.step(**next(iter(inputs("layer"))))
    optimizer.step()
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("meta", [False, True])
def test_checkpoint_of_three_ranks_resumes_on_two(tmp_path: Path, meta: bool) -> None:
    ranks(3).run(trained_and_saved, tmp_path)
    found = ranks(2).run(loaded, tmp_path, meta)
    model = built("layer")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    given = next(iter(inputs("layer")))
    for _ in range(2):
        model.zero_grad()
        unsplit(model, 2, given)
        optimizer.step()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for mine in found:
        for name, value in mine.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-10)


# ---- ranks that differ, and a rank that fails ---------------------------------------------


def with_other_blocks() -> None:
    torch.manual_seed(0)
    model = Speaker(4 + distributed.get_rank())
    Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())


def test_different_models_on_ranks_are_refused() -> None:
    for answer in ranks(2).answers(with_other_blocks):
        assert isinstance(answer, Raised)
        assert "the model calls different units on this rank than on rank 0" in answer.traceback


class Chooser(Speaker):
    """A model whose forward depends on an attribute that ranks may set differently."""

    skips = False

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        x = first = self.words(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x + first if self.skips else x)
        return found


def going_other_ways() -> None:
    pipe = Pipe(Chooser(), 2, stages=2, example=spoken(4, 5), group=group())
    with torch.no_grad():
        pipe(spoken(4, 5))
        pipe._placed_partition.partition.model.skips = distributed.get_rank() == 1  # type: ignore[union-attr]
        pipe(spoken(4, 5))


def test_different_traced_forward_on_one_rank_is_refused() -> None:
    for answer in ranks(2).answers(going_other_ways):
        assert isinstance(answer, Raised)
        assert "the division of the forward" in answer.traceback


class Failing(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[1] == 7 and not x.is_meta and type(x) is Tensor:
            raise ValueError("seven are too many")
        return super().forward(x, mask)


def failing_on_one() -> str:
    model = built("layer")
    assert isinstance(model.blocks, nn.ModuleList)
    model.blocks[3] = Failing().double()
    pipe = Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())
    given = list(inputs("layer"))
    try:
        pipe.step(**given[2])
    except Exception as error:
        told = str(error)
    pipe.step(**given[0])  # the pipe still works
    return told


def test_error_in_a_unit_on_one_rank_is_raised_on_all_ranks() -> None:
    for told in ranks(2).run(failing_on_one):
        assert "seven are too many" in told


class Crossed(nn.Module):
    """Two branches whose order may differ between ranks, as the order of a set does."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDE, WIDE)
        self.left, self.right = Block(), Block()
        self.end = nn.Linear(WIDE, WIDE)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        names = ["right", "left"] if self.turned else ["left", "right"]
        scaled = {name: x * (2.0 if name == "left" else 3.0) for name in names}
        found = {name: getattr(self, name)(x) for name in names}
        ends = found["left"] * 2 - found["right"] + scaled["left"] - scaled["right"].tanh()
        made: Tensor = self.end(ends)
        return made


def crossed() -> Tensor | None:
    torch.manual_seed(3)
    model = Crossed(distributed.get_rank() == 1)
    x = torch.linspace(-1, 1, 4 * WIDE).view(4, WIDE)
    pipe = Pipe(model, 2, stages=[2, 2], example=x, group=group())
    with torch.no_grad():
        pipe(x)
        found: Tensor | None = pipe(torch.cat([x, x, x]))
    return found


def test_units_may_be_called_in_a_different_order_on_each_rank() -> None:
    found = ranks(2).run(crossed)
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 4 * WIDE).view(4, WIDE)
    torch.testing.assert_close(found[1], Crossed(False)(torch.cat([x, x, x])))


# ---- deep copies --------------------------------------------------------------------------


def copied() -> tuple[Tensor, Tensor, Tensor]:
    pipe = Pipe(built("glue"), 2, stages=2, example=next(iter(inputs("glue"))), group=group())
    duplicate = copy.deepcopy(pipe)
    given = list(inputs("glue"))[2]
    first = pipe.step(**given).loss
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    return first, duplicate.step(**given).loss, pipe.step(**given).loss


def test_deepcopy_of_a_pipe_trains_independently() -> None:
    for first, of_copy, after in ranks(2).run(copied):
        assert first == of_copy != after


# ---- hooks --------------------------------------------------------------------------------


class Collecting(Speaker):
    """A model whose blocks have hooks that append what they see to a list of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        seen = self.seen
        self.blocks[1].register_forward_hook(
            lambda block, args, found, none=None: seen.append(found)
        )
        self.blocks[2].register_forward_hook(lambda block, args, found: self.seen.append(found))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        self.seen.clear()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x + self.seen[0] - self.seen[1])
        return found


def collected() -> Tensor | None:
    torch.manual_seed(3)
    pipe = Pipe(Collecting(), 2, stages=[3, 3], example=spoken(4, 5), group=group())
    with torch.no_grad():
        pipe(spoken(4, 5))
        found: Tensor | None = pipe(spoken(6, 7))
    return found


def test_hooks_that_reference_the_parent_module() -> None:
    found = ranks(2).run(collected)
    torch.manual_seed(3)
    torch.testing.assert_close(found[1], Collecting()(spoken(6, 7)))
