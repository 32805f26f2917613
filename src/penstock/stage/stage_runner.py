"""The tape on which one call of the pipe keeps what the backwards of a stage need.

A cell (stage, micro-batch) is computed forward from the parcels of its neighbours, perhaps
recomputed, and computed backward from gradients. What a cell saved is dropped at its last use,
so that what lives is what the timeline says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.stage.caller_context import CallerContext
from penstock.stage.cell_graph import CellGraph, Gradients, GraphInputs, find_gradient_edge
from penstock.stage.parameter_proxies import StageProxies, unwrap_proxy
from penstock.stage.payload import (
    FlatValues,
    NeighborValues,
    Payload,
    build_payloads,
    check_unchanged,
    clone_payloads,
    flatten_outputs,
    is_differentiable,
    is_in_graph,
    payload_versions,
    protect_shared_tensors,
    storage_addresses,
    unpack_payloads,
    unpack_with_graph_inputs,
)
from penstock.stage.recompute import (
    BufferSnapshot,
    exclude_written,
    find_changed,
    find_written,
    mark_checkpointing,
    mark_recomputing,
    override_training,
    restore_buffers,
    snapshot_buffers,
)
from penstock.stage.rng import CellRngMode, RngSource
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral


class SavedForBackward(Enum):
    """What a forward leaves behind."""

    GRAPH = auto()  # for its backward
    INPUTS = auto()  # for its recomputation
    NOTHING = auto()


@dataclass(slots=True)
class _RecomputeInputs:
    """What a cell needs to be computed again."""

    payloads: dict[int, Payload]
    payload_versions: list[int]  # of what arrived, after the forward
    written_buffers: list[BufferSnapshot]  # that the forward changed, as they were before
    unwritten_buffers: list[BufferSnapshot]  # that it did not: nobody may


class StageRunner:
    """What one call of the pipe has computed of a stage, and what that left for backwards.

    Gradients of parameters go to `.grad`. If the caller's graph `tracks` the call, they are
    summed in `collected`, from one `collect` to the next.
    """

    def __init__(
        self,
        stage: Stage,
        context: CallerContext,
        saved_for_backward: Callable[[int], SavedForBackward],
        has_weight_backward: Callable[[int], bool] = lambda microbatch: False,
        is_tracked: bool = False,
        proxies: StageProxies | None = None,
    ) -> None:
        self.stage = stage
        self._proxies = StageProxies(stage.modules()) if proxies is None else proxies
        modules = self._proxies.modules
        self.parameters = find_trainable_parameters(modules)
        self.collected_grads: list[Tensor | None] | None = None
        self.has_recomputed = False  # has it recomputed a cell?
        self.rng_source: Callable[[int], RngSource | int] = lambda microbatch: (
            0
        )  # if the stage draws
        self._context, self._saved_for_backward, self._has_weight_backward = (
            context,
            saved_for_backward,
            has_weight_backward,
        )
        self._behavior = stage.behavior_for(modules)
        self._modules_with_buffers = [module for module in modules if module._buffers]
        self._static_modules = [
            module for module in modules if module not in stage.resharding_modules
        ]
        self._modules, self._training_flags = modules, [module.training for module in modules]
        self._parameter_versions: list[tuple[int, int]] = []  # while something is kept
        self._is_tracked = is_tracked
        self._graphs: dict[int, CellGraph] = {}
        self._recompute_inputs: dict[int, _RecomputeInputs] = {}
        self._pending_weight_grads: dict[
            int, list[PendingWeightGrad]
        ] = {}  # weight gradients for a W
        self._owned_sums: set[int] = set()  # which of the collected are sums of our own

    @property
    def has_drawn(self) -> bool:
        """Does the stage draw random numbers, as far as seen?"""
        return bool(self._behavior.draws_random)

    @property
    def may_draw_random(self) -> bool:
        """Has it not been seen to draw none?"""
        return self._behavior.draws_random is not False or self.stage.may_draw_random

    # ---- forward --------------------------------------------------------------------------

    def forward(self, microbatch: int, input_payloads: dict[int, Payload]) -> dict[int, Payload]:
        """Compute the cell from what its sources sent; gives what its destinations get."""
        keep = self._saved_for_backward(microbatch)
        if keep is SavedForBackward.INPUTS and not self._needs_backward(
            p.needs_grad for p in input_payloads.values()
        ):
            keep = SavedForBackward.GRAPH  # of nothing, and so its outputs need no gradient
        read_only = [parcel for parcel in input_payloads.values() if parcel.shared]
        before = payload_versions(read_only) if read_only else []
        if keep is SavedForBackward.GRAPH:
            self._graphs[microbatch], outputs = self._build_graph(microbatch, input_payloads)
            parcels = build_payloads(outputs, is_in_graph)
        elif keep is SavedForBackward.INPUTS:
            with torch.no_grad():
                self._recompute_inputs[microbatch], outputs = self._forward_for_recompute(
                    microbatch, input_payloads
                )
            parcels = build_payloads(outputs, is_differentiable)
        else:
            outputs = flatten_outputs(self._run_layers(microbatch, unpack_payloads(input_payloads)))
            parcels = build_payloads(outputs, lambda tensor: False)
        if read_only:
            check_unchanged(read_only, before)
        self._protect_outputs(parcels, outputs, read_only)
        self._record_parameter_versions()
        return parcels

    def _needs_backward(self, needs_grad: Iterable[Sequence[bool]]) -> bool:
        """Does anything want a gradient of a cell, of whose inputs these need one?"""
        return bool(self.parameters) or any(map(any, needs_grad))

    def _protect_outputs(
        self,
        payloads: Mapping[int, Payload],
        outputs: FlatValues,
        read_only_payloads: Sequence[Payload],
    ) -> None:
        """Whoever comes next may not change what is the stage's own, or what others read too."""
        others = storage_addresses(t for parcel in read_only_payloads for t in parcel.tensors)
        for dst, (tensors, _) in outputs.items():
            # those that could be something that was there before
            places = [at for at, t in enumerate(tensors) if others or t.is_leaf or t._is_view()]
            if places:
                protect_shared_tensors(payloads[dst], places, self._storage_addresses, others)

    @cached_property
    def _storage_addresses(self) -> set[int]:
        """Where the stage's own parameters and buffers are, and what stands in for them."""
        found = [t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values())]
        return storage_addresses([*found, *self._proxies.proxy_tensors])

    def recompute(self, microbatch: int) -> None:
        """Build the graph that the forward did not, if it did not."""
        kept = self._recompute_inputs.get(microbatch)
        if kept is None:
            return
        self.has_recomputed = True
        same_inputs = payload_versions(kept.payloads.values()) == kept.payload_versions
        same_buffers = not find_changed(kept.unwritten_buffers)
        if not (
            same_inputs
            and same_buffers
            and self._read_parameter_versions() == self._parameter_versions
        ):
            what = "a parameter or buffer" if same_inputs else "an input"
            raise RunError(
                f"{what} of these layers has been changed in place after their forward, and the "
                "recomputation needs it as it was: clone what you change, and change parameters "
                "after the backward"
            )
        arrived = clone_payloads(kept.payloads) if self._behavior.mutates_inputs else kept.payloads
        as_before = override_training(self._modules, self._training_flags)
        with (
            mark_recomputing(),
            as_before,
            restore_buffers(self._modules_with_buffers, kept.written_buffers),
        ):
            self._graphs[microbatch], _ = self._build_graph(microbatch, arrived)
        self._record_parameter_versions()

    def _record_parameter_versions(self) -> None:
        """What the layers themselves do to their parameters (a norm kept small, say) is right."""
        if self._recompute_inputs:
            self._parameter_versions = self._read_parameter_versions()

    def _read_parameter_versions(self) -> list[tuple[int, int]]:
        found = [p for module in self._static_modules for p in module._parameters.values()]
        return [(p.data_ptr(), p._version) for p in found if p is not None]

    def _forward_for_recompute(
        self, microbatch: int, input_payloads: dict[int, Payload]
    ) -> tuple[_RecomputeInputs, FlatValues]:
        """Compute the cell, and keep what it needs to be computed again as it was before."""
        habits = self._behavior
        kept = input_payloads if habits.mutates_inputs is False else clone_payloads(input_payloads)
        buffers = snapshot_buffers(self._modules_with_buffers)
        before = payload_versions(input_payloads.values())
        with mark_checkpointing():
            outputs = self._run_layers(microbatch, unpack_payloads(input_payloads))
        mutated = before != payload_versions(input_payloads.values())
        if mutated and habits.mutates_inputs is False:
            raise RunError(
                "the layers changed their input in place, which they had not done before, so it "
                "is lost for the recomputation: work in place always or never, or set "
                "checkpoint='never'"
            )
        habits.mutates_inputs = mutated or bool(habits.mutates_inputs)
        kept = kept if mutated else input_payloads
        wrote = find_written(buffers, habits.silent_writes)
        others = exclude_written(buffers, wrote)
        return _RecomputeInputs(
            kept, payload_versions(kept.values()), wrote, others
        ), flatten_outputs(outputs)

    def _build_graph(
        self, microbatch: int, input_payloads: dict[int, Payload]
    ) -> tuple[CellGraph, FlatValues]:
        habits = self._behavior
        outer = [
            t
            for p in input_payloads.values()
            for t, need in zip(p.tensors, p.needs_grad, strict=True)
            if need
        ]
        if habits.mutates_inputs is False or not outer:
            beginning = GraphInputs.from_leaves(outer)  # type: ignore[arg-type]
        else:
            beginning = GraphInputs.from_entry(outer)  # type: ignore[arg-type]
        before = payload_versions(input_payloads.values()) if habits.mutates_inputs is None else []
        values = unpack_with_graph_inputs(input_payloads, beginning.tensors)
        outputs = flatten_outputs(
            self._run_layers(microbatch, values, self._has_weight_backward(microbatch))
        )
        beginning.tensors = ()
        if habits.mutates_inputs is None:
            habits.mutates_inputs = before != payload_versions(input_payloads.values())
        roots = {
            dst: tuple(map(find_gradient_edge, tensors)) for dst, (tensors, _) in outputs.items()
        }
        entered = {source: parcel.needs_grad for source, parcel in input_payloads.items()}
        graph = CellGraph(roots, entered, beginning)
        if self._is_tracked and not habits.uses_only_parameters:
            known = {*map(self._proxies.get_proxy, self.parameters)}
            graph.check_leaves_are_parameters(known)
            habits.uses_only_parameters = True
        return graph, outputs

    def _run_layers(
        self, microbatch: int, values: NeighborValues, defer_weight_grads: bool = False
    ) -> NeighborValues:
        habits, context = self._behavior, self._context
        if (
            not self.may_draw_random
            and context.is_grad_mode_only
            and not self._proxies
            and not defer_weight_grads
        ):
            return self.stage.compute(values)
        random: CellRngMode | None = None
        with ExitStack() as stack:
            stack.enter_context(self._proxies.activate())
            stack.enter_context(context.apply_for_forward())
            if defer_weight_grads:
                self._pending_weight_grads[microbatch] = stack.enter_context(
                    self._weight_grad_deferral.activate()
                )
            if self.may_draw_random:
                random = CellRngMode(self.rng_source(microbatch))
                stack.enter_context(random)
            outputs = self.stage.compute(values)
        if random is not None:
            habits.draws_random = random.has_drawn or bool(habits.draws_random)
        return outputs

    @cached_property
    def _weight_grad_deferral(self) -> WeightGradDeferral:
        return WeightGradDeferral(self._static_modules, self.stage.wrappers)

    # ---- backward -------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Mapping[int, Gradients], retain_graph: bool
    ) -> dict[int, Gradients]:
        """Gradients for each source, from those of each destination.

        If the cell has a W, the gradients of most weights are left for that. With `retain` the
        cell can be computed backward again: from its graph, or, if it was recomputed, after
        another recomputation.
        """
        graph = self._graphs.pop(microbatch)
        if not retain_graph:
            self._recompute_inputs.pop(microbatch, None)
        elif microbatch not in self._recompute_inputs:
            self._graphs[microbatch] = graph
        if self.collected_grads is None:
            self._check_loss_requires_grad(graph, gradients)
            return graph.backward_accumulate(gradients, retain_graph)
        leaves = [self._proxies.get_proxy(parameter) for parameter in self.parameters]
        found, of_parameters = graph.backward_collect(gradients, leaves, retain_graph)
        for at, gradient in enumerate(of_parameters):
            if gradient is not None:
                self._add_collected_grad(at, gradient)
        return found

    def _check_loss_requires_grad(
        self, graph: CellGraph, gradients: Mapping[int, Gradients]
    ) -> None:
        """If anything here learns, then by the loss, too."""
        learns = self._needs_backward(graph.inputs_need_grad.values())
        if learns and OUTSIDE in gradients and not any(graph.roots[OUTSIDE]):
            raise RunError(
                "the loss has no gradient, though there is something to learn: it was detached, or "
                "does not depend on the output"
            )

    def backward_weights(self, microbatch: int) -> None:
        """The gradients that the backward of the inputs has left."""
        accumulate_weight_grads(self._pending_weight_grads.pop(microbatch))

    def find_leaves(self, microbatch: int) -> list[Tensor]:
        """What the backwards of the cell may add to: parameters, registered or not.

        A stand-in whose gradient is left for W is not in the graph.
        """
        used = map(self._proxies.get_proxy, self.parameters)
        return [*self.parameters, *used, *self._graphs[microbatch].find_leaves()]

    def start_collecting_grads(self) -> None:
        """Let the next backwards sum gradients of parameters here, not in `.grad`."""
        self.collected_grads = [None] * len(self.parameters)
        self._owned_sums.clear()

    def _add_collected_grad(self, parameter_index: int, gradient: Tensor) -> None:
        assert self.collected_grads is not None
        before = self.collected_grads[parameter_index]
        if before is None:
            self.collected_grads[parameter_index] = gradient
        elif parameter_index in self._owned_sums:
            before.add_(gradient)
        else:
            self.collected_grads[parameter_index] = before + gradient
            self._owned_sums.add(parameter_index)

    def clear(self) -> None:
        """Drop everything."""
        self._graphs.clear()
        self._recompute_inputs.clear()
        self._pending_weight_grads.clear()
        self.collected_grads = None


def find_trainable_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that want a gradient, each once."""
    found = [
        unwrap_proxy(p) for module in modules for p in module._parameters.values() if p is not None
    ]
    return [p for p in dict.fromkeys(found) if p.requires_grad]
