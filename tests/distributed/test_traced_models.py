"""Traced models over processes: exactness, parameters of each rank, checkpoints and errors."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from penstock import Chunk, NoChunk, Pipe, RunError
from tests.distributed.rank import Raised
from tests.distributed.ranks import SOAK, ranks
from tests.distributed.traced_models import (
    WIDE,
    Block,
    LanguageModel,
    batches,
    build,
    first_batch,
    pipe_of,
    token_ids,
    unsplit,
)
from tests.models.architecture import squares
from tests.oracle import Batch, Outcome, closely, differences, merged

# ---- every step equals the unsplit model --------------------------------------------------


def trained(kind: str, schedule: str, data: str, stages: int) -> list[Outcome]:
    pipe = pipe_of(build(kind), first_batch(kind), stages=stages, schedule=schedule, data=data)
    found = []
    for given in batches(kind):
        here = data == "all" or distributed.get_rank() == 0
        result = pipe.step(**given) if here else pipe.step()
        found.append(Outcome.of(pipe, Batch((), given), result.loss, None))
    return found


@pytest.mark.parametrize(
    ("size", "kind", "schedule", "data", "stages"),
    [
        (2, "layer", "1f1b", "first", 2),
        (3, "glue", "1f1b", "all", 3),
        (2, "translator", "zb-h1", "all", 2),
        (2, "layer", "interleaved", "all", 4),
        *(
            [
                (3, "layer", "zb-h1", "all", 3),
                (2, "glue", "zb-h1", "all", 2),
                (2, "translator", "1f1b", "first", 2),
                (3, "translator", "zb-h1", "all", 3),
            ]
            if SOAK
            else []
        ),
    ],
)
def test_traced_model_over_processes_matches_the_unsplit_model(
    size: int, kind: str, schedule: str, data: str, stages: int
) -> None:
    of_ranks = ranks(size).run(trained, kind, schedule, data, stages)
    model = build(kind)
    for found, given in zip(zip(*of_ranks, strict=True), batches(kind), strict=True):
        assert differences(merged(found, model), unsplit(model, 2, given), closely) == []


def in_replicas() -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    given = first_batch("layer")
    pipe = pipe_of(build("layer"), given, group=None, mesh=mesh)
    replica = distributed.get_rank() // 2
    mine = {name: tensor.chunk(2)[replica] for name, tensor in given.items()}
    return Outcome.of(pipe, Batch((), given), pipe.step(**mine).loss, None)


def test_traced_model_with_replicas_averages_gradients() -> None:
    found = ranks(4).run(in_replicas)
    model = build("layer")
    expected = unsplit(model, 4, first_batch("layer"))
    assert differences(merged(found, model), expected, closely) == []


# ---- optional arguments, dropout, casts ---------------------------------------------------


def with_and_without_labels() -> list[Any]:
    pipe = pipe_of(build("layer"), first_batch("layer")).eval()
    with torch.no_grad():
        found = [pipe(token_ids(4, 5)), pipe(ids=token_ids(3, 6), labels=token_ids(3, 6))]
    assert not any(module.training for module in pipe.modules())
    return found


def test_traced_model_with_and_without_optional_labels() -> None:
    found = ranks(2).run(with_and_without_labels)
    model = build("layer").eval()
    assert found[0] == [None, None]
    for output, ids in zip(found[1], (token_ids(4, 5), token_ids(3, 6)), strict=True):
        torch.testing.assert_close(output["scores"], model(ids)["scores"])


def with_dropout(**where: Any) -> list[Outcome]:
    torch.manual_seed(7)
    model = LanguageModel(drop=0.3).double()
    pipe = pipe_of(model, first_batch("layer"), schedule="1f1b", **where)
    found = []
    for step, given in enumerate(batches("layer")):
        torch.manual_seed(step)
        found.append(Outcome.of(pipe, Batch((), given), pipe.step(**given).loss, None))
    return found


def test_traced_model_dropout_equals_the_inline_runtime() -> None:
    of_ranks = ranks(2).run(with_dropout)
    expected = with_dropout(group=None, devices=["cpu", "cpu"], runtime="inline")
    for found, wanted in zip(zip(*of_ranks, strict=True), expected, strict=True):
        assert differences(merged(found, build("layer")), wanted, closely) == []


def cast_and_clipped() -> tuple[list[str], Tensor]:
    pipe = pipe_of(build("glue"), first_batch("glue")).float()
    pipe.step(**first_batch("glue"))
    norm = pipe.clip_grad_norm_(0.1)
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    return sorted({str(p.dtype) for p in pipe.parameters()}), norm


def test_traced_model_cast_to_float32_and_clipped() -> None:
    found = ranks(2).run(cast_and_clipped)
    model = build("glue").float()
    unsplit(model, 2, first_batch("glue"))
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for dtypes, norm in found:
        assert dtypes == ["torch.float32"]
        torch.testing.assert_close(norm, expected, check_dtype=False)


# ---- gradients of inputs ------------------------------------------------------------------


class Shifted(LanguageModel):
    """A model with an input split along its second dim, and inputs of other stages."""

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


def input_gradients(wants: str, data: str) -> list[Tensor | None]:
    torch.manual_seed(7)
    x, shift, whole, late = shifts(wants)
    given = x, Chunk(shift, 1), NoChunk(whole), late
    pipe = pipe_of(Shifted().double(), given, loss_fn=mse_loss, data=data)
    here = distributed.get_rank() == 0 or data == "all"
    pipe.step(*given, target=torch.zeros(6, WIDE).double()) if here else pipe.step()
    return [x.grad, late.grad]


def test_traced_model_input_gradient_on_the_first_rank() -> None:
    found = ranks(2).run(input_gradients, "x", "first")
    torch.manual_seed(7)
    model = Shifted().double()
    x, *others = shifts("x")
    mse_loss(model(x, *others), torch.zeros(6, WIDE).double()).backward()
    torch.testing.assert_close(found[0][0], x.grad, rtol=1e-10, atol=1e-10)


def test_traced_model_input_gradient_on_another_rank_is_refused() -> None:
    for answer in ranks(2).answers(input_gradients, "late", "first"):
        assert isinstance(answer, Raised)
        assert "an input that requires grad is used on stage 1" in answer.traceback
    first, last = ranks(2).run(input_gradients, "late", "all")
    assert first[1] is None
    assert last[1] is not None


# ---- parameters kept by a rank ------------------------------------------------------------


def holdings(kind: str) -> tuple[list[str], list[str], int]:
    """Return the names this rank has, and how many parameters of other ranks survive the model."""
    model = build(kind)
    pipe = pipe_of(model, first_batch(kind), stages=3)
    names = [name for name, _ in pipe.named_parameters(remove_duplicate=False)]
    mine = {id(p) for p in pipe.parameters()}
    others = [weakref.ref(p) for p in model.parameters() if id(p) not in mine]
    del model
    gc.collect()
    return names, list(pipe.state_dict()), sum(one() is not None for one in others)


@pytest.mark.parametrize("kind", ["layer", "glue", "translator"])
def test_rank_keeps_only_its_own_parameters_under_the_model_names(kind: str) -> None:
    found = ranks(3).run(holdings, kind)
    model = build(kind)
    assert {n for names, _, _ in found for n in names} == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }
    assert {n for _, state, _ in found for n in state} == set(model.state_dict())
    assert [left for _, _, left in found] == [0, 0, 0]
    own = [set(names) for names, _, _ in found]
    assert own[0] & own[1] & own[2] == set()
    if kind == "glue":  # the last rank also uses the embedding of the first
        assert [("words.weight" in names) for names in own] == [True, False, True]


def copied() -> tuple[Tensor, Tensor, Tensor]:
    pipe = pipe_of(build("glue"), first_batch("glue"))
    duplicate = copy.deepcopy(pipe)
    given = list(batches("glue"))[2]
    first = pipe.step(**given).loss
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    return first, duplicate.step(**given).loss, pipe.step(**given).loss


def test_deepcopy_of_a_pipe_over_processes_trains_independently() -> None:
    for first, of_copy, after in ranks(2).run(copied):
        assert first == of_copy != after


# ---- checkpoints --------------------------------------------------------------------------


def step_with_adam(pipe: Pipe, load: Path | None = None) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(pipe.parameters(), 0.01)
    if load is not None:
        pipe.load(load, optimizer)
    pipe.zero_grad()
    pipe.step(**first_batch("layer"))
    optimizer.step()
    return optimizer


def trained_and_saved(folder: Path) -> None:
    pipe = pipe_of(build("layer"), first_batch("layer"), stages=3)
    pipe.save(folder, step_with_adam(pipe))
    pipe.export(folder / "all.safetensors")


def resumed(folder: Path, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel().double()
    pipe = pipe_of(model, first_batch("layer"))
    step_with_adam(pipe, load=folder)
    assert not any(p.is_meta for p in pipe.parameters())
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_traced_model_checkpoint_of_three_ranks_resumes_on_two(tmp_path: Path, device: str) -> None:
    ranks(3).run(trained_and_saved, tmp_path)
    found = ranks(2).run(resumed, tmp_path, device)
    model = build("layer")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(2):
        model.zero_grad()
        unsplit(model, 2, first_batch("layer"))
        optimizer.step()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for mine in found:
        for name, value in mine.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-10, atol=1e-10)


# ---- ranks that differ, and a rank that fails ---------------------------------------------


class Chooser(LanguageModel):
    """A model whose forward depends on an attribute that ranks may set differently."""

    skips = False

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        x = first = self.words(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x + first if self.skips else x)
        return found


def different_models() -> None:
    pipe_of(LanguageModel(4 + distributed.get_rank()), first_batch("layer"))


def different_forwards() -> None:
    pipe = pipe_of(Chooser(), token_ids(4, 5))
    with torch.no_grad():
        pipe(token_ids(4, 5))
        for model in gc.get_objects():  # the pipe has its own copy of the model
            if type(model) is Chooser:
                model.skips = distributed.get_rank() == 1
        pipe(token_ids(4, 5))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (different_models, "the model calls different units on this rank than on rank 0"),
        (different_forwards, "the division of the forward"),
    ],
)
def test_different_traced_models_on_ranks_are_refused(function: Any, message: str) -> None:
    for answer in ranks(2).answers(function):
        assert isinstance(answer, Raised)
        assert message in answer.traceback


class Failing(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.shape[1] == 7 and not x.is_meta and type(x) is Tensor:
            raise ValueError("seven are too many")
        return super().forward(x, mask)


def failing_on_one() -> str:
    model = build("layer")
    assert isinstance(model.blocks, nn.ModuleList)
    model.blocks[3] = Failing().double()
    pipe = pipe_of(model, first_batch("layer"))
    given = list(batches("layer"))
    with pytest.raises(Exception, match="seven") as error:
        pipe.step(**given[2])
    pipe.step(**given[0])  # the pipe still works
    return str(error.value)


def test_error_in_a_unit_on_one_rank_is_raised_on_all_ranks() -> None:
    for message in ranks(2).run(failing_on_one):
        assert "seven are too many" in message


# ---- order of units, and hooks ------------------------------------------------------------


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


class Collecting(LanguageModel):
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


def model_and_inputs(kind: str, rank: int) -> tuple[nn.Module, Tensor, Tensor, list[int]]:
    """Return the model of a rank, an example, a larger batch, and the units of each stage."""
    torch.manual_seed(3)
    if kind == "hooks":
        return Collecting(), token_ids(4, 5), token_ids(6, 7), [3, 3]
    x = torch.linspace(-1, 1, 4 * WIDE).view(4, WIDE)
    return Crossed(turned=rank == 1), x, torch.cat([x, x, x]), [2, 2]


def evaluated(kind: str) -> Tensor | None:
    model, example, larger, stages = model_and_inputs(kind, distributed.get_rank())
    pipe = pipe_of(model, example, stages=stages)
    with torch.no_grad():
        pipe(example)
        found: Tensor | None = pipe(larger)
    return found


@pytest.mark.parametrize("kind", ["order of units", "hooks"])
def test_units_in_different_order_and_hooks_that_reference_the_parent(kind: str) -> None:
    found = ranks(2).run(evaluated, kind)
    model, _, larger, _ = model_and_inputs(kind, 0)
    torch.testing.assert_close(found[1], model(larger))


def called_after_training(traced: bool) -> str:
    model, x, _, stages = model_and_inputs("order of units", 0)
    if not traced:
        model, stages = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)), [1, 1]
    pipe = Pipe(model, 2, stages=stages, example=x if traced else None, loss_fn=squares,
                group=distributed.group.WORLD)  # fmt: skip
    with torch.no_grad():
        pipe(x)
        model(x)  # nothing was trained yet
    pipe.step(x)
    with pytest.raises(RunError) as refused:
        model(x)
    return str(refused.value)


@pytest.mark.parametrize("traced", [True, False])
def test_model_left_behind_refuses_to_be_called_after_training(traced: bool) -> None:
    """A process has trained only its stages, and the model computed with old weights elsewhere."""
    for message in ranks(2).run(called_after_training, traced):
        assert message.startswith("this model was given to a Pipe over several processes")
