"""A dry run of a model on a micro-batch: from inputs to a trace."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.partition.forward.boxes import shared_boxes
from penstock.partition.forward.dry import left_as_it_was
from penstock.partition.forward.faking import Fakes
from penstock.partition.forward.hollow import faked, is_hollow
from penstock.partition.forward.ledger import Leak
from penstock.partition.forward.meta import standing_in
from penstock.partition.forward.recorder import Recorder
from penstock.partition.forward.rehearsal import rehearse
from penstock.partition.forward.skeleton import Skeleton, front
from penstock.partition.forward.trace import Trace
from penstock.partition.forward.trees import flatten, unflatten
from penstock.partition.forward.units import Asked, parts_inside, units_of
from penstock.partition.forward.watching import follow_all


def traced(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
) -> tuple[Trace, dict[int, Tensor]]:
    """What the forward does of these inputs, and the tensors that were there before, by values.

    It is followed as if all were on one device. A value that leaves a unit sideways is a Leak.
    """
    follow_all()
    given, spec = flatten((args, kwargs))
    for _ in range(2):  # what functions remember of the first time is not made again
        leaves = [_copied(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in given]
        fakes = Fakes(device)
        with standing_in(model, units.values(), fakes) as unset:
            trace, constants, steady = _followed(model, units, leaves, spec, fakes)
        if steady:
            break
    unset.check(trace)
    return trace, constants


def _followed(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    leaves: list[Any],
    spec: Any,
    fakes: Fakes,
) -> tuple[Trace, dict[int, Tensor], bool]:
    """With whether it takes the same path when it is run again."""
    fronts = {id(module): front(name, module) for name, module in units.items()}
    skeleton = Skeleton(model, fronts)
    skeleton.refresh(fakes.device)
    args, kwargs = unflatten(leaves, spec)
    parents = [original for original, _ in skeleton.parents.values()]
    copies = [copy for _, copy in skeleton.parents.values()]
    with left_as_it_was(model, parents), faked([*copies, *_away(units)], fakes):
        recorder = Recorder([model, skeleton.model], fakes)
        recorder.hooks = skeleton.hooks
        recorder.shared = shared_boxes(parents, units)
        inputs = recorder.ledger.given([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        before = {name: dict(copy._buffers) for name, (_, copy) in skeleton.parents.items()}
        with recorder:
            output = skeleton.model(*args, **kwargs)
        _warn_of_counters(skeleton)
        lasting = {
            f"{name}.{key}" if name else key: buffer
            for name, (_, copy) in skeleton.parents.items()
            for key, buffer in copy._buffers.items()
            if buffer is not None and buffer is not before[name].get(key)
        }
        trace = recorder.trace(inputs, output, lasting)
        steady = rehearse(trace, Skeleton(model, fronts), leaves, spec)
    return trace, recorder.ledger.constants(), steady


def _away(units: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules of units that another process has."""
    return [m for unit in units.values() if is_hollow(unit) for m in unit.modules()]


def _warn_of_counters(skeleton: Skeleton) -> None:
    """What a forward counts on its parents would be counted by every stage: it does not last."""
    found = [
        f"{name}.{key}".lstrip(".")
        for name, (original, own) in skeleton.parents.items()
        for key, value in own.__dict__.items()
        if type(value) in (int, float) and value != original.__dict__.get(key, value)
    ]
    if found:
        warnings.warn(
            f"the forward changes {', '.join(found)}, and every stage runs it for every "
            "micro-batch: what it sets on modules around the units does not last beyond one; keep "
            "such a count inside a unit, or outside of the model",
            stacklevel=2,
        )


def traced_open(
    model: nn.Module,
    asked: Asked,
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
    opened: Collection[str] = (),
) -> tuple[Trace, dict[int, Tensor], dict[str, nn.Module]]:
    """The same; units that leak are opened, with all others of their class, until none does.

    So are those that nobody calls, if their parts are called from outside.
    """
    now = set(opened)
    while True:
        units = units_of(model, asked, now)
        try:
            trace, constants = traced(model, units, args, kwargs, device)
        except Leak as leak:
            now |= _to_open(leak, units)
            continue
        reached = _reached_into(trace, units)
        if not reached:
            return trace, constants, units
        now |= reached


def _reached_into(trace: Trace, units: Mapping[str, nn.Module]) -> set[str]:
    """As `self.vae.encode(x)` does, and the forward of a graph that torch.fx has made."""
    called = {trace.steps[at].func.unit for at in trace.calls}
    used = [value.parameter for value in trace.values if value.parameter]
    return {
        name
        for name, unit in units.items()
        if name not in called
        and parts_inside(unit)
        and any(parameter.startswith(f"{name}.") for parameter in used)
    }


def _to_open(leak: Leak, units: Mapping[str, nn.Module]) -> set[str]:
    module = units.get(leak.unit)
    if module is None or not parts_inside(module):
        what = f"unit '{leak.unit}'" if leak.unit else "a unit"
        raise CutError(
            f"at {leak.where}, the forward uses a tensor that left {what} sideways (as an "
            "attribute, through a hook or in an object), and the unit has no parts to be opened: "
            "return the tensor from its forward"
        )
    return {name for name, other in units.items() if type(other) is type(module)
            and parts_inside(other)}  # fmt: skip


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The forward may change its inputs in place."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
