"""End a rank at a random moment of its steps and saves, resume, and compare bit for bit.

    python -m tests.faults.random_kills [--cases 200] [--seed 0]

Each case trains on 2 to 4 ranks and saves after every step. One rank is ended in one of these ways,
at a random moment; then the run is resumed from its last checkpoint. Losses and weights must be
those of a run without interruption, bit for bit:

    kill      kill -9
    term      SIGTERM, which ends the rank
    handler   SIGTERM on all ranks and a handler of the user's own, which lets all save and exit
    preempt   SIGTERM on one rank, and `Pipe.save_on_preemption`
    stop      SIGSTOP; the others end it once they have given it up
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from penstock import Pipe, saved
from tests.faults.disposable_ranks import RankContext, RankOutcome, run_ranks

STEPS = 12
SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "handler": signal.SIGTERM,
    "preempt": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}


class Kill(NamedTuple):
    """A signal that ranks receive some seconds after they have begun to train."""

    kind: str
    ranks: list[int]
    seconds: float


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*(layer for group in layers for layer in group)).double()


def batches(begin: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(begin, STEPS):
        x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        yield x, x.cos()


def train(context: RankContext, folder: Path, kill: Kill | None) -> None:
    """Train from the last checkpoint on, and report the losses and weights of the whole run."""
    flag, pids = threading.Event(), context.gather_pids()
    if kill is not None and kill.kind == "handler":
        signal.signal(signal.SIGTERM, lambda number, frame: flag.set())
    pipe = Pipe(
        build_model(),
        chunks=3,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
        group=dist.group.WORLD,
        heartbeat=3.0,
        audit="off",
    )
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    losses: list[float] = pipe.load(folder, optimizer=optimizer) if saved(folder) else []
    if kill is not None and kill.kind == "preempt":
        pipe.save_on_preemption(folder, optimizer, extra=lambda: losses)
    dist.barrier()
    if kill is not None and context.rank in kill.ranks:
        number = SIGNALS[kill.kind]
        threading.Timer(kill.seconds, os.kill, (os.getpid(), number)).start()
    try:
        for x, target in batches(len(losses)):
            optimizer.zero_grad()
            loss = pipe.step(x, target=target).loss
            optimizer.step()
            losses.append(float(loss))
            pipe.save(folder, optimizer=optimizer, extra=losses)
            if kill is not None and kill.kind == "handler":
                flags = torch.tensor([flag.is_set()], dtype=torch.int64)
                dist.all_reduce(flags)
                if flags.item():
                    pipe.save(folder, optimizer=optimizer, extra=losses)
                    context.report(saved=True)
                    break
    except Exception:
        if kill is not None and kill.kind == "stop":
            os.kill(pids[kill.ranks[0]], signal.SIGKILL)
        raise
    weights = {name: tensor.tolist() for name, tensor in pipe.state_dict().items()}
    context.report(losses=losses, weights=weights)


def run_case(seed: int, size: int, expected: list[dict[str, Any]], seconds: float) -> str:
    """Run one case. Return its kind, and what was wrong after a colon."""
    draw = random.Random(seed)
    kind = draw.choice(list(SIGNALS))
    victims = [*range(size)] if kind == "handler" else [draw.randrange(size)]
    kill = Kill(kind, victims, draw.uniform(0, seconds))
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        first = run_ranks(size, train, folder, kill, within=60)
        problem = _find_problem(kill, first)
        last = run_ranks(size, train, folder, None, within=60)
    for rank, (outcome, right) in enumerate(zip(last, expected, strict=True)):
        if outcome.code != 0:
            problem += f" rank {rank} could not resume: {outcome.written[-1500:]}"
        elif {key: outcome.facts[key] for key in right} != right:
            problem += f" rank {rank} has other numbers after {kill}"
    was_over = kind != "handler" and all(outcome.code == 0 for outcome in first)
    return f"{kind}{' after the end' if was_over else ''}:{problem}"


def _find_problem(kill: Kill, outcomes: list[RankOutcome]) -> str:
    """Return what is wrong with the run that was interrupted."""
    codes = [outcome.code for outcome in outcomes]
    if codes == [0] * len(codes) and (kill.kind == "handler" or "losses" in outcomes[0].facts):
        return ""  # the run was over before, or all have saved
    if None in codes:
        return f" a rank did not end: {codes} {kill} {[o.written[-800:] for o in outcomes]}"
    if kill.kind == "handler":
        return f" a handler was not respected: {codes} {[o.written[-800:] for o in outcomes]}"
    if kill.kind == "preempt" and set(codes) - {143, 0}:
        return f" not all ranks saved: {codes} {[o.written[-800:] for o in outcomes]}"
    return ""


def run_without_interruption(size: int) -> list[dict[str, Any]]:
    with TemporaryDirectory() as name:
        outcomes = run_ranks(size, train, Path(name) / "run", None, within=60)
    return [{key: o.facts[key] for key in ("losses", "weights")} for o in outcomes]


def search(cases: int, first_seed: int = 0, at_once: int = 4, seconds: float = 1.5) -> list[str]:
    """Run cases at once, print how many there were of each kind, and return the problems."""
    sizes = (2, 3, 4)
    expected = {size: run_without_interruption(size) for size in sizes[: min(cases, 3)]}
    seeds = range(first_seed, first_seed + cases)
    with ThreadPoolExecutor(at_once) as pool:
        found = [
            pool.submit(run_case, seed, size, expected[size], seconds)
            for seed, size in zip(seeds, [s for _ in seeds for s in expected], strict=False)
        ]
        texts = [future.result() for future in found]
    print(dict(Counter(text.split(":")[0] for text in texts)))
    return [
        f"seed {seed}: {text}" for seed, text in zip(seeds, texts, strict=True) if text[-1] != ":"
    ]


def main() -> None:
    """Run the search, and exit with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    problems = search(given.cases, given.seed)
    print(*problems, sep="\n")
    print(f"{given.cases - len(problems)} of {given.cases} cases resumed bit for bit")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
