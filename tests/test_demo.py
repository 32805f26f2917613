from __future__ import annotations

import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from penstock import Pipe, cli
from penstock.cli import demo, report
from penstock.demo import session as found
from penstock.demo.model import (
    DemoSize,
    build_byte_transformer,
    iter_random_batches,
    load_stdlib_text,
    next_byte_loss,
)
from penstock.demo.session import (
    DeviceLayout,
    compare_gradients,
    find_devices,
    generate_text,
    measure_steps,
    parse_devices,
    train,
)
from penstock.errors import ArgumentError, MissingExtra

pytest.importorskip("matplotlib")

TINY = DemoSize(width=8, blocks=2, heads=2, context=8, rows=4)
CPUS = parse_devices("cpu,cpu")
KINDS = ("svg", "png", "json", "html")
PICTURES = {f"{name}.{kind}" for name in ("naive", "pipeline") for kind in KINDS}

Run = Callable[[str], int]
LaidOut = tuple[nn.Sequential, DeviceLayout, tuple[Tensor, Tensor]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return a function that runs a tiny `penstock demo` in an empty directory: its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(report, "ACTIVITY_SECONDS", 600.0)
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(demo, "CPU_SIZE", TINY)

    def call(words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["penstock", "demo", *words.split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return call


@pytest.fixture
def laid_out() -> LaidOut:
    """Return a tiny model, its layout on two CPU ranks, and a batch."""
    model = build_byte_transformer(TINY)
    batch = next(iter_random_batches(load_stdlib_text(), TINY.rows, TINY.context, seed=0))
    return model, DeviceLayout(CPUS, (1.0,) * len(model)), batch


# ---- the command --------------------------------------------------------------------------


def test_demo_trains_compares_checks_and_lists_saved_files(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, threads = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(3)
    try:
        assert run("--steps 40 --chunks 2 --devices cpu,cpu --out pictures") == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    gc.collect()
    assert threading.active_count() == threads
    answer = capsys.readouterr()
    assert answer.err == ""
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == PICTURES
    for name in ("naive", "pipeline"):
        assert "<svg" in (tmp_path / "pictures" / f"{name}.svg").read_text()
        assert f"pictures/{name}.svg, .png" in answer.out
        assert f"pictures/{name}.json" in answer.out
    assert "naive model parallelism, measured" in (tmp_path / "pictures/naive.svg").read_text()
    assert "under 1f1b, measured" in (tmp_path / "pictures/pipeline.svg").read_text()
    assert re.search(r"^the pipeline is \d+\.\d\d times as fast on 2 devices$", answer.out, re.M)
    assert "gradients in float64: the same as the unsplit model's" in answer.out
    lines = re.findall(r"^step +(\d+)/40  (.*)$", answer.out, re.M)  # without a terminal
    assert 8 <= len(lines) <= 12
    assert (lines[0][0], lines[-1][0]) == ("1", "40")
    for _, words in lines:
        assert re.fullmatch(r"loss \d\.\d\d +[\d.]+k? tokens/s  bubble +\d+%", words), words


def test_demo_in_a_terminal_shows_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(demo, "Console", lambda: terminal)
    demo.show_progress(
        (demo.TrainingProgress(step, 2.5, 12345.0, 0.125) for step in (1, 2)), steps=2
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "━" in shown
    assert "2/2 loss 2.50  12.35k tokens/s  bubble 12%" in shown


def test_demo_exits_with_1_if_gradients_differ(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Pipe.step

    def slightly_wrong(pipe: Pipe, *inputs: Any, **options: Any) -> Any:
        result = step(pipe, *inputs, **options)
        first = next(pipe.parameters()).grad
        assert first is not None
        first.view(-1)[0] += 1e-8
        return result

    monkeypatch.setattr(Pipe, "step", slightly_wrong)
    assert run("--steps 1 --chunks 2 --devices cpu,cpu") == 1
    answer = capsys.readouterr().out
    assert "gradients in float64: NOT the same as the unsplit model's" in answer
    assert "largest difference 1.0e-08 (at most 1e-10)" in answer


def test_demo_with_another_schedule_and_size(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 1 --chunks 3 --devices cpu,cpu,cpu --schedule interleaved --seed 7"
    assert run(words) == 0
    answer = capsys.readouterr().out
    assert "runs under interleaved (measured)" in answer
    assert "3 micro-batches of 1 x 8 bytes a step" in answer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--devices cpu",
            "a pipeline needs at least two devices, such as --devices cpu,cpu, not 'cpu'",
        ),
        ("--devices cpu,gpu7", "--devices takes names such as cpu,cpu, not 'cpu,gpu7': "),
        ("--chunks 0", "chunks=0: each of these must be at least 1"),
        ("--schedule 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("--schedule forward-only", "has no backwards"),
    ],
)
def test_demo_reports_invalid_options_before_it_runs(
    run: Run, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--devices" not in words:
        words += " --devices cpu,cpu"
    assert run(words) == 2
    answer = capsys.readouterr()
    assert message in answer.err
    assert answer.out == ""
    assert not list(tmp_path.iterdir())


def test_demo_reports_an_unwritable_output_before_training(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert run("--steps 1 --chunks 2 --devices cpu,cpu --out taken") == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "File exists: 'taken'" in answer.err


def test_demo_without_matplotlib_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert run("--steps 1") == 2
    assert capsys.readouterr() == (
        "",
        "penstock: the demo needs matplotlib: pip install 'torch-penstock[draw]'\n",
    )


def handle_sigint() -> None:
    """Undo the SIG_IGN that a process in the background, such as `nohup make test &`, inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_demo_interrupted_exits_without_traceback(tmp_path: Path) -> None:
    words = ["demo", "--steps", "100000", "--devices", "cpu,cpu"]
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "penstock", *words],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=handle_sigint,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(line.startswith("step") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # otherwise a hanging process would block the test
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# ---- the model and the data ---------------------------------------------------------------


def test_load_stdlib_text_without_sources_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"no Python sources in {tmp_path}"):
        load_stdlib_text(tmp_path)


def test_random_batches_are_slices_of_the_text_chosen_by_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, target = next(iter_random_batches(text, rows=5, context=16, seed=1))
    assert inputs.shape == target.shape == (5, 16)
    assert torch.equal(target, inputs + 1)
    again, other = (
        next(iter_random_batches(text, rows=5, context=16, seed=seed))[0] for seed in (1, 2)
    )
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


def test_random_batches_reach_the_end_of_the_text() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    batches = islice(iter_random_batches(text, rows=1, context=8, seed=0), 40)
    assert {int(x[0, 0]) for x, _ in batches} == {0, 1}


def test_demo_model_is_causal_and_leaves_the_rng_state_alone() -> None:
    before = torch.get_rng_state()
    model = build_byte_transformer(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    text = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    same = (model(text) == model(other)).all(dim=2)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_demo_training_lowers_the_loss(laid_out: LaidOut) -> None:
    model, layout, batch = laid_out
    pipe = layout.build_pipe(model, "1f1b", 2)
    losses = [float(r.loss) for r in train(pipe, iter([batch] * 40), 40, CPUS)]
    assert losses[-1] < losses[0] - 0.3


def test_compare_gradients_equals_the_unsplit_model(laid_out: LaidOut) -> None:
    model, layout, batch = laid_out
    sameness = compare_gradients(model, layout, "1f1b", 4, batch)
    assert sameness.is_equal
    assert sameness.max_gradient > 1e-3
    assert sameness.tensor_count == len(list(model.parameters()))


def test_compare_gradients_counts_none_and_nan_as_different(
    laid_out: LaidOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, layout, batch = laid_out
    step = Pipe.step

    def spoilt(value: Tensor | None) -> None:
        def spoil(pipe: Pipe, *inputs: Any, **options: Any) -> Any:
            result = step(pipe, *inputs, **options)
            *_, last = pipe.parameters()
            last.grad = value
            return result

        monkeypatch.setattr(Pipe, "step", spoil)

    spoilt(None)
    assert not compare_gradients(model, layout, "1f1b", 2, batch).is_equal
    spoilt(torch.full((256,), float("nan"), dtype=torch.float64))
    assert not compare_gradients(model, layout, "1f1b", 2, batch).is_equal


def test_measure_steps_leaves_weights_and_gradients_alone(laid_out: LaidOut) -> None:
    model, layout, batch = laid_out
    before = [parameter.clone() for parameter in model.parameters()]
    pipe = layout.build_pipe(model, "1f1b", 2)
    (measured,) = measure_steps([pipe], batch, repeats=3)
    assert measured.timeline.makespan > 0
    assert measured.forecast.program == measured.timeline.program
    assert measured.rescale_activations(4).timeline.peak == tuple(
        4 * p for p in measured.timeline.peak
    )
    for parameter, value in zip(pipe.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, value)


def test_generate_text_beyond_the_context(laid_out: LaidOut) -> None:
    model, layout, _ = laid_out
    pipe = layout.build_pipe(model, "1f1b", 2)
    prose = generate_text(pipe, b"def ", 12, TINY.context, seed=0)
    assert prose.startswith(b"def ")
    assert len(prose) == 16
    assert prose == generate_text(pipe, b"def ", 12, TINY.context, seed=0)


def test_device_layout_cuts_by_the_same_times_for_every_schedule() -> None:
    layout = DeviceLayout(CPUS, (1.0, 1.0, 1.0, 3.0))
    assert list(layout.layers_per_stage("1f1b")) == list(layout.layers_per_stage("naive")) == [3, 1]
    assert list(layout.layers_per_stage("interleaved")) == [1, 1, 1, 1]


def test_device_layout_measures_layers() -> None:
    model = build_byte_transformer(replace(TINY, width=64))
    example = torch.zeros(2, 8, dtype=torch.long)
    seconds = DeviceLayout.measure(CPUS, model, example).layer_seconds
    assert len(seconds) == len(model)
    assert seconds[1] > seconds[0]  # a block takes longer than the embedding


# ---- devices ------------------------------------------------------------------------------


def test_find_devices_without_a_gpu_gives_two_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "list_accelerators", list)
    assert [repr(place) for place in find_devices().by_rank] == ["cpu", "cpu"]


def test_find_devices_uses_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", index) for index in range(3)]
    monkeypatch.setattr(found, "list_accelerators", lambda: gpus)
    monkeypatch.setattr(found, "resolve_device", str)
    places: tuple[Any, ...] = find_devices().by_rank
    assert places == ("cuda:0", "cuda:1", "cuda:2")


def test_find_devices_splits_one_gpu_or_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "list_accelerators", lambda: [torch.device("cuda:0")])
    monkeypatch.setattr(found, "virtual_devices", lambda name, n: [f"{name}/{i}" for i in range(n)])
    places: tuple[Any, ...] = find_devices().by_rank
    assert places == ("cuda:0/0", "cuda:0/1", "cuda:0/2", "cuda:0/3")

    def missing(name: str, n: int) -> list[Any]:
        raise MissingExtra("cuda-bindings", "cuda", "to cut a GPU")

    monkeypatch.setattr(found, "virtual_devices", missing)
    devices = find_devices()
    assert [repr(place) for place in devices.by_rank] == ["cpu", "cpu"]
    assert "pip install 'torch-penstock[cuda]'" in devices.reason


def test_next_byte_loss_of_uniform_logits() -> None:
    output, target = torch.zeros(2, 3, 256), torch.zeros(2, 3, dtype=torch.long)
    assert float(next_byte_loss(output, target)) == pytest.approx(5.545, abs=1e-3)
