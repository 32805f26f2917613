"""The command line: `penstock` and its commands, from `show` to `demo`.

Results go to stdout. An error gives one short message on stderr, without a traceback and without
control characters. A command that takes long says on stderr that it still works.

    exit status 0    done
                1    the command ran, and its answer is no; or nobody reads its output
                2    a wrong option, argument, file or model
                130  Ctrl-C

Commands on schedules do not import torch, so they start in a fraction of a second. The others
import it when they run.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from penstock import draw, schedules
from penstock.cli.options import (
    DEFAULT_COSTS,
    MAX_SIZE,
    SKIP_WITH_PROGRAM,
    CheckpointOption,
    ChunksOption,
    CostOption,
    HtmlOption,
    JsonOption,
    MemoryOption,
    OptionalChunksOption,
    OptionalRanksOption,
    PlacementOption,
    RanksOption,
    ScheduleArgument,
    SkipOption,
    StagesPerRankOption,
    check_memory_option,
    parse_costs,
    parse_skip,
    read_schedule_file,
    read_timeline_file,
    simulate_file,
)
from penstock.cli.report import (
    describe_exception,
    draw_for_terminal,
    format_sizes,
    print_comparison,
    print_error,
    print_timeline,
    show_activity,
    summarize,
)
from penstock.draw.page import comparison_page, schedule_page
from penstock.errors import ArgumentError, PenstockError
from penstock.schedules.explain import compare_run
from penstock.schedules.ir import Schedule, StageGraph, schedule_of
from penstock.schedules.notation import dumps
from penstock.schedules.request import ScheduleRequest, check_cells
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import verify
from penstock.text_format import make_printable

app = typer.Typer(
    help="Show, compare and verify pipeline schedules; check a model; examine ranks; run a demo.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


# The errors of wrong options are those of click, or of typer's own copy of it. Only `BadParameter`
# has a public name in every release of typer; the base class of all of them is the one above it.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])


def main() -> None:
    """Run the command line, and end with its exit status. An error is one message on stderr."""
    _prepare_streams()
    try:
        status = _run_command(sys.argv[1:] or ["--help"])
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print_error(f"writing to stdout failed: {error}")
        status = 1 if isinstance(error, BrokenPipeError) else 2
    sys.exit(status)


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, for example by `penstock ... >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "").isdecimal():  # rich fails on digits such as "²"
            os.environ.pop(name, None)
    # The pictures use box-drawing characters. A terminal whose encoding lacks them shows "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _run_command(arguments: list[str]) -> int:
    """Run one command, and return its exit status."""
    command = typer.main.get_command(app)
    try:
        status = int(command.main(arguments, "penstock", standalone_mode=False) or 0)
        if status == 130:  # how typer reports Ctrl-C
            print_error("interrupted")
        return status
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted")
        return 130
    except _UsageError as error:
        command_path = "penstock" if error.ctx is None else error.ctx.command_path
        print_error(f"{error.format_message().rstrip('.')}. See '{command_path} --help'.")
    except BrokenPipeError:
        raise
    except (PenstockError, OSError) as error:
        print_error(str(error))
    except MemoryError:
        print_error("not enough memory for this. Use fewer ranks, stages or micro-batches.")
    except Exception as error:
        if os.environ.get("PENSTOCK_TRACEBACK"):
            traceback.print_exc()
        print_error(
            f"this is a defect of Penstock: {describe_exception(error)}\n"
            "Please report it, with what PENSTOCK_TRACEBACK=1 prints in addition."
        )
    return 2


# ---- show ---------------------------------------------------------------------------------


@app.command()
def show(
    name: ScheduleArgument,
    ranks: OptionalRanksOption = None,
    chunks: OptionalChunksOption = None,
    stages_per_rank: StagesPerRankOption = None,
    placement: PlacementOption = "loop",
    cost: CostOption = DEFAULT_COSTS,
    checkpoint: CheckpointOption = "never",
    skip: SkipOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
    svg: Annotated[Path | None, typer.Option(help="Save the picture as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(help="Save the picture as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Save a trace for Perfetto.")] = None,
    html: HtmlOption = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="With a measured step: its forecast, a file of Timeline.save."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the schedule as text.")] = None,
    messages: Annotated[
        bool, typer.Option("--messages", help="With --save: include the messages between ranks.")
    ] = False,
    width: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Columns of the text picture.")
    ] = None,
) -> None:
    """Show a schedule or a measured step: its picture, bubble, peak and messages.

    For a file of result.timeline.save(...), it also says what cost the time.
    """
    check_memory_option(memory)
    measured = ranks is None and chunks is None and Path(name).suffix.lower() == ".json"
    if plan and not measured:
        raise ArgumentError("--plan is for a measured step: a .json file of Timeline.save")
    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path and path.suffix.lower() != suffix:
            raise ArgumentError(f"{path}: the file name must end in {suffix}")
    if messages and not save:
        raise ArgumentError("--messages needs --save FILE, the file that it writes to")
    if name != "fit" and placement != "loop":
        raise ArgumentError(f"--placement applies to fit only; {name} has its own placement")
    skips = tuple(parse_skip(text) for text in skip or [])
    costs = parse_costs(cost)
    sentences: Sequence[str] = ()
    forecast = None
    with show_activity("simulating"):
        if measured:
            applies_to_schedules = {
                "--stages-per-rank": stages_per_rank is not None,
                "--cost": cost != DEFAULT_COSTS,
                "--checkpoint": checkpoint != "never",
                "--skip": bool(skips),
                "--memory": memory is not None,
            }
            for option in (option for option, is_given in applies_to_schedules.items() if is_given):
                raise ArgumentError(f"{option} does not apply to a measured step")
            timeline = read_timeline_file(Path(name))
            forecast = read_timeline_file(plan) if plan else None
            sentences = compare_run(
                forecast or simulate(timeline.program, timeline.cost), timeline
            ).sentences
        elif ranks is None or chunks is None:
            if checkpoint != "never" or stages_per_rank is not None:
                raise ArgumentError(
                    "--checkpoint and --stages-per-rank apply to named schedules only"
                )
            timeline = _load_timeline(name, costs, skips, memory)
        else:
            request = ScheduleRequest(
                ranks, chunks, stages_per_rank, costs, checkpoint, memory, skips
            )
            timeline = (
                request.simulate_fit(placement) if name == "fit" else request.simulate_named(name)
            )
            _check_memory_cap(name, timeline, request)
        name = make_printable(name)
        _write_pictures(timeline, name, svg, png, trace)
        if html and measured:
            draw.run_page(timeline, html, forecast)
        elif html:
            schedule_page(name, timeline).write(html)
        if save:
            save.write_text(dumps(timeline.program if messages else timeline.program.schedule))
        facts = summarize(name, timeline)
        picture = "" if as_json else draw_for_terminal(timeline, width)
    if as_json:
        print(json.dumps(facts))
    else:
        print_timeline(facts, timeline, picture)
        for sentence in sentences:
            print(sentence)
        for path in filter(None, (svg, png, trace, html, save)):
            print(f"wrote {make_printable(str(path))}")


def _load_timeline(
    name: str, costs: dict[str, float], skips: tuple[tuple[int, int], ...], memory: float | None
) -> Timeline:
    if Path(name).is_file():
        return simulate_file(Path(name), costs, skips, memory)
    if name != "fit":
        schedules.family_of(name)  # raises for an unknown name
    raise ArgumentError(f"{name} needs --ranks and --chunks, for example -p 4 -m 8")


def _write_pictures(
    timeline: Timeline, name: str, svg: Path | None, png: Path | None, trace: Path | None
) -> None:
    edges = timeline.program.graph.edges
    skips = any(dst > src + 1 for src, dst in edges)
    for path in filter(None, (svg, png)):
        draw.picture(timeline, path, skips=skips, title=name)
    if trace:
        draw.write_trace(timeline, trace)


def _check_memory_cap(name: str, timeline: Timeline, request: ScheduleRequest) -> None:
    """Raise if the schedule needs more memory than `--memory`, with the schedules that do not."""
    problems = request.find_memory_excess(timeline)
    if not problems:
        return
    assert request.memory is not None
    schedule = timeline.program.schedule
    fitting_names = [
        other
        for other, family in schedules.FAMILIES.items()
        if family.trains
        and family.peak(schedule.ranks, schedule.chunks, family.stages_per_rank) <= request.memory
    ]
    listed = "\n".join(f"  {problem}" for problem in problems)
    raise ArgumentError(
        f"{name} does not fit in {request.memory:g} micro-batches per rank:\n{listed}\n"
        f"Schedules that fit: {', '.join(fitting_names) or 'none'}; or fit --memory M, with M >= 1"
    )


# ---- compare ------------------------------------------------------------------------------


@app.command()
def compare(
    ranks: RanksOption,
    chunks: ChunksOption,
    stages_per_rank: StagesPerRankOption = None,
    cost: CostOption = DEFAULT_COSTS,
    checkpoint: CheckpointOption = "never",
    memory: MemoryOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Compare all schedules, fastest first; with --memory, only those that fit."""
    check_memory_option(memory)
    request = ScheduleRequest(ranks, chunks, stages_per_rank, parse_costs(cost), checkpoint, memory)
    rows, timelines = [], {}
    with show_activity("generating schedules") as update:
        for name, timeline in request.simulate_all():
            update(f"{name} generated and simulated")
            if not request.find_memory_excess(timeline):
                rows.append(summarize(name, timeline))
                timelines[name] = timeline
    rows.sort(key=lambda facts: (round(facts["makespan"], 9), max(facts["peak"])))
    title = f"{ranks} ranks, {chunks} micro-batches, {cost}, checkpoint {checkpoint}"
    title += f", memory {memory:g}" if memory else ""
    if html:
        comparison_page(title, rows, timelines).write(html)
    if as_json:
        print(json.dumps(rows))
        return
    print_comparison(title, rows)
    if html:
        print(f"wrote {make_printable(str(html))}")


