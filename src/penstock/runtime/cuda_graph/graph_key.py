"""The key of a CUDA graph: everything that a step depends on, except the numbers in its tensors.

Two steps with equal keys run the same kernels at the same addresses, so one graph serves both. A
key has five parts:

| part | contents |
|---|---|
| `request` | loss function, options of the pipe, optimizer, autocast and similar modes, TF32 |
| `inputs` | shapes, dtypes, devices and aliases of the inputs; inputs that are not tensors |
| `training_modes` | `training` of every module |
| `tensors_and_hooks` | addresses and layouts of parameters, buffers and other tensors; hooks |
| `attributes` | attributes of modules that are not tensors, such as `layer.p = 0.2` |

The last three are computed once for `StepModules`, and again only when a module has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.fingerprint import (
    AttributeFingerprints,
    CachedHash,
    Fingerprinter,
    ModuleSnapshot,
    ObjectIdentity,
    are_same_objects,
    fingerprint_attributes,
    fingerprint_tensors_and_hooks,
)
from penstock.model.partition import Partition
from penstock.model.stage_inputs import StageInputs
from penstock.runtime.cuda_graph.capture_guard import CaptureError
from penstock.runtime.cuda_graph.static_buffers import FlatInputs
from penstock.runtime.request import Request
from penstock.stage.caller_context import CallerContext
from penstock.torch_compat import get_global_hook_ids


class PreparedStep(NamedTuple):
    """A step whose batch is split. Its gradients are multiplied by `loss_scale`."""

    request: Request
    stage_inputs: StageInputs
    loss_scale: Tensor | None


# ---- the modules of a step ------------------------------------------------------------------


class StepModules:
    """The modules that compute in a step: the layers of the pipe, and a loss that is a module.

    It describes them at one moment. The caller may add, remove or change layers between steps.
    """

    def __init__(self, partition: Partition, loss_fn: Any) -> None:
        self._partition = partition
        self._roots = _list_roots(partition, loss_fn)
        layers = partition.modules()
        parameters = {id(p): p for m in layers for p in m._parameters.values() if p is not None}
        # Of the layers alone: a loss with parameters that require grad is refused elsewhere.
        self.parameters = list(parameters.values())
        loss_modules = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
        self.modules = list(dict.fromkeys([*layers, *loss_modules]))
        self._check_no_script_modules()
        self.training_modes = CachedHash(tuple([module.training for module in self.modules]))
        self.tensors_and_hooks = self.fingerprint_current_tensors()
        attributes = fingerprint_attributes(self.modules)
        self.attributes = CachedHash(tuple([tuple(a.items()) for a in attributes.values()]))
        self._snapshot = ModuleSnapshot(self.modules)

    def is_current(self, loss_fn: Any) -> bool:
        """Return whether a new `StepModules` would be equal to this one."""
        return (
            are_same_objects(_list_roots(self._partition, loss_fn), self._roots)
            and self._snapshot.is_unchanged()
        )

    def _check_no_script_modules(self) -> None:
        """Raise if a module is a ScriptModule: Python cannot see its attributes change."""
        for module in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{self.describe_module(module)} is a ScriptModule, whose changes during a "
                    "step cannot be seen from Python. Use the module that it was scripted from, or "
                    "torch.compile"
                )

    def fingerprint_current_tensors(self) -> CachedHash:
        """Return the addresses and hooks of the tensors that the modules have now."""
        return CachedHash(fingerprint_tensors_and_hooks(self.modules))

    def describe_module(self, module: nn.Module) -> str:
        """Return the name of a module for an error message, such as "layer 3 (Router)"."""
        name = self._partition.names().get(module, "")
        return f"layer {name} ({type(module).__name__})" if name else type(module).__name__

    def describe_parameter(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter for an error message, such as "3.weight"."""
        for module, module_name in self._partition.names().items():
            for name, value in module._parameters.items():
                if value is parameter:
                    return f"{module_name}.{name}".lstrip(".")
        return f"a parameter of shape {tuple(parameter.shape)}"


