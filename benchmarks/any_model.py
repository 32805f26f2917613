"""What it costs the host that every stage runs the model's own forward.

    python benchmarks/any_model.py
    python benchmarks/any_model.py --rounds 40 --tiny

GPT-2 with its own loss, in one thread, without gradients: unsplit; its four stages one after
another, fed by hand; and as a pipe with one micro-batch, inline. Every way takes its turn in every
round, so that all meet the same noise, and the median of their ratios to the unsplit forward of the
same round counts. `cpu` is the thread's own time, which others on the machine disturb less. With
`--tiny` the layers are so small that nearly all of the time is Python's: there the milliseconds
count, and not the ratios.
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
from penstock.runtime.stage_inputs import Batch, build_stage_inputs
from penstock.stage.stage import OUTSIDE

STAGES = 4
SIZES = [(1, 128), (2, 128), (4, 128)]  # rows, tokens
CPU = torch.device("cpu")


class Taken(NamedTuple):
    """Seconds of one forward: on the wall, and of the thread."""

    wall: float
    cpu: float


def gpt2(tiny: bool) -> GPT2LMHeadModel:
    """Twelve layers, as large as the small one, or as narrow as possible."""
    torch.manual_seed(0)
    width = {"n_embd": 32, "n_head": 2, "vocab_size": 64} if tiny else {}
    config = GPT2Config(**width, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def stage_by_stage(pipe: Pipe, inputs: dict[str, Tensor]) -> Any:
    """The forwards of all stages, with what comes from outside dealt out as in a call."""
    partition = pipe._placed_partition.partition
    fed = build_stage_inputs(partition, 1, Batch((), inputs), lambda stage: CPU)
    arrived: dict[int, dict[int, tuple[Any, ...]]] = {
        stage: {OUTSIDE: values[0]} for stage, values in fed.by_stage.items()
    }
    for stage in partition.stages:
        for dst, values in stage.compute(arrived[stage.index]).items():
            arrived.setdefault(dst, {})[stage.index] = values
    return arrived[OUTSIDE][STAGES - 1][0]


def taken(work: Callable[[], Any]) -> Taken:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Taken(time.perf_counter() - wall, time.thread_time() - cpu)


def compared(model: GPT2LMHeadModel, pipe: Pipe, rows: int, tokens: int, rounds: int) -> str:
    ids = torch.randint(model.config.vocab_size, (rows, tokens))
    inputs = {"input_ids": ids, "labels": ids}
    ways: dict[str, Callable[[], Any]] = {
        "unsplit": lambda: model(**inputs, use_cache=False),
        "stages": lambda: stage_by_stage(pipe, inputs),
        "inline": lambda: pipe(**inputs),
    }
    logits = [way().logits for way in ways.values()]
    assert all(torch.equal(logits[0], one) for one in logits)
    del logits
    found: dict[str, list[Taken]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in list(ways.items())[:: 1 if turn % 2 else -1]:
            found[name].append(taken(way))
    cells = [f"{rows} x {tokens}", _milliseconds(found["unsplit"])]
    for name in ("stages", "inline"):
        pairs = list(zip(found[name], found["unsplit"], strict=True))
        wall = statistics.median(mine.wall / plain.wall for mine, plain in pairs)
        cpu = statistics.median(mine.cpu / plain.cpu for mine, plain in pairs)
        more = statistics.median(mine.cpu - plain.cpu for mine, plain in pairs)
        cells += [_milliseconds(found[name]), f"{wall:.3f}", f"{cpu:.3f}", f"{1e3 * more:+.2f} ms"]
    return f"| {' | '.join(cells)} |"


def _milliseconds(times: list[Taken]) -> str:
    return f"{1e3 * statistics.median(one.wall for one in times):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = gpt2(asked.tiny)
    ids = torch.randint(model.config.vocab_size, SIZES[0])
    pipe = Pipe(
        model,
        stages=STAGES,
        devices=["cpu"] * STAGES,
        example={"input_ids": ids, "labels": ids},
        balance="parameters",
        runtime="inline",
    )
    numbers = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"GPT-2, {numbers:,} parameters, stages of {pipe._placed_partition.partition.counts} units,"
    )
    print(f"float32, one thread, torch {torch.__version__}, medians of {asked.rounds} rounds\n")
    print("| rows x tokens | unsplit | stages | wall | cpu | more | pipe | wall | cpu | more |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for rows, tokens in SIZES:
        print(compared(model, pipe, rows, tokens, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
