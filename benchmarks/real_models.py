"""Measure captured steps of models that people train, against their forecasts.

    python benchmarks/real_models.py                                 all models, 2, 4 and 8 devices
    python benchmarks/real_models.py --models llama --devices 8 --schedules zb-v --chunks 32
    python benchmarks/real_models.py --models t5 vit --rows 2/zb-v 4/1f1b    these rows only
    python benchmarks/real_models.py --seconds 200                   no row begins after 200 seconds
    python benchmarks/real_models.py --models t5 --lock FILE         beside others with this FILE
    python benchmarks/real_models.py --models t5 --without-unsplit   another process times that

A row takes seconds to set up, in which the GPU is mostly idle. So several processes with the same
`--lock` may share the GPU: only one of them measures at a time, while the others do nothing on it.

Llama, GPT-2, T5 and ViT of transformers with random weights, and a plain GPT in an `nn.Sequential`,
in bf16 on virtual GPUs of one GPU, under `runtime="graph"`, without recomputation. A model is
built, traced and measured unsplit once, for all its rows. The columns:

step        median milliseconds of a step
forecast    the simulated step, from the costs that the same step has measured, as a median over
            the steps, and so is the ratio. What is between the two:
outside     before the first action and after the last one, which the host spends on the launch
in a row    a step among four that are launched before the host waits, as in training
waits       between actions: the time from the first to the last action, less that of a simulation
            in which each action takes as long as it took in this step
variation   that simulation less the forecast, in which all micro-batches of a stage take equally
            long: some run while more devices are busy than others do
ceiling     the step that the GPU allows, as in `benchmarks/graph.py`: the units' kernels are timed
            alone on one group of multiprocessors, with the loss; these times are simulated under
            the schedule with the cut of the row, messages free; and the result is divided by the
            contention, the speed of units while all groups are busy relative to one alone. Then
            the share of it that the step reaches; above 1 where devices that wait leave more of
            the clock and of the memory's bandwidth to the others
bubble      the share of the step in which a device is idle, measured; then in the forecast; then
            under the schedule if all stages took equally long
slowest     the busiest device over the mean of all: how even the cut is
host        milliseconds until the call of `step` returns
unsplit     the model on the whole GPU, eagerly, one micro-batch after another
plain graph the same as one CUDA graph; nan if the model cannot be captured
loss        how far the loss of the step is from that of the unsplit model, relative to it
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock import Cost, Pipe, Timeline, simulate
from penstock.fingerprint import build_cost_key
from penstock.model.cut import build_unit_calls, find_unit_transfers, measure_tail
from penstock.model.model_profile import trace_for_plan
from penstock.model.profiler import ModuleCall, bind_target, profile_calls, profile_layers
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.traced_partition import UnitCost
from penstock.nested_values import map_tensors
from penstock.runtime.step import StepResult
from penstock.schedules.balance import UnitOutput
from penstock.schedules.explain import Place, TimelineIndex

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.virtual import (
    Block,
    GpuLock,
    choose_cut,
    contention_of_graphs,
    graph_of,
    head,
    in_turns,
    line,
    needs_cuda,
    simulate_units,
)

WORDS, TOKENS = 32_000, 1024
HEADS = ["model", "devices", "schedule", "M", "step", "forecast", "step / forecast"]
HEADS += ["outside", "in a row", "waits", "variation", "ceiling", "of the ceiling", "bubble"]
HEADS += ["forecast", "even stages", "slowest", "host", "unsplit", "x unsplit"]
HEADS += ["plain graph", "x plain graph", "loss"]


class Case(NamedTuple):
    """A model, its inputs, and for a model that returns no loss, a loss and its target."""

    model: nn.Module
    inputs: Mapping[str, Any] | Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    target: Tensor | None = None


# ---- models ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """The first half of a pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return out


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def plain_gpt(rows: int) -> Case:
    """Build 16 blocks of width 1024, and a head of 32,000 words; two rows a micro-batch.

    Each half of a block is a layer of its own, so that the cut may go through a block.
    """
    halves = [half for _ in range(16) for half in (Attention(1024, 16), Block(1024))]
    model = nn.Sequential(
        nn.Embedding(WORDS, 1024), *halves, nn.LayerNorm(1024), nn.Linear(1024, WORDS)
    )
    ids = torch.randint(WORDS, (2 * rows, TOKENS // 2))
    return Case(model, ids, token_loss, ids)


def llama(rows: int) -> Case:
    """Build 16 layers of width 2048."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        vocab_size=WORDS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    ids = torch.randint(WORDS, (rows, TOKENS))
    return Case(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def gpt2(rows: int) -> Case:
    """Build GPT-2 medium without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    ids = torch.randint(config.vocab_size, (rows, TOKENS))
    return Case(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def t5(rows: int) -> Case:
    """Build an encoder and a decoder of 12 layers each, of width 1024, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=12,
        d_model=1024,
        d_kv=64,
        d_ff=2816,
        num_heads=16,
        vocab_size=WORDS,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    ids, labels = (torch.randint(WORDS, (rows, TOKENS // 2)) for _ in range(2))
    return Case(T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels})


def vit(rows: int) -> Case:
    """Build 24 layers of width 1024, without dropout, and give each micro-batch 8 images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
    )
    images, labels = torch.randn(8 * rows, 3, 224, 224), torch.randint(1000, (8 * rows,))
    model = ViTForImageClassification(config)
    return Case(model, {"pixel_values": images.bfloat16(), "labels": labels})


MODELS = {"llama": llama, "gpt2": gpt2, "gpt": plain_gpt, "t5": t5, "vit": vit}


# ---- measurements ----------------------------------------------------------------------------


ENOUGH_MS = 2000.0  # of timed runs: a slow run is repeated once only


def timed(run: Callable[[], object], times: int) -> float:
    """Return the median milliseconds until the device is done."""
    whole: list[float] = []
    while len(whole) < times and (len(whole) < 2 or sum(whole) < ENOUGH_MS):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        whole.append(1e3 * (perf_counter() - start))
    return median(whole)


class TimedStep(NamedTuple):
    """The milliseconds of one step, and what it has measured of itself.

    Attributes:
        step: Until the device is done.
        host: Until the call returns.
        device: From the first to the last action, by the clock of the device.
        own: The simulated step in which each action takes as long as it took in this step.
        forecast: The simulated step in which all micro-batches of a stage take their mean.
    """

    step: float
    host: float
    device: float
    own: float
    forecast: float


def time_steps(step: Callable[[], StepResult], times: int) -> tuple[list[TimedStep], StepResult]:
    """Run steps one by one. Return their times, and the last result."""
    steps: list[TimedStep] = []
    while len(steps) < times:
        torch.cuda.synchronize()
        start = perf_counter()
        result = step()
        returned = perf_counter()
        torch.cuda.synchronize()
        end = perf_counter()
        timeline = result.timeline
        forecast = simulate(timeline.program, timeline.cost).makespan
        seconds = end - start, returned - start, timeline.makespan, replay(timeline), forecast
        steps.append(TimedStep(*(1e3 * number for number in seconds)))
    return steps, result


def replay(timeline: Timeline) -> float:
    """Return the seconds of a step in which each action begins as soon as it can.

    Each takes as long as it took in the timeline, and messages take no time.
    """
    index = TimelineIndex(timeline)
    ends: dict[Place, float] = {}
    positions = [0] * timeline.ranks
    has_advanced = True
    while has_advanced:
        has_advanced = False
        for rank, lane in enumerate(timeline.computes):
            while positions[rank] < len(lane):
                place = Place(rank, positions[rank])
                needs = [arrival.producer for arrival in index.arrivals(place)]
                needs += index.earlier_on_cell(place)
                needs += [Place(rank, place.position - 1)] if place.position else []
                if not all(need in ends for need in needs):
                    break
                span = lane[place.position]
                begin = max((ends[need] for need in needs), default=0.0)
                ends[place] = begin + span.end - span.start
                positions[rank] += 1
                has_advanced = True
    return max(ends.values())


def build(name: str, chunks: int) -> Case:
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        case = MODELS[name](chunks)
    inputs: Any = case.inputs
    moved = (
        inputs.cuda() if isinstance(inputs, Tensor) else {k: v.cuda() for k, v in inputs.items()}
    )
    target = None if case.target is None else case.target.cuda()
    return case._replace(model=case.model.to("cuda:0", torch.bfloat16), inputs=moved, target=target)


class Unsplit(NamedTuple):
    """The model on the whole GPU with accumulated gradients: milliseconds, and the loss."""

    eager: float
    plain_graph: float
    loss: float


def measure_unsplit(case: Case, chunks: int, times: int, lock: GpuLock) -> Unsplit:
    """Run the unsplit model for its loss and, if `times` is not 0, time it."""

    def loss_of(index: int) -> Tensor:
        if isinstance(case.inputs, Tensor):
            assert case.loss_fn is not None
            assert case.target is not None
            out = case.model(case.inputs.chunk(chunks)[index])
            return case.loss_fn(out, case.target.chunk(chunks)[index])
        loss: Tensor = case.model(
            **{k: v.chunk(chunks)[index] for k, v in case.inputs.items()}
        ).loss
        return loss

    def accumulate() -> Tensor:
        total = torch.zeros((), device="cuda:0")
        for index in range(chunks):
            loss = loss_of(index) / chunks
            loss.backward()
            total += loss.detach()
        return total

    with lock.hold(exclusive=False):
        loss = float(accumulate())
    if not times:
        return Unsplit(nan, nan, loss)
    with lock.hold(exclusive=True):
        eager = timed(accumulate, times)
    try:
        with lock.hold(exclusive=False):
            graph = graph_of(accumulate, accumulate, torch.cuda.Stream())
        with lock.hold(exclusive=True):
            captured = timed(graph.replay, times)
    except RuntimeError as error:  # the forward reads a value on the host
        print(f"the unsplit model cannot be captured: {error}".splitlines()[0], file=sys.stderr)
        captured = nan
    return Unsplit(eager, captured, loss)


class GroupCosts(NamedTuple):
    """The units' costs on one group of multiprocessors, and the contention of all groups."""

    units: Sequence[UnitCost]
    values: tuple[UnitOutput, ...]
    contention: float

    def ceiling(self, pipe: Pipe) -> float:
        """Return the milliseconds of the step that the GPU allows, under the schedule of a pipe."""
        return 1e3 * simulate_units(pipe, self.units) / self.contention


def measure_groups(
    case: Case,
    traced: TracedModel | None,
    unit_calls: Sequence[ModuleCall],
    places: list[Any],
    chunks: int,
) -> GroupCosts:
    """Time the units alone on the first group, and the most costly ones on all groups at once."""
    first, calls = places[0], list(unit_calls)
    if traced is None:
        assert isinstance(case.model, nn.Sequential)
        assert isinstance(case.inputs, Tensor)
        assert case.loss_fn is not None
        loss = bind_target(case.loss_fn, case.target, chunks)
        layers = list(case.model)
        with first.activate():
            units = profile_layers(
                layers, (case.inputs,), chunks=chunks, device=first.device, loss=loss
            )
        with torch.no_grad():
            hidden = layers[0](case.inputs[: len(case.inputs) // chunks])
        ids = case.inputs[: len(case.inputs) // chunks]
        calls += [(layer, (hidden if index else ids,), {}) for index, layer in enumerate(layers)]
        return GroupCosts(units, (), measure_contention(places, calls, units))
    measure = partial(profile_calls, device=first.device)
    with first.activate():
        units = measure(calls)
        for cost in measure_tail(traced.trace, None, measure):
            units[-1] = units[-1].with_loss(cost.forward, cost.input_grad)
    values = tuple(find_unit_transfers(traced.trace))
    return GroupCosts(units, values, measure_contention(places, calls, units))


def measure_contention(
    places: list[Any], calls: Sequence[ModuleCall], units: Sequence[UnitCost]
) -> float:
    """Return the contention of the units that take four fifths of the time, by their time.

    Equal units count as one kind, and a kind is measured once.
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, (module, args, kwargs) in enumerate(calls):
        kinds.setdefault(build_cost_key(module, args, kwargs), []).append(index)
    seconds = {key: sum(units[index].seconds for index in same) for key, same in kinds.items()}
    alone = together = 0.0
    for key in sorted(seconds, key=lambda key: -seconds[key]):
        if alone > 0.8 * sum(seconds.values()):
            break
        block, *arguments = calls[kinds[key][0]]
        args, kwargs = map_tensors(arguments, lambda tensor: tensor.detach().to(places[0].device))
        alone += seconds[key]
        together += seconds[key] / contention_of_graphs(places, block, args, kwargs)
    return alone / together


def row(
    name: str,
    case: Case,
    traced: TracedModel | None,
    places: list[Any],
    schedule: str,
    unsplit: Unsplit,
    groups: GroupCosts,
    lock: GpuLock,
    args: argparse.Namespace,
) -> str:
    """Measure one model under one schedule, and return a line of the table."""
    pipe = Pipe(
        case.model,
        args.chunks,
        "never",
        stages=choose_cut(schedule, places, args.chunks, groups.units, groups.values),
        devices=places,
        example=traced or case.inputs,
        loss_fn=case.loss_fn,
        schedule=schedule,
        runtime="graph",
        # The audit takes time in the first step, and this benchmark builds many pipes.
        audit="off",
    )

    def step() -> Any:
        if isinstance(case.inputs, Tensor):
            return pipe.step(case.inputs, target=case.target)
        return pipe.step(**case.inputs)

    with lock.hold(exclusive=False):
        step()
    with lock.around_replays():
        step()
    with lock.hold(exclusive=True):
        step()
        steps, result = time_steps(step, args.times)
        (in_a_row,) = in_turns([step], 1)
    timeline, forecast = result.timeline, pipe.forecast()
    even = pipe.forecast(Cost.even(forecast.program.schedule.placement)).bubble
    duration = median(s.step for s in steps)
    busy = [sum(span.end - span.start for span in lane) for lane in timeline.computes]
    ceiling = groups.ceiling(pipe)
    return line(
        [
            name,
            len(places),
            schedule,
            args.chunks,
            f"{duration:.1f}",
            f"{median(s.forecast for s in steps):.1f}",
            f"{median(s.step / s.forecast for s in steps):.3f}",
            f"{median(s.step - s.device for s in steps):.1f}",
            f"{in_a_row:.1f}",
            f"{median(s.device - s.own for s in steps):.1f}",
            f"{median(s.own - s.forecast for s in steps):.1f}",
            f"{ceiling:.1f}",
            f"{ceiling / duration:.3f}",
            f"{timeline.bubble:.1%}",
            f"{forecast.bubble:.1%}",
            f"{even:.1%}",
            f"{max(busy) / mean(busy):.2f}",
            f"{median(s.host for s in steps):.1f}",
            f"{unsplit.eager:.1f}",
            f"{unsplit.eager / duration:.2f}",
            f"{unsplit.plain_graph:.1f}",
            f"{unsplit.plain_graph / duration:.2f}",
            f"{abs(float(result.loss) / unsplit.loss - 1):.0e}",
        ]
    )


def tidy(case: Case) -> None:
    """Free the memory of the last measurement."""
    case.model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()


def measure_model(name: str, lock: GpuLock, args: argparse.Namespace, end: float) -> None:
    """Print the rows of one model. None begins after `end`."""
    begin = perf_counter()
    with lock.hold(exclusive=False):
        case = build(name, args.chunks)
    report(f"{name} built", begin)
    traced = None
    if not isinstance(case.model, nn.Sequential):
        # One trace for all rows, with enough units for two stages a device.
        devices = penstock.virtual_devices("cuda:0", max(rows_by_devices(args)))
        traced = trace_for_plan(case.model, case.inputs, args.chunks, None, [*devices, *devices])
    report(f"{name} traced", begin)
    unsplit = measure_unsplit(case, args.chunks, 0 if args.without_unsplit else args.times, lock)
    report(f"{name} unsplit", begin)
    calls = () if traced is None else tuple(build_unit_calls(traced))
    for ranks, schedules in rows_by_devices(args).items():
        places, groups = list(penstock.virtual_devices("cuda:0", ranks)), None
        for schedule in schedules:
            if perf_counter() > end:
                return
            tidy(case)
            begin = perf_counter()
            try:
                if groups is None:
                    with lock.hold(exclusive=True):
                        groups = measure_groups(case, traced, calls, places, args.chunks)
                    report(f"{name} {ranks} contention {groups.contention:.3f}", begin)
                    tidy(case)
                print(
                    row(name, case, traced, places, schedule, unsplit, groups, lock, args),
                    flush=True,
                )
            except RuntimeError as error:  # the other rows are still worth their time
                print(line([name, ranks, schedule, args.chunks, error]), flush=True)
                if groups is None:
                    break
            report(f"{name} {ranks} {schedule}", begin)


def rows_by_devices(args: argparse.Namespace) -> dict[int, list[str]]:
    """Return the schedules to measure for each number of devices."""
    if args.rows is None:
        return {ranks: list(args.schedules) for ranks in args.devices}
    rows: dict[int, list[str]] = {}
    for text in args.rows:
        ranks, schedule = text.split("/")
        rows.setdefault(int(ranks), []).append(schedule)
    return rows


def report(what: str, begin: float) -> None:
    print(f"{what}: {perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved", "zb-v"])
    parser.add_argument(
        "--rows", nargs="+", metavar="DEVICES/SCHEDULE", help="instead of --devices, --schedules"
    )
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--times", type=int, default=5, help="timed steps")
    parser.add_argument("--seconds", type=float, default=inf, help="no row begins later")
    parser.add_argument(
        "--without-unsplit", action="store_true", help="run the unsplit model for its loss only"
    )
    parser.add_argument("--lock", help="a file by which processes that share the GPU take turns")
    args = parser.parse_args()
    needs_cuda()
    end, lock = perf_counter() + args.seconds, GpuLock(args.lock)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {args.times}\n")
    print(head(HEADS), flush=True)
    for name in args.models:
        if perf_counter() < end:
            measure_model(name, lock, args, end)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
