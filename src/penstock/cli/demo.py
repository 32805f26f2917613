"""`penstock demo`: a model trained over a pipeline, and what the pipeline does for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from penstock import draw, schedules
from penstock.cli.report import draw_for_terminal
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
from penstock.draw.style import format_number
from penstock.errors import MissingExtra
from penstock.runtime.train_step import StepResult
from penstock.schedules.timeline import Timeline

PROMPT = b"def "


@dataclass(frozen=True)
class DemoRequest:
    """What was asked for on the command line."""

    steps: int
    out: Path
    schedule: str
    chunks: int
    devices: str | None
    seed: int


def run(request: DemoRequest, size: DemoSize | None = None) -> bool:
    """Train, compare, check, save, and say so; are the gradients right?"""
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "draw", "the demo")
    devices = find_devices() if request.devices is None else parse_devices(request.devices)
    schedules.check_sizes(len(devices.by_rank), request.chunks)
    with limit_cpu_threads(devices):
        return _train_and_report(
            request, devices, _adjust_size(size or _get_default_size(devices), request, devices)
        )


def _get_default_size(devices: DemoDevices) -> DemoSize:
    return CPU_SIZE if devices.first.type == "cpu" else GPU_SIZE


def _adjust_size(size: DemoSize, request: DemoRequest, devices: DemoDevices) -> DemoSize:
    """A block for each stage at least, and micro-batches of equal size."""
    blocks = max(size.blocks, count_stages(request.schedule, devices))
    return replace(size, blocks=blocks, rows=max(1, size.rows // request.chunks) * request.chunks)


def _train_and_report(request: DemoRequest, devices: DemoDevices, size: DemoSize) -> bool:
    text = load_stdlib_text()
    endless = iter_random_batches(text, size.rows, size.context, request.seed)
    batch = next(endless)
    model = build_byte_transformer(size, request.seed)
    layout = DeviceLayout.measure(devices, model, batch[0][: size.rows // request.chunks])
    pipe = layout.build_pipe(model, request.schedule, request.chunks)
    request.out.mkdir(parents=True, exist_ok=True)
    _print_setup(request, layout, size, model, len(text))

    results = train(pipe, endless, request.steps, devices)
    show_progress(_sample_progress(results, size, request.steps), request.steps)
    prose = generate_text(pipe, PROMPT, 2 * size.context, size.context, request.seed)
    print(f"\nit writes\n{_format_prose(prose)}\n")

    batch = move_batch(devices.first, batch)
    alike = build_byte_transformer(size)
    alike.load_state_dict(pipe.state_dict())
    naive, pipelined = measure_steps([layout.build_pipe(alike, "naive", 1), pipe], batch)
    naive = naive.rescale_activations(request.chunks)
    _print_comparison(request.schedule, naive, pipelined)
    sameness = compare_gradients(model, layout, request.schedule, request.chunks, batch)
    _print_gradient_check(sameness)
    _save_pictures(request, naive, pipelined)
    return sameness.is_equal


# ---- training -----------------------------------------------------------------------------


def _print_setup(
    request: DemoRequest, layout: DeviceLayout, size: DemoSize, model: nn.Module, text_length: int
) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = size.rows // request.chunks
    names = ", ".join(map(repr, layout.devices.by_rank))
    cuts = " + ".join(map(str, layout.layers_per_stage(request.schedule)))
    print(
        f"model     a transformer over bytes: {size.blocks} blocks, {format_number(parameters)} parameters"
    )
    print(f"text      {format_number(text_length)} bytes: the sources of Python's standard library")
    print(f"devices   {names} ({layout.devices.reason})")
    print(f"pipeline  {request.schedule}; stages of {cuts} layers, cut by their measured times;")
    print(f"          {request.chunks} micro-batches of {rows} x {size.context} bytes a step\n")


class TrainingProgress(NamedTuple):
    """How training goes, after so many steps."""

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
    """Some fifty readings; each waits for its step to end, so there is not one at every step."""
    every = max(1, steps // 50)
    start, counted = time.perf_counter(), 0
    for step, result in enumerate(results, start=1):
        if step in (1, steps) or step % every == 0:
            loss, bubble = result.loss.item(), result.timeline.bubble
            now = time.perf_counter()
            tokens = (step - counted) * size.rows * size.context
            yield TrainingProgress(step, loss, tokens / (now - start), bubble)
            start, counted = now, step


def show_progress(samples: Iterable[TrainingProgress], steps: int) -> None:
    """A bar in a terminal; elsewhere a line now and then."""
    console = Console()
    if console.is_terminal:
        _show_progress_bar(samples, steps, console)
        return
    due = 0
    for reading in samples:
        if reading.step > due or reading.step == steps:
            print(f"step {reading.step:>{len(str(steps))}}/{steps}  {reading}", flush=True)
            due += max(1, steps // 10)


def _show_progress_bar(samples: Iterable[TrainingProgress], steps: int, console: Console) -> None:
    words = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), words, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        for reading in samples:
            progress.update(task, completed=reading.step, description=str(reading))


def _format_prose(prose: bytes) -> str:
    """Its lines that are not blank, with a dot for what is no letter."""
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
        times = [f(t) for t in (measured, forecast) for f in (_format_makespan, _format_bubble)]
        table.add_row(name, *times, format_number(max(measured.peak)))
    Console().print(table)
    gain, ranks = naive.timeline.makespan / pipelined.timeline.makespan, naive.timeline.ranks
    print(f"the pipeline is {gain:.2f} times as fast on {ranks} devices")
    if gain < 1.1:
        print("(little gained: are there fewer cores than ranks, or are they busy otherwise?)")
    print()


def _format_makespan(timeline: Timeline) -> str:
    return f"{timeline.makespan * 1e3:.1f} ms"


def _format_bubble(timeline: Timeline) -> str:
    return f"{timeline.bubble:.1%}"


def _print_gradient_check(comparison: GradientComparison) -> None:
    verdict = "the same as" if comparison.is_equal else "NOT the same as"
    print(
        f"gradients in float64: {verdict} the unsplit model's\n"
        f"  largest difference {comparison.max_difference:.1e} (at most {GRADIENT_TOLERANCE:.0e}), "
        f"largest gradient {comparison.max_gradient:.1e}, {comparison.tensor_count} tensors\n"
    )


def _save_pictures(
    request: DemoRequest, naive: DemoMeasurement, pipelined: DemoMeasurement
) -> None:
    print("saved")
    shown = {
        "naive": ("naive model parallelism, measured", naive.timeline),
        "pipeline": (f"pipeline under {request.schedule}, measured", pipelined.timeline),
    }
    for name, (title, timeline) in shown.items():
        for suffix in (".svg", ".png"):
            draw.picture(timeline, request.out / f"{name}{suffix}", title=title)
        draw.write_trace(timeline, request.out / f"{name}.json")
        print(f"  {request.out / name}.svg, .png: the picture of the {name} step")
        print(f"  {request.out / name}.json: its trace, for https://ui.perfetto.dev")
