"""Measure the host overhead of stages that run the model's own forward.

    python benchmarks/any_model.py
    python benchmarks/any_model.py --rounds 40 --tiny

GPT-2 with its own loss runs in one thread, without gradients, in three variants: unsplit; as four
stages one after another, fed by hand; and as an inline pipe with one micro-batch. Every round runs
each variant once, so that all see the same noise. The ratios are medians over the rounds, each
relative to the unsplit forward of the same round. `cpu` is the CPU time of the thread, which other
processes disturb less. With `--tiny`, the layers are so small that nearly all of the time is spent
in Python. Then look at the milliseconds, not at the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from penstock import Pipe
from penstock.model.stage_inputs import Batch
from penstock.stage.stage import OUTSIDE

STAGES = 4
SIZES = [(1, 128), (2, 128), (4, 128)]  # rows, tokens
CPU = torch.device("cpu")


class Taken(NamedTuple):
    """The seconds of one forward: wall-clock time, and CPU time of the thread."""

    wall: float
    cpu: float


def gpt2(tiny: bool) -> GPT2LMHeadModel:
    """Build GPT-2 small with random weights, or a very narrow version of it."""
    torch.manual_seed(0)
    width = {"n_embd": 32, "n_head": 2, "vocab_size": 64} if tiny else {}
    config = GPT2Config(**width, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def stage_by_stage(pipe: Pipe, inputs: dict[str, Tensor]) -> Any:
    """Run the forwards of all stages, with the inputs distributed as in a call of the pipe."""
    partition = pipe._placed_partition.partition
    stage_inputs = partition.build_stage_inputs(
        Batch((), inputs), dict.fromkeys(range(STAGES), CPU)
    )
    received: dict[int, dict[int, tuple[Any, ...]]] = {
        stage: {OUTSIDE: values[0]} for stage, values in stage_inputs.by_stage.items()
    }
    for stage in partition.stages:
        for dst, values in stage.compute(received[stage.index]).items():
            received.setdefault(dst, {})[stage.index] = values
    return received[OUTSIDE][STAGES - 1][0]


def taken(work: Callable[[], Any]) -> Taken:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Taken(time.perf_counter() - wall, time.thread_time() - cpu)


def compared(model: GPT2LMHeadModel, pipe: Pipe, rows: int, tokens: int, rounds: int) -> str:
    ids = torch.randint(model.config.vocab_size, (rows, tokens))
    inputs = {"input_ids": ids, "labels": ids}
    variants: dict[str, Callable[[], Any]] = {
        "unsplit": lambda: model(**inputs, use_cache=False),
        "stages": lambda: stage_by_stage(pipe, inputs),
        "inline": lambda: pipe(**inputs),
    }
    logits = [forward().logits for forward in variants.values()]
    assert all(torch.equal(logits[0], other) for other in logits)
    del logits
    durations: dict[str, list[Taken]] = {name: [] for name in variants}
    for round_index in range(rounds):
        for name, forward in list(variants.items())[:: 1 if round_index % 2 else -1]:
            durations[name].append(taken(forward))
    cells = [f"{rows} x {tokens}", _milliseconds(durations["unsplit"])]
    for name in ("stages", "inline"):
        pairs = list(zip(durations[name], durations["unsplit"], strict=True))
        wall = statistics.median(split.wall / plain.wall for split, plain in pairs)
        cpu = statistics.median(split.cpu / plain.cpu for split, plain in pairs)
        more = statistics.median(split.cpu - plain.cpu for split, plain in pairs)
        cells += [
            _milliseconds(durations[name]),
            f"{wall:.3f}",
            f"{cpu:.3f}",
            f"{1e3 * more:+.2f} ms",
        ]
    return f"| {' | '.join(cells)} |"


def _milliseconds(times: list[Taken]) -> str:
    return f"{1e3 * statistics.median(duration.wall for duration in times):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = gpt2(args.tiny)
    ids = torch.randint(model.config.vocab_size, SIZES[0])
    pipe = Pipe(
        model,
        stages=STAGES,
        devices=["cpu"] * STAGES,
        example={"input_ids": ids, "labels": ids},
        balance="parameters",
        runtime="inline",
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"GPT-2, {count:,} parameters, stages of {pipe._placed_partition.partition.counts} units,"
    )
    print(f"float32, one thread, torch {torch.__version__}, medians of {args.rounds} rounds\n")
    print("| rows x tokens | unsplit | stages | wall | cpu | more | pipe | wall | cpu | more |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for rows, tokens in SIZES:
        print(compared(model, pipe, rows, tokens, args.rounds), flush=True)


if __name__ == "__main__":
    main()
