"""Damage one file of a checkpoint at a time, and load it.

    python -m tests.checkpoint.corrupt --cases 500 --seed 0

Each case truncates a file, flips one bit of it, sets a part of it to zero, or removes it. Loading
must raise, name the file, and leave the model, the optimizer, the extra state of layers and the
random state bitwise as they were.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock import CheckpointError, Pipe
from tests.checkpoint.saved_models import differences, optimizer_of, state_of, stepped

KINDS = ("truncate", "flip", "zero", "remove")


class Counting(nn.Linear):
    """A layer with extra state, which it hands out itself and not as a copy."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.count = {"calls": 1, "scale": torch.ones(3)}

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = dict(state)


def make_pipe(seed: int) -> tuple[Pipe, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(Counting(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = Pipe(model, stages=3, devices=["cpu"] * 3)
    optimizer = optimizer_of(pipe)
    stepped(pipe, optimizer)
    return pipe, optimizer


def everything(pipe: Pipe, optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of all that a load may change."""
    layer: Any = pipe[0]
    state = {**state_of(pipe, optimizer), **layer.count, "random": torch.get_rng_state()}
    del state["0._extra_state"]
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def damaged(data: bytes, kind: str, draw: random.Random) -> bytes:
    """Return the bytes of a file with one damage."""
    if kind == "truncate":
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    if kind == "flip":
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        begin = draw.choice([0, draw.randrange(len(data))])
        length = draw.choice([1, 64, 512, len(data)])
        changed[begin : begin + length] = bytes(len(changed[begin : begin + length]))
    return bytes(changed)


def run_cases(folder: Path, cases: range) -> Counter[str]:
    """Run cases, and return how many of them damaged each file in each way."""
    saver, saver_optimizer = make_pipe(1)
    for step in range(2):
        path = saver.save(folder, optimizer=saver_optimizer, extra={"step": step}).path
    pipe, optimizer = make_pipe(2)
    files = sorted(path.iterdir())
    counts: Counter[str] = Counter()
    for number in cases:
        draw = random.Random(number)
        file, kind = files[number % len(files)], KINDS[number // len(files) % len(KINDS)]
        intact = file.read_bytes()
        content = None if kind == "remove" else damaged(intact, kind, draw)
        while content == intact:  # those bytes were zero
            content = damaged(intact, kind, draw)
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        before = everything(pipe, optimizer)
        message = "nothing was raised"
        try:
            pipe.load(folder if draw.random() < 0.5 else path, optimizer=optimizer)
        except CheckpointError as error:
            message = str(error)
        assert str(file) in message, f"case {number}: {kind} {file.name}: {message}"
        changed = differences(everything(pipe, optimizer), before)
        assert changed == [], f"case {number}: {kind} {file.name} changed {changed}"
        file.write_bytes(intact)
        counts[f"{kind} {file.name}"] += 1
    assert pipe.load(folder, optimizer=optimizer) == {"step": 1}
    after = everything(pipe, optimizer)
    del after["random"]  # it was saved before the parameters of the second pipe were drawn
    assert differences(after, everything(saver, saver_optimizer)) == []
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run_cases(Path(folder), range(options.seed, options.seed + options.cases))
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")
    print(f"{counts.total()} cases: all were refused, named the file and changed nothing")


if __name__ == "__main__":
    main()
