"""One stage's part of a forward: its steps are run, the others are passed over.

The model's own forward runs on the stage's skeleton. Where it calls a unit of another stage, or an
operation that another stage runs, it gets what looks like the result; what the stage itself
runs gets the real values, made here or received. After the stage's last step, the forward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import CutError
from penstock.model.traced.containers import (
    OutputWithContainerUpdates,
    apply_container_updates,
    call_tracking_containers,
    get_forward_hooks,
    wrap_with_hooks,
)
from penstock.model.traced.dry_run import make_shape_placeholder
from penstock.model.traced.guards import ModelSettings
from penstock.model.traced.interception import (
    HookSkipped,
    NullHookHandle,
    OpInterceptor,
    get_source_location,
    without_interception,
)
from penstock.model.traced.proxies import ProxyModel, sync_attributes
from penstock.model.traced.pytrees import (
    flatten,
    iter_tensors,
    map_call_tensors,
    map_tensors,
    unflatten,
)
from penstock.model.traced.remote_tensor import FORWARD_COUNTER, RemoteTensor
from penstock.model.traced.stage_program import Instruction, StageProgram
from penstock.model.traced.torch_functions import (
    HOOK_REGISTRATION,
    METADATA_ONLY,
    REFLECTED_COMPARISONS,
    SHAPE_ONLY,
    get_function_name,
    is_metadata_only,
)
from penstock.model.traced.trace import ArgumentLeaf, NodeKind, TraceNode, ValueLeaf
from penstock.model.traced.traced_partition import ForwardRequest
from penstock.stage.recompute import is_recomputing
from penstock.stage.stage import OUTSIDE


class StageFinished(BaseException):
    """The stage's part is done. No model catches it by mistake."""


def _register_no_hook(*_: Any, **__: Any) -> NullHookHandle:
    return NullHookHandle()


def _matches_node(node: TraceNode, func: Any) -> bool:
    known = node.func
    if node.kind is NodeKind.UNIT:
        return bool(known.unit == func)
    return known is func or bool(known == func) or func is REFLECTED_COMPARISONS.get(known, known)