# ---- verify -------------------------------------------------------------------------------


@app.command("verify")
def verify_file(
    file: Annotated[Path, typer.Argument(help="A schedule or program: one line per rank.")],
    memory: MemoryOption = None,
    skip: SkipOption = None,
) -> None:
    """Verify a schedule or program in a file. Ranks, positions and micro-batches count from 0.

    Exit status: 0 if it is sound, 1 if it has problems, 2 if the file cannot be read.
    """
    check_memory_option(memory)
    with show_activity("reading and verifying"):
        schedule_or_program = read_schedule_file(file)
        graph = None
        if isinstance(schedule_or_program, Schedule):
            skips = [parse_skip(text) for text in skip or []]
            graph = StageGraph.chain(schedule_or_program.stages, skips)
        elif skip:
            raise ArgumentError(SKIP_WITH_PROGRAM)
        problems = verify(schedule_or_program, graph, memory)
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"sound: {format_sizes(schedule_of(schedule_or_program))}")


# ---- studio -------------------------------------------------------------------------------


@app.command("studio")
def run_studio(
    file: Annotated[
        Path | None, typer.Argument(help="A schedule, or a timeline that Timeline.save wrote.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open the studio in a browser: look at schedules, edit them, compare a run with its plan."""
    from penstock.studio.server import StudioServer

    with StudioServer(port, file) as server:
        print(f"the studio is at {server.url} (Ctrl-C ends it)", flush=True)
        if browser:
            webbrowser.open(server.url)
        server.serve_forever()


# ---- plan ---------------------------------------------------------------------------------


@app.command("plan")
def make_plan(
    target: Annotated[
        str,
        typer.Argument(
            help="MODULE:FACTORY, a function that returns (model, batch, ...), or a profile: a "
            ".json file of Profile.save."
        ),
    ],
    devices: Annotated[
        int | None, typer.Option(help="Number of devices. Default: those of the profile.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Cap of each device: 24GB, 1.5GiB or 90%.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="makespan of one step, or period of steps in a row.")
    ] = "makespan",
    solver_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="Time for the exact solver; 0: none.")
    ] = 10.0,
    optimizer: Annotated[
        str, typer.Option(help="For MODULE:FACTORY: adamw, sgd, momentum, ...")
    ] = "adamw",
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it: .svg or .png.")] = None,
    html: HtmlOption = None,
) -> None:
    """Find the fastest plan for a model and its devices, and say how far it is from the best."""
    from penstock.cli.plan import run

    run(target, devices, memory, objective, solver_seconds, save, picture, optimizer, html)


@app.command("split")
def split_model(
    factory: Annotated[
        str, typer.Argument(help="MODULE:FACTORY, a function that returns (model, batch, ...).")
    ],
    stages: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Number of stages.")] = 4,
    chunks: ChunksOption = 1,
    balance: Annotated[
        str | None, typer.Option(help="time, memory or parameters. Default: time.")
    ] = None,
) -> None:
    """Cut a model into stages and show them, without a pipe."""
    from penstock.cli.plan import run_split

    run_split(factory, stages, chunks, balance)


# ---- check --------------------------------------------------------------------------------


@app.command("check")
def check_model(
    factory: Annotated[
        str, typer.Argument(help="MODULE:FACTORY, a function that returns (model, batch, ...).")
    ],
    stages: Annotated[int, typer.Option(max=MAX_SIZE, help="Number of stages.")] = 4,
    chunks: ChunksOption = 4,
    schedules: Annotated[str, typer.Option(help="all, or names separated by commas.")] = "all",
    checkpoints: Annotated[str, typer.Option(help="Modes of recomputation.")] = "never,always",
    runtimes: Annotated[str, typer.Option(help="inline, threads.")] = "inline,threads",
    units: Annotated[
        str | None, typer.Option(help="Where the units are, for example model.layers.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="The largest difference allowed.")] = 1e-10,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two combinations that tell most, in seconds.")
    ] = False,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Check that a pipe computes what your model computes, under every schedule.

    Exit status: 0 if everything is equal, 1 if anything differs, 2 if the check could not run.
    """
    from penstock.cli.check import CheckRequest, run  # imports torch

    lists = schedules, checkpoints, runtimes
    request = CheckRequest(factory, stages, chunks, *lists, units, tolerance, quick, as_json, html)
    if not run(request):
        raise typer.Exit(1)


# ---- saved --------------------------------------------------------------------------------


@app.command("saved")
def show_saves(
    folder: Annotated[Path, typer.Argument(help="A folder that pipe.save writes to.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files, and compare their digests.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set damaged saves aside, and write missing manifests."),
    ] = False,
) -> None:
    """List the checkpoints of a folder, and verify or repair them.

    Exit status: 0 if the newest one can be loaded and no damage was found, otherwise 1.
    """
    from penstock.cli.saved import run

    if not run(folder, verify, repair):
        raise typer.Exit(1)


# ---- doctor -------------------------------------------------------------------------------


@app.command("doctor")
def run_doctor(
    patience: Annotated[float, typer.Option(help="Seconds to wait for a rank or a link.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Examine devices, links, versions and settings, and say what to fix.

    In one process, or on all ranks: torchrun --nproc-per-node 2 -m penstock doctor.
    Exit status: 1 if something is broken.
    """
    # PyTorch reads this when it is imported. Its notes on a store that does not answer are pages
    # of C++ frames, and the doctor says the same in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from penstock.cli.doctor import run  # imports torch

    if not run(patience, as_json):
        raise typer.Exit(1)


# ---- gallery and demo ---------------------------------------------------------------------


@app.command("gallery")
def show_gallery(
    out: Annotated[Path, typer.Option(help="Where to save the pictures.")] = Path("gallery"),
    ranks: RanksOption = 4,
    chunks: ChunksOption = 8,
) -> None:
    """Show every schedule, and save their pictures as a gallery."""
    check_cells(ranks, chunks, 2)
    exhibits = []
    with show_activity("drawing the gallery"):
        for exhibit in draw.exhibits(ranks, chunks):
            print(f"\n{exhibit.name}: {exhibit.use}")
            print(draw_for_terminal(exhibit.timeline))
            exhibits.append(exhibit)
        draw.write_gallery(out, exhibits)
    folder = make_printable(str(out))
    print(f"\nwrote the pictures to {folder}/, with {folder}/index.md")


@app.command("demo")
def run_demo(
    steps: Annotated[int, typer.Option(min=1, max=MAX_SIZE, help="Steps of training.")] = 100,
    out: Annotated[Path, typer.Option(help="Where to save the pictures.")] = Path("out/demo"),
    schedule: Annotated[str, typer.Option(help="The pipeline's schedule.")] = "1f1b",
    chunks: ChunksOption = 8,
    devices: Annotated[
        str | None, typer.Option(help="For example cpu,cpu or cuda:0,cuda:1. Default: all GPUs.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights and the batches.")
    ] = 0,
) -> None:
    """Train a small model on the available devices, and compare with naive model parallelism.

    Exit status: 1 if the gradients differ from those of the unsplit model.
    """
    from penstock.cli.demo import DemoRequest, run  # imports torch

    if not run(DemoRequest(steps, out, schedule, chunks, devices, seed)):
        raise typer.Exit(1)
