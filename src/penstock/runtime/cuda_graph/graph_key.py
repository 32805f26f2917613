"""When one recording may stand for a step: if all is alike that it depends on, but numbers.

Numbers in tensors may change from step to step; their places may not, nor anything that Python
looks at: shapes, modes, hooks, and what layers have as plain attributes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from penstock.model.partition import Partition
from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.runtime.cuda_graph.fingerprint import (
    CachedHash,
    Fingerprinter,
    ModuleSnapshot,
    ObjectIdentity,
    are_same_objects,
    fingerprint_attributes,
    fingerprint_tensors_and_hooks,
)
from penstock.runtime.cuda_graph.static_inputs import FlatInputs
from penstock.runtime.step_request import PreparedStep
from penstock.stage.caller_context import CallerContext

# -------------------------------------------------------------------------------------------------
# What computes in a step: the layers of a pipe, and a loss that is a module.
# -------------------------------------------------------------------------------------------------


class StepModules:
    """As it is now: layers may have come and gone since the last step."""

    def __init__(self, partition: Partition, loss_fn: Any) -> None:
        self._partition = partition
        self._roots = _list_roots(partition, loss_fn)
        layers = partition.modules()
        found = {id(p): p for m in layers for p in m._parameters.values() if p is not None}
        self.parameters = list(found.values())  # of the layers: a loss that learns is refused
        of_loss = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
        self.modules = list(dict.fromkeys([*layers, *of_loss]))
        self._check_no_script_modules()
        self.training_modes = CachedHash(tuple([module.training for module in self.modules]))
        self.tensors_and_hooks = self.fingerprint_current_tensors()
        told = fingerprint_attributes(self.modules)
        self.attributes = CachedHash(tuple([tuple(own.items()) for own in told.values()]))
        self._snapshot = ModuleSnapshot(self.modules)

    def is_current(self, loss_fn: Any) -> bool:
        """Is it what would be made now?"""
        return (
            are_same_objects(_list_roots(self._partition, loss_fn), self._roots)
            and self._snapshot.is_unchanged()
        )

    def _check_no_script_modules(self) -> None:
        """What a ScriptModule has, and what it changes, is not to be seen from Python."""
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{self.describe_module(module)} is a ScriptModule, and what it changes in a step "
                    "cannot be seen: give the module that it was made of, or take torch.compile"
                )

    def fingerprint_current_tensors(self) -> CachedHash:
        """Where the tensors of the same modules are."""
        return CachedHash(fingerprint_tensors_and_hooks(self.modules))

    def describe_module(self, module: nn.Module) -> str:
        """For people."""
        name = self._partition.names().get(module, "")
        return f"layer {name} ({type(module).__name__})" if name else type(module).__name__

    def describe_parameter(self, parameter: nn.Parameter) -> str:
        """For people."""
        for module, of_module in self._partition.names().items():
            for name, value in module._parameters.items():
                if value is parameter:
                    return f"{of_module}.{name}".lstrip(".")
        return f"a parameter of shape {tuple(parameter.shape)}"


def _list_roots(partition: Partition, loss_fn: Any) -> list[nn.Module]:
    return [*partition.roots(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]


# -------------------------------------------------------------------------------------------------

_GLOBAL_HOOK_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_FIELD_DESCRIPTIONS = (
    "what is asked (the loss function, the optimizer's numbers, settings of the pipe)",
    "the inputs (shapes, kinds, what is no tensor)",
    "which layers are in training",
    "the places of tensors of the layers",
    "attributes of the layers",
)


class GraphKey(NamedTuple):
    """Two steps with the same are done by the same recording."""

    request: Hashable
    inputs: Hashable
    training_modes: Hashable  # which layers are in training
    tensors_and_hooks: Hashable  # of parameters, buffers, and other tensors of layers; and hooks
    attributes: Hashable  # of layers, that are no tensors

    def without_module_state(self) -> GraphKey:
        """That of all steps that differ in nothing but what layers may change themselves."""
        return self._replace(tensors_and_hooks=None, attributes=None)

    def describe_difference(self, other: GraphKey) -> str:
        """What is not the same, for people."""
        pairs = zip(_FIELD_DESCRIPTIONS, self, other, strict=True)
        return " and ".join(name for name, a, b in pairs if a != b)


def build_graph_key(
    prepared: PreparedStep,
    inputs: FlatInputs,
    step_modules: StepModules,
    device_types: frozenset[str],
) -> GraphKey:
    """Of one step."""
    settings, lesson, fed = prepared.options, prepared.request, prepared.stage_inputs
    context = CallerContext.current(device_types)
    if context.inference_mode:
        raise CaptureError("it is asked for in torch.inference_mode: take torch.no_grad")
    if context.saved_tensors_hooks is not None:
        raise CaptureError("there are hooks on saved tensors around it, which no replay calls")
    tell = Fingerprinter()
    asked = (
        (settings.chunks, settings.checkpoint, settings.training, settings.reduction),
        (tell(lesson.loss_fn), lesson.return_outputs, lesson.scaler is None),
        _fingerprint_optimizer(lesson.optimizer, step_modules.parameters, tell),
        (
            context,
            torch.get_default_dtype(),
            *(tuple(vars(torch_module)[g]) for g in _GLOBAL_HOOK_TABLES),
        ),
        _get_kernel_flags(),
    )
    given = (
        fed.rows,
        fed.chunks,
        fed.graph,
        fed.has_target,
        fed.assignment_digest,
        *_fingerprint_inputs(inputs, tell),
    )
    return GraphKey(
        CachedHash(asked),
        CachedHash(given),
        step_modules.training_modes,
        step_modules.tensors_and_hooks,
        step_modules.attributes,
    )


def _get_kernel_flags() -> Hashable:
    """What the caller has set that libraries choose their kernels by."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic,
    )


