"""What splitting a backward into I and W costs on the host, beside PyTorch's own split.

    python benchmarks/split_backward.py

One stage of pre-norm transformer blocks with tiny tensors, one intra-op thread, so that nearly all
of the time is the host's. The same cell is computed with a whole backward (B), with Penstock's I
and W, and with `stage_backward_input` and `stage_backward_weight` of torch.distributed.pipelining.
Every way takes its turn in every round, so that all meet the same noise. All three gradients are
compared first.
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
from penstock.stage.stage_runner import SavedForBackward, StageRunner

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
    found = work()
    times[name] = time.perf_counter() - start
    return found


def penstock(stage: Stage, x: Tensor, divided: bool) -> Timed:
    """One cell, as a pipe computes it."""
    context = CallerContext.current(frozenset({"cpu"}))
    tape = StageRunner(stage, context, lambda i: SavedForBackward.GRAPH, lambda i: divided)
    given = Payload((x.detach(),), None, (True,))
    times: Timed = {}
    made = seconds(times, "F", lambda: tape.forward(0, {OUTSIDE: given}))
    (output,) = made[OUTSIDE].tensors
    gradients = {OUTSIDE: (torch.ones_like(output),)}
    seconds(times, "I" if divided else "B", lambda: tape.backward(0, gradients, retain_graph=False))
    if divided:
        seconds(times, "W", lambda: tape.backward_weights(0))
    return times


def pytorch(model: nn.Sequential, x: Tensor) -> Timed:
    """The same by PyTorch's functions."""
    given = x.detach().requires_grad_()
    times: Timed = {}
    output = seconds(times, "F", lambda: model(given))
    gradients = [torch.ones_like(output)]
    _, groups = seconds(
        times, "I", lambda: stage_backward_input([output], gradients, [given], model.parameters())
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
    """All give the same gradients."""
    found = []
    for way in ways(model, x).values():
        model.zero_grad()
        way()
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def measure(number: int, rounds: int) -> dict[str, Timed]:
    """Milliseconds, medians."""
    model, x = blocks(number), inputs()
    check(model, x)
    found = ways(model, x)
    times: dict[str, list[Timed]] = {name: [] for name in found}
    gc.disable()
    for turn in range(rounds + 2):
        for name, way in found.items():
            model.zero_grad()
            taken = way()
            gc.collect()
            if turn >= 2:
                times[name].append(taken)
    gc.enable()
    return {
        name: {op: statistics.median(t[op] for t in taken) * 1e3 for op in taken[0]}
        for name, taken in times.items()
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
        found = measure(number, rounds)
        whole, split, theirs = found["whole"], found["split"], found["pytorch"]
        F, B = whole["F"], whole["B"]
        ours = split["I"] + split["W"]
        cells = [F, B, split["F"], split["I"], split["W"], ours / B, (split["F"] + ours) / (F + B)]
        cells += [theirs["I"], theirs["W"], (theirs["I"] + theirs["W"]) / B]
        print(f"| {number} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
