"""Compare plans with alternatives, with their forecasts and with their caps, on virtual GPUs.

    python benchmarks/plans.py                              all tables, about ten minutes
    python benchmarks/plans.py --models gpt --devices 4     one model, on four virtual GPUs
    python benchmarks/plans.py --tables caps unequal        some of the tables
    python benchmarks/plans.py --seconds 120                stop after so long

choices  the plan and at least 20 alternatives: other schedules and numbers of micro-batches, each
         with the best cut for it and with equal layers; measured and forecast milliseconds of a
         step. The plan should be within 2% of the fastest, and within 5% of its forecast.
caps     plans under three caps that bind: what was allocated in all, of what the ranks may use
worth    the plan against equal layers, 1f1b and everything recomputed, under the same cap
unequal  groups of 64, 32 and 16 multiprocessors: the plan against the ceiling, which is its
         forecast with the contention of the groups, and against equal layers

The GPT has 16 blocks and a head of 32,000 words, in bf16. Times are medians in milliseconds. Each
row is printed as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, Plan
from penstock.device.nvidia import VirtualGpu
from penstock.errors import ArgumentError, PenstockError
from penstock.model.planner import ModelPlan, attach_model
from penstock.planning import search_plan

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from benchmarks.virtual import (
    Block,
    blocks_of,
    contention_of_graphs,
    head,
    line,
    loss_of,
    needs_cuda,
)
from resnet101 import resnet101

TABLES = ("choices", "caps", "worth", "unequal")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v")
WORDS, SEQUENCE = 32_000, 512
CAPS = (0.8, 0.6, 0.45)  # of what the plan without a cap needs


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        mixed = self.inputs(self.norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.output(y.transpose(1, 2).reshape(x.shape))
        return out


def gpt(blocks: int = 16, width: int = 1024) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(Attention(width, 16), Block(width)) for _ in range(blocks)]
    end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False))
    return nn.Sequential(nn.Embedding(WORDS, width), *layers, end).to("cuda:0", torch.bfloat16)


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Case(NamedTuple):
    """A model with a batch and a loss."""

    model: nn.Sequential
    x: Tensor
    target: Tensor | None
    loss_fn: Callable[..., Tensor]


def make_case(name: str) -> Case:
    if name == "gpt":
        words = torch.randint(WORDS, (64, SEQUENCE), device="cuda:0")
        return Case(gpt(), words, words.roll(-1, 1), word_loss)
    if name == "resnet101":
        images = torch.randn(128, 3, 128, 128, device="cuda:0")
        labels = torch.randint(1000, (128,), device="cuda:0")
        return Case(resnet101().to("cuda:0"), images, labels, nn.functional.cross_entropy)
    x = torch.randn(32 * 1024, 2048, device="cuda:0", dtype=torch.bfloat16)
    return Case(blocks_of(16, 2048), x, None, loss_of)


class Clock:
    """The time that is left for the whole run."""

    def __init__(self, seconds: float) -> None:
        self.end = perf_counter() + seconds

    @property
    def is_over(self) -> bool:
        return perf_counter() > self.end


def make_plan(case: Case, places: Sequence[Any], **options: Any) -> ModelPlan:
    return penstock.plan(
        case.model,
        case.x,
        devices=places,
        target=case.target,
        loss_fn=case.loss_fn,
        optimizer="sgd",
        solver_seconds=0,
        **options,
    )


def with_contention(case: Case, planned: ModelPlan, places: list[VirtualGpu]) -> ModelPlan:
    """Return the best plan for groups that are slower when all of them are busy.

    The groups share the memory and the power of one GPU. A profile is measured on one of them.
    """
    block = case.model[len(case.model) // 2]
    x = case.x[: len(case.x) // (4 * len(places))]
    with torch.no_grad():
        x = case.model[: len(case.model) // 2](x)
    share = contention_of_graphs(places, block, x)
    print(f"contention {share:.3f}", flush=True)
    slower = [replace(device, speed=device.speed * share) for device in planned.profile.devices]
    found = search_plan(planned.profile.with_devices(slower), memory=inf, solver_seconds=0)
    attached = planned.example, planned.target, planned.model_devices, planned.units
    return attach_model(found, *attached)


def with_choice(planned: ModelPlan, **options: Any) -> ModelPlan | None:
    """Return the best plan with these choices from the same profile, if there is one."""
    try:
        found = search_plan(planned.profile, solver_seconds=0, **options)
    except PenstockError:
        return None
    attached = planned.example, planned.target, planned.model_devices, planned.units
    return attach_model(found, *attached)


def measure(case: Case, plan: Plan, times: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the bytes that are allocated at its peak."""
    gc.collect()
    torch.cuda.empty_cache()
    pipe = Pipe(case.model, plan=plan, loss_fn=case.loss_fn, audit="off", runtime="auto")
    durations = []
    # A replayed step does not allocate: its memory is counted when it is captured.
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3 + times):
        case.model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        start = perf_counter()
        pipe.step(case.x, target=case.target)
        torch.cuda.synchronize()
        durations.append(1e3 * (perf_counter() - start))
    peak = torch.cuda.max_memory_allocated()
    return median(durations[3:]), peak


