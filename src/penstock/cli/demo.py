"""`penstock demo`: train a small model over a pipeline, and show what the pipeline gains.

The command trains, generates some text, compares the measured step with naive model parallelism,
compares the gradients with those of the unsplit model, and saves pictures and traces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from penstock import draw, schedules
from penstock.cli.report import draw_for_terminal, show_activity
from penstock.demo.model import (
    CPU_SIZE,
    GPU_SIZE,
    DemoSize,
    build_byte_transformer,
    iter_random_batches,
    load_stdlib_text,
    move_batch,
)
from penstock.demo.session import (
    GRADIENT_TOLERANCE,
    DemoDevices,
    DemoMeasurement,
    DeviceLayout,
    GradientComparison,
    compare_gradients,
    count_stages,
    find_devices,
    generate_text,
    limit_cpu_threads,
    measure_steps,
    parse_devices,
    train,
)
from penstock.errors import ArgumentError, MissingExtra
from penstock.runtime.step import StepResult
from penstock.text_format import format_number, make_printable

PROMPT = b"def "
MAX_RANKS, MAX_CHUNKS = 64, 1024
SECONDS_PER_ROW = 5e-3  # of a step on two cores, with the two blocks of `CPU_SIZE`


@dataclass(frozen=True)
class DemoRequest:
    """The arguments of `penstock demo`."""

    steps: int
    out: Path
    schedule: str
    chunks: int
    devices: str | None
    seed: int


def run(request: DemoRequest, size: DemoSize | None = None) -> bool:
    """Run the demo, print its results, and return whether the gradients are right."""
    # Everything that can be wrong is checked before the training, which takes a while.
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "draw", "the demo")
    devices = find_devices() if request.devices is None else parse_devices(request.devices)
    _check_sizes(len(devices.by_rank), request.chunks)
    # In a terminal there is a progress bar.
    activity = nullcontext() if Console().is_terminal else show_activity("training and measuring")
    with limit_cpu_threads(devices), activity:
        size = size or (CPU_SIZE if devices.first.type == "cpu" else GPU_SIZE)
        return _train_and_report(request, devices, _adjust_size(size, request, devices))


def _check_sizes(ranks: int, chunks: int) -> None:
    schedules.check_sizes(ranks, chunks)
    if chunks > MAX_CHUNKS or ranks > MAX_RANKS:
        seconds = format_number(SECONDS_PER_ROW * chunks * max(1, ranks // CPU_SIZE.blocks))
        raise ArgumentError(
            f"{ranks} devices and {chunks} micro-batches need a model of as many blocks and a "
            f"batch of as many rows: about {seconds} seconds a step on a CPU. Use at most "
            f"{MAX_RANKS} devices and {MAX_CHUNKS} micro-batches."
        )


def _adjust_size(size: DemoSize, request: DemoRequest, devices: DemoDevices) -> DemoSize:
    """Return the size with at least one block per stage, and micro-batches of equal size."""
    blocks = max(size.blocks, count_stages(request.schedule, devices))
    return replace(size, blocks=blocks, rows=max(1, size.rows // request.chunks) * request.chunks)


def _train_and_report(request: DemoRequest, devices: DemoDevices, size: DemoSize) -> bool:
    text = load_stdlib_text()
    batches = iter_random_batches(text, size.rows, size.context, request.seed)
    batch = next(batches)
    model = build_byte_transformer(size, request.seed)
    layout = DeviceLayout.measure(devices, model, batch[0][: size.rows // request.chunks])
    pipe = layout.build_pipe(model, request.schedule, request.chunks)
    request.out.mkdir(parents=True, exist_ok=True)
    _print_setup(request, layout, size, model, len(text))
    sys.stdout.flush()

    results = train(pipe, batches, request.steps, devices)
    show_progress(_sample_progress(results, size, request.steps), request.steps)
    prose = generate_text(pipe, PROMPT, 2 * size.context, size.context, request.seed)
    print(f"\ngenerated text\n{_format_prose(prose)}\n")

    batch = move_batch(devices.first, batch)
    same_model = build_byte_transformer(size)
    same_model.load_state_dict(pipe.state_dict())
    naive, pipelined = measure_steps([layout.build_pipe(same_model, "naive", 1), pipe], batch)
    # The naive step has one micro-batch, as large as all of the pipeline's together.
    naive = naive.rescale_activations(request.chunks)
    _print_comparison(request.schedule, naive, pipelined)
    comparison = compare_gradients(model, layout, request.schedule, request.chunks, batch)
    _print_gradient_check(comparison)
    _save_pictures(request, naive, pipelined)
    return comparison.is_equal


# ---- training -----------------------------------------------------------------------------


def _print_setup(
    request: DemoRequest, layout: DeviceLayout, size: DemoSize, model: nn.Module, text_length: int
) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = size.rows // request.chunks
    names = ", ".join(map(repr, layout.devices.by_rank))
    cuts = " + ".join(map(str, layout.layers_per_stage(request.schedule)))
    print(
        f"model     a transformer over bytes: {size.blocks} blocks, "
        f"{format_number(parameters)} parameters"
    )
    print(f"text      {format_number(text_length)} bytes: the sources of Python's standard library")
    print(f"devices   {names} ({layout.devices.reason})")
    print(f"pipeline  {request.schedule}; stages of {cuts} layers, balanced by measured times;")
    print(f"          {request.chunks} micro-batches of {rows} x {size.context} bytes a step\n")


class TrainingProgress(NamedTuple):
    """A reading of the training: loss, speed and bubble after a number of steps."""

    step: int
    loss: float
    tokens_per_second: float
    bubble: float

    def __str__(self) -> str:
        speed = format_number(round(self.tokens_per_second))
        return f"loss {self.loss:.2f}  {speed:>6} tokens/s  bubble {self.bubble:3.0%}"


def _sample_progress(
    results: Iterator[StepResult], size: DemoSize, steps: int
) -> Iterator[TrainingProgress]:
    """Yield about fifty readings.

    A reading waits until its step has ended on the device, so one at every step would slow the
    training down.
    """
    interval = max(1, steps // 50)
    start, last_step = time.perf_counter(), 0
    for step, result in enumerate(results, start=1):
        if step in (1, steps) or step % interval == 0:
            loss, bubble = result.loss.item(), result.timeline.bubble
            now = time.perf_counter()
            tokens = (step - last_step) * size.rows * size.context
            yield TrainingProgress(step, loss, tokens / (now - start), bubble)
            start, last_step = now, step


def show_progress(samples: Iterable[TrainingProgress], steps: int) -> None:
    """Show a progress bar in a terminal, and about ten lines elsewhere."""
    console = Console()
    if console.is_terminal:
        _show_progress_bar(samples, steps, console)
        return
    next_step = 0
    for sample in samples:
        if sample.step > next_step or sample.step == steps:
            print(f"step {sample.step:>{len(str(steps))}}/{steps}  {sample}", flush=True)
            next_step += max(1, steps // 10)


def _show_progress_bar(samples: Iterable[TrainingProgress], steps: int, console: Console) -> None:
    description = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), description, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        for sample in samples:
            progress.update(task, completed=sample.step, description=str(sample))


def _format_prose(prose: bytes) -> str:
    """Return the lines that are not blank, with a dot for bytes that are not printable ASCII."""
    shown = "".join(chr(c) if 32 <= c < 127 or c == 10 else "·" for c in prose)
    return "\n".join(f"  {line.rstrip()}" for line in shown.splitlines() if line.strip())


# ---- the comparison -----------------------------------------------------------------------


def _print_comparison(schedule: str, naive: DemoMeasurement, pipelined: DemoMeasurement) -> None:
    print("naive model parallelism: the model is cut, the batch is not (measured)")
    print(draw_for_terminal(naive.timeline))
    print(f"\npipeline: the batch is cut too, and runs under {schedule} (measured)")
    print(draw_for_terminal(pipelined.timeline))
    print()
    table = Table(
        title="a training step: the median of five, and its forecast",
        caption="peak: micro-batches alive on the worst rank",
    )
    table.add_column("")
    for heading in ("measured", "bubble", "forecast", "its bubble", "peak"):
        table.add_column(heading, justify="right")
    for name, (measured, forecast) in (("naive", naive), (schedule, pipelined)):
        times = [
            text
            for timeline in (measured, forecast)
            for text in (f"{timeline.makespan * 1e3:.1f} ms", f"{timeline.bubble:.1%}")
        ]
        table.add_row(name, *times, format_number(max(measured.peak)))
    Console().print(table)
    gain, ranks = naive.timeline.makespan / pipelined.timeline.makespan, naive.timeline.ranks
    print(f"the pipeline is {gain:.2f} times as fast on {ranks} devices")
    if gain < 1.1:
        print("(little gain: are there fewer cores than ranks, or are they busy otherwise?)")
    print()


def _print_gradient_check(comparison: GradientComparison) -> None:
    relation = "the same as" if comparison.is_equal else "NOT the same as"
    print(
        f"gradients in float64: {relation} the unsplit model's\n"
        f"  largest difference {comparison.max_difference:.1e} (at most {GRADIENT_TOLERANCE:.0e}), "
        f"largest gradient {comparison.max_gradient:.1e}, {comparison.tensor_count} tensors\n"
    )


def _save_pictures(
    request: DemoRequest, naive: DemoMeasurement, pipelined: DemoMeasurement
) -> None:
    print("saved")
    pictures = {
        "naive": ("naive model parallelism, measured", naive.timeline),
        "pipeline": (f"pipeline under {request.schedule}, measured", pipelined.timeline),
    }
    forecasts = {"naive": naive.forecast, "pipeline": pipelined.forecast}
    for name, (title, timeline) in pictures.items():
        for suffix in (".svg", ".png"):
            draw.picture(timeline, request.out / f"{name}{suffix}", title=title)
        draw.write_trace(timeline, request.out / f"{name}.json")
        draw.run_page(timeline, request.out / f"{name}.html", forecasts[name])
        path = make_printable(str(request.out / name))
        print(f"  {path}.svg, .png: the picture of the {name} step")
        print(f"  {path}.json: its trace, for https://ui.perfetto.dev")
        print(f"  {path}.html: the step beside its forecast, and what cost the time")
