"""A dry run of a model on a micro-batch: from inputs to a trace."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.partition.forward.boxes import find_shared_containers
from penstock.partition.forward.dry import preserve_model_state
from penstock.partition.forward.faking import FakeTensorFactory
from penstock.partition.forward.hollow import fake_remote_tensors, is_remote_unit
from penstock.partition.forward.ledger import EscapedTensor
from penstock.partition.forward.meta import replace_meta_tensors
from penstock.partition.forward.recorder import Tracer
from penstock.partition.forward.rehearsal import is_reproducible
from penstock.partition.forward.skeleton import ProxyModel, build_unit_proxy
from penstock.partition.forward.trace import Trace
from penstock.partition.forward.trees import flatten, unflatten
from penstock.partition.forward.units import UnitSelector, find_units, is_expandable
from penstock.partition.forward.watching import install_interception_patches


def trace_model(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
) -> tuple[Trace, dict[int, Tensor]]:
    """What the forward does of these inputs, and the tensors that were there before, by values.

    It is followed as if all were on one device. A value that leaves a unit sideways is a Leak.
    """
    install_interception_patches()
    given, spec = flatten((args, kwargs))
    for _ in range(2):  # what functions remember of the first time is not made again
        leaves = [_copy_input(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in given]
        fakes = FakeTensorFactory(device)
        with replace_meta_tensors(model, units.values(), fakes) as unset:
            trace, constants, steady = _trace_once(model, units, leaves, spec, fakes)
        if steady:
            break
    unset.check_not_read(trace)
    return trace, constants


def _trace_once(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    leaves: list[Any],
    tree_spec: Any,
    fake_factory: FakeTensorFactory,
) -> tuple[Trace, dict[int, Tensor], bool]:
    """With whether it takes the same path when it is run again."""
    fronts = {id(module): build_unit_proxy(name, module) for name, module in units.items()}
    skeleton = ProxyModel(model, fronts)
    skeleton.refresh_buffers(fake_factory.device)
    args, kwargs = unflatten(leaves, tree_spec)
    parents = [original for original, _ in skeleton.parent_copies.values()]
    copies = [copy for _, copy in skeleton.parent_copies.values()]
    with (
        preserve_model_state(model, parents),
        fake_remote_tensors([*copies, *_find_remote_modules(units)], fake_factory),
    ):
        recorder = Tracer([model, skeleton.model], fake_factory)
        recorder.unit_hooks = skeleton.unit_hooks
        recorder.shared_containers = find_shared_containers(parents, units)
        inputs = recorder.value_table.register_inputs(
            [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        )
        before = {name: dict(copy._buffers) for name, (_, copy) in skeleton.parent_copies.items()}
        with recorder:
            output = skeleton.model(*args, **kwargs)
        _warn_about_lost_attributes(skeleton)
        lasting = {
            f"{name}.{key}" if name else key: buffer
            for name, (_, copy) in skeleton.parent_copies.items()
            for key, buffer in copy._buffers.items()
            if buffer is not None and buffer is not before[name].get(key)
        }
        trace = recorder.build_trace(inputs, output, lasting)
        steady = is_reproducible(trace, ProxyModel(model, fronts), leaves, tree_spec)
    return trace, recorder.value_table.collect_constants(), steady


def _find_remote_modules(units: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules of units that another process has."""
    return [m for unit in units.values() if is_remote_unit(unit) for m in unit.modules()]


def _warn_about_lost_attributes(skeleton: ProxyModel) -> None:
    """What a forward counts on its parents would be counted by every stage: it does not last."""
    found = [
        f"{name}.{key}".lstrip(".")
        for name, (original, own) in skeleton.parent_copies.items()
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


def trace_expanding_units(
    model: nn.Module,
    selector: UnitSelector,
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device,
    expanded: Collection[str] = (),
) -> tuple[Trace, dict[int, Tensor], dict[str, nn.Module]]:
    """The same; units that leak are opened, with all others of their class, until none does.

    So are those that nobody calls, if their parts are called from outside.
    """
    now = set(expanded)
    while True:
        units = find_units(model, selector, now)
        try:
            trace, constants = trace_model(model, units, args, kwargs, device)
        except EscapedTensor as leak:
            now |= _find_units_to_expand(leak, units)
            continue
        reached = _find_bypassed_units(trace, units)
        if not reached:
            return trace, constants, units
        now |= reached


def _find_bypassed_units(trace: Trace, units: Mapping[str, nn.Module]) -> set[str]:
    """As `self.vae.encode(x)` does, and the forward of a graph that torch.fx has made."""
    called = {trace.nodes[at].func.unit for at in trace.unit_call_indices}
    used = [value.parameter_name for value in trace.values if value.parameter_name]
    return {
        name
        for name, unit in units.items()
        if name not in called
        and is_expandable(unit)
        and any(parameter.startswith(f"{name}.") for parameter in used)
    }


def _find_units_to_expand(escaped: EscapedTensor, units: Mapping[str, nn.Module]) -> set[str]:
    module = units.get(escaped.unit)
    if module is None or not is_expandable(module):
        what = f"unit '{escaped.unit}'" if escaped.unit else "a unit"
        raise CutError(
            f"at {escaped.location}, the forward uses a tensor that left {what} sideways (as an "
            "attribute, through a hook or in an object), and the unit has no parts to be opened: "
            "return the tensor from its forward"
        )
    return {name for name, other in units.items() if type(other) is type(module)
            and is_expandable(other)}  # fmt: skip


def _copy_input(tensor: Tensor, device: torch.device) -> Tensor:
    """The forward may change its inputs in place."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
