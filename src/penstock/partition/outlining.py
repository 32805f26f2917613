"""From a cut model to its outline: what people see of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from penstock.batch import scatter
from penstock.outline import Flow, Outline, Piece, Seconds, Shared
from penstock.partition.chain import Route
from penstock.partition.forward.cutting import Prospect
from penstock.partition.forward.division import Division
from penstock.partition.forward.dry import left_as_it_was
from penstock.partition.forward.survey import Survey, UnitCost
from penstock.partition.forward.tables import called
from penstock.partition.forward.trace import Kind
from penstock.partition.forward.whole import Cut
from penstock.stage.added import added_losses
from penstock.stage.skip import popped_keys, stashed_keys
from penstock.stage.stage import OUTSIDE, Stage

Homes = Iterable[tuple[str, nn.Parameter, Iterable[int]]]  # names, parameters, their stages

# ---- a Sequential -------------------------------------------------------------------------


def outline_of_layers(
    module: nn.Sequential, counts: Sequence[int], routes: Sequence[Route]
) -> Outline:
    """Its layers are the units; how large the values are is not known.

    (Counts that another rank found may not fit, if it has another model: that is told later.)
    """
    layers = list(module._modules.items())
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    pieces = [
        _piece(name, stage, layer) for (name, layer), stage in zip(layers, stages, strict=False)
    ]
    homes = (
        (name, parameter, [stage])
        for (prefix, layer), stage in zip(layers, stages, strict=False)
        for name, parameter in layer.named_parameters(prefix)
    )
    flows = _flows_of_layers([layer for _, layer in layers], pieces, counts, routes)
    return _outlined(module, pieces, flows, homes, len(counts))


def _flows_of_layers(
    layers: Sequence[nn.Module],
    pieces: Sequence[Piece],
    counts: Sequence[int],
    routes: Sequence[Route],
) -> Iterator[Flow]:
    """From each stage what it passes on, then its skips, in the order in which they are sent."""
    makers = {key: at for at, layer in enumerate(layers) for key in _keys(layer, stashed_keys)}
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    for stage, end in enumerate(ends):
        if end < len(pieces):
            yield Flow(pieces[end - 1].name, stage, stage + 1, end - 1, end)
        for key, src, dst in routes:
            if src == stage:
                users = range(ends[dst] - counts[dst], ends[dst])
                user = next(at for at in users if key in _keys(layers[at], popped_keys))
                yield Flow(key.name, src, dst, makers[key], user, value=makers[key])


def _keys(layer: nn.Module, of: Any) -> list[Any]:
    return [key for module in layer.modules() for key in of(module)]


def sizes_on(
    module: nn.Sequential, stages: Sequence[Stage], example: Any, chunks: int
) -> dict[tuple[int, int, int], int]:
    """Bytes that go between the stages of a Sequential, seen in a run without numbers.

    Nothing depends on them, so where they cannot be had there are none.
    """
    found: dict[tuple[int, int, int], int] = {}
    given = example if isinstance(example, tuple) else (example,)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress(Exception), left_as_it_was(module, []):
        first = pytree.tree_map_only(Tensor, fake.from_tensor, scatter(given, chunks)[0][0])
        arrived: dict[int, dict[int, Any]] = {0: {OUTSIDE: first}}
        with fake, added_losses():
            for stage in stages:
                for dst, values in stage.compute(arrived[stage.index]).items():
                    arrived.setdefault(dst, {})[stage.index] = values
                    found |= {(stage.index, dst, n): _bytes(v) for n, v in enumerate(values)}
    return found


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


# ---- any module ---------------------------------------------------------------------------


def outline_of_parts(prospect: Prospect, cut: Cut, survey: Survey) -> Outline:
    """Of a model whose forward is divided."""
    costs: Sequence[UnitCost | None] = survey.costs or [None] * len(survey.calls)
    stages = [stage for stage, count in enumerate(survey.counts) for _ in range(count)]
    pieces = [
        _piece(str(call), stage, None if call.turn else prospect.units[call.unit], cost)
        for call, stage, cost in zip(survey.calls, stages, costs, strict=True)
    ]
    parameters = dict(prospect.model.named_parameters(remove_duplicate=False))
    homes = ((name, parameters[name], stages) for name, stages in cut.parameters.items())
    flows = _flows_of_parts(survey.division, stages)
    return _outlined(prospect.model, pieces, flows, homes, cut.stages)


def _flows_of_parts(division: Division, stages: Sequence[int]) -> Iterator[Flow]:
    calls, trace = division.trace.calls, division.trace
    for src, portion in enumerate(division.portions):
        for dst, values in sorted(portion.departing.items()):
            for at in values:
                value = trace.values[at]
                maker = trace.steps[value.maker or 0]
                made = max((n for n, call in enumerate(calls) if call <= (value.maker or 0)
                            and stages[n] == src), default=stages.index(src))  # fmt: skip
                user = min((n for n in division.portions[dst].runs if at in trace.steps[n].takes),
                           default=len(trace.steps))  # fmt: skip
                mine = [n for n, stage in enumerate(stages) if stage == dst]
                used = next((n for n in mine if calls[n] >= user), mine[-1])
                is_unit = maker.kind is Kind.UNIT
                name = str(maker.func) if is_unit else called(maker.func)
                if is_unit and maker.result and len(maker.result.made) > 1:
                    name = f"{name}, value {maker.result.made.index(at)}"
                where = "" if is_unit else maker.where.rpartition("/")[2].partition(",")[0]
                yield Flow(name, src, dst, made, used, value.look.size, where, at)


# ---- both ---------------------------------------------------------------------------------


def _piece(name: str, stage: int, module: nn.Module | None, cost: UnitCost | None = None) -> Piece:
    own = [] if module is None else list(module.parameters())
    numbers, size = sum(_count(p) for p in own), sum(_size(p) for p in own)
    if cost is None:
        return Piece(name, stage, numbers, size)
    seconds = Seconds(cost.forward, cost.inputs, cost.weights)
    return Piece(name, stage, numbers, size, seconds, cost.keeps)


def _outlined(
    model: nn.Module, pieces: Sequence[Piece], flows: Iterable[Flow], homes: Homes, stages: int
) -> Outline:
    names: dict[nn.Parameter, list[str]] = {}
    held: dict[nn.Parameter, set[int]] = {}
    for name, parameter, where in homes:
        names.setdefault(parameter, []).append(name)
        held.setdefault(parameter, set()).update(where)
    shared = [
        Shared(tuple(names[p]), tuple(sorted(where)), _count(p), _size(p))
        for p, where in held.items()
        if len(where) > 1
    ]
    mine: Mapping[int, list[nn.Parameter]] = {
        stage: [p for p, where in held.items() if stage in where] for stage in range(stages)
    }
    return Outline(
        type(model).__name__,
        tuple(pieces),
        tuple(flows),
        tuple(shared),
        tuple(sum(map(_count, those)) for those in mine.values()),
        tuple(sum(map(_size, those)) for those in mine.values()),
    )


def _count(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()  # its size comes with the first batch


def _size(parameter: Tensor) -> int:
    return _count(parameter) * parameter.dtype.itemsize
