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
from penstock.cli.report import drawing
from penstock.demo.devices import (
    Devices,
    Layout,
    devices_at_hand,
    devices_named,
    one_thread_a_rank,
    stages_of,
)
from penstock.demo.model import ON_CPU, ON_GPU, Size, byte_transformer
from penstock.demo.session import (
    SAMENESS,
    Measured,
    Sameness,
    compare_gradients,
    measure,
    train,
    written,
)
from penstock.demo.text import batches, on, stdlib_text
from penstock.draw.palette import number
from penstock.errors import MissingExtra
from penstock.run.training import StepResult
from penstock.timeline import Timeline

PROMPT = b"def "


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    steps: int
    out: Path
    schedule: str
    chunks: int
    devices: str | None
    seed: int


def run(asked: Asked, size: Size | None = None) -> bool:
    """Train, compare, check, save, and say so; are the gradients right?"""
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "draw", "the demo")
    devices = devices_at_hand() if asked.devices is None else devices_named(asked.devices)
    schedules.check_sizes(len(devices.places), asked.chunks)
    with one_thread_a_rank(devices):
        return _show(asked, devices, _fitting(size or _usual(devices), asked, devices))


def _usual(devices: Devices) -> Size:
    return ON_CPU if devices.first.type == "cpu" else ON_GPU


