"""The forward of one stage: the model's own forward, interpreted against a stage program.

The forward runs on the stage's `ProxyModel`, under a `StageInterpreter`. The interpreter compares
every operation and every call of a unit with the next instruction of the program:

    the forward calls ...             the interpreter ...
    ------------------------------    -------------------------------------------------------------
    a node of this stage              replaces remote tensors by received ones, and runs it
    a node of another stage           returns a placeholder of the traced result
    something else                    raises: the forward took another path than the trace
    anything after the last node      raises `StageFinished`, which ends the forward early

The host code between the units therefore runs on every stage, once per micro-batch. An operation
that is skipped costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
)
from penstock.model.traced.dry_run import make_shape_placeholder
from penstock.model.traced.interception import (
    HookSkipped,
    NullHookHandle,
    OpInterceptor,
    get_source_location,
    without_interception,
)
from penstock.model.traced.proxies import ProxyModel, copy_attribute_tree, sync_attributes
from penstock.model.traced.remote_tensor import FORWARD_COUNTER, RemoteTensor
from penstock.model.traced.settings import ModelSettings
from penstock.model.traced.shared_state import SharedState
from penstock.model.traced.stage_program import (
    ANY_TENSOR,
    Instruction,
    StageProgram,
)
from penstock.model.traced.torch_functions import (
    HOOK_REGISTRATION,
    METADATA_ONLY,
    MODE_DEPENDENT,
    REFLECTED_COMPARISONS,
    SHAPE_ONLY,
    get_function_name,
    is_metadata_only,
)
from penstock.model.traced.trace import ArgumentLeaf, NodeKind, TraceNode, ValueLeaf
from penstock.model.traced.traced_partition import ForwardRequest
from penstock.model.traced.unit_checks import (
    are_same_values,
    check_unit_aliases,
    check_unit_output,
    check_unit_tensors,
    check_watched_attributes,
    read_watched_attributes,
)
from penstock.nested_values import flatten, iter_tensors, map_call_tensors, map_tensors, unflatten
from penstock.stage.host_rng import draw_between_units, draw_in_unit
from penstock.stage.recompute import in_checkpointed_forward, in_recomputation
from penstock.stage.stage import OUTSIDE


class StageFinished(BaseException):
    """Raised inside the model's forward when the stage has run its last node.

    It derives from BaseException so that an `except Exception` in the model does not catch it.
    """


def _register_no_hook(*_: Any, **__: Any) -> NullHookHandle:
    return NullHookHandle()


def _matches_node(node: TraceNode, func: Any) -> bool:
    """Return whether a call, of a unit by name or of a function, is the one that a node recorded.

    Python tries the reflected comparison first if the right operand is of a subclass: `a < b` with
    a remote tensor `b` arrives as `b > a`.
    """
    traced = node.func
    if node.kind is NodeKind.UNIT:
        return bool(traced.unit == func)
    return (
        traced is func or bool(traced == func) or func is REFLECTED_COMPARISONS.get(traced, traced)
    )


class StageInterpreter(OpInterceptor):
    """Executes a stage program for one micro-batch.

    Args:
        program: The program of the stage.
        unit_modules: The units by name, as this stage has them.
        received: The values that came from other stages.
        inputs: The values of the tensors of the batch that the stage takes.
    """

    def __init__(
        self,
        program: StageProgram,
        unit_modules: Mapping[str, nn.Module],
        received: dict[int, Tensor],
        inputs: Mapping[int, Tensor],
        builds_graph: bool,
    ) -> None:
        super().__init__()
        self._builds_graph = builds_graph
        self._instructions, self._end = program.instructions, program.end
        self._device, self._is_last = program.device, program.is_last
        self._unit_modules, self._received = unit_modules, received
        self._original_values = program.original_values
        for value in program.values_to_clone:
            received[value] = received[value].clone()
        # Tensors of this stage by value, as far as a later change in place has to find them.
        self._live_values: dict[int, Tensor] = dict(inputs)
        # Another stage changes a tensor of which this stage has the old state. The new state, as
        # received, replaces it from then on; by the id of the old tensor.
        self._replacements: dict[int, Tensor] = {}
        self.sent_values: dict[int, Tensor] = {}
        self._node_index, self._is_finished = 0, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a read of metadata; treat any other function as a node."""
        if func in METADATA_ONLY and is_metadata_only(func, args):
            # `x.device` is always the device of this stage, so that new tensors are created here.
            # A parent's parameter may still be elsewhere.
            answer = func(*args, **(kwargs or {}))
            return self._device if type(answer) is torch.device else answer
        return self.intercept_op(func, args, kwargs or {}, func)

    def intercept_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run an operation, or return the placeholder of its result."""
        if self._is_finished:
            # `StageFinished` unwinds the forward, and context managers of the model run on the way
            # out: leaving `no_grad` or `autocast` must still take effect.
            return call(*args, **kwargs)
        if self.in_hook:
            raise HookSkipped
        instruction = self._advance(func)
        node = instruction.node
        if instruction.guarded_arguments is not None and func is node.func:
            self._check_guarded_arguments(instruction, args, kwargs)
        if node.kind is NodeKind.HOST_READ and func in MODE_DEPENDENT:
            self._check_mode_dependent(node, args[0])
        if not instruction.runs_here:
            if instruction.placeholder_is_static and not instruction.rebound_values:
                return instruction.placeholder_result
            return self._fill_placeholder(instruction, list(iter_tensors((args, kwargs))))
        if node.kind is NodeKind.NON_TENSOR:
            return call(*args, **kwargs)
        # `torch.zeros_like(x)` needs the shape of `x` and not its values, so `x` was not sent.
        resolve = (
            self._resolve_shape_only if func in SHAPE_ONLY and not node.inputs else self._resolve
        )
        resolved_args, resolved_kwargs = map_tensors((args, kwargs), resolve)
        # `register_hook` raises on a tensor without a graph, as in a forward to be recomputed.
        if func in HOOK_REGISTRATION and not resolved_args[0].requires_grad:
            call = _register_no_hook
        if self._builds_graph:
            result = call(*resolved_args, **resolved_kwargs)
        else:
            with torch.set_grad_enabled(False):
                result = call(*resolved_args, **resolved_kwargs)
        if isinstance(result, tuple | list) and node.output is not None:
            self._check_result_count(node, result)
        if instruction.saved_values:
            self._save_values(
                instruction, result, lambda: list(iter_tensors((resolved_args, resolved_kwargs)))
            )
        if instruction.returns_argument:
            resolved = iter_tensors((resolved_args, resolved_kwargs))
            return _restore_arguments(result, iter_tensors((args, kwargs)), resolved)
        return result

    def handle_autograd_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        """Run a `torch.autograd.Function`; modules among its arguments are copies for this call.

        The backward of reversible layers reads attributes that their forward has set on modules.
        The parents get their old attributes back after each micro-batch, the copies keep them.
        """
        copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        own_args = tuple(
            copy_attribute_tree(arg, copies) if isinstance(arg, nn.Module) else arg for arg in args
        )
        result = super().handle_autograd_function(function, own_args, kwargs, call)
        for original, module_copy in copies.values():
            sync_attributes(module_copy, original)
        return result

    def intercept_unit(
        self, name: str, target: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a unit, or return the placeholder of its output.

        The forward hooks of a unit run on every stage. A model may read what they collect.
        """
        if self._is_finished:
            raise StageFinished
        if self.in_hook:
            raise HookSkipped
        instruction = self._advance(name)
        if not instruction.runs_here:
            output = instruction.placeholder_result
            if instruction.rebound_values or not instruction.placeholder_is_static:
                output = self._fill_placeholder(instruction, _find_tensors((args, kwargs)))
                output = apply_container_updates(output, args, kwargs)
            self.notify_hooks(name, target, args, kwargs, output)
            return output
        resolved_args, resolved_kwargs = map_call_tensors(args, kwargs, self._resolve)
        if instruction.returns_argument or instruction.must_not_alias:
            # Before the call, which may fill a list among them.
            arguments = _find_tensors((args, kwargs))
            resolved = _find_tensors((resolved_args, resolved_kwargs))
        unit, hooks = self._unit_modules[name], self.unit_hooks.get(name)
        if instruction.watched_attributes:
            attributes = read_watched_attributes(unit, instruction)
        run: Callable[..., Any] = unit if hooks is None else hooks.wrap(unit)
        # A parent called `torch.utils.checkpoint` on code around this unit. The region may span
        # several stages, so each unit in it is checkpointed by itself.
        if self.checkpoint_options is not None:
            checkpoint_kwargs = {"use_reentrant": False, **self.checkpoint_options}
            run = partial(checkpoint, run, **checkpoint_kwargs)
        with without_interception(self), draw_in_unit():
            if self._builds_graph:
                output = call_tracking_containers(run, resolved_args, resolved_kwargs)
            else:
                with torch.set_grad_enabled(False):
                    output = call_tracking_containers(run, resolved_args, resolved_kwargs)
            if isinstance(output, OutputWithContainerUpdates) is not instruction.fills_container:
                raise self._divergence_error(
                    f"unit '{name}', which fills a list or a dict in some calls only"
                )
            expected = instruction.expected_output
            if expected is not None and not (expected is ANY_TENSOR and isinstance(output, Tensor)):
                check_unit_output(instruction, output)
            if instruction.watched_attributes:
                check_watched_attributes(unit, instruction, attributes)
            if instruction.expected_tensors:
                check_unit_tensors(instruction, output)
            if instruction.returns_argument or instruction.must_not_alias:
                check_unit_aliases(instruction, output, resolved)
            if instruction.saved_values:  # may clone, and that is not a node of the forward
                self._save_values(
                    instruction, output, lambda: _find_tensors((resolved_args, resolved_kwargs))
                )
        if instruction.returns_argument:
            output = _restore_arguments(output, arguments, resolved)
        return apply_container_updates(output, args, kwargs)

    def resolve_output(self, output: Any) -> Any:
        """Return the model's output with received tensors in place of remote ones.

        Only the last stage has an output; the others return None.
        """
        if self._node_index != len(self._instructions):
            raise self._divergence_error("the end of the forward")
        self._is_finished = True
        if not self._is_last:
            return None
        leaves, spec = flatten(output)
        leaves = [self._resolve(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return unflatten(leaves, spec)

    def _advance(self, func: Any) -> Instruction:
        """Return the next instruction. Raise if it is not about the function or unit `func`."""
        index = self._node_index
        if index >= self._end and not self._is_tensor_free(index):
            self._is_finished = True
            raise StageFinished
        if index < len(self._instructions) and _matches_node(self._instructions[index].node, func):
            self._node_index = index + 1
            return self._instructions[index]
        raise self._divergence_error(
            f"unit '{func}'" if isinstance(func, str) else get_function_name(func)
        )

    def _is_tensor_free(self, node_index: int) -> bool:
        """Return whether a node has nothing to do with tensors, such as the end of a `no_grad`.

        Such nodes still run after the last tensor node of the stage, because they may restore a
        mode. The forward ends at the node after them, and not before, so that it can still assign
        its last result to an attribute or buffer.
        """
        return (
            node_index < len(self._instructions)
            and self._instructions[node_index].node.kind is NodeKind.NON_TENSOR
        )

    def _divergence_error(self, actual: str) -> CutError:
        index = self._node_index
        traced = "its end"
        if index < len(self._instructions):
            node = self._instructions[index].node
            traced = f"{get_function_name(node.func)} ({node.location})"
            if node.kind is NodeKind.UNIT:
                traced = f"unit '{node.func}'"
        cure = (
            "What a forward does may depend on its inputs, on settings and on training mode, but "
            "not on other state that changes. Let it depend on these alone, or put the code that "
            "decides into one unit with units=."
        )
        if torch.compiler.is_compiling():
            # PyTorch has one flag for all threads, and transformers skips checks of masks if it is
            # set.
            cure = (
                "Another thread compiles a function, so that torch.compiler.is_compiling() is True "
                "here, too. Call the step again, or make the first one with runtime='inline'."
            )
        return CutError(
            f"the forward took another path at node {index} of its trace: with inputs like these "
            f"it came to {traced}, and now to {actual} ({get_source_location()}). {cure}"
        )

    def _check_guarded_arguments(
        self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise if an operation that a guard depends on has other arguments than in the trace.

        The guard has repeated the operation with those of the trace, and its outcome is the answer
        that this forward gets.
        """
        if are_same_values(instruction.guarded_arguments, (args, kwargs)):
            return
        node = instruction.node
        raise CutError(
            f"at {node.location}, {get_function_name(node.func)} is called with other values than "
            "when the forward was traced, and the path of the forward depends on its result. Keep "
            "such a value in an attribute of the model, in a dict, list or plain object that it "
            "holds, or in a global variable: these are compared in every step. Or pass it as an "
            "argument of the forward."
        )

    def _check_mode_dependent(self, node: TraceNode, tensor: Tensor) -> None:
        """Raise if `requires_grad` of a parameter is another one than in the trace."""
        if isinstance(tensor, nn.Parameter) and node.recorded_result != node.func(tensor):
            raise self._divergence_error("a parameter with another requires_grad")

    def _resolve(self, tensor: Tensor) -> Tensor:
        """Return the tensor to compute with: the received one for a remote tensor."""
        if type(tensor) is RemoteTensor:
            if tensor.value_index not in self._received:
                raise self._divergence_error("a tensor that no stage sends to this one")
            return self._received[tensor.value_index]
        return self._replacements.get(id(tensor), tensor) if self._replacements else tensor

    def _check_result_count(self, node: TraceNode, result: Sequence[Any]) -> None:
        """Raise if an operation such as `unbind` returns more or fewer tensors than in the trace.

        Their number may depend on a shape, and that shape on data.
        """
        assert node.output is not None
        count = len(flatten(result)[0])
        if count != len(node.output.leaves):
            raise CutError(
                f"at {node.location}, {get_function_name(node.func)} returned {count} values, but "
                f"the trace has {len(node.output.leaves)} for inputs like these. Their number "
                "depends on data that other stages do not have. Put the call and all that follows "
                "from it into one unit with units=."
            )

    def _resolve_shape_only(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the right shape for a remote one; its data is never read."""
        return make_shape_placeholder(tensor) if type(tensor) is RemoteTensor else tensor

    def _fill_placeholder(self, instruction: Instruction, tensors: Sequence[Tensor]) -> Any:
        """Return a placeholder in which arguments that the call passes through are this call's.

        First rebind the tensors among the arguments that the node changes in place.
        """
        if instruction.rebound_values:
            self._rebind(instruction, tensors)
        if instruction.placeholder_is_static:
            return instruction.placeholder_result
        assert instruction.node.output is not None
        leaves = [
            tensors[leaf.argument_index] if isinstance(leaf, ArgumentLeaf) else leaf
            for leaf in instruction.placeholder_result
        ]
        return unflatten(leaves, instruction.node.output.tree_spec)

    def _rebind(self, instruction: Instruction, tensors: Sequence[Tensor]) -> None:
        """Use the new state of tensors that another stage changes in place and sends."""
        inputs = instruction.node.inputs
        for old, new in instruction.rebound_values:
            local = tensors[inputs.index(old)] if old in inputs else self._live_values.get(old)
            if local is not None:
                self._live_values[new] = local
            if new in self._received:
                self._replace_value(local, self._received[new], self._original_values.get(old, old))

    def _replace_value(
        self, local: Tensor | None, replacement: Tensor, original_value: int
    ) -> None:
        """Let later nodes compute with `replacement` where the forward passes `local`.

        The forward keeps its own reference, which this stage cannot change. A remote tensor keeps
        the index of the value that it was before the first change.
        """
        if local is None:
            self._received[original_value] = replacement
        elif type(local) is RemoteTensor:
            self._received[local.value_index] = replacement
        else:
            self._replacements[id(local)] = replacement

    def _save_values(
        self, instruction: Instruction, result: Any, arguments: Callable[[], list[Tensor]]
    ) -> None:
        """Remember tensors that the stage sends, or that a later change in place refers to."""
        leaves = flatten(result)[0]
        assert instruction.node.output is not None
        traced_leaves = instruction.node.output.leaves
        for value, source, is_sent, needs_copy in instruction.saved_values:
            if isinstance(source, ValueLeaf):
                tensor = leaves[traced_leaves.index(source)]
            elif isinstance(source, ArgumentLeaf):
                tensor = arguments()[source.argument_index]
            elif source in self._live_values:
                tensor = self._live_values[source]
            elif (original := self._original_values.get(source, source)) in self._received:
                tensor = self._received[original]
            else:
                node = instruction.node
                raise CutError(
                    f"at {node.location}, {get_function_name(node.func)} changes a tensor in "
                    "place, and another stage has a view of it that is used again. Clone the "
                    "tensor before you change it, or put both into one unit with units=."
                )
            self._live_values[value] = tensor
            if is_sent:
                self.sent_values[value] = tensor.clone() if needs_copy else tensor


def _restore_arguments(result: Any, arguments: Iterable[Tensor], resolved: Iterable[Tensor]) -> Any:
    """Return the result of a node with the forward's own tensors for arguments that it returns.

    The node was run on `resolved`. The forward must not go on with two objects for one tensor: a
    change in place by another stage is noted for one object only.
    """
    originals = {id(new): old for old, new in zip(arguments, resolved, strict=True)}
    if isinstance(result, Tensor):
        return originals.get(id(result), result)
    leaves, spec = flatten(result)
    return unflatten([originals.get(id(leaf), leaf) for leaf in leaves], spec)


def _find_tensors(arguments: Any) -> list[Tensor]:
    """Return the tensors among the arguments of a unit, also those in nested containers."""
    return [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)]


# ---- the callable of a stage ---------------------------------------------------------------------


class StageForward:
    """The computation of one stage of a traced model.

    Args:
        index: The index of the stage.
        proxy_model: The model's parents, as this stage has them.
        unit_modules: The units by name, as this stage has them.
        unit_copies: Pairs of original and copy, for units that another stage calls as well.
        shared_state: What the units of this stage may change and others read.
    """

    def __init__(
        self,
        index: int,
        proxy_model: ProxyModel,
        unit_modules: Mapping[str, nn.Module],
        unit_copies: Sequence[tuple[nn.Module, nn.Module]],
        shared_state: SharedState,
    ) -> None:
        self._index, self._proxy_model, self._unit_modules = index, proxy_model, unit_modules
        self._unit_copies, self._shared_state = unit_copies, shared_state
        self._settings: ModelSettings | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The settings refer to objects of this process. Another one copies the attributes again.
        return {**self.__dict__, "_settings": None}

    def refresh_buffers(self, device: torch.device) -> None:
        """Copy the buffers of the model again, after it was cast to another dtype."""
        self._proxy_model.refresh_buffers(device)

    def __call__(
        self, inputs_by_source: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, tuple[Any, ...]]:
        """Run one micro-batch through this stage.

        Args:
            inputs_by_source: By source stage, the tensors that it sent. From OUTSIDE come a
                `ForwardRequest` and the tensors of the batch that this stage takes.

        Returns:
            By destination stage, the tensors to send. To OUTSIDE goes the model's output.
        """
        FORWARD_COUNTER.count += 1
        request: ForwardRequest
        request, *tensors = inputs_by_source[OUTSIDE]
        program = request.programs[self._index]
        # A new settings object means that an attribute of the model may have changed. The object
        # is the same for all micro-batches of a call, so this happens at most once per call.
        if self._settings is not request.settings:
            self._proxy_model.sync_with_originals()
            for original, copy in self._unit_copies:
                sync_attributes(original, copy)
            self._settings = request.settings
        # Rebuild the arguments of the model's forward: the tensors that this stage takes, remote
        # tensors for the others, and everything that is not a tensor.
        leaves = list(request.plain_leaves)
        for position, proxy in zip(request.tensor_positions, program.input_proxies, strict=True):
            leaves[position] = proxy
        inputs: dict[int, Tensor] = {}
        for index, tensor in zip(program.input_indices, tensors, strict=True):
            leaves[request.tensor_positions[index]] = inputs[
                program.input_proxies[index].value_index
            ] = tensor
        args, kwargs = unflatten(leaves, request.tree_spec)
        received = {
            value: tensor
            for source, values in program.recv_values.items()
            for value, tensor in zip(values, inputs_by_source[source], strict=True)
        }
        # `torch.is_grad_enabled()` in the forward must answer the same in a forward that will be
        # recomputed. So the mode stays on there, and each node switches it off for itself.
        hides_mode = in_checkpointed_forward() and not program.runs_backward
        interpreter = StageInterpreter(
            program, self._unit_modules, received, inputs, builds_graph=not hides_mode
        )
        interpreter.unit_hooks = self._proxy_model.unit_hooks
        output: Any = None
        state = self._shared_state.take_snapshot() if self._shared_state else ()
        try:
            # The forward may end early inside a `no_grad` block of the model. This context restores
            # the grad mode in any case.
            grad_mode = torch.set_grad_enabled(torch.is_grad_enabled() or hides_mode)
            # A recomputation must not advance buffers a second time. What it leaves in the copies
            # is compared with what the forward left, and undone.
            isolated = self._proxy_model.isolated_forward(
                program.reassigned_buffers, writes_originals=not in_recomputation()
            )
            with draw_between_units(), grad_mode, isolated, interpreter:
                output = self._proxy_model.model(*args, **kwargs)
        except StageFinished:
            pass
        else:
            output = interpreter.resolve_output(output)
        if state:
            self._shared_state.check(state)
        outputs = {
            dst: tuple(interpreter.sent_values[value] for value in program.send_values.get(dst, ()))
            for dst in request.destinations[self._index]
        }
        if program.is_last:
            outputs[OUTSIDE] = (output,)
        return outputs