class StageInterpreter(OpInterceptor):
    """Performs a score once. `received` has the values that came from other stages, `given` those
    from outside.
    """

    def __init__(
        self,
        program: StageProgram,
        unit_modules: Mapping[str, nn.Module],
        received: dict[int, Tensor],
        inputs: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self._instructions, self._end, self._unit_modules = (
            program.instructions,
            program.end,
            unit_modules,
        )
        self._device = program.device  # wherever the model's other parts are
        self._original_values, self._received, self._is_last = (
            program.original_values,
            received,
            program.is_last,
        )
        for value in program.values_to_clone:
            received[value] = received[value].clone()
        self._live_values: dict[int, Tensor] = dict(inputs)
        self._replacements: dict[
            int, Tensor
        ] = {}  # of tensors that were changed elsewhere, by identity
        self.sent_values: dict[int, Tensor] = {}
        self._node_index, self._is_finished, self._in_hook = 0, False, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """One step, unless it only looks."""
        if func in METADATA_ONLY and is_metadata_only(func, args):
            found = func(*args, **(kwargs or {}))
            return self._device if type(found) is torch.device else found
        return self.intercept_op(func, args, kwargs or {}, func)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run it, or pass over it."""
        if self._is_finished:
            return call(*args, **kwargs)
        if self._in_hook:
            raise HookSkipped
        act = self._advance(func)
        step = act.node
        if not act.runs_here:
            if act.placeholder_is_static and not act.rebound_values:
                return act.placeholder_result
            tensors = list(iter_tensors((args, kwargs)))
            if act.rebound_values:
                self._rebind(act, tensors)
            return (
                act.placeholder_result
                if act.placeholder_is_static
                else self._fill_placeholder(act, tensors)
            )
        if step.kind is NodeKind.NON_TENSOR:
            return call(*args, **kwargs)
        change = (
            self._resolve_shape_only if func in SHAPE_ONLY and not step.inputs else self._resolve
        )
        some_args, some_kwargs = map_tensors((args, kwargs), change)
        if (
            func in HOOK_REGISTRATION and not some_args[0].requires_grad
        ):  # in a forward without a graph
            call = _register_no_hook
        found = call(*some_args, **some_kwargs)
        if isinstance(found, tuple | list) and step.output is not None:
            self._check_result_count(step, found)
        if act.saved_values:
            self._save_values(act, found, lambda: list(iter_tensors((some_args, some_kwargs))))
        return found

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run it, or pass over it; its hooks are told in any case."""
        if self._is_finished:
            raise StageFinished
        if self._in_hook:
            raise HookSkipped
        act = self._advance(name)
        if not act.runs_here:
            found = act.placeholder_result
            if act.rebound_values or not act.placeholder_is_static:
                tensors = _find_tensors((args, kwargs))
                if act.rebound_values:
                    self._rebind(act, tensors)
                found = (
                    act.placeholder_result
                    if act.placeholder_is_static
                    else self._fill_placeholder(act, tensors)
                )
                found = apply_container_updates(found, args, kwargs)
            self._notify_hooks(name, target, args, kwargs, found)
            return found
        some_args, some_kwargs = map_call_tensors(args, kwargs, self._resolve)
        run: Callable[..., Any] = wrap_with_hooks(
            self._unit_modules[name], self.unit_hooks.get(name)
        )
        if self.checkpoint_options is not None:
            how = {"use_reentrant": False, **self.checkpoint_options}
            run = partial(checkpoint, run, **how)
        with without_interception(self):
            found = call_tracking_containers(run, some_args, some_kwargs)
            if act.expected_shapes:
                _check_unit_shapes(act, found)
            if act.saved_values:  # a copy that is made of one is no step of the forward
                given = some_args, some_kwargs
                self._save_values(act, found, lambda: _find_tensors(given))
        if isinstance(found, OutputWithContainerUpdates) is not act.fills_container:
            raise self._divergence_error(
                f"unit '{name}', which fills a list or a dict now and then"
            )
        return apply_container_updates(found, args, kwargs)

    def resolve_output(self, output: Any) -> Any:
        """The model's output, with the values that other stages sent."""
        if self._node_index != len(self._instructions):
            raise self._divergence_error("the end of the forward")
        self._is_finished = True
        if not self._is_last:
            return None
        leaves, spec = flatten(output)
        leaves = [self._resolve(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return unflatten(leaves, spec)

    def _advance(self, func: Any) -> Instruction:
        at = self._node_index
        if at >= self._end and not self._is_tensor_free(at):
            self._is_finished = True
            raise StageFinished
        if at < len(self._instructions) and _matches_node(self._instructions[at].node, func):
            self._node_index = at + 1
            return self._instructions[at]
        raise self._divergence_error(
            f"unit '{func}'" if isinstance(func, str) else get_function_name(func)
        )

    def _is_tensor_free(self, node_index: int) -> bool:
        """A step that has to do with no tensor: it may leave `no_grad`, and must not be missed.

        Nor does a forward end before its next step: it may still assign what it has computed.
        """
        return (
            node_index < len(self._instructions)
            and self._instructions[node_index].node.kind is NodeKind.NON_TENSOR
        )

    def _divergence_error(self, actual: str) -> CutError:
        at = self._node_index
        planned = "its end"
        if at < len(self._instructions):
            step = self._instructions[at].node
            unit = step.kind is NodeKind.UNIT
            planned = (
                f"unit '{step.func}'"
                if unit
                else f"{get_function_name(step.func)} ({step.location})"
            )
        return CutError(
            f"the forward took another path at its step {at}: with inputs like these there came "
            f"{planned}, and now {actual} ({get_source_location()}). What a forward does may depend on the "
            "inputs, on settings and on whether it trains, and not on anything else that changes: "
            "let it go by these, or put what decides into one unit with units="
        )

    def _resolve(self, tensor: Tensor) -> Tensor:
        if type(tensor) is RemoteTensor:
            if tensor.value_index not in self._received:
                raise self._divergence_error("a value that no stage sends to this one")
            return self._received[tensor.value_index]
        return self._replacements.get(id(tensor), tensor) if self._replacements else tensor

    def _check_result_count(self, node: TraceNode, result: Sequence[Any]) -> None:
        """Into how many parts something falls may depend on its shape, and that on numbers."""
        assert node.output is not None
        count = len(flatten(result)[0])
        if count != len(node.output.leaves):
            raise CutError(
                f"at {node.location}, {get_function_name(node.func)} gives {count} values, and "
                f"{len(node.output.leaves)} were planned for inputs like these: how many depends "
                "on numbers that other stages do not have; put it into one unit, with all that "
                "follows from it, with units="
            )

    def _resolve_shape_only(self, tensor: Tensor) -> Tensor:
        return make_shape_placeholder(tensor) if type(tensor) is RemoteTensor else tensor

    def _fill_placeholder(self, instruction: Instruction, tensors: Sequence[Tensor]) -> Any:
        assert instruction.node.output is not None
        leaves = [
            tensors[x.argument_index] if isinstance(x, ArgumentLeaf) else x
            for x in instruction.placeholder_result
        ]
        return unflatten(leaves, instruction.node.output.tree_spec)

    def _rebind(self, instruction: Instruction, tensors: Sequence[Tensor]) -> None:
        """Tensors were changed in place on another stage, which sends them as they are now."""
        takes = instruction.node.inputs
        for old, new in instruction.rebound_values:
            here = tensors[takes.index(old)] if old in takes else self._live_values.get(old)
            if here is not None:
                self._live_values[new] = here
            if new in self._received:
                self._replace_value(here, self._received[new], self._original_values.get(old, old))

    def _replace_value(
        self, local: Tensor | None, replacement: Tensor, original_value: int
    ) -> None:
        """From now on; what is not here is known by the value that it was at first."""
        if local is None:
            self._received[original_value] = replacement
        elif type(local) is RemoteTensor:
            self._received[local.value_index] = replacement
        else:
            self._replacements[id(local)] = replacement

    def _save_values(
        self, instruction: Instruction, result: Any, arguments: Callable[[], list[Tensor]]
    ) -> None:
        leaves = flatten(result)[0]
        assert instruction.node.output is not None
        places = instruction.node.output.leaves
        for value, place, sent, copied in instruction.saved_values:
            if isinstance(place, ValueLeaf):
                tensor = leaves[places.index(place)]
            elif isinstance(place, ArgumentLeaf):
                tensor = arguments()[place.argument_index]
            elif place in self._live_values:
                tensor = self._live_values[place]
            else:
                tensor = self._received[self._original_values.get(place, place)]
            self._live_values[value] = tensor
            if sent:
                self.sent_values[value] = tensor.clone() if copied else tensor

    def _notify_hooks(
        self, name: str, target: nn.Module, args: Any, kwargs: Any, result: Any
    ) -> None:
        """What they collect is there; what they compute is computed where the unit runs."""
        for key, hook in get_forward_hooks(target, self.unit_hooks.get(name)).items():
            self._in_hook = True
            try:
                if key in target._forward_hooks_with_kwargs:
                    hook(target, args, kwargs, result)
                else:
                    hook(target, args, result)
            except HookSkipped:
                pass
            finally:
                self._in_hook = False


def _check_unit_shapes(instruction: Instruction, result: Any) -> None:
    """Other stages know what the unit gives by the shape that it was planned with."""
    leaves = [result] if isinstance(result, Tensor) else flatten(result)[0]
    for leaf, planned in zip(leaves, instruction.expected_shapes, strict=False):
        now = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
        if planned is not None and now != planned:
            raise CutError(
                f"unit '{instruction.node.func}' gives a tensor of the shape {now}, and {planned} was "
                f"planned for inputs like these: it depends on numbers, and the forward goes on by "
                f"it, on stages that do not have them ({instruction.node.location}). Let the unit give one "
                "shape (pad, or mask instead of picking), or put all that goes by the shape into "
                "one unit with units="
            )


def _find_tensors(arguments: Any) -> list[Tensor]:
    """The tensors that a unit is given, wherever they are in its arguments."""
    return [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)]


# -------------------------------------------------------------------------------------------------
# A stage of a divided forward: computes its part of it.
# -------------------------------------------------------------------------------------------------


class StageForward:
    """A stage's computation: the model's own forward, of which it runs its steps.

    From outside come a `Handed` and the inputs that it takes; from other stages, values.
    """

    def __init__(
        self,
        index: int,
        proxy_model: ProxyModel,
        unit_modules: Mapping[str, nn.Module],
        unit_copies: Sequence[tuple[nn.Module, nn.Module]] = (),
    ) -> None:
        self._index, self._proxy_model, self._unit_modules = index, proxy_model, unit_modules
        self._unit_copies = (
            unit_copies  # of units that another stage calls as well: original and copy
        )
        self._settings: ModelSettings | None = None

    def refresh_buffers(self, device: torch.device) -> None:
        """The model was cast."""
        self._proxy_model.refresh_buffers(device)

    def __call__(
        self, inputs_by_source: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, ...]]:
        """As a stage computes."""
        FORWARD_COUNTER.count += 1
        handed: ForwardRequest
        handed, *tensors = inputs_by_source[OUTSIDE]
        score = handed.programs[self._index]
        if self._settings is not handed.settings:
            self._proxy_model.sync_with_originals()
            for original, copy in self._unit_copies:
                sync_attributes(original, copy)
            self._settings = handed.settings
        leaves = list(handed.plain_leaves)
        for place, stand_in in zip(handed.tensor_positions, score.input_proxies, strict=True):
            leaves[place] = stand_in
        given: dict[int, Tensor] = {}
        for at, tensor in zip(score.input_indices, tensors, strict=True):
            leaves[handed.tensor_positions[at]] = given[score.input_proxies[at].value_index] = (
                tensor
            )
        args, kwargs = unflatten(leaves, handed.tree_spec)
        received = {
            value: tensor
            for source, values in score.recv_values.items()
            for value, tensor in zip(values, inputs_by_source[source], strict=True)
        }
        performer = StageInterpreter(score, self._unit_modules, received, given)
        performer.unit_hooks = self._proxy_model.unit_hooks
        anew = () if is_recomputing() else score.reassigned_buffers
        output: Any = None
        try:
            grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
            with grad_mode, self._proxy_model.isolated_forward(anew), performer:
                output = self._proxy_model.model(*args, **kwargs)
        except StageFinished:
            pass
        else:
            output = performer.resolve_output(output)
        departing = {
            dst: tuple(performer.sent_values[value] for value in score.send_values.get(dst, ()))
            for dst in handed.destinations[self._index]
        }
        if score.is_last:
            departing[OUTSIDE] = (output,)
        return departing
