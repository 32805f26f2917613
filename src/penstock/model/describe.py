"""From a cut model to its outline: what people see of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from penstock.microbatch import scatter
from penstock.model.sequential_stage import SkipRoute
from penstock.model.traced.assignment import TraceAssignment
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.dry_run import preserve_model_state
from penstock.model.traced.torch_functions import get_function_name
from penstock.model.traced.trace import NodeKind
from penstock.model.traced.traced_partition import CutSummary, StageOwnership, UnitCost
from penstock.model_summary import (
    ComputeSeconds,
    ModelSummary,
    SharedParameter,
    Transfer,
    UnitSummary,
)
from penstock.stage.aux_loss import added_losses
from penstock.stage.skip import popped_keys, stashed_keys
from penstock.stage.stage import OUTSIDE, Stage
from penstock.torch_compat import pytree

ParameterStages = Iterable[
    tuple[str, nn.Parameter, Iterable[int]]
]  # names, parameters, their stages

# ---- a Sequential -------------------------------------------------------------------------


def describe_sequential(
    module: nn.Sequential, counts: Sequence[int], skip_routes: Sequence[SkipRoute]
) -> ModelSummary:
    """Its layers are the units; how large the values are is not known.

    (Counts that another rank found may not fit, if it has another model: that is told later.)
    """
    layers = list(module._modules.items())
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    pieces = [
        _summarize_unit(name, stage, layer)
        for (name, layer), stage in zip(layers, stages, strict=False)
    ]
    homes = (
        (name, parameter, [stage])
        for (prefix, layer), stage in zip(layers, stages, strict=False)
        for name, parameter in layer.named_parameters(prefix)
    )
    flows = _find_sequential_transfers([layer for _, layer in layers], pieces, counts, skip_routes)
    return _build_summary(module, pieces, flows, homes, len(counts))


def _find_sequential_transfers(
    layers: Sequence[nn.Module],
    units: Sequence[UnitSummary],
    counts: Sequence[int],
    skip_routes: Sequence[SkipRoute],
) -> Iterator[Transfer]:
    """From each stage what it passes on, then its skips, in the order in which they are sent."""
    makers = {
        key: at
        for at, layer in enumerate(layers)
        for key in _collect_skip_keys(layer, stashed_keys)
    }
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    for stage, end in enumerate(ends):
        if end < len(units):
            yield Transfer(units[end - 1].name, stage, stage + 1, end - 1, end)
        for key, src, dst in skip_routes:
            if src == stage:
                users = range(ends[dst] - counts[dst], ends[dst])
                user = next(
                    at for at in users if key in _collect_skip_keys(layers[at], popped_keys)
                )
                yield Transfer(key.name, src, dst, makers[key], user, value_id=makers[key])


def _collect_skip_keys(layer: nn.Module, find_keys: Any) -> list[Any]:
    return [key for module in layer.modules() for key in find_keys(module)]


def measure_transfer_bytes(
    module: nn.Sequential, stages: Sequence[Stage], example: Any, chunks: int
) -> dict[tuple[int, int, int], int]:
    """Bytes that go between the stages of a Sequential, seen in a run without numbers.

    Nothing depends on them, so where they cannot be had there are none.
    """
    found: dict[tuple[int, int, int], int] = {}
    given = example if isinstance(example, tuple) else (example,)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress(Exception), preserve_model_state(module, []):
        first = pytree.tree_map_only(Tensor, fake.from_tensor, scatter(given, chunks)[0][0])
        arrived: dict[int, dict[int, Any]] = {0: {OUTSIDE: first}}
        with fake, added_losses():
            for stage in stages:
                for dst, values in stage.compute(arrived[stage.index]).items():
                    arrived.setdefault(dst, {})[stage.index] = values
                    found |= {(stage.index, dst, n): _count_bytes(v) for n, v in enumerate(values)}
    return found


def _count_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


# ---- any module ---------------------------------------------------------------------------


def describe_traced_model(
    traced_model: TracedModel, cut: StageOwnership, survey: CutSummary
) -> ModelSummary:
    """Of a model whose forward is divided."""
    costs: Sequence[UnitCost | None] = survey.costs or [None] * len(survey.calls)
    stages = [stage for stage, count in enumerate(survey.calls_per_stage) for _ in range(count)]
    pieces = [
        _summarize_unit(
            str(call), stage, None if call.call_index else traced_model.units[call.unit], cost
        )
        for call, stage, cost in zip(survey.calls, stages, costs, strict=True)
    ]
    parameters = dict(traced_model.model.named_parameters(remove_duplicate=False))
    homes = ((name, parameters[name], stages) for name, stages in cut.parameter_owners.items())
    flows = _find_traced_transfers(survey.assignment, stages)
    return _build_summary(traced_model.model, pieces, flows, homes, cut.num_stages)


def _find_traced_transfers(
    division: TraceAssignment, call_stages: Sequence[int]
) -> Iterator[Transfer]:
    calls, trace = division.trace.unit_call_indices, division.trace
    for src, portion in enumerate(division.stage_assignments):
        for dst, values in sorted(portion.send_values.items()):
            for at in values:
                value = trace.values[at]
                maker = trace.nodes[value.producer or 0]
                made = max((n for n, call in enumerate(calls) if call <= (value.producer or 0)
                            and call_stages[n] == src), default=call_stages.index(src))  # fmt: skip
                user = min((n for n in division.stage_assignments[dst].nodes if at in trace.nodes[n].inputs),
                           default=len(trace.nodes))  # fmt: skip
                mine = [n for n, stage in enumerate(call_stages) if stage == dst]
                used = next((n for n in mine if calls[n] >= user), mine[-1])
                is_unit = maker.kind is NodeKind.UNIT
                name = str(maker.func) if is_unit else get_function_name(maker.func)
                if is_unit and maker.output and len(maker.output.value_indices) > 1:
                    name = f"{name}, value {maker.output.value_indices.index(at)}"
                where = "" if is_unit else maker.location.rpartition("/")[2].partition(",")[0]
                yield Transfer(name, src, dst, made, used, value.tensor_spec.nbytes, where, at)


# ---- both ---------------------------------------------------------------------------------


def _summarize_unit(
    name: str, stage: int, module: nn.Module | None, cost: UnitCost | None = None
) -> UnitSummary:
    own = [] if module is None else list(module.parameters())
    numbers, size = sum(_count_elements(p) for p in own), sum(_parameter_bytes(p) for p in own)
    if cost is None:
        return UnitSummary(name, stage, numbers, size)
    seconds = ComputeSeconds(cost.forward, cost.input_grad, cost.weight_grad)
    return UnitSummary(name, stage, numbers, size, seconds, cost.activation_bytes)


def _build_summary(
    model: nn.Module,
    units: Sequence[UnitSummary],
    transfers: Iterable[Transfer],
    parameter_stages: ParameterStages,
    num_stages: int,
) -> ModelSummary:
    names: dict[nn.Parameter, list[str]] = {}
    held: dict[nn.Parameter, set[int]] = {}
    for name, parameter, where in parameter_stages:
        names.setdefault(parameter, []).append(name)
        held.setdefault(parameter, set()).update(where)
    shared = [
        SharedParameter(
            tuple(names[p]), tuple(sorted(where)), _count_elements(p), _parameter_bytes(p)
        )
        for p, where in held.items()
        if len(where) > 1
    ]
    mine: Mapping[int, list[nn.Parameter]] = {
        stage: [p for p, where in held.items() if stage in where] for stage in range(num_stages)
    }
    return ModelSummary(
        type(model).__name__,
        tuple(units),
        tuple(transfers),
        tuple(shared),
        tuple(sum(map(_count_elements, those)) for those in mine.values()),
        tuple(sum(map(_parameter_bytes, those)) for those in mine.values()),
    )


def _count_elements(parameter: Tensor) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()  # its size comes with the first batch


def _parameter_bytes(parameter: Tensor) -> int:
    return _count_elements(parameter) * parameter.dtype.itemsize
