"""Measure the host overhead of splitting a backward into I and W, next to PyTorch's own split.

    python benchmarks/split_backward.py

The stage has pre-norm transformer blocks with tiny tensors, and one intra-op thread, so that nearly
all of the time is overhead of the host. The same cell is computed with a full backward (B), with
the I and W of Penstock, and with `stage_backward_input` and `stage_backward_weight` of
torch.distributed.pipelining. Every round runs each variant once, so that all see the same noise.
The gradients of all three are compared first.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.demo.model import DemoSize, TransformerBlock
from penstock.model.sequential import cut_sequential
from penstock.stage.caller_context import CallerContext
from penstock.stage.payload import Payload
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.stage_runner import StageRunner

BLOCKS = (8, 16, 32, 64)
SIZE = DemoSize(width=16, blocks=1, heads=2, context=8, rows=2)

Timed = dict[str, float]


def blocks(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[TransformerBlock(SIZE) for _ in range(number)])


def inputs() -> Tensor:
    return torch.randn(
        SIZE.rows, SIZE.context, SIZE.width, generator=torch.Generator().manual_seed(1)
    )


def seconds(times: Timed, name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    times[name] = time.perf_counter() - start
    return result


def penstock(stage: Stage, x: Tensor, divided: bool) -> Timed:
    """Time one cell as a pipe computes it."""
    context = CallerContext.current(frozenset({"cpu"}))
    runner = StageRunner(stage, context, split_cells={(stage.index, 0)} if divided else ())
    payload = Payload((x.detach(),), None, (True,))
    times: Timed = {}
    outputs = seconds(times, "F", lambda: runner.forward(0, {OUTSIDE: payload}))
    (output,) = outputs[OUTSIDE].tensors
    gradients = {OUTSIDE: Payload((torch.ones_like(output),))}
    seconds(
        times, "I" if divided else "B", lambda: runner.backward(0, gradients, retain_graph=False)
    )
    if divided:
        seconds(times, "W", lambda: runner.backward_weights(0))
    return times


def pytorch(model: nn.Sequential, x: Tensor) -> Timed:
    """Time the same cell with the functions of torch.distributed.pipelining."""
    stage_input = x.detach().requires_grad_()
    times: Timed = {}
    output = seconds(times, "F", lambda: model(stage_input))
    gradients = [torch.ones_like(output)]
    _, groups = seconds(
        times,
        "I",
        lambda: stage_backward_input([output], gradients, [stage_input], model.parameters()),
    )
    seconds(times, "W", lambda: stage_backward_weight(model.parameters(), groups))
    return times


def ways(model: nn.Sequential, x: Tensor) -> dict[str, Callable[[], Timed]]:
    (stage,) = cut_sequential(model, [len(model)]).stages
    return {
        "whole": lambda: penstock(stage, x, divided=False),
        "split": lambda: penstock(stage, x, divided=True),
        "pytorch": lambda: pytorch(model, x),
    }


def check(model: nn.Sequential, x: Tensor) -> None:
    """Check that all variants give the same gradients."""
    gradients = []
    for way in ways(model, x).values():
        model.zero_grad()
        way()
        gradients.append([p.grad for p in model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=1e-6)


def measure(number: int, rounds: int) -> dict[str, Timed]:
    """Return the median milliseconds of each action, by variant."""
    model, x = blocks(number), inputs()
    check(model, x)
    variants = ways(model, x)
    times: dict[str, list[Timed]] = {name: [] for name in variants}
    gc.disable()
    for round_index in range(rounds + 2):
        for name, run_cell in variants.items():
            model.zero_grad()
            timings = run_cell()
            gc.collect()
            if round_index >= 2:
                times[name].append(timings)
    gc.enable()
    return {
        name: {op: statistics.median(t[op] for t in runs) * 1e3 for op in runs[0]}
        for name, runs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # as a pipe's workers do
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, ms, medians of {rounds} rounds\n")
    print("| blocks | F | B | split: F | I | W | (I + W) / B | (F + I + W) / (F + B) ", end="")
    print("| PyTorch: I | W | (I + W) / B |")
    print("|---|" + "---|" * 10)
    for number in BLOCKS:
        medians = measure(number, rounds)
        whole, split, theirs = medians["whole"], medians["split"], medians["pytorch"]
        F, B = whole["F"], whole["B"]
        ours = split["I"] + split["W"]
        cells = [F, B, split["F"], split["I"], split["W"], ours / B, (split["F"] + ours) / (F + B)]
        cells += [theirs["I"], theirs["W"], (theirs["I"] + theirs["W"]) / B]
        print(f"| {number} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
