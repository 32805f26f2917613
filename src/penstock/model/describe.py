"""Build the `ModelSummary` of a cut model, which the report and the picture show.

A Sequential and a traced model are described by different functions, because the first is known
layer by layer and the second through its trace. The summary is for people: nothing in the library
decides by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.microbatch import scatter
from penstock.model.isolation import isolated
from penstock.model.sequential_stage import SkipRoute
from penstock.model.traced.assignment import TraceAssignment
from penstock.model.traced.build_stages import TracedModel
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
from penstock.torch_compat import FakeTensorMode, force_eager, pytree

# Name of a parameter, the parameter, and the stages that have it.
ParameterStages = Iterable[tuple[str, nn.Parameter, Iterable[int]]]

# ---- a Sequential --------------------------------------------------------------------------------


def describe_sequential(
    module: nn.Sequential,
    counts: Sequence[int],
    skip_routes: Sequence[SkipRoute],
    costs: Sequence[UnitCost] | None = None,
) -> ModelSummary:
    """Describe a Sequential: each layer is a unit, and the sizes of the transfers are unknown.

    `costs` are those of the layers, if they were measured.

    Under torchrun the first rank decides the counts. If this rank has another model, they may not
    add up to its layers. The zips below are not strict for that reason: a later check reports
    the difference between the ranks, with a better message than a failed zip.
    """
    layers = list(module._modules.items())
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    unit_costs: Sequence[UnitCost | None] = costs or [None] * len(stages)
    units = [
        _summarize_unit(name, stage, layer, cost)
        for (name, layer), stage, cost in zip(layers, stages, unit_costs, strict=False)
    ]
    parameter_stages = (
        (name, parameter, [stage])
        for (prefix, layer), stage in zip(layers, stages, strict=False)
        for name, parameter in layer.named_parameters(prefix)
    )
    transfers = _find_sequential_transfers(
        [layer for _, layer in layers], units, counts, skip_routes
    )
    return _build_summary(module, units, transfers, parameter_stages, len(counts))


def _find_sequential_transfers(
    layers: Sequence[nn.Module],
    units: Sequence[UnitSummary],
    counts: Sequence[int],
    skip_routes: Sequence[SkipRoute],
) -> Iterator[Transfer]:
    """Yield the transfers of each stage: its output, then its skips, in the order of sending.

    `ModelSummary.with_transfer_bytes` counts on this order.
    """
    producers = {
        key: index
        for index, layer in enumerate(layers)
        for key in _collect_skip_keys(layer, stashed_keys)
    }
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    for stage, end in enumerate(ends):
        if end < len(units):
            yield Transfer(units[end - 1].name, stage, stage + 1, end - 1, end)
        for key, src, dst in skip_routes:
            if src == stage:
                candidates = range(ends[dst] - counts[dst], ends[dst])
                consumer = next(
                    index
                    for index in candidates
                    if key in _collect_skip_keys(layers[index], popped_keys)
                )
                producer = producers[key]
                yield Transfer(key.name, src, dst, producer, consumer, value_id=producer)


def _collect_skip_keys(layer: nn.Module, find_keys: Any) -> list[Any]:
    return [key for module in layer.modules() for key in find_keys(module)]


def measure_transfer_bytes(
    module: nn.Sequential, stages: Sequence[Stage], example: Any, chunks: int
) -> dict[tuple[int, int, int], int]:
    """Return the bytes of each transfer between the stages of a Sequential.

    The stages run once on fake tensors, which have shapes and no memory. The keys are those of
    `ModelSummary.with_transfer_bytes`.
    """
    sizes: dict[tuple[int, int, int], int] = {}
    batch = example if isinstance(example, tuple) else (example,)
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    # Some layers cannot run on fake tensors (they read values, or use an operator without a fake
    # implementation). The sizes are only printed and drawn, so they are then left out.
    def map_tensor(tensor: Tensor) -> Tensor:
        # A layer may read the values of a buffer.
        return fake.from_tensor(tensor) if isinstance(tensor, nn.Parameter) else tensor.clone()

    modules = dict.fromkeys([*module.modules(), *(m for stage in stages for m in stage.modules())])
    with suppress(Exception), isolated(list(modules), map_tensor=map_tensor), force_eager():
        microbatch = pytree.tree_map_only(Tensor, fake.from_tensor, scatter(batch, chunks)[0][0])
        inputs: dict[int, dict[int, Any]] = {0: {OUTSIDE: microbatch}}  # by stage, by source
        with fake, added_losses():
            for stage in stages:
                for dst, values in stage.compute(inputs[stage.index]).items():
                    inputs.setdefault(dst, {})[stage.index] = values
                    sizes |= {(stage.index, dst, n): _count_bytes(v) for n, v in enumerate(values)}
    return sizes


def _count_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


# ---- a traced model ------------------------------------------------------------------------------


def describe_traced_model(
    traced_model: TracedModel, cut: StageOwnership, survey: CutSummary
) -> ModelSummary:
    """Describe a traced model: each call of a unit is one entry.

    A unit that is called twice has two entries. Its parameters count in the first only.
    """
    costs: Sequence[UnitCost | None] = survey.costs or [None] * len(survey.calls)
    stages = [stage for stage, count in enumerate(survey.calls_per_stage) for _ in range(count)]
    units = [
        _summarize_unit(
            str(call), stage, None if call.call_index else traced_model.units[call.unit], cost
        )
        for call, stage, cost in zip(survey.calls, stages, costs, strict=True)
    ]
    parameters = dict(traced_model.model.named_parameters(remove_duplicate=False))
    parameter_stages = (
        (name, parameters[name], owners) for name, owners in cut.parameter_owners.items()
    )
    transfers = _find_traced_transfers(survey.assignment, stages)
    return _build_summary(traced_model.model, units, transfers, parameter_stages, cut.num_stages)


def _find_traced_transfers(
    division: TraceAssignment, call_stages: Sequence[int]
) -> Iterator[Transfer]:
    """Yield the values that stages send to each other.

    A trace has nodes that are calls of units and nodes that are operations between them. A picture
    shows units only. So the producer is the last unit of the sending stage that runs before the
    node that computes the value, and the consumer is the first unit of the receiving stage that
    runs at or after the node that uses it.
    """
    calls, trace = division.trace.unit_call_indices, division.trace
    for src, portion in enumerate(division.stage_assignments):
        for dst, value_indices in sorted(portion.send_values.items()):
            for value_index in value_indices:
                value = trace.values[value_index]
                node = trace.nodes[value.producer or 0]
                producer = max(
                    (
                        n
                        for n, call in enumerate(calls)
                        if call <= (value.producer or 0) and call_stages[n] == src
                    ),
                    default=call_stages.index(src),
                )
                using_node = min(
                    (
                        n
                        for n in division.stage_assignments[dst].nodes
                        if value_index in trace.nodes[n].inputs
                    ),
                    default=len(trace.nodes),
                )
                # Operations after the last unit of a stage use a value, too. Then the arrow of the
                # picture ends at that last unit.
                dst_calls = [n for n, stage in enumerate(call_stages) if stage == dst]
                consumer = next((n for n in dst_calls if calls[n] >= using_node), dst_calls[-1])
                is_unit = node.kind is NodeKind.UNIT
                name = str(node.func) if is_unit else get_function_name(node.func)
                outputs = node.output.value_indices if is_unit and node.output else ()
                if value_index not in outputs and is_unit:
                    name = f"{name}, an argument that it changes"
                elif len(outputs) > 1:
                    name = f"{name}, value {outputs.index(value_index)}"
                # "/path/model.py:12, in forward" is shown as "model.py:12".
                line = "" if is_unit else node.location.rpartition("/")[2].partition(",")[0]
                nbytes = value.tensor_spec.nbytes
                yield Transfer(name, src, dst, producer, consumer, nbytes, line, value_index)


# ---- any model -----------------------------------------------------------------------------------


def _summarize_unit(
    name: str, stage: int, module: nn.Module | None, cost: UnitCost | None = None
) -> UnitSummary:
    parameters = [] if module is None else list(module.parameters())
    count, size = sum(map(_count_elements, parameters)), sum(map(_parameter_bytes, parameters))
    if cost is None:
        return UnitSummary(name, stage, count, size)
    seconds = ComputeSeconds(cost.forward, cost.input_grad, cost.weight_grad)
    return UnitSummary(name, stage, count, size, seconds, cost.activation_bytes)


def _build_summary(
    model: nn.Module,
    units: Sequence[UnitSummary],
    transfers: Iterable[Transfer],
    parameter_stages: ParameterStages,
    num_stages: int,
) -> ModelSummary:
    names: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, set[int]] = {}
    for name, parameter, stages in parameter_stages:
        names.setdefault(parameter, []).append(name)
        owners.setdefault(parameter, set()).update(stages)
    shared = [
        SharedParameter(
            tuple(names[p]), tuple(sorted(stages)), _count_elements(p), _parameter_bytes(p)
        )
        for p, stages in owners.items()
        if len(stages) > 1
    ]
    parameters_by_stage: Mapping[int, list[nn.Parameter]] = {
        stage: [p for p, stages in owners.items() if stage in stages] for stage in range(num_stages)
    }
    return ModelSummary(
        type(model).__name__,
        tuple(units),
        tuple(transfers),
        tuple(shared),
        tuple(sum(map(_count_elements, p)) for p in parameters_by_stage.values()),
        tuple(sum(map(_parameter_bytes, p)) for p in parameters_by_stage.values()),
    )


def _count_elements(parameter: Tensor) -> int:
    # A lazy parameter gets its shape from the first batch.
    return 0 if is_lazy(parameter) else parameter.numel()


def _parameter_bytes(parameter: Tensor) -> int:
    return _count_elements(parameter) * parameter.dtype.itemsize
