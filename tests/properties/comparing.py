"""A case, run as a pipe and as the unsplit model: how far the numbers are apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from penstock import Pipe, Schedule, loads
from penstock.checking.reference import difference
from penstock.ir import schedule_of
from tests.properties.cases import Case
from tests.properties.losses import LOSSES
from tests.properties.oracle import (
    Batch,
    Numbers,
    batch,
    layer_by_layer,
    numbers_of,
    read,
    stepped,
    together,
    whole,
)

LIMIT = 1e-10


def piped(case: Case, model: nn.Sequential) -> Pipe:
    loss = LOSSES[case.loss]
    return Pipe(
        model,
        case.chunks,
        case.checkpoint,
        case.deferred,
        stages=case.counts,
        devices=["cpu"] * case.ranks,
        schedule=case.schedule if case.by_name else schedule_of(loads(case.schedule)),
        loss_fn=loss.function(case.model.output),
        reduction=loss.reduction,
        runtime=case.runtime,
    )


def run(case: Case, pipe: Pipe, given: Batch) -> Numbers:
    """A step of the pipe, through either door."""
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
    """Its outputs, in eval mode and without gradients."""
    model.eval()
    with torch.no_grad():
        if isinstance(model, Pipe):
            output = model(*given.inputs, **given.side)
        else:
            part = given.whole()
            output = together([layer_by_layer(model, list(model.children()), part.inputs, part)])
    model.train(case.training)
    return numbers_of(model, given, torch.zeros(()), {}, output)


def compare(case: Case) -> float:
    """The largest difference; raises if it is too large, with the names of all that differ."""
    worst = 0.0
    for what, found, expected, bitwise in outcomes(case):
        assert found.keys() == expected.keys(), what
        wrong = []
        for name, wanted in expected.items():
            apart = difference("", name, found[name], wanted)
            equal = not bitwise or apart.size == 0.0
            worst = max(worst, apart.size)
            if apart.size > LIMIT or not equal:
                wrong.append(f"{name} {apart.note or f'differs by {apart.size:.3g}'}")
        assert not wrong, "\n".join([f"{what}:", *wrong])
    return worst


def outcomes(case: Case) -> Iterator[tuple[str, Numbers, Numbers, bool]]:
    """What was compared, what the pipe gave, what the model gave, and whether to the last bit."""
    model = case.model.build().train(case.training)
    by_parts, at_once = copy.deepcopy(model), copy.deepcopy(model)
    pipe = piped(case, model)
    models: list[nn.Module] = [pipe, by_parts, at_once]
    for step, rows in enumerate(case.rows):
        sizes = [len(part) for part in torch.empty(rows).chunk(case.chunks)]
        given = batch(case, rows, step)
        found = run(case, pipe, given)
        after = torch.get_rng_state()
        expected = stepped(case, by_parts, batch(case, rows, step), sizes, _schedule(pipe, sizes))
        found["the generator"], expected["the generator"] = after, torch.get_rng_state()
        yield f"step {step}", found, expected, case.bitwise
        if not case.mixes:
            at_all = whole(case, at_once, batch(case, rows, step))
            found.pop("the generator")
            yield f"step {step}, the whole batch", found, at_all, False
        if case.updates:
            for each in models:
                _update(each)
    rows = case.rows[-1] // 2 + 1
    given, mine = (batch(case, rows, 0) for _ in range(2))
    yield "eval mode", evaluated(case, pipe, given), evaluated(case, by_parts, mine), False


def _schedule(pipe: Pipe, sizes: list[int]) -> Schedule:
    """That of so many micro-batches."""
    return pipe._choice(len(sizes))


@torch.no_grad()
def _update(model: nn.Module) -> None:
    """Some way along the gradients, however large they are."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad / (1 + parameter.grad.abs()), alpha=0.05)
    model.zero_grad()
