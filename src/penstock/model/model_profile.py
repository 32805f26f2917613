"""The profile of a model for the planner: what each unit costs on the devices that will run it.

    model, example --+-- micro-batches of two sizes
                     |      each unit on each kind of device: seconds of F, I and W, bytes it keeps
                     +-- straight lines through both sizes -> `Profile`

A planner tries many numbers of micro-batches, and so many sizes of them. Costs hardly bend in
between, so two sizes are measured: as large as with one micro-batch per rank, and a quarter of it.

Each unit is measured alone. Ranks that share one GPU slow each other down, which is measured, too:
the mean becomes the speed of their devices, and what is above the mean counts as the unit's
seconds. Ranks that are idle leave more to the others, which becomes the `idle_gain` of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from penstock.device.accelerator import is_accelerator
from penstock.device.contention import IDLE_SHARE, SharedDevice
from penstock.device.device import Device
from penstock.display import Progress
from penstock.errors import ArgumentError
from penstock.microbatch import scatter
from penstock.model.cut import (
    ExampleMicrobatch,
    build_tail_call,
    build_unit_calls,
    find_unit_transfers,
    trace_with_enough_units,
)
from penstock.model.isolation import iter_module_tensors, preserve_rng
from penstock.model.placement import describe_device
from penstock.model.profiler import (
    ExampleLoss,
    LossWithTarget,
    ModuleCall,
    UnitMeasurement,
    measure_unit_calls,
    measure_unit_layers,
)
from penstock.model.sequential import PipeSequential, is_plain_sequential
from penstock.model.traced.build_stages import TracedModel
from penstock.model.traced.units import UnitSelector
from penstock.planning.profile import (
    LinkProfile,
    PerRows,
    Profile,
    UnitProfile,
    UnitSeconds,
    ValueProfile,
)

# The bytes of an optimizer's state, for each byte of gradients.
OPTIMIZER_FACTORS = {
    "sgd": 0.0,
    "momentum": 1.0,
    "rmsprop": 1.0,
    "adagrad": 1.0,
    "lion": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
    "nadam": 2.0,
    "radam": 2.0,
    "adamax": 2.0,
    "adadelta": 2.0,
    "asgd": 1.0,
    "rprop": 2.0,
    "muon": 1.0,
}
# Options of optimizers of torch.optim that add a tensor as large as the parameter to their state.
# (Muon has a momentum, too, and always keeps it.)
_STATE_OPTIONS = {
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "centered"),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
}
# Seconds that Python needs for an action, and a link between two GPUs over PCIe. Ranks on the CPU
# share memory.
_ACTION_SECONDS = 4e-5
_REPLAYED_SECONDS = 5e-6  # between two actions of a captured step
_GPU_LINK = LinkProfile(latency=2e-5, bandwidth=20e9)
_SMALLER = 4  # the second size is so many times smaller


@dataclass(frozen=True)
class _Sample:
    """The measurements of one size of micro-batches."""

    rows: int
    by_kind: Mapping[str, Sequence[UnitMeasurement]]
    values: Sequence[tuple[int, tuple[int, ...], float]]  # unit, units that use it, bytes


def resolve_optimizer(optimizer: Any) -> float:
    """Return the bytes of an optimizer's state per byte of gradients.

    `optimizer` is a name, such a number, or an optimizer of `torch.optim` or its class.

    >>> resolve_optimizer("AdamW"), resolve_optimizer(torch.optim.SGD), resolve_optimizer(0.5)
    (2.0, 0.0, 0.5)
    """
    is_number = isinstance(optimizer, int | float) and not isinstance(optimizer, bool)
    if is_number and 0 <= float(optimizer) < inf:
        return float(optimizer)
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    kind = type(optimizer) if groups else optimizer
    # A class is known by its name or by that of a base, as an AdamW of one's own.
    names = [base.__name__ for base in kind.__mro__] if isinstance(kind, type) else [str(kind)]
    known_names = [name.lower() for name in names if name.lower() in OPTIMIZER_FACTORS]
    if not known_names:
        raise ArgumentError(
            f"optimizer must be one of {', '.join(OPTIMIZER_FACTORS)}, or a number: the bytes of "
            f"its state per byte of gradients, not {kind!r}"
        )
    name = known_names[0]
    options = _STATE_OPTIONS.get(name, ())
    return OPTIMIZER_FACTORS[name] + sum(any(g.get(option) for g in groups) for option in options)


def profile_model(
    model: nn.Module,
    example: Any,
    devices: Sequence[Device],
    *,
    units: UnitSelector = None,
    optimizer_factor: float = OPTIMIZER_FACTORS["adamw"],
    loss: ExampleLoss | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model on an example, on each kind of device, and return its profile.

    The last unit is measured with the loss, if there is one.
    """
    device_profiles = tuple(map(describe_device, devices))
    kinds = {p.kind: device for p, device in zip(device_profiles, devices, strict=True)}
    shared = {kind: SharedDevice.find(device, devices) for kind, device in kinds.items()}
    rows = _count_rows(example)
    sizes = {_count_rows(example, chunks): chunks for chunks in _choose_chunks(rows, len(devices))}
    names: list[str] = []
    modules: list[nn.Module] = []
    samples = []
    for index, (count, chunks) in enumerate(sizes.items()):
        report = _report_part(progress, index, len(sizes), count)
        if is_plain_sequential(model):
            names, modules = [name for name, _ in model.named_children()], list(model)
            measure = partial(_measure_sequential, model, example, chunks)
        else:
            traced = trace_for_plan(model, example, chunks, units, devices)
            calls = traced.calls
            names, modules = list(map(str, calls)), [traced.units[call.unit] for call in calls]
            measure = partial(_measure_traced, traced)
        microbatch_loss = None if loss is None else loss(chunks)
        samples.append(measure(count, kinds, shared, microbatch_loss, report))
    speeds = {kind: _find_speed(kind, samples) for kind in kinds}
    gains = {kind: _find_idle_gain(kind, samples) for kind in kinds}
    return Profile(
        model=type(model).__name__,
        rows=rows,
        units=tuple(
            _build_unit(index, name, module, samples, speeds)
            for index, (name, module) in enumerate(zip(names, modules, strict=True))
        ),
        values=tuple(_build_values(samples)),
        devices=tuple(
            replace(p, speed=speeds[p.kind], idle_gain=gains[p.kind]) for p in device_profiles
        ),
        link=_describe_link(devices),
        optimizer_factor=optimizer_factor,
        runtimes=_list_runtimes(devices),
    )


