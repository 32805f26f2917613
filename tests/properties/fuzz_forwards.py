"""Compare thousands of random forwards as a pipe and unsplit: the second half of `make fuzz`.

    python -m tests.properties.fuzz_forwards --cases 20000 --workers 16 --first 0
    python -m tests.properties.fuzz_forwards --cases 1 --first 4711    one case, shrunk if it fails

A case is a number, the seed of everything that is drawn. Its model comes from `random_forwards.py`.
It is trained for two steps and evaluated once, as a pipe and unsplit, one micro-batch after another
with the random numbers of the pipe. The verdict is one of

    equal      loss, outputs, gradients, buffers and random state agree within 1e-10
    refused    the pipe raised an error of Penstock's own
    failed     the numbers differ, or anything else was raised

Where the numbers differ, the case runs again with the audit. If the audit refuses the model, so
does the pipe by default, and the case counts as refused.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock import ArgumentError, AuditError, PenstockError, Pipe, schedules
from penstock.model.unsplit import UnsplitCells
from penstock.stage.rng import advance_caller_rng, peek_seed
from tests.oracle import Batch, Outcome, closely, differences, gathered, sizes_of
from tests.properties.random_forwards import (
    CHANGES,
    WIDTH,
    Forward,
    Parts,
    apply_change,
    draw_forward,
)

SCHEDULES = ("fit", *(name for name, family in schedules.FAMILIES.items() if family.trains))
HANG = 120.0  # seconds after which a case is considered to hang

# ---- cases --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One training step: its rows, a flag among its inputs, and a change of the model before it."""

    rows: int
    flag: bool = False
    change: tuple[str, str] | None = None  # a feature, and a statement


@dataclass(frozen=True)
class Case:
    """A model and a way to run it."""

    forward: Forward
    schedule: str
    ranks: int
    stages: int
    cut: tuple[int, ...] | None  # blocks of each stage; None: balanced by parameters
    chunks: int
    checkpoint: str
    runtime: str
    door: str
    steps: tuple[Step, ...]
    example_rows: int
    learns: bool = False  # whether the input requires a gradient
    updates: bool = False  # update parameters after each step; otherwise gradients accumulate
    evaluates: bool = True
    audit: str = "off"

    @property
    def has_own_loss(self) -> bool:
        """Return whether the model returns its loss."""
        return self.forward.body is not None and self.forward.body.form == "own loss"

    @property
    def features(self) -> set[str]:
        """Return what a table of many cases counts."""
        found = {"Sequential" if self.forward.sequential else "traced", self.door, self.runtime}
        found |= {self.schedule, f"checkpoint {self.checkpoint}", f"audit {self.audit}"}
        found |= {one.change[0] for one in self.steps if one.change}
        if any(step.rows % self.chunks for step in self.steps):
            found.add("uneven")
        if self.learns:
            found.add("inputs with gradients")
        return found | self.forward.features

    def options(self) -> str:
        """Return everything but the model."""
        names = [field.name for field in fields(self) if field.name != "forward"]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def draw_case(seed: int) -> Case:
    """Draw a case whose model runs unsplit; other models are drawn again."""
    draw = random.Random(seed)
    while True:
        case = _draw_any(draw)
        if is_valid(case):
            return case


def _draw_any(draw: random.Random) -> Case:
    schedule = draw.choice(SCHEDULES)
    family = schedules.FAMILIES.get(schedule)
    per_rank = family.stages_per_rank if family else draw.choice([1, 2])
    if family and family.free:
        per_rank = draw.choice([1, 2])
    ranks = draw.choice([2, 2, 3] if per_rank == 1 else [1, 2])
    stages = ranks * per_rank
    forward = draw_forward(draw, stages)
    count = len(forward.blocks)
    edges = sorted(draw.sample(range(1, count), stages - 1))
    cut = tuple(b - a for a, b in zip([0, *edges], [*edges, count], strict=True))
    chunks = draw.choice([1, 2, 2, 3, 4])
    steps: list[Step] = []
    for at in range(2):
        change = None
        if at and draw.random() < 0.25:
            name = draw.choice(list(CHANGES))
            change = name, CHANGES[name].format(i=draw.randrange(count))
            if forward.sequential and "root.factor" in change[1]:
                change = None
        rows = steps[0].rows if at and draw.random() < 0.5 else draw.randint(1, 7)
        steps.append(Step(rows, draw.random() < 0.3, change))
    return Case(
        forward,
        schedule,
        ranks,
        stages,
        cut if forward.sequential or draw.random() < 0.5 else None,
        chunks,
        draw.choice(["never", "always", "except_last"]),
        draw.choice(["inline", "threads"]),
        draw.choice(["call", "step"]),
        tuple(steps),
        draw.choice([steps[0].rows, draw.randint(2, 6)]),
        draw.random() < 0.3,
        draw.random() < 0.5,
        draw.random() < 0.3,
        "first" if draw.random() < 0.1 else "off",
    )