def measure_within(
    case: Case, free: ModelPlan, cap: float, times: int
) -> tuple[ModelPlan, float, float] | None:
    """Return the plan that fits below a cap, its milliseconds, and the bytes that it allocates.

    A pipe measures what its stages keep, and refuses a plan that needs more than its profile has
    told. The next plan then has to leave more free.
    """
    for share in (0.95, 0.88, 0.8, 0.7, 0.6):
        plan = with_choice(free, memory=cap * share)
        if plan is None:
            return None
        try:
            return plan, *measure(case, replace(plan, memory=(cap,) * plan.ranks), times)
        except ArgumentError as error:
            print(f"with {share:.0%} of the cap: {str(error)[:120]}", flush=True)
    return None


def list_alternatives(planned: ModelPlan) -> Iterator[tuple[str, ModelPlan]]:
    """Yield other plans: schedules x micro-batches, with the best cut and with equal layers."""
    ranks = planned.ranks
    chunks = [m for m in (2 * ranks, 4 * ranks) if planned.profile.rows % m == 0]
    cuts: dict[int, tuple[int, ...]] = {}  # the best one for each number of stages
    for name in ("1f1b", "zb-v"):
        best = with_choice(planned, schedules=[name], chunks=chunks[:1], memory=inf)
        if best is not None:
            cuts[len(best.cut)] = best.cut
    for number, name, cut in product(chunks, SCHEDULES, cuts.values()):
        options: dict[str, Any] = {"schedules": [name], "chunks": [number], "memory": inf}
        for words, tried in (("", cut), (", equal layers", cut_equally(planned, len(cut)))):
            other = with_choice(planned, **options, cut=tried)
            if other is not None and (not words or name in ("1f1b", "zb-h1")):
                yield f"{name}, {number}, {len(cut)} stages{words}", other


def cut_equally(plan: ModelPlan, stages: int) -> list[int]:
    share, rest = divmod(len(plan.profile.units), stages)
    return [share + (stage < rest) for stage in range(stages)]


def print_choices(case: Case, places: list[VirtualGpu], clock: Clock, times: int) -> None:
    start = perf_counter()
    planned = make_plan(case, places, memory=inf)
    planned = with_contention(case, planned, places)
    print(
        f"\nplanned in {perf_counter() - start:.1f} s: {planned.describe_choice()}, {planned.cut}"
    )
    print(head(["choice", "ms", "forecast", "measured / forecast"]), flush=True)
    measured: dict[str, float] = {}
    rows = chain([("the plan", planned)], list_alternatives(planned), [("again", planned)])
    for name, other in rows:
        if clock.is_over and len(measured) > 1 and name != "again":
            continue
        try:
            ms, _ = measure(case, other, times)
        except (PenstockError, torch.OutOfMemoryError) as error:
            print(line([name, type(error).__name__, str(error)[:60], ""]), flush=True)
            continue
        measured[name] = ms
        ratio = ms / 1e3 / other.seconds
        print(line([name, f"{ms:.1f}", f"{1e3 * other.seconds:.1f}", f"{ratio:.3f}"]), flush=True)
    mine = min(measured.pop("the plan"), measured.pop("again", inf))
    fastest = min(measured.values(), default=mine)
    print(
        f"the plan takes {mine / fastest:.3f} of the fastest of {len(measured)} alternatives, "
        f"and {mine / 1e3 / planned.seconds:.3f} of its forecast",
        flush=True,
    )


