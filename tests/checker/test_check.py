"""What a check says of models that are right, what it leaves alone, and how it reads."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Chunk, NoChunk, PipeSequential, Report, WithDevice, schedules
from penstock.checker.report import Compared
from penstock.schedules.registry import FAMILIES
from tests.support import Do, batch, crews, network, plain

FEW = ["naive", "1f1b", "interleaved"]


def checked(model: nn.Module, *inputs: Any, **options: Any) -> Report:
    return penstock.check(model, *inputs, quiet=True, **options)


def memories(report: Report) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    results = [run.result for run in report.rows]
    return [
        (r.memory.measured, r.memory.forecast)
        for r in results
        if isinstance(r, Compared) and r.memory
    ]


# ---- models that are right ----------------------------------------------------------------


def test_every_schedule_is_run_or_refused_with_its_message() -> None:
    x, target = batch(10, torch.float32)
    report = checked(network(torch.float32), x, target=target, loss_fn=nn.MSELoss(), chunks=3)
    assert report.ok
    assert report
    assert report.problems == {}
    report.raise_if_wrong()
    trained = [name for name, family in FAMILIES.items() if family.trains]
    assert [line[0] for line in report.table()[1:]] == [*trained, "fit"]
    assert len(report.rows) == 4 * (len(trained) + 1)
    assert report.refused == []
    assert len(memories(report)) == 2 * (len(trained) + 1)
    assert report.worst is not None
    assert report.worst[1].size < 1e-12


def test_a_model_that_draws_and_normalises_goes_micro_batch_by_micro_batch() -> None:
    x, target = batch(9)
    report = checked(network(), x, target=target, loss_fn=nn.MSELoss(), chunks=3, schedules=FEW)
    assert report.ok
    assert "micro-batch by micro-batch" in report.reference
    assert "draws random numbers and BatchNorm (4) is in training" in report.reference
    assert all(line[-4] == line[-3] == "equal" for line in report.table()[1:])


def test_in_eval_mode_the_whole_batch_is_the_reference() -> None:
    x, target = batch(9)
    report = checked(
        network().eval(), x, target=target, loss_fn=nn.MSELoss(), chunks=3, schedules=["1f1b"]
    )
    assert report.ok
    assert report.reference == "the unsplit model on the whole batch, in float64"


def test_deferred_batch_norm_and_uneven_batches_of_any_size() -> None:
    from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm

    model = DeferredStatsBatchNorm.convert_deferred_batch_norm(network())
    x, target = batch(8)
    assert checked(model, x, target=target, loss_fn=nn.MSELoss(), schedules=["1f1b"]).ok
    for rows in (1, 2, 5, 7):
        assert checked(plain(), batch(rows)[0], schedules=["1f1b"]).ok


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * y


class One(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x + y, "loss": (x * y).mean()}


def test_several_inputs_and_any_outputs() -> None:
    model = PipeSequential(Two(), WithDevice(Two(), "cpu"), nn.Module(), One())
    model[2] = Do(lambda x, y: (x.tanh(), y))
    x, _ = batch(8)
    report = checked(model, x, torch.rand(8, 6), schedules=FEW)
    assert report.ok
    worst = [d.name for d in report.rows[0].result.differences]  # type: ignore[union-attr]
    assert "['sum']" in worst
    assert {"gradient of input 0", "gradient of input 1"} <= set(worst)


def test_an_input_that_is_given_whole_and_one_that_is_no_tensor() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, weights: Tensor, factor: float) -> Tensor:
            return x * weights * factor

    x, _ = batch(8, torch.float32)
    model = nn.Sequential(Scaled(), *plain(torch.float32))
    report = checked(model, x, NoChunk(torch.rand(6)), 0.5, schedules=FEW)
    assert report.ok
    assert not report.refused  # memory is measured with a micro-batch, and that is not cut either


def test_rows_on_another_dim_and_no_loss() -> None:
    """The loss that stands in for the missing one depended on where the rows were."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    report = checked(model, Chunk(torch.randn(5, 6, 3), dim=1), chunks=3, schedules=FEW)
    assert report.ok, str(report)
    assert "6 rows in micro-batches of 2, 2, 2" in str(report)