# ---- running a case -----------------------------------------------------------------------


def make_batch(case: Case, step: int, rows: int | None = None, seed: int | None = None) -> Batch:
    """Return the batch of a step, and seed the generator."""
    torch.default_generator.manual_seed(step if seed is None else seed)
    rows = case.steps[step].rows if rows is None else rows
    x = torch.randn(rows, WIDTH, dtype=torch.float64).requires_grad_(case.learns)
    target = torch.randn(rows, WIDTH, dtype=torch.float64)
    if case.forward.sequential:
        return Batch((x,), {}, target)
    gate = torch.rand(rows, 1, dtype=torch.float64) + 0.05
    side = {"flag": True} if case.steps[step].flag else {}
    return Batch((x, gate), side, None if case.has_own_loss else target)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a mean over rows, whatever the form of the output."""
    more: Any = 0.0
    if isinstance(output, dict):
        output, more = output["out"], output["more"][0].square().mean()
    elif isinstance(output, tuple):
        output, more = output[0], output[1].mean()
    loss: Tensor = functional.mse_loss(output, target) + more
    return loss


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Take a bounded step along the gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad / (1 + parameter.grad.abs()), alpha=0.05)
    model.zero_grad()


class Cells:
    """The random numbers that a pipe draws for the micro-batches of one batch.

    The unsplit model draws the same ones: in each unit, and in each operation between units, those
    of the stage on which the pipe runs it.
    """

    def __init__(self, pipe: Pipe, given: nn.Module, model: nn.Module) -> None:
        self._partition = pipe._placed_partition.partition
        self._names = {id(m): name for name, m in given.named_modules(remove_duplicate=False)}
        self._model, self._seed = model, peek_seed()
        self.has_drawn = False

    @contextmanager
    def emulate(self, microbatch: int, part: Batch) -> Iterator[None]:
        """Draw in this context what the pipe draws for a micro-batch."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        args, kwargs = pytree.tree_map_only(Tensor, copied, (part.inputs, part.side))
        units, functions = self._partition.map_stages(args, kwargs)
        ours = [(self._model.get_submodule(self._names[id(unit)]), at) for unit, at in units]
        cells = UnsplitCells(self._seed, len(self._partition.stages), ours, functions)
        with cells.emulate(microbatch):
            yield
        self.has_drawn |= cells.has_drawn


