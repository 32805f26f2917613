"""Run a case as a pipe, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from penstock import Pipe, loads
from penstock.schedules.ir import schedule_of
from tests.properties.cases import Case
from tests.properties.losses import LOSSES
from tests.properties.oracle import (
    Batch,
    Numbers,
    batch,
    layer_by_layer,
    numbers_of,
    read,
    together,
)

NOTHING = Batch({}, (), {}, None)  # for a rank that gets no inputs


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


def trained(case: Case, pipe: Pipe, given_here: bool = True) -> Iterator[Numbers]:
    """Yield the numbers of each step, then those of eval mode."""

    def given(rows: int, seed: int) -> Batch:
        made = batch(case, rows, seed)  # also seeds the generator
        return made if given_here else NOTHING

    for step, rows in enumerate(case.rows):
        found = run(case, pipe, given(rows, step))
        found["the generator"] = torch.get_rng_state()
        yield found
        if case.updates:
            update(pipe)
    yield evaluated(case, pipe, given(case.rows[-1] // 2 + 1, 0))


def run(case: Case, pipe: Pipe, given: Batch) -> Numbers:
    """Run a step with `pipe.step`, or with `pipe(x)` and `loss.backward()`."""
    if case.door == "step":
        result = pipe.step(*given.inputs, target=given.target, outputs=True, **given.side)
        return numbers_of(pipe, given, result.loss, result.metrics, result.outputs)
    assert pipe.loss_fn is not None
    output = pipe(*given.inputs, **given.side)
    loss = read(pipe.loss_fn(output, given.whole().target)).loss
    for left in reversed(range(case.backwards)):
        loss.backward(retain_graph=left > 0)
    return numbers_of(pipe, given, loss, {}, output)


def evaluated(case: Case, model: nn.Module, given: Batch) -> Numbers:
    """Return the outputs in eval mode, without gradients."""
    model.eval()
    with torch.no_grad():
        if isinstance(model, Pipe):
            output = model(*given.inputs, **given.side)
        else:
            part = given.whole()
            output = together([layer_by_layer(model, list(model.children()), part.inputs, part)])
    model.train(case.training)
    return numbers_of(model, given, torch.zeros(()), {}, output)


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Take a bounded step along the gradients, however large they are."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad / (1 + parameter.grad.abs()), alpha=0.05)
    model.zero_grad()
