"""`Pipe`: its arguments, the errors it raises, and its behaviour as a module."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import (
    ArgumentError,
    InvalidScheduleError,
    Pipe,
    PipeSequential,
    is_checkpointing,
    schedules,
)
from tests.support import (
    Do,
    Pop,
    Stash,
    Watch,
    batch,
    each_checkpoint,
    each_door,
    network,
    plain,
    trained,
    whole,
)

# ---- errors -------------------------------------------------------------------------------


def test_pipe_refuses_a_model_that_is_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"needs an nn\.Module, not str"):
        Pipe("layers")  # type: ignore[arg-type]


def test_pipe_of_a_model_that_is_not_sequential_needs_an_example() -> None:
    with pytest.raises(ValueError, match=r"Pipe\(model, example=batch\)"):
        Pipe(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="Pass a batch as example="):
        Pipe(nn.Linear(1, 1), stages=2)


@pytest.mark.parametrize("chunks", [0, -3, 1.5, "2", None, True])
def test_pipe_refuses_invalid_chunks(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"chunks must be a positive integer, not {chunks!r}"):
        Pipe(plain(), chunks)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "checkpoint",
            "sometimes",
            "checkpoint must be one of always, except_last, never, not",
        ),
        ("checkpoint", None, "checkpoint must be one of"),
        (
            "runtime",
            "processes",
            "runtime must be one of 'threads', 'inline', 'graph', 'auto', not 'processes'",
        ),
        ("reduction", "none", "reduction must be one of None, 'mean', 'sum', not 'none'"),
        ("devices", 2, "a list with one device for each rank, not their number, 2"),
        ("schedule", 3, "schedule must be a name, a Schedule or the path of a file, not 3"),
        ("schedule", "2f2b", "there is no schedule '2f2b'"),
        ("schedule", "forward-only", "forward-only has no backwards"),
    ],
)
def test_pipe_refuses_invalid_options(option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipe(plain(), 2, **{"stages": 4, option: value})


def test_pipe_repr_lists_tied_weights() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    layers[1].weight = layers[0].weight
    shown = repr(Pipe(nn.Sequential(*layers), stages=2))
    assert shown.endswith("\n  tied 1.weight on rank 1 is 0.weight of rank 0)")


def test_pipe_refuses_a_schedule_that_deadlocks() -> None:
    stuck = penstock.loads("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B1 1B0")
    with pytest.raises(InvalidScheduleError, match="0B0 waits for 1B0"):
        Pipe(plain(), 2, stages=2, schedule=stuck)


def test_pipe_refuses_a_schedule_for_other_sizes() -> None:
    with pytest.raises(ArgumentError, match="the schedule is for 4 micro-batches, not 2: set"):
        Pipe(plain(), 2, stages=4, schedule=schedules.one_f_one_b(4, 4))
    with pytest.raises(ArgumentError, match="the schedule is for 3 stages on 3 ranks, but there"):
        Pipe(plain(), 2, stages=4, schedule=schedules.one_f_one_b(3, 2))


def test_pipe_refuses_a_file_that_is_not_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("buy milk")
    with pytest.raises(penstock.FormatError, match="'buy' is not an action"):
        Pipe(plain(), 2, stages=4, schedule=file)
    with pytest.raises(ArgumentError, match=r"there is no file '.*nothing.txt' to read a schedule"):
        Pipe(plain(), 2, stages=4, schedule=tmp_path / "nothing.txt")


@each_door
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((), TypeError, "a pipe needs a tensor among its inputs, but got nothing"),
        ((1, [2]), TypeError, "a pipe needs a tensor among its inputs, but got int, list"),
        ((torch.zeros(2, 6, device="meta"),), ValueError, "on meta, but the first stage is on cpu"),
        ((torch.zeros(4, 6), torch.zeros(3)), RuntimeError, "micro-batches"),
        ((torch.zeros(4, 6), torch.zeros(8)), ValueError, r"input 1, of shape \(8,\)"),
    ],
)
def test_pipe_refuses_inputs_that_cannot_be_chunked(
    inputs: tuple[Any, ...], error: type[Exception], message: str, door: str
) -> None:
    pipe = Pipe(plain(), 4, stages=4, loss_fn=torch.sum)
    with pytest.raises(error, match=message):
        pipe.step(*inputs) if door == "step" else pipe(*inputs)


# ---- a pipe as a module -------------------------------------------------------------------


def test_pipe_len_index_slice_and_iteration() -> None:
    model = plain()
    pipe = Pipe(model, 2, stages=2)
    assert len(pipe) == 4
    assert list(pipe) == list(model) == list(pipe.children())
    assert pipe[1] is model[1]
    assert pipe[-1] is model[3]
    assert isinstance(pipe[1:3], nn.Sequential)
    assert list(pipe[1:3]) == [model[1], model[2]]
    with pytest.raises(IndexError):
        pipe[4]


def test_pipe_names_parameters_and_state_dict_equal_the_model() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(6, 6), norm=nn.BatchNorm1d(6)))
    model.register_buffer("table", torch.ones(2))
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    pipe = Pipe(model, 2, stages=2)
    assert [name for name, _ in pipe.named_children()] == ["first", "norm"]
    assert dict(pipe.named_parameters()) == dict(model.named_parameters())
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe.first is model.first


def test_pipe_load_state_dict_with_assign() -> None:
    pipe = Pipe(plain(), 2, stages=4)
    x, _ = batch(4)
    zeros = {name: torch.zeros_like(value) for name, value in pipe.state_dict().items()}
    pipe.load_state_dict(zeros, assign=True)
    pipe(x).sum().backward()
    assert not pipe(x).any()
    assert all(p.grad is not None for p in pipe.parameters())


def test_pipe_train_and_eval_reach_the_layers() -> None:
    pipe = Pipe(network().eval(), 2, stages=4)
    assert not pipe.training
    assert all(not layer.training for layer in pipe)
    assert pipe.train() is pipe
    assert all(layer.training for layer in pipe)
    pipe.eval()
    x, _ = batch(4)
    assert torch.equal(pipe(x), pipe(x))


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda pipe: pipe.half(), torch.float16),
        (lambda pipe: pipe.bfloat16(), torch.bfloat16),
        (lambda pipe: pipe.float(), torch.float32),
        (lambda pipe: pipe.to(torch.float16), torch.float16),
        (lambda pipe: pipe.to(dtype=torch.float32), torch.float32),
        (lambda pipe: pipe.type(torch.float32), torch.float32),
    ],
)
def test_pipe_cast_to_another_dtype(cast: Any, dtype: torch.dtype) -> None:
    pipe = Pipe(plain(), 2, stages=4)
    assert cast(pipe) is pipe
    assert {p.dtype for p in pipe.parameters()} == {dtype}
    y = pipe(torch.randn(4, 6).to(dtype))
    assert y.dtype == dtype
    y.sum().backward()


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cuda"),
        lambda pipe: pipe.to(torch.device("meta")),
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(0),
        lambda pipe: pipe.xpu(),
        lambda pipe: pipe.to_empty(device="meta"),
        lambda pipe: nn.Sequential(pipe).to("meta"),
    ],
)
def test_pipe_refuses_to_be_moved(move: Any) -> None:
    pipe = Pipe(plain(), 2, stages=4)
    with pytest.raises(TypeError, match=r"it cannot be moved. Make another Pipe.*Casting"):
        move(pipe)
    assert {(p.device.type, p.dtype) for p in pipe.parameters()} == {("cpu", torch.float64)}


def test_pipe_repr_lists_options_stages_and_skips() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Stash(), nn.ReLU(), Pop())
    assert repr(Pipe(model, 3, "always", stages=[2, 1, 1], schedule="1f1b")).splitlines() == [
        "Pipe(chunks=3, checkpoint='always', runtime='threads', schedule='1f1b',",
        "  stage 0 (layers 0 to 1: Linear, Stash) on cpu, 42 parameters",
        "  stage 1 (layer 2: ReLU) on cpu, 0 parameters",
        "  stage 2 (layer 3: Pop) on cpu, 0 parameters",
        "  skip 'far': stage 0 to 2)",
    ]


def test_pipe_apply_and_requires_grad_reach_the_layers() -> None:
    pipe = Pipe(plain(), 2, stages=4)

    def zero(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    pipe.apply(zero)
    assert not pipe[0].weight.any()
    pipe.requires_grad_(False)
    assert not pipe(batch(4)[0]).requires_grad


def test_pipe_refuses_to_run_with_a_replaced_layer() -> None:
    pipe = Pipe(plain(), 2, stages=4)
    pipe._modules["2"] = nn.Linear(8, 8).double()
    with pytest.raises(RuntimeError, match="layer '2' was replaced after the pipe was made"):
        pipe(batch(4)[0])


def test_pipe_runs_with_a_replaced_child_of_a_layer() -> None:
    pipe = Pipe(nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Tanh()), 2, stages=2)
    pipe[0][0] = nn.Linear(6, 2)
    y = pipe(torch.randn(4, 6))
    assert y.shape == (4, 2)
    y.sum().backward()
    assert pipe[0][0].weight.grad is not None


@each_door
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_pipe_trained_with_an_optimizer_equals_the_model(make: Any, door: str) -> None:
    model = plain()
    pipe = Pipe(copy.deepcopy(model), 3, stages=4, loss_fn=functional.mse_loss)
    ours, theirs = make(model.parameters(), lr=0.1), make(pipe.parameters(), lr=0.1)
    x, target = batch(7)
    for _ in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        whole(model, x, target, functional.mse_loss)
        trained(pipe, x, target, door)
        ours.step()
        theirs.step()
    for p, q in zip(pipe.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-8, atol=1e-8)


# ---- inputs and outputs -------------------------------------------------------------------


def test_pipe_sequential_unpacks_tuples() -> None:
    layers = [Do(lambda a, b: (a + b, a - b)), Do(lambda a, b: [a * b, "kept"]), Do(tuple)]
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    found, names = Pipe(PipeSequential(*layers), 2, stages=3)(x, y)
    assert torch.allclose(found, x**2 - y**2, atol=1e-6)
    assert names == ["kept", "kept", "kept"][: len(names)]
    pair = Pipe(nn.Sequential(layers[0], Do(lambda both: both[0])), 2, stages=2)(x, y)
    assert torch.allclose(pair, x + y)


def test_pipe_with_nested_outputs() -> None:
    def made(x: Tensor) -> Any:
        return {"rows": x, "sum": x.sum(), "pair": (x[:, 0], None), "size": len(x)}

    found = Pipe(nn.Sequential(nn.Identity(), Do(made)), 2, stages=2)(torch.ones(3, 2))
    assert torch.equal(found["rows"], torch.ones(3, 2))
    assert torch.stack(found["sum"]).tolist() == [4, 2]
    assert found["pair"][0].shape == (3,)
    assert found["pair"][1] == [None, None]
    assert found["size"] == [2, 1]


@pytest.mark.parametrize("rows", range(1, 10))
def test_pipe_with_any_batch_size(rows: int) -> None:
    seen: list[int] = []
    pipe = Pipe(nn.Sequential(nn.Linear(6, 3), Watch(lambda x: seen.append(len(x)))), 4, stages=2)
    assert pipe(torch.randn(rows, 6)).shape == (rows, 3)
    assert seen == [len(piece) for piece in torch.empty(rows).chunk(4)]


# ---- options ------------------------------------------------------------------------------


def test_pipe_defaults() -> None:
    pipe = Pipe(plain())
    assert (pipe.chunks, pipe.checkpoint, pipe.runtime) == (1, "except_last", "threads")
    schedule = pipe.forecast().program.schedule
    assert (schedule.stages, schedule.ranks, schedule.chunks) == (1, 1, 1)


@each_checkpoint
def test_pipe_checkpoint_modes_in_the_program(checkpoint: str) -> None:
    recomputed = Pipe(plain(), 3, checkpoint, stages=4).forecast().program.schedule.recomputed
    cells = {(stage, i) for stage in range(4) for i in range(3)}
    expected = {
        "always": cells,
        "except_last": {cell for cell in cells if cell[1] < 2},
        "never": set(),
    }
    assert recomputed == expected[checkpoint]


def test_pipe_recomputes_the_stages_and_micro_batches_of_its_choice() -> None:
    words = Pipe(plain(), 3, ["always", False, "except_last", "never"], stages=4)
    expected = {*((0, i) for i in range(3)), (2, 0), (2, 1)}
    assert words.forecast().program.schedule.recomputed == expected
    cells = Pipe(plain(), 3, lambda stage, microbatch: stage == 3 and microbatch > 0, stages=4)
    assert cells.forecast().program.schedule.recomputed == {(3, 1), (3, 2)}
    # A batch of two rows has two micro-batches, of which "except_last" recomputes the first.
    cells.checkpoint = words.checkpoint
    seen: list[bool] = []
    cells[2].register_forward_hook(lambda *given: seen.append(is_checkpointing()))
    cells(batch(2)[0]).sum().backward()
    assert seen == [True, False, False]


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("sometimes", "checkpoint must be one of always, except_last, never, not 'sometimes'"),
        (True, "or a function of (stage, micro-batch), not True"),
        (["always"], "checkpoint has 1 entries, but there are 4 stages"),
        (["always", "never", "never", 1], "True or False, not 1"),
    ],
    ids=["word", "bool", "length", "entry"],
)
def test_pipe_refuses_an_unknown_recomputation(checkpoint: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Pipe(plain(), 3, checkpoint, stages=4)


def test_pipe_keeps_the_recompute_actions_of_a_schedule() -> None:
    """The option `checkpoint` does not remove them."""
    by_hand = penstock.loads("0F0 0F1 0B1 0R0 0B0 \n 1F0 1F1 1B1 1B0")
    pipe = Pipe(plain(), 2, "never", stages=2, schedule=by_hand)
    assert pipe.forecast().program.schedule.recomputed == {(0, 0)}
    checkpointing: list[bool] = []
    pipe[0].register_forward_hook(lambda *given: checkpointing.append(is_checkpointing()))
    pipe(batch(4)[0]).sum().backward()
    assert checkpointing == [True, False, False]


def test_pipe_forecast_equals_the_schedule() -> None:
    pipe = Pipe(plain(), 8, "never", stages=4, schedule="1f1b")
    forecast = pipe.forecast()
    assert forecast.program.schedule == schedules.one_f_one_b(4, 8)
    assert round(100 * forecast.bubble, 1) == 27.3
    assert forecast.peak == (4, 3, 2, 1)


@pytest.mark.parametrize("door", ["step", "forward"])
def test_pipe_says_once_what_too_few_chunks_cost(
    door: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(**options: Any) -> list[str]:
        caplog.clear()
        pipe = Pipe(plain(), stages=2, devices=["cpu"] * 2, **options)
        x, y = batch(8)
        with torch.no_grad():
            pipe(x)
        assert not caplog.records  # only training is slower than it could be
        for _ in range(2):
            if door == "step":
                pipe.step(x, target=y, loss_fn=functional.mse_loss)
            else:
                pipe(x).sum().backward()
        return [record.getMessage() for record in caplog.records]

    (message,) = train(chunks=1)
    assert "chunks=1 for 2 stages: the ranks are idle for 50% of the time" in message
    assert train(chunks=2) == train(chunks=1, schedule="naive") == []


def test_pipe_in_a_layer_of_another_says_nothing_about_chunks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pipe = Pipe(plain(), stages=2, devices=["cpu"] * 2)

        def forward(self, x: Tensor) -> Any:
            return self.pipe(x)

    pipe = Pipe(nn.Sequential(Layer(), nn.Identity()), chunks=2, stages=2, devices=["cpu"] * 2)
    x, y = batch(8)
    for _ in range(2):
        pipe.step(x, target=y, loss_fn=functional.mse_loss)
    assert not caplog.records


class Tempered(nn.Module):
    """A model with settings of its own."""

    default_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.temperature: Any = 1.0
        self.config = {"heads": 2}

    @property
    def doubled(self) -> float:
        raise AssertionError("the property is not read")

    def predict(self, x: Tensor) -> Tensor:
        return self.forward(x).mean()

    def forward(self, x: Tensor) -> Tensor:
        scale: float = self.temperature * self.default_scale
        y: Tensor = self.last(self.first(x).tanh() * scale)
        return y


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", 3.0, r"pipe.temperature = 3.0 would change nothing.* model.temperature = "),
        (
            "temperature",
            torch.tensor(3.0),
            r"pipe.temperature = Tensor\(...\) would change nothing",
        ),
        ("temperature", nn.Parameter(torch.tensor(3.0)), "is an attribute of the model"),
        ("default_scale", 3.0, "is an attribute of the model, a Tempered"),
        ("doubled", 3.0, "is an attribute of the model"),
        ("predict", 3, "is a method of the model"),
    ],
)
def test_attribute_of_the_model_cannot_be_set_on_the_pipe(
    name: str, value: Any, problem: str
) -> None:
    x = torch.ones(4, 4)
    model = Tempered()
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x)
    before = pipe(x)
    with pytest.raises(ArgumentError, match=problem):
        setattr(pipe, name, value)
    torch.testing.assert_close(pipe(x), before)
    with pytest.raises(AttributeError, match=f"model.{name}"):
        getattr(pipe, name)
    assert not hasattr(pipe, name)


def test_attribute_that_is_set_on_the_model_changes_the_pipe() -> None:
    x = torch.ones(4, 4)
    model = Tempered()
    pipe = Pipe(model, 2, stages=2, devices=["cpu"] * 2, example=x)
    before = pipe(x)
    model.temperature = 3.0
    assert not torch.equal(pipe(x), before)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.config = {"heads": 3}  # read from the model, so it is set there
    assert model.config == pipe.config == {"heads": 3}
    pipe.note = "mine"  # which the model does not have
    assert pipe.note == "mine"