def _fitting(size: Size, asked: Asked, devices: Devices) -> Size:
    """A block for each stage at least, and micro-batches of equal size."""
    blocks = max(size.blocks, stages_of(asked.schedule, devices))
    return replace(size, blocks=blocks, rows=max(1, size.rows // asked.chunks) * asked.chunks)


def _show(asked: Asked, devices: Devices, size: Size) -> bool:
    text = stdlib_text()
    endless = batches(text, size.rows, size.context, asked.seed)
    batch = next(endless)
    model = byte_transformer(size, asked.seed)
    layout = Layout.measured(devices, model, batch[0][: size.rows // asked.chunks])
    pipe = layout.pipe(model, asked.schedule, asked.chunks)
    asked.out.mkdir(parents=True, exist_ok=True)
    _introduce(asked, layout, size, model, len(text))

    results = train(pipe, endless, asked.steps, devices)
    show_progress(_readings(results, size, asked.steps), asked.steps)
    prose = written(pipe, PROMPT, 2 * size.context, size.context, asked.seed)
    print(f"\nit writes\n{_indented(prose)}\n")

    batch = on(devices.first, batch)
    alike = byte_transformer(size)
    alike.load_state_dict(pipe.state_dict())
    naive, pipelined = measure([layout.pipe(alike, "naive", 1), pipe], batch)
    naive = naive.counted_in(asked.chunks)
    _compare(asked.schedule, naive, pipelined)
    sameness = compare_gradients(model, layout, asked.schedule, asked.chunks, batch)
    _judge(sameness)
    _save(asked, naive, pipelined)
    return sameness.holds


# ---- training -----------------------------------------------------------------------------


def _introduce(asked: Asked, layout: Layout, size: Size, model: nn.Module, text: int) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = size.rows // asked.chunks
    names = ", ".join(map(repr, layout.devices.places))
    cuts = " + ".join(map(str, layout.cuts(asked.schedule)))
    print(
        f"model     a transformer over bytes: {size.blocks} blocks, {number(parameters)} parameters"
    )
    print(f"text      {number(text)} bytes: the sources of Python's standard library")
    print(f"devices   {names} ({layout.devices.why})")
    print(f"pipeline  {asked.schedule}; stages of {cuts} layers, cut by their measured times;")
    print(f"          {asked.chunks} micro-batches of {rows} x {size.context} bytes a step\n")


class Reading(NamedTuple):
    """How training goes, after so many steps."""

    step: int
    loss: float
    speed: float
    bubble: float

    def __str__(self) -> str:
        speed = number(round(self.speed))
        return f"loss {self.loss:.2f}  {speed:>6} tokens/s  bubble {self.bubble:3.0%}"


def _readings(results: Iterator[StepResult], size: Size, steps: int) -> Iterator[Reading]:
    """Some fifty readings; each waits for its step to end, so there is not one at every step."""
    every = max(1, steps // 50)
    start, counted = time.perf_counter(), 0
    for step, result in enumerate(results, start=1):
        if step in (1, steps) or step % every == 0:
            loss, bubble = result.loss.item(), result.timeline.bubble
            now = time.perf_counter()
            tokens = (step - counted) * size.rows * size.context
            yield Reading(step, loss, tokens / (now - start), bubble)
            start, counted = now, step


def show_progress(readings: Iterable[Reading], steps: int) -> None:
    """A bar in a terminal; elsewhere a line now and then."""
    console = Console()
    if console.is_terminal:
        _bar(readings, steps, console)
        return
    due = 0
    for reading in readings:
        if reading.step > due or reading.step == steps:
            print(f"step {reading.step:>{len(str(steps))}}/{steps}  {reading}", flush=True)
            due += max(1, steps // 10)


def _bar(readings: Iterable[Reading], steps: int, console: Console) -> None:
    words = TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), words, TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        for reading in readings:
            progress.update(task, completed=reading.step, description=str(reading))


def _indented(prose: bytes) -> str:
    """Its lines that are not blank, with a dot for what is no letter."""
    shown = "".join(chr(c) if 32 <= c < 127 or c == 10 else "·" for c in prose)
    return "\n".join(f"  {line.rstrip()}" for line in shown.splitlines() if line.strip())


# ---- the comparison -----------------------------------------------------------------------


def _compare(schedule: str, naive: Measured, pipelined: Measured) -> None:
    print("naive model parallelism: the model is cut, the batch is not (measured)")
    print(drawing(naive.timeline))
    print(f"\npipeline: the batch is cut too, and runs under {schedule} (measured)")
    print(drawing(pipelined.timeline))
    print()
    table = Table(
        title="a training step: the median of five, and its forecast",
        caption="peak: micro-batches alive on the worst rank",
    )
    table.add_column("")
    for heading in ("measured", "bubble", "forecast", "its bubble", "peak"):
        table.add_column(heading, justify="right")
    for name, (measured, forecast) in (("naive", naive), (schedule, pipelined)):
        times = [f(t) for t in (measured, forecast) for f in (_makespan, _bubble)]
        table.add_row(name, *times, number(max(measured.peak)))
    Console().print(table)
    gain, ranks = naive.timeline.makespan / pipelined.timeline.makespan, naive.timeline.ranks
    print(f"the pipeline is {gain:.2f} times as fast on {ranks} devices")
    if gain < 1.1:
        print("(little gained: are there fewer cores than ranks, or are they busy otherwise?)")
    print()


def _makespan(timeline: Timeline) -> str:
    return f"{timeline.makespan * 1e3:.1f} ms"


def _bubble(timeline: Timeline) -> str:
    return f"{timeline.bubble:.1%}"


def _judge(found: Sameness) -> None:
    verdict = "the same as" if found.holds else "NOT the same as"
    print(
        f"gradients in float64: {verdict} the unsplit model's\n"
        f"  largest difference {found.difference:.1e} (at most {SAMENESS:.0e}), "
        f"largest gradient {found.largest:.1e}, {found.tensors} tensors\n"
    )


def _save(asked: Asked, naive: Measured, pipelined: Measured) -> None:
    print("saved")
    shown = {
        "naive": ("naive model parallelism, measured", naive.timeline),
        "pipeline": (f"pipeline under {asked.schedule}, measured", pipelined.timeline),
    }
    for name, (title, timeline) in shown.items():
        for suffix in (".svg", ".png"):
            draw.picture(timeline, asked.out / f"{name}{suffix}", title=title)
        draw.write_trace(timeline, asked.out / f"{name}.json")
        print(f"  {asked.out / name}.svg, .png: the picture of the {name} step")
        print(f"  {asked.out / name}.json: its trace, for https://ui.perfetto.dev")