def _fingerprint_inputs(inputs: FlatInputs, fingerprint: Fingerprinter) -> tuple[Hashable, ...]:
    memory = inputs.alias_indices, inputs.has_overlap
    return (
        inputs.specs,
        inputs.tensor_indices,
        memory,
        fingerprint(inputs.other_leaves),
        inputs.structure,
    )


# ---- the optimizer -------------------------------------------------------------------------


def _fingerprint_optimizer(
    optimizer: torch.optim.Optimizer | None,
    parameters: Sequence[nn.Parameter],
    fingerprint: Fingerprinter,
) -> Hashable:
    """Its numbers, where its state is, and which parameters have a gradient before the step."""
    if optimizer is None:
        return None
    groups = [
        tuple(
            [(k, tuple(map(id, v)) if k == "params" else fingerprint(v)) for k, v in group.items()]
        )
        for group in optimizer.param_groups
    ]
    state = [
        (name, fingerprint(value) if isinstance(value, Tensor) else type(value))
        for of_one in optimizer.state.values()
        for name, value in (of_one.items() if isinstance(of_one, dict) else ())
    ]
    empty = tuple([p.grad is None for p in parameters])
    return ObjectIdentity(optimizer), tuple(groups), tuple(state), empty


def get_optimizer_numbers(optimizer: torch.optim.Optimizer | None) -> dict[tuple[int, str], float]:
    """What it has in its state that is no tensor."""
    if optimizer is None:
        return {}
    return {
        (at, name): value
        for at, of_one in enumerate(optimizer.state.values())
        for name, value in (of_one.items() if isinstance(of_one, dict) else ())
        if isinstance(value, int | float)
    }


def check_optimizer_numbers_unchanged(
    optimizer: torch.optim.Optimizer | None, before: Mapping[Any, float]
) -> None:
    """It does not count in Python: a replay would not."""
    now = get_optimizer_numbers(optimizer)
    changed = [name for at, name in before if now.get((at, name)) != before[at, name]]
    if changed:
        raise CaptureError(
            f"{type(optimizer).__name__} changes '{changed[0]}' of its state in every step, a "
            "number in Python, and a replay would not: call its step after pipe.step"
        )