def print_caps(case: Case, places: Sequence[Any], clock: Clock, times: int) -> None:
    free = make_plan(case, places, memory=inf)
    need = max(free.forecast.peak)
    print("\n" + head(["cap", "choice", "ms", "allocated", "of the caps"]), flush=True)
    for share in CAPS:
        cap = share * need
        found = None if clock.is_over else measure_within(case, free, cap, times)
        if found is None:
            print(line([f"{cap / 1e9:.2f} GB", "nothing fits, or no time is left"]), flush=True)
            continue
        plan, ms, peak = found
        used = f"{peak / 1e9:.2f} GB", f"{peak / cap / len(places):.2f}"
        print(line([f"{cap / 1e9:.2f} GB", plan.describe_choice(), f"{ms:.1f}", *used]), flush=True)


def print_worth(case: Case, places: Sequence[Any], times: int) -> None:
    free = make_plan(case, places, memory=inf)
    ranks = len(places)
    options: dict[str, Any] = {"cut": cut_equally(free, ranks), "schedules": ["1f1b"]}
    usual = with_choice(free, memory=inf, recompute=[True] * ranks, **options)
    assert usual is not None
    # A cap that 1f1b exceeds unless it recomputes something.
    kept = with_choice(free, memory=inf, chunks=[usual.chunks], **options)
    assert kept is not None
    cap = 0.9 * max(kept.forecast.peak)
    slow, slow_peak = measure(case, usual, times)
    found = measure_within(case, free, cap, times)
    assert found is not None
    plan, fast, fast_peak = found
    print("\n" + head(["under a cap of " + f"{cap / 1e9:.2f} GB", "ms", "forecast", "allocated"]))
    for name, forecast, ms, peak in (
        ("equal layers, 1f1b, recompute all", usual.seconds, slow, slow_peak),
        (plan.describe_choice(), plan.seconds, fast, fast_peak),
    ):
        print(line([name, f"{ms:.1f}", f"{1e3 * forecast:.1f}", f"{peak / 1e9:.2f} GB"]))
    print(f"{slow / fast:.2f} times the speed", flush=True)


def print_unequal(times: int) -> None:
    places = penstock.virtual_devices("cuda:0", sms=[64, 32, 16])
    case = make_case("mlp")
    rows = len(case.x) // 32
    share = contention_of_graphs(list(places), case.model[0], case.x[:rows])
    planned = make_plan(case, places, memory=inf, chunks=[16, 32, 64])
    stages = len(planned.cut)
    options: dict[str, Any] = {"chunks": [planned.chunks], "memory": inf}
    even = with_choice(planned, cut=cut_equally(planned, stages), **options)
    assert even is not None
    (fast, _), (slow, _) = (measure(case, plan, times) for plan in (planned, even))
    ceiling = 1e3 * planned.seconds / share
    print(f"\nunequal: {[place.sms for place in places]} multiprocessors, contention {share:.3f}")
    print(f"plan {planned.describe_choice()}, cut {planned.cut}: {fast:.1f} ms,")
    print(f"{ceiling / fast:.3f} of the ceiling ({ceiling:.1f} ms); equal cut {slow:.1f} ms,")
    print(f"{slow / fast:.2f} times the speed of the equal cut", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["gpt", "resnet101", "mlp"])
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    needs_cuda()
    torch.cuda.init()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    start = perf_counter()
    end = start + args.seconds
    rounds = list(product(args.devices, args.models))
    for index, (ranks, name) in enumerate(rounds):
        # What is left is shared by the models that are left, so that each gets some rows.
        clock = Clock((end - perf_counter()) / (len(rounds) - index))
        places, case = penstock.virtual_devices("cuda:0", ranks), make_case(name)
        print(f"\n## {name} on {ranks} virtual GPUs of {places[0].sms} multiprocessors", flush=True)
        try:
            if "worth" in args.tables and name == "gpt":
                print_worth(case, places, args.times)
            if "caps" in args.tables and name == "gpt":
                print_caps(case, places, clock, args.times)
            if "choices" in args.tables:
                print_choices(case, places, clock, args.times)
        except (PenstockError, torch.OutOfMemoryError) as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    if "unequal" in args.tables:
        print_unequal(args.times)
    print(f"{perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