def run_parts(
    case: Case, model: nn.Module, batch: Batch, cells: Cells | None
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the output of the unsplit model for each micro-batch, and its share of the loss."""
    sizes = sizes_of(len(batch.inputs[0]), case.chunks)
    for i, part in enumerate(batch.parts(sizes)):
        with nullcontext() if cells is None else cells.emulate(i, part):
            output = model(*part.inputs, **part.side)
        loss = output if part.target is None else loss_of(output, part.target)
        yield output, loss * (sizes[i] / sum(sizes))
    if cells is not None and cells.has_drawn:
        advance_caller_rng()


def train_unsplit(case: Case, model: nn.Module, batch: Batch, cells: Cells | None) -> Outcome:
    """Run a step of the unsplit model; the backward of a micro-batch follows its forward."""
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    for output, share in run_parts(case, model, batch, cells):
        if share.requires_grad:
            share.backward()
        outputs.append(output)
        total = total + share.detach()
    return Outcome.of(model, batch, total, gathered(outputs))


def evaluate_unsplit(case: Case, model: nn.Module, batch: Batch, cells: Cells | None) -> Outcome:
    """Run the unsplit model without gradients."""
    outputs, shares = zip(*run_parts(case, model, batch, cells), strict=True)
    return Outcome(sum(shares), gathered(outputs), {}, {})


def train_pipe(case: Case, pipe: Pipe, batch: Batch) -> Outcome:
    """Run a step of the pipe."""
    if case.door == "step":
        result = pipe.step(*batch.inputs, target=batch.target, outputs=True, **batch.side)
        return Outcome.of(pipe, batch, result.loss, result.outputs)
    outcome = evaluate_pipe(pipe, batch)
    if outcome.loss.requires_grad:
        outcome.loss.backward()
    return Outcome.of(pipe, batch, outcome.loss, outcome.output)


def evaluate_pipe(pipe: Pipe, batch: Batch) -> Outcome:
    """Call the pipe, and compute the loss of its output."""
    output = pipe(*batch.inputs, **batch.side)
    loss = output if batch.target is None else loss_of(output, batch.target)
    return Outcome(loss, output, {}, {})


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Switch models to eval mode, without gradients, and back."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    with torch.no_grad():
        yield
    for module, mode in modes:
        module.training = mode


class NoHooksOnChangedViews(TorchFunctionMode):
    """Refuses hooks on views that were changed in place, in which PyTorch 2.13 ends the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and args[0]._is_view() and args[0]._version:
            raise RuntimeError("a hook on a view that was changed in place")
        return func(*args, **(kwargs or {}))


def is_valid(case: Case) -> bool:
    """Return whether the unsplit model runs, with numbers of a moderate size."""
    with NoHooksOnChangedViews():
        return _is_valid(case)


def _is_valid(case: Case) -> bool:
    try:
        example = make_batch(case, 0, case.example_rows)
        train_unsplit(case, case.forward.build(), example, None)
        model = case.forward.build()
        for at, step in enumerate(case.steps):
            if step.change:
                apply_change(model, step.change[1])
            outcome = train_unsplit(case, model, make_batch(case, at), None)
            numbers = [outcome.loss, *(g for g in outcome.gradients.values() if g is not None)]
            if len(numbers) == 1 or not all(bool((n.abs() < 1e4).all()) for n in numbers):
                return False
            if case.updates:
                update(model)
        if case.evaluates:
            with evaluating(model):
                evaluate_unsplit(case, model, make_batch(case, 0), None)
    except Exception:
        return False
    return True


def mixes_rows(case: Case) -> bool:
    """Return whether the unsplit model computes something else for rows that it gets one by one.

    The audit refuses such models, though a pipe computes what the model does for a micro-batch.
    """
    # What a forward does may depend on the rows that come together, so many batches are tried
    # beside those of the case; and on a change of the model before a step.
    changed = [at for at, step in enumerate(case.steps) if step.change]
    own: list[tuple[int | None, int | None, int]] = [
        (None, None, at) for at in range(len(case.steps))
    ]
    for seed, rows, last in (*own, *product(range(16), (2, 4), (0, *changed))):
        outcomes = []
        for chunks in (1, 2, rows or case.chunks):
            cut = replace(case, chunks=chunks)
            try:
                model = case.forward.build()
                for step in case.steps[: last + 1]:
                    if step.change:
                        apply_change(model, step.change[1])
                batch = make_batch(case, last, rows, seed)
                outcomes.append(train_unsplit(cut, model, batch, None))
            except Exception:  # a BatchNorm needs two rows
                return True
        if any(differences(outcome, outcomes[0], closely) for outcome in outcomes[1:]):
            return True
    return False


def make_pipe(case: Case, model: nn.Module) -> Pipe:
    """Cut the model as the case says, or balanced where its blocks are not the units."""
    names = ("chunks", "checkpoint", "schedule", "runtime", "audit")
    options: dict[str, Any] = {name: getattr(case, name) for name in names}
    options["devices"] = ["cpu"] * case.ranks
    options["loss_fn"] = None if case.has_own_loss else loss_of
    if case.forward.sequential:
        return Pipe(model, stages=case.cut, **options)
    batch = make_batch(case, 0, case.example_rows)
    named = dict(zip(("x", "gate"), batch.inputs, strict=True)) | batch.side
    # A pre-hook of the model does another thing with inputs by name than with those by position.
    is_hooked = any("root.register_forward_pre_hook" in text for _, text in case.forward.wiring)
    in_order = (*batch.inputs, *batch.side.values())
    options["example"] = named if batch.side and not is_hooked else in_order
    try:
        if case.cut is not None:
            return Pipe(model, stages=case.cut, **options)
    except ArgumentError as error:
        if "is not a cut of" not in str(error):
            raise
    return Pipe(model, stages=case.stages, balance="parameters", **options)


class Difference(AssertionError):
    """The pipe and the unsplit model computed different numbers."""


def compare(case: Case) -> None:
    """Run a case, and raise if anything differs."""
    given, model = case.forward.build(), case.forward.build()
    pipe = make_pipe(case, given)
    for at, step in enumerate(case.steps):
        if step.change:
            for root in (given, model):
                apply_change(root, step.change[1])
            pipe.training = given.training
        outcome = train_pipe(case, pipe, make_batch(case, at))
        state = torch.get_rng_state()
        batch = make_batch(case, at)
        expected = train_unsplit(case, model, batch, Cells(pipe, given, model))
        _check(f"step {at}", outcome, expected)
        if not torch.equal(state, torch.get_rng_state()):
            raise Difference(f"step {at}: the state of the random generator differs")
        ours, theirs = (_count_calls(pipe, root) for root in (given, model))
        if ours != theirs:
            raise Difference(f"step {at}: the blocks count {ours} calls, not {theirs}")
        if case.updates:
            update(pipe)
            update(model)
    if case.evaluates:
        with evaluating(pipe, given, model):
            outcome = evaluate_pipe(pipe, make_batch(case, 0))
            batch = make_batch(case, 0)
            expected = evaluate_unsplit(case, model, batch, Cells(pipe, given, model))
        _check("evaluation", outcome, expected)


def _count_calls(pipe: Pipe, root: nn.Module) -> dict[str, int]:
    """Return a Python counter of each block that is a unit of one stage.

    Of other blocks each stage has a copy, which may change as long as no number depends on it.
    """
    units = pipe._placed_partition.partition.find_unit_stages()
    modules = {name: root.get_submodule(name) for name, at in units.items() if len(set(at)) == 1}
    return {name: unit.calls for name, unit in modules.items() if isinstance(unit, Parts)}


def _check(where: str, outcome: Outcome, expected: Outcome) -> None:
    wrong = differences(outcome, expected, closely)
    if wrong:
        raise Difference("\n".join([f"{where}:", *wrong]))


# ---- verdicts -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    seed: int
    kind: str  # "equal", "refused" or "failed"
    reason: str = ""  # the error of a refusal, or the failure, without names and numbers
    features: frozenset[str] = frozenset()
    report: str = ""  # of a failure, with the smallest model


def judge(case: Case) -> tuple[str, str, str]:
    """Run a case, and return the kind of its verdict, the reason, and the whole text of it."""
    try:
        compare(case)
    except AuditError as error:
        if case.audit == "off":
            return "failed", "the audit ran though it is off", str(error)
        # With numbers of `random`, rows cannot be compared, so what may mix them is refused.
        is_uncertain = "an operation may mix rows" in str(error)
        if (
            is_uncertain
            or mixes_rows(case)
            or _ends_with((Difference, PenstockError), replace(case, audit="off"))
        ):
            return "refused", _normalise(error), str(error)
        return "failed", "false alarm of the audit", str(error)
    except PenstockError as error:
        return "refused", _normalise(error), str(error)
    except Difference as error:
        if case.audit == "off" and _ends_with(PenstockError, replace(case, audit="first")):
            return "refused", "AuditError, where the numbers differ without the audit", str(error)
        return "failed", "the numbers differ", str(error)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return "failed", _normalise(error), text
    return "equal", "", ""


def _ends_with(kinds: Any, case: Case) -> bool:
    """Return whether a case raises an error of one of these kinds."""
    try:
        compare(case)
    except Exception as error:
        return isinstance(error, kinds)
    return False


def _normalise(error: Exception) -> str:
    """Return the beginning of a message without names and numbers, to count messages alike."""
    text = re.sub(r"'[^']*'|\(.*?\)|\d+", "*", str(error).split("\n")[0])
    return f"{type(error).__name__}: {text[:90]}"


def shrink(case: Case, reason: str, budget: float = 30.0) -> Case:
    """Return a smaller case that fails for the same reason."""
    end = time.monotonic() + budget
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case
            if is_valid(smaller) and judge(smaller)[:2] == ("failed", reason):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less."""
    plain: dict[str, Any] = {"schedule": "gpipe", "runtime": "inline", "checkpoint": "never"}
    plain |= {"door": "step", "chunks": 1, "steps": case.steps[:1]}
    plain |= dict.fromkeys(("learns", "updates", "evaluates"), False)
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    forward = case.forward
    for at in range(len(forward.wiring)):
        kept = forward.wiring[:at] + forward.wiring[at + 1 :]
        yield replace(case, forward=replace(forward, wiring=kept))
    if forward.body is not None:
        for at in reversed(range(len(forward.body.statements) - 1)):
            yield replace(case, forward=replace(forward, body=forward.body.without(at)))
    for index, block in enumerate(forward.blocks):
        for at in reversed(range(len(block.statements) - 1)):
            blocks = list(forward.blocks)
            blocks[index] = block.without(at)
            yield replace(case, forward=replace(forward, blocks=tuple(blocks)))


def attempt(seed: int) -> Verdict:
    """Draw a case, run it, and shrink it if it fails."""
    case = draw_case(seed)
    kind, reason, text = judge(case)
    report = ""
    if kind == "failed":
        small = shrink(case, reason)
        wiring = "\n".join(statement for _, statement in small.forward.wiring)
        text = judge(small)[2] or text
        report = f"{small.forward.source()}\n{wiring}\n\n{small.options()}\n\n{text}"
    return Verdict(seed, kind, reason, frozenset(case.features), report)


# ---- many cases, in several processes -----------------------------------------------------


def prepare_process() -> None:
    """Set up a process for tiny tensors and many seeds."""
    torch.set_num_threads(1)
    # Torch keeps each seed, with a stack trace, for accelerators that might be initialised later.
    torch.manual_seed = torch.default_generator.manual_seed
    warnings.simplefilter("ignore")


def _work(seeds: range, tell: Any) -> None:
    prepare_process()
    for seed in seeds:
        tell.put(attempt(seed))


class Pool:
    """Worker processes, each with every n-th seed. One that dies or hangs is replaced."""

    def __init__(self, seeds: range, workers: int) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._news = self._spawn.Queue()
        self._lanes = [seeds[at::workers] for at in range(min(workers, len(seeds)))]
        self._done = [0] * len(self._lanes)  # cases of each worker so far
        self._since = [time.monotonic()] * len(self._lanes)
        self._home = {seed: at for at, lane in enumerate(self._lanes) for seed in lane}
        self._processes = [self._start(at) for at in range(len(self._lanes))]

    def _start(self, at: int) -> Any:
        self._since[at] = time.monotonic()
        left = self._lanes[at][self._done[at] :]
        process = self._spawn.Process(target=_work, args=(left, self._news), daemon=True)
        process.start()
        return process

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdict of each case."""
        while any(map(self._is_running, range(len(self._lanes)))):
            try:
                verdict = self._news.get(timeout=1.0)
            except queue.Empty:
                yield from self._replace_lost()
                continue
            at = self._home[verdict.seed]
            self._done[at] += 1
            self._since[at] = time.monotonic()
            yield verdict

    def _is_running(self, at: int) -> bool:
        return self._done[at] < len(self._lanes[at])

    def _replace_lost(self) -> Iterator[Verdict]:
        for at in filter(self._is_running, range(len(self._lanes))):
            died = not self._processes[at].is_alive()
            if died or time.monotonic() - self._since[at] > HANG:
                self._processes[at].kill()
                seed = self._lanes[at][self._done[at]]
                self._done[at] += 1
                yield Verdict(seed, "failed", "the process died" if died else "it hangs")
                self._processes[at] = self._start(at)


def fuzz(first: int, cases: int, workers: int) -> int:
    """Try cases, print a table, also of an interrupted run, and return the exit status."""
    began = time.monotonic()
    seeds = range(first, first + cases)
    print(f"random forwards {first} to {seeds[-1]}, {workers} at once", flush=True)
    verdicts: list[Verdict] = []
    with suppress(KeyboardInterrupt):
        for verdict in Pool(seeds, workers).verdicts():
            verdicts.append(verdict)
            if verdict.kind == "failed":
                print(f"failed: {verdict.seed}: {verdict.reason}\n{verdict.report}\n", flush=True)
            if len(verdicts) % 500 == 0:
                took = time.monotonic() - began
                kinds = Counter(one.kind for one in verdicts)
                print(f"{len(verdicts):6} of {cases}, {took:.0f} s, {dict(kinds)}", flush=True)
    print(describe(verdicts))
    return int(any(verdict.kind == "failed" for verdict in verdicts))


def describe(verdicts: list[Verdict]) -> str:
    """Return the table of a run: cases by feature, refusals by error, failures by reason."""
    kinds = ("equal", "refused", "failed")
    names = sorted({feature for verdict in verdicts for feature in verdict.features})
    lines = [f"{'':32}{'equal':>8}{'refused':>9}{'failed':>8}"]
    for name in ["all", *names]:
        counts = Counter(v.kind for v in verdicts if name == "all" or name in v.features)
        equal, refused, failed = (counts[kind] for kind in kinds)
        lines.append(f"{name:32}{equal:8}{refused:9}{failed:8}")
    for kind in kinds[1:]:
        seeds: dict[str, list[int]] = {}
        for verdict in verdicts:
            if verdict.kind == kind:
                seeds.setdefault(verdict.reason, []).append(verdict.seed)
        lines.append(f"\n{kind}:")
        for reason, found in sorted(seeds.items(), key=lambda item: -len(item[1])):
            listed = ", ".join(map(str, sorted(found)[: 4 if kind == "refused" else 40]))
            lines.append(f"{len(found):6} {reason} (seed {listed})")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="fuzz_forwards")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--first", type=int, default=random.randrange(10**6), help="the first seed")
    options = parser.parse_args(arguments)
    return fuzz(options.first, options.cases, options.workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
