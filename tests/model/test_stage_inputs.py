"""Side inputs by name go straight to the layers that name them, compared with the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import (
    BatchShapeError,
    Chunk,
    NoChunk,
    PenstockTypeError,
    Pipe,
    PipeSequential,
    RunError,
    WithDevice,
    is_recomputing,
    pop,
    skippable,
    stash,
)
from penstock.microbatch import MicrobatchRows
from penstock.model.stage_inputs import Batch, _weight_loss
from penstock.runtime.transport import Mailbox
from penstock.schedules.ir import Message
from penstock.stage.payload import Payload
from tests import oracle
from tests.support import (
    CHECKPOINTS,
    closely,
    differences,
    each_checkpoint,
    each_door,
    each_runtime,
    same_gradients,
)


class Masked(nn.Module):
    """A linear layer whose output is multiplied by a mask and an optional scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        y: Tensor = self.linear(x)
        return y * mask * scale


@skippable(stash=["far"])
class Positions(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("far", x + positions[:, None])
        return x


@skippable(pop=["far"])
class Ends(nn.Module):
    def forward(
        self, x: Tensor, extra: dict[str, Any] | None = None
    ) -> Generator[Any, Any, Tensor]:
        far: Tensor = yield pop("far")
        return x + far if extra is None else x * extra["by"][0] + far


def network() -> PipeSequential:
    """Return six layers: the first, the third and the fifth take a mask, one of them nested."""
    torch.manual_seed(0)
    layers = [
        Masked(),
        Positions(),
        PipeSequential(nn.Tanh(), WithDevice(Masked(), "cpu")),
        nn.Linear(4, 4),
        WithDevice(Masked(), "cpu"),
        Ends(),
    ]
    return PipeSequential(*layers).double()


def real(*shape: int, learns: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=learns)


def side(rows: int, learns: bool) -> dict[str, Any]:
    """Return split, whole and plain side inputs, one of them for several stages."""
    torch.manual_seed(rows)
    return {
        "positions": torch.arange(rows),
        "mask": real(rows, 1, learns=learns),
        "scale": real(learns=learns),
        "extra": {"by": [real(rows, 4, learns=learns), None], "name": "any"},
    }


def compare(pipe: Pipe, model: nn.Module, door: str, rows: int, learns: bool) -> None:
    target = torch.linspace(0, 1, rows * 4, dtype=torch.float64).view(rows, 4)
    torch.manual_seed(9)
    x = real(rows, 4, learns=learns)
    mine, theirs = (
        oracle.Batch((x.detach().clone().requires_grad_(learns),), side(rows, learns), target)
        for _ in range(2)
    )
    output = model(*theirs.inputs, **theirs.side)
    loss = functional.mse_loss(output, target)
    loss.backward()
    expected = oracle.Outcome.of(model, theirs, loss, output)
    assert differences(oracle.run_pipe(pipe, mine, door), expected, closely) == []


@each_door
@each_runtime
@each_checkpoint
@pytest.mark.parametrize("learns", [False, True])
def test_side_inputs_match_the_unsplit_model(
    checkpoint: str, runtime: str, door: str, learns: bool
) -> None:
    model = network()
    for stages in ([6], [2, 1, 3], [1] * 6):
        pipe = Pipe(
            copy.deepcopy(model),
            3,
            checkpoint,
            stages=stages,
            runtime=runtime,
            loss_fn=functional.mse_loss,
        )
        for rows in (1, 5, 7):
            model.zero_grad()
            pipe.zero_grad()
            compare(pipe, model, door, rows, learns)


def test_side_inputs_of_a_plain_sequential() -> None:
    torch.manual_seed(0)
    layers = [Masked(), nn.Tanh(), Masked()]
    pipe = Pipe(nn.Sequential(*layers).double(), 2, stages=3)
    x, mask = real(5, 4), real(5, 1)
    assert torch.equal(pipe(x, mask=mask)[:3], PipeSequential(*layers)(x[:3], mask=mask[:3]))


def test_all_inputs_by_name() -> None:
    """The first layer has no predecessor, so its first parameter may be given by name."""
    model = network()
    x, given = real(5, 4), side(5, learns=False)
    expected = model(x, **given)
    assert torch.equal(model(x=x, **given), expected)
    assert closely(Pipe(copy.deepcopy(model), 2, stages=3)(x=x, **given), expected)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        Pipe(model, 2, stages=3)(x, **given, x=x)


def test_side_inputs_with_a_default_may_be_omitted() -> None:
    model = network()
    x, given = real(5, 4), side(5, learns=False)
    del given["scale"], given["extra"]
    pipe = Pipe(copy.deepcopy(model), 2, stages=6)
    assert closely(pipe(x, **given), model(x, **given))
    del given["mask"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mask'") as caught:
        pipe(x, **given)
    assert "in stage 0 (layer 0: Masked)" in caught.value.__notes__[0]


@pytest.mark.parametrize("make", [lambda model: model, lambda model: Pipe(model, 2, stages=3)])
def test_unknown_side_input_is_refused(make: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(PenstockTypeError) as caught:
        make(network())(real(4, 4), maks=real(4, 1), mask=real(4, 1), size=3)
    assert str(caught.value) == (
        "no layer takes 'maks', 'size'. A side input goes to the layers whose forward has a "
        "parameter of that name. The names here are: extra (layer 5); mask (layer 0, 2, 4); "
        "positions (layer 1); scale (layer 0, 2, 4); x (layer 0)"
    )
    plain = PipeSequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()).double()
    with pytest.raises(
        PenstockTypeError, match=r"'mask'\. .* The names here are: input \(layer 0\)$"
    ):
        make(plain)(real(4, 4), mask=1)


def test_side_inputs_are_not_matched_by_var_keyword_parameters() -> None:
    class Anything(nn.Module):
        def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
            assert not more
            assert not named
            return x

    class Only(nn.Module):
        def forward(self, x: Tensor, /, mask: Tensor) -> Tensor:
            return x * mask

    pipe = Pipe(nn.Sequential(Anything(), Only(), Anything()), 2, stages=3)
    assert torch.equal(pipe(torch.ones(3), mask=torch.arange(3)), torch.arange(3.0))
    with pytest.raises(PenstockTypeError, match="no layer takes 'more', 'named'"):
        pipe(torch.ones(3), mask=torch.arange(3), more=1, named=2)


@each_door
def test_side_inputs_of_a_nested_pipe(door: str) -> None:
    layers = list(network())
    model = PipeSequential(*layers[:2], PipeSequential(*layers[2:5]), layers[5])
    copied = copy.deepcopy(list(model))
    copied[2] = Pipe(copied[2], 1, stages=2)
    pipe = Pipe(PipeSequential(*copied), 3, stages=4, loss_fn=functional.mse_loss)
    compare(pipe, model, door, 7, learns=True)


def test_side_inputs_of_a_compiled_layer() -> None:
    layer = Masked().double()
    compiled: Any = torch.compile(layer, backend="eager")
    pipe = Pipe(nn.Sequential(nn.Tanh(), compiled), 2, stages=2, runtime="inline")
    x, mask = real(4, 4), real(4, 1)
    assert closely(pipe(x, mask=mask), layer(x.tanh(), mask))


def test_side_inputs_go_straight_to_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages carry only the activation and the skip."""
    sent: dict[tuple[int, int], int] = {}
    send = Mailbox.send

    def watched(self: Mailbox, message: Message, payload: Payload) -> None:
        sent[message.src, message.dst] = len(payload.tensors)
        send(self, message, payload)

    monkeypatch.setattr(Mailbox, "send", watched)
    x, given = real(4, 4), side(4, learns=False)
    Pipe(network(), 2, stages=6)(x, **given)
    assert sent == {(0, 1): 1, (1, 2): 1, (1, 5): 1, (2, 3): 1, (3, 4): 1, (4, 5): 1}


def test_side_inputs_are_chunked_like_the_batch() -> None:
    seen = []

    class Sees(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, table: Tensor) -> Tensor:
            seen.append((tuple(mask.shape), tuple(table.shape)))
            return x

    pipe = Pipe(nn.Sequential(nn.Identity(), Sees()), 2, stages=2, runtime="inline")
    pipe(torch.ones(3, 4), mask=Chunk(torch.ones(5, 3), dim=1), table=NoChunk(torch.ones(5, 3)))
    assert seen == [((5, 2), (5, 3)), ((5, 1), (5, 3))]
    with pytest.raises(BatchShapeError) as caught:
        pipe.step(
            torch.ones(3, 4),
            mask=torch.ones(5, 3),
            table={"a": [torch.ones(5)]},
            target=[torch.ones(2)],
        )
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "mask",
        "table['a'][0]",
        "target[0]",
    ]
    assert "NoChunk(mask)" in str(caught.value)
    assert "Chunk(mask, dim=1)" in str(caught.value)


@dataclass
class Elsewhere:
    """A device that holds no values."""

    device = torch.device("meta")


def test_stage_inputs_are_moved_once_per_device() -> None:
    """An input is moved once per device and shared by the stages on it."""
    split = Pipe(network(), 2, stages=6)._placed_partition
    here = split.devices[0]
    split = replace(split, devices={0: here, 1: Elsewhere()}, placement=(0, 1, 1, 0, 1, 0))  # type: ignore[dict-item]
    x, mask = real(4, 4), real(4, 1)
    named = {"mask": mask, "positions": torch.arange(4)}
    batch = Batch((x,), named, (x,), chunks=2)
    stage_inputs = split.partition.build_stage_inputs(batch, split.stage_devices)
    sizes = {stage: len(values[0]) for stage, values in stage_inputs.by_stage.items()}
    assert sizes == {0: 2, 1: 1, 2: 1, 4: 1, 5: 1}
    side = {stage: stage_inputs.by_stage[stage][1][-1].values for stage in (0, 1, 2, 4)}
    assert {stage: list(values) for stage, values in side.items()} == {
        0: ["mask"],
        1: ["positions"],
        2: ["mask"],
        4: ["mask"],
    }
    assert torch.equal(side[0]["mask"], mask[2:])
    assert side[1]["positions"].device == side[2]["mask"].device == Elsewhere.device
    assert side[2]["mask"] is side[4]["mask"]
    assert (
        stage_inputs.by_stage[5][1][0] is stage_inputs.by_stage[0][1][0]
    )  # the batch itself, as the target
    assert stage_inputs.rows == MicrobatchRows((2, 2))
    assert stage_inputs.chunks == 2


def test_batch_chunked_on_another_dim() -> None:
    """The time steps come first, so the rows are on dim 1 of inputs and outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    pipe = Pipe(copy.deepcopy(model), 3, stages=3, loss_fn=functional.mse_loss)
    x, target = real(9, 7, 4, learns=True), real(9, 7, 2)
    found = pipe(Chunk(x, dim=1))
    expected = model(x)
    assert closely(found, expected)
    result = pipe.step(Chunk(x, dim=1), target=Chunk(target, dim=1), outputs=True)
    assert closely(result.loss, functional.mse_loss(expected, target))
    assert closely(result.outputs, expected)


@each_checkpoint
def test_in_place_change_of_a_shared_side_input_is_refused(checkpoint: str) -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask.mul_(2)

    x, mask = real(4, 4), real(4, 1)
    for second in (nn.Identity(), Doubles()):
        pipe = Pipe(nn.Sequential(Doubles(), second), 2, checkpoint, stages=2)
        if isinstance(second, nn.Identity):
            assert closely(pipe(x, mask=mask.clone()), x * mask * 2)
            continue
        with pytest.raises(RunError, match=r"changed a shared tensor of shape .* in place"):
            pipe(x, mask=mask)


# ---- stages that need no gradient ---------------------------------------------------------


@each_door
@each_runtime
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_gradients_stop_at_the_first_stage_that_needs_none(
    checkpoint: str, runtime: str, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen stages were recomputed, and sent gradients that no stage needed."""
    again: list[int] = []
    sent: dict[tuple[int, int], int] = {}

    class Seen(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                again.append(self.stage)
            return x

    send = Mailbox.send

    def watched(self: Mailbox, message: Message, payload: Payload) -> None:
        if message.src > message.dst:
            sent[message.src, message.dst] = sum(t is not None for t in payload.tensors)
        send(self, message, payload)

    monkeypatch.setattr(Mailbox, "send", watched)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(Seen(stage), nn.Linear(4, 4), nn.Dropout(0.0)) for stage in range(5))
    ).double()
    for at in (0, 1, 3):
        model[at].requires_grad_(False)
    pipe = Pipe(
        copy.deepcopy(model), 2, checkpoint, stages=5, runtime=runtime, loss_fn=functional.mse_loss
    )
    x, target = real(4, 4), real(4, 4)
    for _ in range(2):
        again.clear()  # the first call also finds out which outputs are detached
        if door == "step":
            pipe.step(x, target=target)
        else:
            functional.mse_loss(pipe(x), target).backward()
        functional.mse_loss(model(x), target).backward()
    assert sent == {(4, 3): 1, (3, 2): 1, (2, 1): 0, (1, 0): 0}
    times = {"never": 0, "except_last": 1, "always": 2}[checkpoint]
    assert sorted(again) == sorted([2, 3, 4] * times)
    assert same_gradients(pipe, model)


def test_retain_graph_with_a_frozen_stage() -> None:
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), 2, "always", stages=2)
    pipe[0].requires_grad_(False)
    loss = pipe(real(4, 4)).sum()
    loss.backward(retain_graph=True)
    once = pipe[1].weight.grad.clone()
    loss.backward()
    assert closely(pipe[1].weight.grad, 2 * once)


@pytest.mark.parametrize("share", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_loss_with_share_0_counts_as_0_even_if_it_is_nan(share: float | Tensor) -> None:
    """As it is if all targets of some rows are ignored."""
    assert _weight_loss(torch.tensor(torch.nan), share) == 0