def test_a_loss_with_weights_of_its_own_is_in_float64_too() -> None:
    x, _ = batch(8, torch.float32)
    labels = torch.randint(3, (8,))
    weight = torch.rand(3)
    one = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    assert checked(plain(torch.float32), x, target=labels, loss_fn=one, schedules=["1f1b"]).ok
    assert one.weight is not None
    assert one.weight.dtype == torch.float32


def test_a_first_layer_that_works_in_place() -> None:
    """Its input cannot have a gradient, and so there is none to compare."""
    x, _ = batch(8)
    report = checked(nn.Sequential(nn.ReLU(inplace=True), *plain()), x, schedules=FEW)
    assert report.ok
    assert {line[6] for line in report.table()[1:]} == {"-"}


def test_an_output_that_is_the_loss() -> None:
    x, _ = batch(8)
    model = nn.Sequential(*plain(), Do(lambda y: y.square().mean()))
    report = checked(model, x, schedules=["1f1b"])
    assert report.ok
    assert report.table()[1][3] == "-"


def test_frozen_layers() -> None:
    model = plain()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert checked(model, batch(8)[0], schedules=FEW).ok


# ---- what it leaves alone -----------------------------------------------------------------


def test_nothing_of_the_users_is_touched() -> None:
    model = network(torch.float32)
    x, target = batch(8, torch.float32)
    x.requires_grad_()
    functional.mse_loss(model(x), target).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    of_x = x.grad.clone() if x.grad is not None else None
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    threads = torch.get_num_threads(), crews()
    assert checked(model, x, target=target, loss_fn=nn.MSELoss(), schedules=["1f1b"]).ok
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # type: ignore[index]
    assert (torch.get_num_threads(), crews()) == threads
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, after, gradients))
    assert of_x is not None
    assert x.grad is not None
    assert torch.equal(x.grad, of_x)
    assert model.training


def test_it_runs_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert checked(plain(), batch(8)[0], schedules=["1f1b"]).ok
    with torch.inference_mode():
        assert checked(plain(), torch.rand(8, 6), schedules=["1f1b"]).ok


# ---- memory -------------------------------------------------------------------------------


def test_the_forecast_of_memory_is_met() -> None:
    """To the byte on ranks of one stage with equal micro-batches and layers that save alike."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    report = checked(model, torch.randn(16, 6), schedules=["naive", "gpipe", "1f1b"])
    assert report.ok
    found = memories(report)
    assert len(found) == 6
    for measured, forecast in found:
        assert all(m <= f for m, f in zip(measured, forecast, strict=True))
        assert max(measured) == pytest.approx(max(forecast), rel=0.05)
    alive = {tuple(measured) for measured, _ in found}
    assert len(alive) > 3  # the families and the modes differ


def test_the_losses_of_a_step_keep_a_number_each() -> None:
    """PyTorch gives the loss of mse_loss and others the memory of the whole output."""
    x = torch.randn(8, 6)
    model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 100))
    report = checked(
        model, x, target=torch.zeros(8, 100), loss_fn=nn.MSELoss(), stages=2, schedules=["naive"]
    )
    assert report.ok
    assert functional.mse_loss(x, x).untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_what_a_w_needs_goes_with_it(schedule: str) -> None:
    """The stand-ins for the weights kept those of the last cell."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    report = checked(model, torch.randn(16, 6), schedules=[schedule], runtimes=["inline"])
    assert report.ok, str(report)


def with_weights(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, target), len(target)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), with_weights])
def test_gradients_that_a_step_makes_anew_are_no_activations(loss_fn: Any) -> None:
    """Those of a tied parameter on another rank, and all of a step whose loss has weights."""
    words, head = nn.Embedding(50, 16), nn.Linear(16, 50)
    head.weight = words.weight
    model = nn.Sequential(words, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), head)
    x = torch.arange(10) * 5
    report = checked(model, x, target=x, loss_fn=loss_fn, schedules=["1f1b", "zb-h1"])
    assert report.ok, str(report)


