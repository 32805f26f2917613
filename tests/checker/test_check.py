"""Tests of `penstock.check` on correct models: its result, its side effects and its report."""

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
from penstock import Chunk, NoChunk, PipeSequential, Report, Weighted, WithDevice, schedules
from penstock.checker.reference import compute_difference
from penstock.checker.report import Compared
from penstock.schedules.families import FAMILIES
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


# ---- correct models -----------------------------------------------------------------------


def test_check_runs_every_schedule() -> None:
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


def test_reference_runs_by_micro_batch_for_dropout_and_batch_norm() -> None:
    x, target = batch(9)
    report = checked(network(), x, target=target, loss_fn=nn.MSELoss(), chunks=3, schedules=FEW)
    assert report.ok
    assert "micro-batch by micro-batch" in report.reference
    assert "draws random numbers and BatchNorm (4) is in training" in report.reference
    assert all(line[-4] == line[-3] == "equal" for line in report.table()[1:])


def test_reference_is_the_whole_batch_in_eval_mode() -> None:
    x, target = batch(9)
    report = checked(
        network().eval(), x, target=target, loss_fn=nn.MSELoss(), chunks=3, schedules=["1f1b"]
    )
    assert report.ok
    assert report.reference == "the unsplit model on the whole batch, in float64"


def test_check_with_deferred_batch_norm_and_uneven_batches() -> None:
    from penstock.stage.deferred_batchnorm import DeferredStatsBatchNorm

    model = DeferredStatsBatchNorm.convert_deferred_batch_norm(network())
    x, target = batch(8)
    assert checked(model, x, target=target, loss_fn=nn.MSELoss(), schedules=["1f1b"]).ok
    for rows in (1, 2, 5, 7):
        assert checked(plain(), batch(rows)[0], schedules=["1f1b"]).ok


def test_check_with_several_inputs_and_nested_outputs() -> None:
    first, second = (Do(lambda x, y: (x + y, x * y)) for _ in range(2))
    last = Do(lambda x, y: {"sum": x + y, "loss": (x * y).mean()})
    tanh = Do(lambda x, y: (x.tanh(), y))
    model = PipeSequential(first, WithDevice(second, "cpu"), tanh, last)
    x, _ = batch(8)
    report = checked(model, x, torch.rand(8, 6), schedules=FEW)
    assert report.ok
    worst = [d.name for d in report.rows[0].result.differences]  # type: ignore[union-attr]
    assert "['sum']" in worst
    assert {"gradient of input 0", "gradient of input 1"} <= set(worst)


def test_check_with_a_no_chunk_input_and_a_non_tensor_input() -> None:
    x, _ = batch(8, torch.float32)
    scaled = Do(lambda x, weights, factor: x * weights * factor)
    model = nn.Sequential(scaled, *plain(torch.float32))
    report = checked(model, x, NoChunk(torch.rand(6)), 0.5, schedules=FEW)
    assert report.ok
    assert not report.refused  # a NoChunk input stays whole while memory is measured, too


