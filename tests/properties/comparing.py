"""Run a case as a pipe and as the unsplit model, and compare the numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from penstock.checker.reference import compute_difference
from tests.properties.cases import Case
from tests.properties.gathering import gathered
from tests.properties.oracle import Numbers, batch, stepped, whole
from tests.properties.running import evaluated, piped, trained, update

LIMIT = 1e-10


def compare(case: Case) -> float:
    """Return the largest difference; if it is too large, raise with all names that differ."""
    worst = 0.0
    for what, found, expected, bitwise in outcomes(case):
        assert found.keys() == expected.keys(), what
        wrong = []
        for name, wanted in expected.items():
            apart = compute_difference("", name, found[name], wanted)
            equal = not bitwise or apart.size == 0.0
            worst = max(worst, apart.size)
            if apart.size > LIMIT or not equal:
                wrong.append(f"{name} {apart.note or f'differs by {apart.size:.3g}'}")
        assert not wrong, "\n".join([f"{what}:", *wrong])
    return worst


def outcomes(case: Case) -> Iterator[tuple[str, Numbers, Numbers, bool]]:
    """Yield a title, the numbers of the pipe and of the model, and whether bits must be equal."""
    model = case.model.build().train(case.training)
    by_parts, at_once = copy.deepcopy(model), copy.deepcopy(model)
    pipe = piped(case, model)
    each = iter(gathered(case)) if case.runtime == "processes" else trained(case, pipe)
    for step, rows in enumerate(case.rows):
        sizes = [len(part) for part in torch.empty(rows).chunk(case.chunks)]
        found = next(each)
        schedule = pipe._schedule_choice(len(sizes))
        expected = stepped(case, by_parts, batch(case, rows, step), sizes, schedule)
        expected["the generator"] = torch.get_rng_state()
        yield f"step {step}", found, expected, case.bitwise
        if not case.mixes:
            at_all = whole(case, at_once, batch(case, rows, step))
            found.pop("the generator")
            yield f"step {step}, the whole batch", found, at_all, False
        if case.updates:
            update(by_parts)
            update(at_once)
    rows = case.rows[-1] // 2 + 1
    yield "eval mode", next(each), evaluated(case, by_parts, batch(case, rows, 0)), False
