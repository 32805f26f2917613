"""Any model over processes: each rank follows the forward, runs its part, and keeps its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, dropout

from penstock import Pipe
from tests.processes.rank import Raised
from tests.processes.ranks import ranks
from tests.properties.gathering import first_names, same

WIDE, WORDS = 8, 13

Numbers = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.inner = nn.Linear(WIDE, 2 * WIDE)
        self.outer = nn.Linear(2 * WIDE, WIDE)
        self.register_buffer("scale", torch.full((WIDE,), 0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.outer(torch.tanh(self.inner(self.norm(x)))) * self.scale
        return x + (y if mask is None else y * mask)


class Speaker(nn.Module):
    """As GPT-2: learned positions, blocks in a list, an embedding that is used twice."""

    def __init__(self, blocks: int = 4, tied: str = "layer", drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.places = nn.Parameter(torch.randn(16, WIDE) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDE)
        self.tied, self.drop = tied, drop
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 16))
        if tied != "glue":
            self.head = nn.Linear(WIDE, WORDS, bias=False)
        if tied == "layer":
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        length = ids.shape[1]
        weights = self.weights[:length, None]
        if mask is not None and not bool(mask.all()):
            weights = weights * mask[..., None]
        x = self.words(ids) + self.places[:length]
        x = dropout(x, self.drop, self.training)
        first = x
        for block in self.blocks:
            x = block(x, weights)
        x = self.norm(x + first)
        scores = x @ self.words.weight.T if self.tied == "glue" else self.head(x)
        if labels is None:
            return {"scores": scores}
        return {"scores": scores, "loss": cross_entropy(scores.flatten(0, 1), labels.flatten())}


class Translator(nn.Module):
    """Encoder and decoder, whose blocks all take what the encoder gave. One block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Joining() for _ in range(3))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids: Tensor, said: Tensor, labels: Tensor | None = None) -> Any:
        x = self.words(ids)
        for block in (*self.encoder, self.encoder[0]):
            x = block(x)
        y = self.words(said)
        for joining in self.decoder:
            y = joining(y, x)
        scores = self.head(y)
        if labels is None:
            return scores
        return cross_entropy(scores.flatten(0, 1), labels.flatten())


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.asks, self.block = nn.Linear(WIDE, WIDE), Block()

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        found: Tensor = self.block(y + torch.softmax(self.asks(y) @ x.mT, -1) @ x)
        return found


def built(kind: str) -> nn.Module:
    torch.manual_seed(7)
    model = Translator() if kind == "translator" else Speaker(tied=kind)
    return model.double()


def spoken(rows: int, length: int, seed: int = 1) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, WORDS, (rows, length), generator=made)


def inputs(kind: str) -> Iterator[dict[str, Tensor]]:
    """Two lengths, a smaller batch, a mask with and without holes."""
    for rows, length, seed in ((4, 5, 1), (6, 7, 2), (4, 5, 3), (3, 5, 4)):
        ids = spoken(rows, length, seed)
        if kind == "translator":
            yield {
                "ids": ids,
                "said": spoken(rows, length + 1, seed),
                "labels": spoken(rows, length + 1),
            }
            continue
        mask = torch.ones(rows, length)
        yield {"ids": ids, "mask": mask, "labels": ids}
        mask = mask.clone()
        mask[:, -2:] = 0
        yield {"ids": ids, "mask": mask, "labels": ids}