def test_check_with_rows_on_dim_one_and_no_loss() -> None:
    """The default loss of the check once depended on which dim the rows were on."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    report = checked(model, Chunk(torch.randn(5, 6, 3), dim=1), chunks=3, schedules=FEW)
    assert report.ok, str(report)
    assert "6 rows in micro-batches of 2, 2, 2" in str(report)


def test_check_converts_the_weights_of_the_loss_to_float64() -> None:
    x, _ = batch(8, torch.float32)
    labels = torch.randint(3, (8,))
    weight = torch.rand(3)
    one = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    assert checked(plain(torch.float32), x, target=labels, loss_fn=one, schedules=["1f1b"]).ok
    assert one.weight is not None
    assert one.weight.dtype == torch.float32


def test_check_of_a_first_layer_that_works_in_place() -> None:
    """The input cannot have a gradient, so there is none to compare."""
    x, _ = batch(8)
    report = checked(nn.Sequential(nn.ReLU(inplace=True), *plain()), x, schedules=FEW)
    assert report.ok
    assert {line[6] for line in report.table()[1:]} == {"-"}


def test_check_of_a_model_whose_output_is_the_loss() -> None:
    x, _ = batch(8)
    model = nn.Sequential(*plain(), Do(lambda y: y.square().mean()))
    report = checked(model, x, schedules=["1f1b"])
    assert report.ok
    assert report.table()[1][3] == "-"


def test_check_with_frozen_layers() -> None:
    model = plain()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert checked(model, batch(8)[0], schedules=FEW).ok


# ---- side effects -------------------------------------------------------------------------


def test_check_leaves_the_model_the_inputs_and_random_states() -> None:
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


def test_check_runs_under_no_grad_and_inference_mode() -> None:
    with torch.no_grad():
        assert checked(plain(), batch(8)[0], schedules=["1f1b"]).ok
    with torch.inference_mode():
        assert checked(plain(), torch.rand(8, 6), schedules=["1f1b"]).ok


# ---- memory -------------------------------------------------------------------------------


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def test_measured_memory_meets_the_forecast() -> None:
    """With one stage per rank and equal layers and micro-batches, the forecast is nearly exact."""
    report = checked(blocks(), torch.randn(16, 6), schedules=["naive", "gpipe", "1f1b"])
    assert report.ok
    found = memories(report)
    assert len(found) == 6
    for measured, forecast in found:
        assert all(m <= f for m, f in zip(measured, forecast, strict=True))
        assert max(measured) == pytest.approx(max(forecast), rel=0.05)
    alive = {tuple(measured) for measured, _ in found}
    assert len(alive) > 3  # the schedules and the checkpoint modes differ
    naive, gpipe, one_f_one_b = (measured[0] for measured, _ in found[::2])  # checkpoint never
    assert naive < one_f_one_b <= gpipe


def test_kept_losses_do_not_hold_the_memory_of_the_output() -> None:
    """The loss that mse_loss and others return has a storage as large as the whole output."""
    x = torch.randn(8, 6)
    model = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 100))
    report = checked(
        model, x, target=torch.zeros(8, 100), loss_fn=nn.MSELoss(), stages=2, schedules=["naive"]
    )
    assert report.ok
    assert functional.mse_loss(x, x).untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_weight_grad_memory_is_released_after_w(schedule: str) -> None:
    """The parameter proxies kept the tensors of the last cell alive."""
    report = checked(blocks(), torch.randn(16, 6), schedules=[schedule], runtimes=["inline"])
    assert report.ok, str(report)


def with_weights(output: Tensor, target: Tensor) -> Weighted:
    return Weighted(functional.cross_entropy(output, target), len(target))


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), with_weights])
def test_new_gradients_do_not_count_as_activation_memory(loss_fn: Any) -> None:
    """A step creates gradients for a tied parameter on another rank.

    It creates all gradients anew if its loss has weights.
    """
    words, head = nn.Embedding(50, 16), nn.Linear(16, 50)
    head.weight = words.weight
    model = nn.Sequential(words, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), head)
    x = torch.arange(10) * 5
    report = checked(model, x, target=x, loss_fn=loss_fn, schedules=["1f1b", "zb-h1"])
    assert report.ok, str(report)


# ---- arguments ----------------------------------------------------------------------------


def test_check_reports_a_stage_count_that_a_schedule_refuses() -> None:
    report = checked(plain(), batch(8)[0], stages=3, schedules=["1f1b", "interleaved"])
    assert report.ok
    assert [run.case.schedule for run in report.refused] == ["interleaved"] * 4
    assert (
        "refused: interleaved: interleaved has 2 stages per rank, and 3 is not a multiple of 2. "
        "Use stages=4." in str(report)
    )


def test_check_of_a_custom_schedule_and_one_from_a_file(tmp_path: Any) -> None:
    mine = schedules.gpipe(ranks=2, chunks=3)
    path = tmp_path / "mine.txt"
    path.write_text(penstock.dumps(schedules.one_f_one_b(ranks=2, chunks=3)))
    report = checked(plain(), batch(9)[0], stages=2, chunks=3, schedules=[mine, str(path)])
    assert report.ok
    assert [line[0] for line in report.table()[1:]] == ["your own", str(path)]
    refused = checked(plain(), batch(9)[0], stages=2, chunks=2, schedules=[mine])
    assert not refused.ok  # nothing was proved
    assert "nothing ran, so nothing is proved" in str(refused)


def test_missing_or_additional_gradient_is_a_difference() -> None:
    gradient = torch.zeros(2)
    assert compute_difference("gradients", "", None, None).size == 0
    assert compute_difference("gradients", "", None, gradient).size == torch.inf
    assert compute_difference("gradients", "", gradient, None).size == torch.inf


@pytest.mark.parametrize("expected", [1.0, torch.inf])
def test_nan_is_equal_to_nan_alone(expected: float) -> None:
    nan, other = torch.tensor([torch.nan, 1.0]), torch.tensor([expected, 1.0])
    assert compute_difference("outputs", "", nan, nan.clone()).size == 0
    assert compute_difference("outputs", "", nan, other).size == torch.inf
    assert compute_difference("outputs", "", other, nan).size == torch.inf


@pytest.mark.parametrize(("relative", "counts"), [(2e-7, False), (1e-5, True)])
def test_only_rounding_is_tolerated_in_single_precision(relative: float, counts: bool) -> None:
    expected = torch.linspace(1, 2, 5)
    found = compute_difference("outputs", "", expected * (1 + relative), expected)
    assert bool(found.size) is counts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": ["1f2b"]}, "there is no schedule '1f2b'; did you mean 1f1b?"),
        ({"schedules": []}, "schedules is empty"),
        ({"schedules": "forward-only"}, "forward-only has no backwards"),
        ({"checkpoints": ["sometimes"]}, "checkpoints must be a list of some of 'always'"),
        ({"runtimes": "inline"}, "runtimes must be a list of some of 'threads', 'inline', "),
        ({"target": torch.zeros(8)}, "a target needs a loss_fn"),
        ({"stages": 9}, "9 stages"),
        ({"quick": True, "runtimes": ["inline"]}, "quick=True chooses schedules, checkpoints and"),
        ({"chunks": 0}, "chunks"),
    ],
)
def test_check_refuses_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(penstock.ArgumentError, match=re.escape(message)):
        checked(plain(), batch(8)[0], **options)


def test_check_of_an_unsplit_model_that_fails() -> None:
    with pytest.raises(RuntimeError, match="mat1") as error:
        checked(plain(), torch.rand(8, 7))
    assert "on the CPU: the unsplit model on the whole batch" in error.value.__notes__[0]


# ---- report -------------------------------------------------------------------------------


def test_check_prints_a_table_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    report = penstock.check(plain(), batch(8)[0], schedules=["1f1b"], stages=2)
    out = capsys.readouterr().out
    assert out == f"{report}\n"
    assert out.startswith("model      155 parameters; stages of 2 + 2 layers; 8 rows in")
    assert "equal in all 4 runs, to 1e-10\nlargest difference: " in out
    penstock.check(plain(), batch(8)[0], schedules=["1f1b"], stages=2, quiet=True)
    assert capsys.readouterr().out == ""


def test_report_converts_to_json() -> None:
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


def test_check_calls_progress() -> None:
    updates: list[tuple[int, int, str]] = []
    checked(
        plain(), batch(8)[0], schedules=["1f1b"], progress=lambda *update: updates.append(update)
    )
    assert updates[0] == (0, 4, "1f1b, never, inline")
    assert updates[-1] == (4, 4, "done")
