"""Run a case as a pipe, inline, in threads or over processes, and compare it with the oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from penstock import Chunk, NoChunk, Op, Pipe, loads
from penstock.schedules.ir import schedule_of
from tests.distributed.ranks import ranks
from tests.oracle import (
    Batch,
    Outcome,
    bitwise,
    call,
    closely,
    differences,
    gathered,
    merged,
    orders_of,
    run_parts,
    run_pipe,
    run_whole,
    sizes_of,
)
from tests.properties.cases import Case
from tests.properties.layers import WIDTH
from tests.properties.losses import LOSSES, numbers
from tests.properties.models import packed

NOTHING = Batch((), leaves={})  # for a rank that gets no inputs


def compare(case: Case) -> None:
    """Compare each step, its random numbers, and the evaluation after the last step."""
    model = case.model.build().train(case.training)
    by_parts, at_once = copy.deepcopy(model), copy.deepcopy(model)
    pipe = piped(case, model)
    loss = LOSSES[case.loss]
    loss_fn = loss.function(case.model.output)
    found = over_processes(case) if case.runtime == "processes" else trained(case, pipe)
    for step, rows in enumerate(case.rows):
        outcome, generator = next(found)
        sizes = sizes_of(rows, case.chunks)
        schedule = pipe._schedule_choice(len(sizes))
        expected = run_parts(
            by_parts,
            batch(case, rows, step),
            loss_fn,
            sizes=sizes,
            counts=case.counts,
            door=case.door,
            reduction=loss.reduction,
            weigh=loss.weight,
            forward_orders=orders_of(schedule, Op.F),
            backward_order=orders_of(schedule, Op.B, Op.I)[-1],
            deferred=case.deferred,
            backwards=case.backwards,
        )
        wrong = differences(outcome, expected, bitwise if case.bitwise else closely)
        assert not wrong, "\n".join([f"step {step}:", *wrong])
        assert torch.equal(generator, torch.get_rng_state()), f"step {step}: the random state"
        if not case.mixes:
            expected = run_whole(at_once, batch(case, rows, step), loss_fn, case.backwards)
            if case.door == "call":
                expected.metrics = {}
            wrong = differences(outcome, expected, closely)
            assert not wrong, "\n".join([f"step {step}, the whole batch:", *wrong])
        if case.updates:
            update(by_parts)
            update(at_once)
    rows = case.rows[-1] // 2 + 1
    outcome, _ = next(found)
    wrong = differences(outcome, evaluated(case, by_parts, batch(case, rows, 0)), closely)
    assert not wrong, "\n".join(["eval mode:", *wrong])


def batch(case: Case, rows: int, seed: int) -> Batch:
    """Return a new batch, the same for the same seed."""
    torch.default_generator.manual_seed(seed)  # a hundred times as fast as torch.manual_seed
    leaves = {
        "x": numbers(rows),
        "gate": torch.rand(rows, 1, dtype=torch.float64),
        "shift": torch.randn(WIDTH, dtype=torch.float64),
        "columns": torch.rand(WIDTH, rows, dtype=torch.float64),
        "noted": numbers(rows),
    }
    target = LOSSES[case.loss].target(rows)
    for leaf in leaves.values():
        leaf.requires_grad_(case.learns)
    given = packed(case.model.given, leaves["x"])
    side = {
        "gate": leaves["gate"],
        "shift": NoChunk(leaves["shift"]),
        "columns": Chunk(leaves["columns"], dim=1),
        "note": {"parts": [leaves["noted"]], "none": None, "times": 0.5},
        "factor": 0.25,
    }
    wanted = {name: side[name] for name in side if name in case.model.takes}
    return Batch(given if type(given) is tuple else (given,), wanted, target, leaves)


def piped(case: Case, model: nn.Sequential, processes: bool = False) -> Pipe:
    """Return a pipe with all ranks in this process, or this rank's part under `processes`."""
    loss = LOSSES[case.loss]
    here: dict[str, Any] = {"devices": ["cpu"] * case.ranks, "runtime": "inline"}
    if processes:
        here = {
            "group": distributed.group.WORLD,
            "data": case.data,
            "outputs": case.outputs,
            "shapes": case.shapes,
        }
    elif case.runtime != "processes":
        here["runtime"] = case.runtime
    return Pipe(
        model,
        case.chunks,
        case.checkpoint,
        case.deferred,
        stages=case.counts,
        schedule=case.schedule if case.by_name else schedule_of(loads(case.schedule)),
        loss_fn=loss.function(case.model.output),
        reduction=loss.reduction,
        **here,
    )


Step = tuple[Outcome, Tensor]  # the outcome, and the state of the generator after it


def trained(case: Case, pipe: Pipe, given_here: bool = True) -> Iterator[Step]:
    """Yield each step of a pipe, then its evaluation."""

    def given(rows: int, seed: int) -> Batch:
        made = batch(case, rows, seed)  # also seeds the generator
        return made if given_here else NOTHING

    for step, rows in enumerate(case.rows):
        outcome = run_pipe(pipe, given(rows, step), case.door, case.backwards)
        yield outcome, torch.get_rng_state()
        if case.updates:
            update(pipe)
    yield evaluated(case, pipe, given(case.rows[-1] // 2 + 1, 0)), torch.get_rng_state()


def over_processes(case: Case) -> Iterator[Step]:
    """Yield each step of all ranks as if there were one process."""
    of_ranks = ranks(case.ranks).run(on_rank, case)
    first = case.first_rank
    ordered = [of_ranks[first], *of_ranks[:first], *of_ranks[first + 1 :]]
    for steps in zip(*ordered, strict=True):
        assert all(torch.equal(generator, steps[0][1]) for _, generator in steps)
        yield merged([outcome for outcome, _ in steps], case.model.build()), steps[0][1]


def on_rank(case: Case) -> list[Step]:
    """Run the case in one of the processes."""
    pipe = piped(case, case.model.build().train(case.training), processes=True)
    given_here = case.data == "all" or distributed.get_rank() == case.first_rank
    return list(trained(case, pipe, given_here))


def evaluated(case: Case, model: nn.Module, given: Batch) -> Outcome:
    """Return the outputs in eval mode, without gradients."""
    model.eval()
    with torch.no_grad():
        if isinstance(model, Pipe):
            output = model(*given.inputs, **given.side)
        else:
            output = gathered([call(model, given.whole())])
    model.train(case.training)
    return Outcome.of(model, given, torch.zeros(()), output)


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Take a bounded step along the gradients, however large they are."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad / (1 + parameter.grad.abs()), alpha=0.05)
    model.zero_grad()