def _list_roots(partition: Partition, loss_fn: Any) -> list[nn.Module]:
    return [*partition.roots(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]


def check_attributes_unchanged(
    before: AttributeFingerprints, now: AttributeFingerprints, describe: Callable[[nn.Module], str]
) -> None:
    """Raise `CaptureError` if a step has changed an attribute of a module: a replay would not."""
    for module, attributes in now.items():
        attributes_before = before.get(module, attributes)
        if attributes_before == attributes:
            continue
        names = [
            name
            for name in (*attributes_before, *attributes)
            if attributes_before.get(name, attributes_before) != attributes.get(name, attributes)
        ]
        raise CaptureError(
            f"{describe(module)}: it changes its attribute '{names[0]}' in every step, and a "
            "replay would not. Keep the value in a buffer, as a tensor"
        )


# ---- the key --------------------------------------------------------------------------------

# The parts of a key, for the warning that says why no graph is replayed.
_FIELD_DESCRIPTIONS = (
    "the request (loss function, numbers of the optimizer, settings of the pipe)",
    "the inputs (shapes, dtypes, values that are not tensors)",
    "which layers are in training mode",
    "the memory addresses of the layers' tensors, or their hooks",
    "attributes of the layers",
)


class GraphKey(NamedTuple):
    """The key of a step in the cache of graphs. Steps with equal keys can use one graph."""

    request: Hashable
    inputs: Hashable
    training_modes: Hashable  # `training` of every module
    tensors_and_hooks: Hashable  # addresses of all tensors of the modules, and hooks on both
    attributes: Hashable  # attributes of the modules that are not tensors

    def without_module_state(self) -> GraphKey:
        """Return the key without the parts that the layers may change themselves in a step."""
        return self._replace(tensors_and_hooks=None, attributes=None)

    def describe_difference(self, other: GraphKey) -> str:
        """Return the parts in which two keys differ, for a message."""
        pairs = zip(_FIELD_DESCRIPTIONS, self, other, strict=True)
        return " and ".join(name for name, a, b in pairs if a != b)


# The context variables with which a notebook's kernel tells the outputs of cells apart. They change
# with every cell, and with them in the key no step would be replayed in another cell.
_NOTEBOOK_VARIABLES = frozenset({"parent_header", "shell_parent", "shell_parent_ident"})


def _fingerprint_context_variables(
    context: CallerContext, fingerprint: Fingerprinter
) -> frozenset[tuple[ContextVar[Any], Any]]:
    """Return the context variables that a layer may read, with fingerprints of their values.

    Event loops are left out, too: Jupyter keeps one in a variable, and its state always changes.
    """
    return frozenset(
        (variable, fingerprint(value))
        for variable, value in context.variables.items()
        if variable.name not in _NOTEBOOK_VARIABLES
        and not isinstance(value, asyncio.AbstractEventLoop)
    )


def build_graph_key(
    prepared: PreparedStep,
    inputs: FlatInputs,
    step_modules: StepModules,
    device_types: frozenset[str],
) -> GraphKey:
    """Return the key of one step. Raise `CaptureError` under modes that no replay can follow."""
    request, stage_inputs = prepared.request, prepared.stage_inputs
    context = CallerContext.current(device_types)
    if context.inference_mode:
        raise CaptureError("it runs under torch.inference_mode. Use torch.no_grad instead")
    if context.saved_tensors_hooks is not None:
        raise CaptureError(
            "it runs under torch.autograd.graph.saved_tensors_hooks, which a replay would not "
            "call. Run the step outside of them"
        )
    fingerprint = Fingerprinter()
    request_facts = (
        (*request.describe_options().values(), fingerprint(request.loss_fn)),
        _fingerprint_optimizer(request.optimizer, step_modules.parameters, fingerprint),
        (context, torch.get_default_dtype(), *get_global_hook_ids()),
        _fingerprint_context_variables(context, fingerprint),
        _get_kernel_flags(),
    )
    input_facts = (
        stage_inputs.rows,
        stage_inputs.chunks,
        stage_inputs.graph,
        stage_inputs.has_target,
        stage_inputs.assignment_digest,
        (inputs.specs, inputs.tensor_indices, inputs.alias_indices, inputs.has_overlap),
        # One by one: a tuple with an entry a stage and micro-batch may be too long to be inspected.
        (tuple(map(fingerprint, inputs.other_leaves)), inputs.structure),
    )
    return GraphKey(
        CachedHash(request_facts),
        CachedHash(input_facts),
        step_modules.training_modes,
        step_modules.tensors_and_hooks,
        step_modules.attributes,
    )


def _get_kernel_flags() -> Hashable:
    """Return the global settings by which PyTorch and its libraries choose kernels."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic,
    )


# ---- the optimizer --------------------------------------------------------------------------
#
# An optimizer that is given to `step` is part of the graph. Its Python numbers, such as a learning
# rate that is a float, are arguments of the recorded kernels: another value needs another graph. A
# Python number that the optimizer itself changes in every step cannot be repeated. Numbers in its
# tensors may change.


def _fingerprint_optimizer(
    optimizer: torch.optim.Optimizer | None,
    parameters: Sequence[nn.Parameter],
    fingerprint: Fingerprinter,
) -> Hashable:
    """Return the optimizer's settings and addresses, and which parameters have no gradient yet.

    An optimizer skips parameters whose gradient is None, so that belongs to the key.
    """
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
        for parameter_state in optimizer.state.values()
        for name, value in (parameter_state.items() if isinstance(parameter_state, dict) else ())
    ]
    has_no_grad = tuple([p.grad is None for p in parameters])
    return ObjectIdentity(optimizer), tuple(groups), tuple(state), has_no_grad


def get_optimizer_numbers(optimizer: torch.optim.Optimizer | None) -> dict[tuple[int, str], float]:
    """Return the Python numbers in the optimizer's state, by parameter index and name."""
    if optimizer is None:
        return {}
    return {
        (index, name): value
        for index, parameter_state in enumerate(optimizer.state.values())
        for name, value in (parameter_state.items() if isinstance(parameter_state, dict) else ())
        if isinstance(value, int | float)
    }


def check_optimizer_numbers_unchanged(
    optimizer: torch.optim.Optimizer | None, before: Mapping[Any, float]
) -> None:
    """Raise if the optimizer has changed a Python number of its state: a replay would not."""
    now = get_optimizer_numbers(optimizer)
    changed = [name for index, name in before if now.get((index, name)) != before[index, name]]
    if changed:
        raise CaptureError(
            f"{type(optimizer).__name__} changes '{changed[0]}' of its state in every step, a "
            "Python number that a replay would not change. Call optimizer.step() after pipe.step, "
            "or create the optimizer with capturable=True"
        )