def _describe_link(devices: Sequence[Device]) -> LinkProfile:
    """Return the link between ranks. Ranks on the CPU, or on one GPU, share their memory."""
    shared = len({device.device for device in devices}) == 1
    is_gpu = is_accelerator(devices[0].device)
    return _GPU_LINK if is_gpu and not shared else LinkProfile(shares_memory=True)


def _list_runtimes(devices: Sequence[Device]) -> dict[str, float]:
    """Return the runtimes to choose from, with the seconds that each adds to an action."""
    if all(device.device.type == "cuda" for device in devices):
        return {"threads": _ACTION_SECONDS, "auto": _REPLAYED_SECONDS}
    return {"threads": _ACTION_SECONDS}


def _report_part(
    progress: Progress | None, index: int, count: int, rows: int
) -> Callable[[str, float], None]:
    def report(kind: str, fraction: float) -> None:
        if progress is not None:
            progress(f"measuring {rows} rows on {kind}", (index + fraction) / count)

    return report


def _count_rows(example: Any, chunks: int = 1) -> int:
    values = tuple(example.values()) if isinstance(example, Mapping) else example
    values = values if isinstance(values, tuple) else (values,)
    counts = scatter(values, chunks)[1].counts
    return counts[0] if counts else 1


def _choose_chunks(rows: int, ranks: int) -> list[int]:
    largest = min(max(ranks, 1), rows)
    return [largest, min(_SMALLER * largest, rows)]


def _measure_sequential(
    model: nn.Sequential,
    example: Any,
    chunks: int,
    rows: int,
    kinds: Mapping[str, Device],
    shared: Mapping[str, SharedDevice | None],
    loss: LossWithTarget | None,
    report: Progress,
) -> _Sample:
    values = example if isinstance(example, tuple) else (example,)
    microbatch = scatter(values, chunks)[0][0]
    unpack, by_kind = isinstance(model, PipeSequential), {}
    for number, (kind, device) in enumerate(kinds.items()):
        report(kind, number / len(kinds))
        with device.activate():
            by_kind[kind] = measure_unit_layers(
                list(model),
                microbatch,
                device.device,
                unpack,
                loss=loss,
                shared=shared[kind],
            )
    measured = next(iter(by_kind.values()))
    edges = [(i, (i + 1,), float(m.output_bytes)) for i, m in enumerate(measured[:-1])]
    return _Sample(rows, by_kind, edges)


def trace_for_plan(
    model: nn.Module, example: Any, chunks: int, units: UnitSelector, devices: Sequence[Device]
) -> TracedModel:
    """Trace a model on a micro-batch, with as many units as devices or more."""
    microbatch = ExampleMicrobatch.from_batch(example, chunks)
    assert isinstance(microbatch, ExampleMicrobatch)
    return trace_with_enough_units(model, microbatch, units, len(devices), devices[0].device)


def _measure_traced(
    traced: TracedModel,
    rows: int,
    kinds: Mapping[str, Device],
    shared: Mapping[str, SharedDevice | None],
    loss: LossWithTarget | None,
    report: Progress,
) -> _Sample:
    with preserve_rng():
        calls = list(build_unit_calls(traced))
    tail = build_tail_call(traced.trace, loss)
    by_kind = {}
    for number, (kind, device) in enumerate(kinds.items()):
        report(kind, number / len(kinds))
        measure = partial(measure_unit_calls, device=device.device, shared=shared[kind])
        with device.activate():
            by_kind[kind] = _measure_calls(calls, tail, measure)
    # A transfer counts the value and its gradient.
    values = [(v.src, v.dsts, v.size / 2) for v in find_unit_transfers(traced.trace)]
    return _Sample(rows, by_kind, values)