def numbers(model: nn.Module, loss: Tensor) -> Numbers:
    found: Numbers = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[f"grad {name}"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def unsplit(model: nn.Module, chunks: int, given: dict[str, Tensor]) -> Tensor:
    """The mean over micro-batches, by their rows, as a pipe takes it."""
    total = torch.zeros((), dtype=torch.float64)
    rows = len(given["ids"])
    pieces = {name: tensor.chunk(chunks) for name, tensor in given.items()}
    for at in range(len(pieces["ids"])):
        found = model(**{name: those[at] for name, those in pieces.items()})
        loss = found if isinstance(found, Tensor) else found["loss"]
        share = loss * len(pieces["ids"][at]) / rows
        share.backward()
        total += share.detach()
    return total


def expected(kind: str, chunks: int) -> list[Numbers]:
    model = built(kind)
    return [numbers(model, unsplit(model, chunks, given)) for given in inputs(kind)]


def group() -> distributed.ProcessGroup:
    assert distributed.group.WORLD is not None
    return distributed.group.WORLD


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
def test_it_gives_the_models_own_numbers(size: int, kind: str, schedule: str) -> None:
    check(ranks(size).run(trained, kind, schedule, "all", size), kind, 2)


@pytest.mark.parametrize("kind", ["layer", "translator"])
def test_data_on_the_first_rank_goes_to_all(kind: str) -> None:
    check(ranks(2).run(trained, kind, "1f1b", "first", 2), kind, 2)


def test_a_rank_may_have_several_stages() -> None:
    check(ranks(2).run(trained, "layer", "interleaved", "all", 4), "layer", 2)


# ---- what a rank keeps --------------------------------------------------------------------


def holdings(kind: str) -> tuple[list[str], list[str], int]:
    """The names it has; how many parameters of others are left, once the model is given up."""
    model = built(kind)
    pipe = Pipe(model, 2, stages=3, example=next(iter(inputs(kind))), group=group())
    names = [name for name, _ in pipe.named_parameters(remove_duplicate=False)]
    mine = {id(p) for p in pipe.parameters()}
    others = [weakref.ref(p) for p in model.parameters() if id(p) not in mine]
    del model
    gc.collect()
    return names, list(pipe.state_dict()), sum(one() is not None for one in others)


@pytest.mark.parametrize("kind", ["layer", "glue", "translator"])
def test_a_rank_keeps_its_own_under_the_models_names(kind: str) -> None:
    found = ranks(3).run(holdings, kind)
    model = built(kind)
    assert {n for names, _, _ in found for n in names} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert {n for _, state, _ in found for n in state} == set(model.state_dict())
    assert [left for _, _, left in found] == [0, 0, 0]
    own = [set(names) for names, _, _ in found]
    assert own[0] & own[1] & own[2] == set()
    if kind == "glue":  # the last has of the first's embedding what it uses
        assert [("words.weight" in names) for names in own] == [True, False, True]


# ---- settings -----------------------------------------------------------------------------


def with_and_without_labels() -> list[Any]:
    model = built("layer")
    pipe = Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())
    pipe.eval()
    with torch.no_grad():
        found = [pipe(spoken(4, 5)), pipe(ids=spoken(3, 6), labels=spoken(3, 6))]
    assert not any(module.training for module in pipe.modules())
    return found


def test_labels_may_be_left_out() -> None:
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


def test_what_is_dropped_is_as_in_one_process() -> None:
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


def test_it_is_cast_clipped_and_trained() -> None:
    found = ranks(2).run(cast_and_clipped)
    model = built("glue").float()
    given = next(iter(inputs("glue")))
    unsplit(model, 2, given)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for dtypes, _, told in found:
        assert dtypes == ["torch.float32"]
        torch.testing.assert_close(told, norm, check_dtype=False)


# ---- checkpoints --------------------------------------------------------------------------


def trained_and_saved(folder: Path) -> None:
    pipe = Pipe(built("layer"), 2, stages=3, example=next(iter(inputs("layer"))), group=group())
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    pipe.step(**next(iter(inputs("layer"))))
    optimizer.step()
    pipe.save(folder, optimizer)
    pipe.export(folder / "all.safetensors")


def loaded(folder: Path, meta: bool) -> dict[str, Tensor]:
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
def test_what_three_ranks_saved_two_go_on_with(tmp_path: Path, meta: bool) -> None:
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


# ---- when ranks differ, or one fails ------------------------------------------------------


def with_other_blocks() -> None:
    torch.manual_seed(0)
    model = Speaker(4 + distributed.get_rank())
    Pipe(model, 2, stages=2, example=next(iter(inputs("layer"))), group=group())


def test_other_models_are_refused() -> None:
    for answer in ranks(2).answers(with_other_blocks):
        assert isinstance(answer, Raised)
        assert "the model calls other units than on the first" in answer.traceback


class Chooser(Speaker):
    """It goes by an attribute that ranks may set differently."""

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
        pipe._split.partition.how.model.skips = distributed.get_rank() == 1  # type: ignore[union-attr]
        pipe(spoken(4, 5))


def test_another_division_is_refused() -> None:
    for answer in ranks(2).answers(going_other_ways):
        assert isinstance(answer, Raised)
        assert "how the forward is divided" in answer.traceback


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
    pipe.step(**given[0])  # and it goes on
    return told


def test_what_one_rank_raises_all_do() -> None:
    for told in ranks(2).run(failing_on_one):
        assert "seven are too many" in told


class Crossed(nn.Module):
    """Two branches, whose order may differ from rank to rank, as that of a set does."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDE, WIDE)
        self.left, self.right = Block(), Block()
        self.end = nn.Linear(WIDE, WIDE)
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        names = ["right", "left"] if self.turned else ["left", "right"]
        found = {name: getattr(self, name)(x) for name in names}
        made: Tensor = self.end(found["left"] * 2 - found["right"])
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


def test_units_may_be_called_in_another_order_on_another_rank() -> None:
    found = ranks(2).run(crossed)
    torch.manual_seed(3)
    x = torch.linspace(-1, 1, 4 * WIDE).view(4, WIDE)
    torch.testing.assert_close(found[1], Crossed(False)(torch.cat([x, x, x])))