def test_memory_grows_with_the_schedule() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    x = torch.randn(16, 6)
    peaks = {
        name: memories(
            checked(model, x, schedules=[name], checkpoints=["never"], runtimes=["inline"])
        )[0][0][0]
        for name in ("naive", "gpipe", "1f1b")
    }
    assert peaks["naive"] < peaks["1f1b"] <= peaks["gpipe"]


# ---- sizes and wishes ---------------------------------------------------------------------


def test_stages_that_do_not_suit_a_family_are_said() -> None:
    report = checked(plain(), batch(8)[0], stages=3, schedules=["1f1b", "interleaved"])
    assert report.ok
    assert [run.case.schedule for run in report.refused] == ["interleaved"] * 4
    assert (
        "refused: interleaved: interleaved has 2 stages per rank, and 3 is not a multiple of 2. "
        "Use stages=4." in str(report)
    )


def test_a_schedule_of_ones_own_and_one_from_a_file(tmp_path: Any) -> None:
    mine = schedules.gpipe(ranks=2, chunks=3)
    path = tmp_path / "mine.txt"
    path.write_text(penstock.dumps(schedules.one_f_one_b(ranks=2, chunks=3)))
    report = checked(plain(), batch(9)[0], stages=2, chunks=3, schedules=[mine, str(path)])
    assert report.ok
    assert [line[0] for line in report.table()[1:]] == ["your own", str(path)]
    refused = checked(plain(), batch(9)[0], stages=2, chunks=2, schedules=[mine])
    assert not refused.ok  # nothing was proved
    assert "nothing ran, so nothing is proved" in str(refused)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": ["1f2b"]}, "there is no schedule '1f2b'; did you mean 1f1b?"),
        ({"schedules": []}, "schedules is empty"),
        ({"schedules": "forward-only"}, "forward-only has no backwards"),
        ({"checkpoints": ["sometimes"]}, "checkpoints is a list of some of 'always'"),
        ({"runtimes": "inline"}, "runtimes is a list of some of 'threads', 'inline', "),
        ({"target": torch.zeros(8)}, "a target needs a loss_fn"),
        ({"stages": 9}, "9 stages"),
        ({"chunks": 0}, "chunks"),
    ],
)
def test_what_is_asked_wrongly_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(penstock.ArgumentError, match=re.escape(message)):
        checked(plain(), batch(8)[0], **options)


def test_an_unsplit_model_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError, match="mat1") as error:
        checked(plain(), torch.rand(8, 7))
    assert "on the CPU: the unsplit model on the whole batch" in error.value.__notes__[0]


# ---- how it reads -------------------------------------------------------------------------


def test_it_prints_a_table_unless_it_is_to_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    report = penstock.check(plain(), batch(8)[0], schedules=["1f1b"], stages=2)
    out = capsys.readouterr().out
    assert out == f"{report}\n"
    assert out.startswith("model      155 parameters; stages of 2 + 2 layers; 8 rows in")
    assert "equal in all 4 runs, to 1e-10\nlargest difference: " in out
    penstock.check(plain(), batch(8)[0], schedules=["1f1b"], stages=2, quiet=True)
    assert capsys.readouterr().out == ""


def test_a_report_is_json() -> None:
    model = nn.Sequential(*plain(), Do(lambda x: x - x.mean(0)))
    report = checked(model, batch(8)[0], schedules=["1f1b", "zb-h1"])
    read = json.loads(json.dumps(report.as_dict()))
    assert read["ok"] is False
    assert len(read["runs"]) == 8
    first = read["runs"][0]
    assert (first["schedule"], first["ranks"], first["runtime"]) == ("1f1b", 4, "inline")
    assert first["result"] == "compared"
    assert {worst["kind"] for worst in first["worst"]} >= {"loss", "outputs", "gradients"}
    assert len(first["memory"]["measured"]) == 4
    assert any("layer '4' (Do)" in hint for hint in read["hints"])


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    checked(plain(), batch(8)[0], schedules=["1f1b"], progress=lambda *news: told.append(news))
    assert told[0] == (0, 4, "1f1b, never, inline")
    assert told[-1] == (4, 4, "done")