def _measure_calls(
    calls: list[ModuleCall],
    tail: ModuleCall | None,
    measure: Callable[[list[ModuleCall]], list[UnitMeasurement]],
) -> list[UnitMeasurement]:
    """Measure the units, the last one with the tail: mostly the loss, if it can be measured.

    They are measured together, because neighbours that share an accelerator run all of them.
    """
    if tail is not None:
        # See `measure_tail`: some operations do not accept the values that they are measured with.
        with suppress(Exception):
            *units, last, of_loss = measure([*calls, tail])
            return [*units, last.with_loss(of_loss)]
    return measure(calls)


# ---- from measurements to a profile --------------------------------------------------------------


def _find_speed(kind: str, samples: Sequence[_Sample], with_pauses: bool = False) -> float:
    """Return the speed of devices of a kind while all ranks that share an accelerator are busy.

    It is relative to a device that is busy alone. The units' slowdowns count by their seconds.

    Args:
        kind: The kind of devices.
        samples: The measurements.
        with_pauses: Whether the other ranks are idle for some of the time.
    """
    alone = together = 0.0
    for unit in (unit for sample in samples for unit in sample.by_kind[kind]):
        if (slowdowns := unit.slowdowns) is not None:
            alone += unit.seconds
            together += unit.seconds * (slowdowns.with_pauses if with_pauses else slowdowns.always)
    return alone / together if together else 1.0


def _find_idle_gain(kind: str, samples: Sequence[_Sample]) -> float:
    """Return how much faster devices of a kind are if all ranks are idle, as a fraction.

    What was measured with neighbours that are idle for a part of the time goes on in a line.
    """
    gain = _find_speed(kind, samples, with_pauses=True) / _find_speed(kind, samples) - 1
    return min(1.0, max(0.0, gain / IDLE_SHARE))


def _build_unit(
    index: int,
    name: str,
    module: nn.Module,
    samples: Sequence[_Sample],
    speeds: Mapping[str, float],
) -> UnitProfile:
    def line(kind: str, read: Callable[[UnitMeasurement], float]) -> PerRows:
        return _fit_line([(s.rows, read(s.by_kind[kind][index])) for s in samples])

    def seconds_line(kind: str, read: Callable[[UnitMeasurement], float]) -> PerRows:
        # Units differ in how much the neighbours slow them down, and so do sizes of micro-batches.
        # The seconds are divided by the mean, so what is above the mean counts as seconds.
        points = []
        for sample in samples:
            unit = sample.by_kind[kind][index]
            if unit.slowdowns is not None:
                slowdown = unit.slowdowns.always
            elif any(other.slowdowns is not None for other in sample.by_kind[kind]):
                slowdown = 1 / _find_speed(kind, [sample])
            else:  # There was no memory for any of this size, say.
                slowdown = 1 / speeds[kind]
            points.append((sample.rows, read(unit) * slowdown * speeds[kind]))
        return _fit_line(points)

    kinds = list(samples[0].by_kind)
    tensors = list(iter_module_tensors(module))
    is_last = index == len(samples[0].by_kind[kinds[0]]) - 1
    # A loss that was not measured keeps about as much as the output, as a cross-entropy does.
    activation_bytes = line(
        kinds[0], lambda m: m.inner_bytes + m.output_bytes * (is_last and not m.has_loss)
    )
    return UnitProfile(
        name=name,
        seconds={
            kind: UnitSeconds(
                seconds_line(kind, lambda m: m.forward),
                seconds_line(kind, lambda m: m.input_grad),
                seconds_line(kind, lambda m: m.weight_grad),
            )
            for kind in kinds
        },
        parameter_bytes=sum(t.nbytes for t in tensors),
        gradient_bytes=sum(t.nbytes for t in tensors if t.requires_grad),
        activation=activation_bytes,
        workspace=line(kinds[0], lambda m: m.workspace_bytes),
    )


def _build_values(samples: Sequence[_Sample]) -> list[ValueProfile]:
    measured = next(iter(samples[0].by_kind.values()))
    sizes = [{(src, dsts): size for src, dsts, size in s.values} for s in samples]
    values = []
    for src, dsts, _ in samples[0].values:
        points = [
            (sample.rows, by_edge[src, dsts])
            for sample, by_edge in zip(samples, sizes, strict=True)
            if (src, dsts) in by_edge
        ]
        saved_by = [unit for unit in dsts if measured[unit].saves_inputs]
        saved_by += [src] if measured[src].saves_outputs else []
        values.append(ValueProfile(src, dsts, _fit_line(points), True, tuple(sorted(saved_by))))
    return values


def _fit_line(points: Sequence[tuple[int, float]]) -> PerRows:
    """Return the line through the points, with neither part negative.

    >>> _fit_line([(4, 3.0), (2, 2.0)])
    PerRows(fixed=1.0, per_row=0.5)
    """
    rows, largest = points[0]
    if len(points) > 1 and points[1][0] != rows:
        slope = max(0.0, (largest - points[1][1]) / (rows - points[1][0]))
        if slope * rows <= largest:
            return PerRows(largest - slope * rows, slope)
    return PerRows(0.0, largest / rows)
