"""The runner of one stage in one call of the pipe: forward, recomputation and backward of cells.

A cell is one stage on one micro-batch. These are the actions of a schedule and the methods that
carry them out:

    F  forward            payloads of the source stages -> payloads for the destination stages
    R  recompute          kept inputs -> the graph that F did not build
    B  backward           gradients of the outputs -> gradients of the inputs, and of all weights
    I  backward           the same, but most weight gradients are left for W
    W  backward_weights   the weight gradients that I has left

Each action drops what it is the last to use, so the memory that is alive is the memory that the
timeline of the schedule shows.

Which of the mechanisms below a forward needs is learned from the first one: whether the stage draws
random numbers, changes its input in place, or writes to its buffers (`ObservedBehavior`). A stage
that does none of this runs without any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PenstockError, RunError
from penstock.fingerprint import ModuleSnapshot
from penstock.stage.aux_loss import (
    AuxLossSink,
    CarriedLoss,
    CollectedLosses,
    carry_losses,
    take_carried_losses,
    thread_state,
)
from penstock.stage.caller_context import CallerContext
from penstock.stage.cell_graph import (
    CellGraph,
    Gradients,
    TensorOrEdge,
    enter_graph,
    find_gradient_edge,
)
from penstock.stage.compile_support import has_compiled_module
from penstock.stage.gradient_flow import GradientFlow, GradientNeed
from penstock.stage.host_rng import HostRngCell, host_rng_lock
from penstock.stage.loss_terms import LossTerms, find_added_terms
from penstock.stage.parameter_proxies import StageProxies
from penstock.stage.payload import (
    FlatValues,
    NeighborValues,
    Payload,
    build_payloads,
    check_unchanged,
    clone_payloads,
    flatten_outputs,
    flatten_values,
    is_differentiable,
    is_in_graph,
    needs_no_grad,
    payload_versions,
    protect_shared_tensor,
    storage_addresses,
    unflatten_values,
    unpack_payloads,
    unpack_with_graph_inputs,
)
from penstock.stage.recompute import (
    OTHER_BUFFER,
    AttributeSnapshot,
    AttributeWatch,
    BufferSnapshot,
    Product,
    RepeatCheck,
    checksum,
    compute_product,
    exclude_written,
    find_changed,
    find_written,
    in_checkpointed_forward,
    mark_checkpointing,
    mark_recomputing,
    read_buffers,
    restore_state,
    snapshot_attributes,
    snapshot_buffers,
    tells_runs_apart,
)
from penstock.stage.rng import (
    CellRngKernels,
    CellRngMode,
    DrawRedirect,
    RngSource,
    mark_cell_boundary,
)
from penstock.stage.stage import OUTSIDE, Stage, StageContents
from penstock.stage.weight_grad import PendingWeightGrad, accumulate_weight_grads
from penstock.stage.weight_grad_ops import WeightGradDeferral
from penstock.torch_compat import (
    AUTOCAST_CACHE_LACKS_GRAPH,
    find_function_mode,
)


@dataclass(slots=True)
class _RecomputeInputs:
    """The inputs and buffers that a recomputation needs.

    Attributes:
        payloads: The inputs of the cell, as they were before the forward.
        payload_versions: The version counters of their tensors after the forward.
        written_buffers: Snapshots, from before the forward, of the buffers that it changed.
        unwritten_buffers: Snapshots of the other buffers, which must stay unchanged.
        aux_loss_count: How many losses the forward has added, those of earlier stages included.
        attributes: Snapshots, from before the forward, of Python attributes that it sets.
        host_rng: What the forward drew from `random` and `numpy.random`, or None for nothing.
        products: Numbers of the outputs by destination, if the recomputation is compared with them.
        buffer_products: Numbers of what the forward left in its written buffers, for the same
            comparison. None if it is not made, or if a layer asks which run it is in: that may
            write in one of them only.
        detached: The outputs that need no gradient, by destination, as their indices.
        is_detached_unknown: Whether only a graph can tell which outputs need no gradient.
    """

    payloads: dict[int, Payload]
    payload_versions: list[int]
    written_buffers: list[BufferSnapshot]
    unwritten_buffers: list[BufferSnapshot]
    aux_loss_count: int
    attributes: list[AttributeSnapshot]
    host_rng: HostRngCell | None
    products: dict[int, list[Product]]
    buffer_products: list[Product] | None
    detached: Mapping[int, Collection[int]] = field(default_factory=dict)
    is_detached_unknown: bool = False


class StageRunner:
    """A stage in one call of the pipe, with everything that its forwards keep for backwards.

    Gradients of parameters are added to their `.grad`. After `start_collecting_grads` they are
    summed in `collected_grads` instead, in the order of `parameters`: that is how `pipe(x)` returns
    them to the caller's own autograd graph.

    Args:
        stage: The stage to run.
        context: The PyTorch state of the calling thread, under which the layers compute.
        recomputed_cells: The cells (stage, micro-batch) whose forward keeps only its inputs. None:
            there is no backward, and nothing is kept.
        split_cells: The cells whose backward is split into I and W.
        is_tracked: Whether to raise if a layer uses a leaf tensor that is not a parameter. It would
            get no gradient through `pipe(x)` or in a captured step.
        proxies: Proxies for parameters that the stage cannot use directly, or None.
        aux_sink: Where `add_loss` of a layer goes. None: with the messages to the last stage.
        compares_all: Whether every recomputation is compared with its forward. False: those of the
            first call are. None: none is.
        snapshot: The state of the modules. See `Stage.read_contents`.
    """

    def __init__(
        self,
        stage: Stage,
        context: CallerContext,
        recomputed_cells: Collection[tuple[int, int]] | None = (),
        split_cells: Collection[tuple[int, int]] = (),
        is_tracked: bool = False,
        proxies: StageProxies | None = None,
        aux_sink: AuxLossSink | None = None,
        compares_all: bool | None = False,
        snapshot: ModuleSnapshot | None = None,
    ) -> None:
        self.stage = stage
        self._proxies, self._aux_sink = proxies, aux_sink
        contents = (
            stage.read_contents(snapshot)
            if proxies is None
            else StageContents(stage, proxies.modules)
        )
        self.parameters = contents.parameters
        self.collected_grads: list[Tensor | None] | None = None
        self.has_recomputed = False
        # The micro-batch whose graph is described, and its description: see `describe_graph`.
        self.described_microbatches: Container[int] = ()
        self.graph_descriptions: dict[int, int] = {}
        # Returns the source, or the seed, of the random numbers of a micro-batch.
        self.rng_source: Callable[[int], RngSource | int] = lambda microbatch: 0
        # The seed of the call, for draws from `random` and `numpy.random`, and the lock that a cell
        # holds while it has these generators for itself. None: it must not draw from them.
        self.call_seed = 0
        self.host_rng_lock: AbstractContextManager[object] | None = host_rng_lock
        self.used_host_generators: set[str] = set()
        # Where the terms of losses that layers add are noted, by stage and micro-batch.
        self.added_terms: dict[tuple[int, int], LossTerms] | None = None
        self.peers: Sequence[ref[StageRunner]] = ()  # the runners of all stages in this process
        self._context, self._recomputed_cells = context, recomputed_cells
        self._split_cells = split_cells if recomputed_cells is not None else ()
        self._behavior = stage.behavior_for(contents.settings)
        # Whether the layers cannot simply be called: see `_run_in_context`.
        self._needs_context = bool(
            not context.is_grad_mode_only
            or proxies is not None
            or self._split_cells
            or self.may_draw_random
            or self.may_draw_host_random
            or self._behavior.uses_empty
        )
        self._modules, self._static_modules = contents.modules, contents.static_modules
        self._modules_with_buffers = contents.modules_with_buffers
        self._parameter_modules = contents.parameter_modules
        self._training_flags = contents.training_flags
        # Addresses and version counters of the parameters, up to date while inputs are kept.
        self._parameter_versions: list[tuple[int, int]] = []
        # Whether a forward has changed them, as an embedding with `max_norm` does. So does its
        # recomputation then.
        self._writes_parameters = False
        self._is_tracked = is_tracked
        self._graphs: dict[int, CellGraph] = {}
        self._recompute_inputs: dict[int, _RecomputeInputs] = {}
        self._pending_weight_grads: dict[int, list[PendingWeightGrad]] = {}
        # Indices of collected gradients that were allocated here, and may be added to in place.
        self._owned_sums: set[int] = set()
        # How many losses the last forward or recomputation has added, and what it has drawn from
        # `random` and `numpy.random`.
        self._aux_loss_count = 0
        self._host_rng: HostRngCell | None = None
        self._has_drawn = False  # from the random numbers of PyTorch
        # Whether recomputations are compared with their forwards, and whether the first forward of
        # the latter runs now.
        self.repeat_check = RepeatCheck(stage, bool(context.autocast_dtypes))
        is_new = self._behavior.written_attributes is None
        self._is_compared = bool(compares_all or (compares_all is False and is_new))
        self._is_observed = False
        # The outputs of the model that the loss of the last stage has taken.
        model_outputs: list[Any] | None = getattr(stage.compute, "model_outputs", None)
        self._has_loss = model_outputs is not None
        self._model_outputs = [] if model_outputs is None else model_outputs

    @property
    def has_drawn(self) -> bool:
        """Return whether the stage has drawn random numbers in this call."""
        return self._has_drawn or bool(self._behavior.draws_host_random)

    @property
    def may_draw_random(self) -> bool:
        """Return whether the stage may draw random numbers.

        It may if it has drawn before, if it has not run yet, or if the partition says so.
        """
        return self._behavior.draws_random is not False or self.stage.may_draw_random

    @property
    def may_draw_host_random(self) -> bool:
        """Return whether the stage may draw from `random` or `numpy.random`."""
        return self._behavior.draws_host_random is not False

    @property
    def _fills_empty(self) -> bool:
        """Return whether `torch.empty` is filled, so that a recomputation finds the same in it."""
        return self._is_observed or (self._is_compared and self._behavior.uses_empty)

    # ---- forward and recomputation -------------------------------------------------------------

    def forward(self, microbatch: int, input_payloads: dict[int, Payload]) -> dict[int, Payload]:
        """Compute a cell from the payloads of its sources; return those for its destinations."""
        # Loops here and below, and no comprehensions, which are function calls in Python 3.11.
        read_only = []
        for payload in input_payloads.values():
            if payload.shared:
                read_only.append(payload)
        before = payload_versions(read_only) if read_only else []
        if self._recomputed_cells is None:
            # A pipe that is a layer of another one detaches what its stages send to each other.
            if (outer_flow := find_function_mode(GradientFlow)) is not None:
                outer_flow.count_all()
            for payload in input_payloads.values():
                if True in payload.needs_grad:
                    _let_require_grad(payload)
            outputs = flatten_outputs(self._run_layers(microbatch, unpack_payloads(input_payloads)))
            needs_grad: Callable[[Tensor], bool] = needs_no_grad
        elif (self.stage.index, microbatch) in self._recomputed_cells and (
            self.parameters or self._needs_backward(p.needs_grad for p in input_payloads.values())
        ):
            with torch.set_grad_enabled(False):  # half the time of `torch.no_grad`
                self._recompute_inputs[microbatch], outputs = self._forward_for_recompute(
                    microbatch, input_payloads
                )
            if AUTOCAST_CACHE_LACKS_GRAPH:
                torch.clear_autocast_cache()
            # There is no graph yet to ask: see `_exclude_detached`.
            needs_grad = is_differentiable
        else:
            # Also for a recomputed cell in which nothing requires grad: the empty graph tells the
            # next stages that the outputs need no gradient.
            self._graphs[microbatch], outputs = self._build_graph(microbatch, input_payloads)
            needs_grad = is_in_graph
            if self._recompute_inputs:
                self._parameter_versions = self._read_parameter_versions()
        if read_only:
            check_unchanged(read_only, before)
        output_payloads, tensor_count, may_alias = build_payloads(outputs, needs_grad)
        if needs_grad is is_differentiable:
            saved = self._recompute_inputs[microbatch]
            saved.is_detached_unknown |= self._must_recompute_to_find_detached
            if tensor_count > 1 or saved.is_detached_unknown or saved.detached:
                self._exclude_detached(microbatch, output_payloads)
        if may_alias or read_only:
            self._protect_outputs(output_payloads, read_only)
        return output_payloads

    def _needs_backward(self, needs_grad: Iterable[Sequence[bool]]) -> bool:
        """Return whether a cell needs a backward: a parameter or one of its inputs needs a grad."""
        return bool(self.parameters) or any(map(any, needs_grad))

    def _protect_outputs(
        self, payloads: Mapping[int, Payload], read_only_payloads: Sequence[Payload]
    ) -> None:
        """Mark outputs that the next stage must not change in place.

        These are outputs in the memory of the stage's parameters or buffers, or of inputs that
        others read too.
        """
        read_only_addresses = (
            storage_addresses(t for payload in read_only_payloads for t in payload.tensors)
            if read_only_payloads
            else ()
        )
        stage_addresses = self._storage_addresses
        for payload in payloads.values():
            addresses = storage_addresses(payload.tensors)
            if addresses.isdisjoint(stage_addresses) and addresses.isdisjoint(read_only_addresses):
                continue  # as most outputs
            for index in range(len(payload.tensors)):
                protect_shared_tensor(payload, index, stage_addresses, read_only_addresses)

    @cached_property
    def _storage_addresses(self) -> set[int]:
        """The storage addresses of the stage's parameters and buffers, and of their proxies."""
        tensors = [
            t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values())
        ]
        proxies = () if self._proxies is None else self._proxies.proxy_tensors
        return storage_addresses([*tensors, *proxies])

    def recompute(self, microbatch: int) -> dict[int, Payload]:
        """Build the graph of a cell whose forward kept only its inputs; otherwise do nothing.

        The recomputation starts from the state that the forward found: its inputs, the buffers that
        it changed, the training flags and the random seed. The payload for the caller is returned,
        if there is one: the loss is computed here, and not in the forward.
        """
        saved = self._recompute_inputs.get(microbatch)
        if saved is None:
            return {}
        self.has_recomputed = True
        inputs = self._copy_inputs(saved)
        buffer_products = saved.buffer_products
        buffers: list[Tensor] = []
        with self._restore_state(saved):
            self._graphs[microbatch], outputs = self._build_graph(microbatch, inputs)
            if tells_runs_apart():
                buffer_products = None
            elif buffer_products is not None:
                buffers = read_buffers(saved.written_buffers)
        for dst, excluded in saved.detached.items():
            if any(self._graphs[microbatch].roots[dst][index] for index in excluded):
                self._behavior.follows_gradients = False  # so that the next step is right
                raise RunError(
                    "an output of these layers needs a gradient in their recomputation, but did "
                    "not need one when they first ran on inputs like these. The next stage has "
                    "computed no gradient for it. Detach it always or never, or set "
                    "checkpoint='never'."
                )
        # The value of an auxiliary loss comes from the forward, its gradient from the
        # recomputation. A layer that adds it in only one of the two would train on a loss that is
        # not reported, or report one that it does not train on.
        if self._aux_loss_count != saved.aux_loss_count:
            raise RunError(
                f"these layers added {self._aux_loss_count} losses in their recomputation, but "
                f"{saved.aux_loss_count} in their forward. Call penstock.add_loss in both; the "
                "loss counts only once."
            )
        if self._host_rng is not None and saved.host_rng is not None:
            self._host_rng.check_repeats(saved.host_rng)
        compared = self._list_compared_outputs(outputs)
        for dst, products in saved.products.items():
            self.repeat_check.compare(microbatch, products, compared[dst])
        if buffer_products is not None:
            self.repeat_check.compare(microbatch, buffer_products, buffers, OTHER_BUFFER)
        if self._writes_parameters:
            self._parameter_versions = self._read_parameter_versions()
        if OUTSIDE not in outputs:
            return {}
        return build_payloads({OUTSIDE: outputs[OUTSIDE]}, is_in_graph)[0]

    def _copy_inputs(self, saved: _RecomputeInputs) -> dict[int, Payload]:
        """Return inputs for another run of the layers. Raise if anything has changed since."""
        # Inputs, parameters and unwritten buffers are not copied. A change after the forward would
        # make the gradients wrong, so their version counters are compared.
        same_inputs = payload_versions(saved.payloads.values()) == saved.payload_versions
        same_buffers = not (saved.unwritten_buffers and find_changed(saved.unwritten_buffers))
        if not (
            same_inputs
            and same_buffers
            and self._read_parameter_versions() == self._parameter_versions
        ):
            what = "a parameter or buffer" if same_inputs else "an input"
            raise RunError(
                f"{what} of these layers was changed in place after their forward, but the "
                "recomputation needs its old value. Clone a tensor before you change it, and "
                "change parameters only after the backward."
            )
        # The cell may be recomputed again, so a stage that changes its inputs in place gets copies.
        # Other stages get new leaves, without the hooks that a recomputation has put on the old.
        copy_tensor = Tensor.clone if self._behavior.mutates_inputs else Tensor.detach
        inputs = {}
        for source, payload in saved.payloads.items():
            inputs[source] = payload.map_tensors(copy_tensor)
        return inputs

    def _restore_state(self, saved: _RecomputeInputs) -> AbstractContextManager[None]:
        """Let the layers find the state that their forward found, and undo what they change."""
        has_flags = list(map(_get_training, self._modules)) == self._training_flags
        has_buffers = any(map(_get_buffers, self._modules))  # a forward may register one
        if has_flags and not has_buffers and not saved.attributes:
            return mark_recomputing
        return restore_state(
            self._modules, self._training_flags, saved.written_buffers, saved.attributes
        )

    def _exclude_detached(self, microbatch: int, payloads: dict[int, Payload]) -> None:
        """Let outputs that the layers have detached arrive without a gradient at the next stages.

        A forward without a graph cannot tell them apart. Of a single output, `GradientFlow` knows
        most cases. In others, the first forward of each kind is followed by a recomputation whose
        graph is dropped at once: where that does not know, of several outputs, in a frozen stage
        that may need no backward at all, and if a layer has backward hooks, which are not called
        without gradients. So it is for outputs of the pipe that share memory: `h, h[:, 0]` and
        `h, h.detach()` are joined to a tensor and a view of it.
        """
        sent = {dst: p.needs_grad for dst, p in payloads.items() if dst != OUTSIDE or p.shared}
        saved = self._recompute_inputs[microbatch]
        if not saved.is_detached_unknown and sum(map(sum, sent.values())) < 2:
            self._exclude(saved.detached, payloads)
            return
        received = tuple((src, p.needs_grad) for src, p in saved.payloads.items())
        key = received, tuple(sent.items()), self._trainable_ids
        detached = self._behavior.detached_outputs.get(key)
        if detached is None:
            # Nothing is kept for a backward, so the memory is that of a forward without a graph.
            with saved_tensors_hooks(lambda _: None, lambda kept: kept), torch.enable_grad():
                inputs = self._copy_inputs(saved)
                with self._restore_state(saved):
                    graph, _ = self._build_graph(microbatch, inputs)
            self._pending_weight_grads.pop(microbatch, None)
            self._parameter_versions = self._read_parameter_versions()
            detached = {
                dst: tuple(
                    n for n, edge in enumerate(graph.roots[dst]) if edge is None and flags[n]
                )
                for dst, flags in sent.items()
            }
            self._behavior.detached_outputs[key] = detached
        saved.detached = detached
        self._exclude(detached, payloads)

    @staticmethod
    def _exclude(detached: Mapping[int, Collection[int]], payloads: dict[int, Payload]) -> None:
        for dst, excluded in detached.items():
            flags = enumerate(payloads[dst].needs_grad)
            payloads[dst].needs_grad = tuple([need and n not in excluded for n, need in flags])

    @cached_property
    def _must_recompute_to_find_detached(self) -> bool:
        """Whether a stage is frozen, or has layers with backward hooks."""
        peers = [peer for reference in self.peers if (peer := reference()) is not None]
        return any(
            peer._has_backward_hooks
            or (not peer.parameters and any(m._parameters for m in peer._modules))
            for peer in peers
        )

    @cached_property
    def _has_backward_hooks(self) -> bool:
        return any(m._backward_hooks or m._backward_pre_hooks for m in self._modules)

    @cached_property
    def _trainable_ids(self) -> frozenset[int]:
        return frozenset(map(id, self.parameters))

    def awaits_recompute(self, microbatch: int) -> bool:
        """Return whether the forward of a micro-batch has built no graph yet."""
        return microbatch in self._recompute_inputs

    def _read_parameter_versions(self) -> list[tuple[int, int]]:
        # Three times for each cell that is recomputed.
        versions = []
        for module in self._parameter_modules:
            for p in module._parameters.values():
                if p is not None:
                    versions.append((p.data_ptr(), p._version))
        return versions

    def _note_parameters(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the memory of each parameter and a checksum of it."""
        return [
            (p.detach(), checksum(p))
            for module in self._static_modules
            for p in module._parameters.values()
            if p is not None
        ]

    def _find_parameter_write(
        self,
        versions: list[tuple[int, int]],
        notes: Sequence[tuple[Tensor, Tensor | None]] = (),
    ) -> tuple[str, str] | None:
        """Return the class and the name of a parameter that a forward has changed, or None.

        A write through `.data` changes no version, so a forward that will be recomputed compares
        checksums, too. Two changes are the same in a recomputation: an embedding with `max_norm`
        scales its rows, and a layer casts its weight to another dtype.
        """
        before, notes_before = iter(versions), iter(notes)
        for module in self._static_modules:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                old, old_sum = next(notes_before, (None, None))
                has_moved = next(before, None) != (parameter.data_ptr(), parameter._version)
                if old is not None and has_moved and _is_cast(old, parameter.detach()):
                    continue
                is_written = has_moved or (
                    old_sum is not None and bool(old_sum != checksum(parameter))
                )
                is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
                if is_written and not (is_embedding and module.max_norm is not None):
                    return type(module).__name__, name
        return None

    def _forward_for_recompute(
        self, microbatch: int, input_payloads: dict[int, Payload]
    ) -> tuple[_RecomputeInputs, FlatValues]:
        """Compute a cell without a graph, and keep what its recomputation needs."""
        behavior = self._behavior
        # Until a forward has shown that the stage leaves its inputs alone, they are copied first.
        originals = (
            input_payloads if behavior.mutates_inputs is False else clone_payloads(input_payloads)
        )
        buffers = snapshot_buffers(modules) if (modules := self._modules_with_buffers) else []
        is_first = behavior.written_attributes is None  # it is not yet known what it sets
        watch = AttributeWatch(self._modules) if is_first else None
        notes = self._note_parameters() if is_first else []
        known_attributes = behavior.written_attributes
        attributes = snapshot_attributes(known_attributes) if known_attributes else []
        parameter_versions = self._read_parameter_versions()
        before = payload_versions(input_payloads.values())
        if is_first:
            self._is_observed = self._needs_context = True
        flow = self._build_gradient_flow(input_payloads) if behavior.follows_gradients else None
        with mark_checkpointing, nullcontext() if flow is None else flow.activate():
            outputs = self._run_layers(microbatch, unpack_payloads(input_payloads))
            has_asked = tells_runs_apart()
        self._is_observed = False
        self._parameter_versions = self._read_parameter_versions()
        if watch is not None:
            behavior.written_attributes = watch.find_written()
            attributes = watch.select(behavior.written_attributes)
        if is_first or self._parameter_versions != parameter_versions:
            self._writes_parameters |= self._parameter_versions != parameter_versions
            write = self._find_parameter_write(parameter_versions, notes)
            if write is not None:
                raise RunError(
                    f"the forward of {write[0]} changes its parameter '{write[1]}', and its "
                    "recomputation would compute with the changed value. Make it a buffer "
                    "(register_buffer), whose old value is restored, or pass checkpoint='never'."
                )
        after = payload_versions(input_payloads.values())
        mutated = before != after
        if mutated and behavior.mutates_inputs is False:
            raise RunError(
                "the layers changed their input in place, which they had not done before. The "
                "recomputation needs that input, and there is no copy of it. Change inputs in "
                "place always or never, or set checkpoint='never'."
            )
        behavior.mutates_inputs = mutated or bool(behavior.mutates_inputs)
        written = unwritten = buffers
        if buffers:
            written = find_written(buffers, behavior.silent_writes)
            unwritten = exclude_written(buffers, written)
        flat_outputs = flatten_outputs(outputs)
        detached, is_unknown = ({}, False) if flow is None else _find_detached(flat_outputs, flow)
        behavior.follows_gradients = bool(detached) or is_unknown
        products: dict[int, list[Product]] = {}
        for dst, tensors in self._list_compared_outputs(flat_outputs).items():
            products[dst] = list(map(compute_product, tensors))
        buffer_products: list[Product] | None = None
        if written and self._is_compared and not has_asked:
            buffer_products = list(map(compute_product, read_buffers(written)))
        if not mutated:
            flat_outputs = _copy_returned_inputs(flat_outputs, input_payloads)
        return _RecomputeInputs(
            originals if mutated else input_payloads,
            payload_versions(originals.values()) if mutated else after,
            written,
            unwritten,
            self._aux_loss_count,
            attributes,
            self._host_rng,
            products,
            buffer_products,
            detached,
            is_unknown,
        ), flat_outputs

    def _build_gradient_flow(self, input_payloads: dict[int, Payload]) -> GradientFlow | None:
        """Return a mode that follows which tensors of a forward would need a gradient."""
        if self._has_compiled or self.stage.wrappers:  # a compiler would trace the mode
            return None
        constants = [
            t
            for module in self._modules
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None and not t.requires_grad
        ]
        for payload in input_payloads.values():
            flags = zip(payload.tensors, payload.needs_grad, strict=True)
            constants += [t for t, needs_grad in flags if t is not None and not needs_grad]
        return GradientFlow(constants)

    def _list_compared_outputs(self, outputs: FlatValues) -> dict[int, Sequence[Tensor]]:
        """Return the outputs of the layers by destination: of the model, and not its loss."""
        compared: dict[int, Sequence[Tensor]] = {}
        if self._is_compared:
            for dst, (tensors, _) in outputs.items():
                compared[dst] = tensors
        if self._model_outputs:
            output = self._model_outputs.pop()
            if self._is_compared:
                compared[OUTSIDE] = flatten_values((output,))[0]
        return compared

    def _build_graph(
        self, microbatch: int, input_payloads: dict[int, Payload]
    ) -> tuple[CellGraph, FlatValues]:
        """Run the layers with autograd, and return the graph and the outputs."""
        behavior = self._behavior
        inputs_with_grad: list[Tensor] = []
        inputs_need_grad: dict[int, tuple[bool, ...]] = {}
        values: NeighborValues = {}
        for source, payload in input_payloads.items():
            tensors, layout, needs_grad = payload.tensors, payload.layout, payload.needs_grad
            inputs_need_grad[source] = needs_grad
            inputs_with_grad += compress(tensors, needs_grad)  # type: ignore[arg-type]
            # As `unpack_payloads` does, in the same loop.
            values[source] = tensors if layout is None else unflatten_values(tensors, layout)  # type: ignore[arg-type]
        inputs: tuple[TensorOrEdge, ...]
        received_grads = None
        if behavior.mutates_inputs is False or not inputs_with_grad:
            # The received tensors themselves are the leaves of the graph. This is cheap, but layers
            # cannot change a leaf in place.
            for tensor in inputs_with_grad:
                tensor.requires_grad_()
            inputs = tuple(inputs_with_grad)
        else:
            graph_tensors, inputs, received_grads = enter_graph(inputs_with_grad)
            values = unpack_with_graph_inputs(input_payloads, graph_tensors)
        before = (
            payload_versions(input_payloads.values()) if behavior.mutates_inputs is None else []
        )
        # Walking the graph is slow, so a stage is checked in one forward only.
        is_checked = behavior.uses_only_parameters if self._is_tracked else behavior.stays_in_stage
        versions = [] if is_checked else self._read_parameter_versions()
        try:
            outputs = flatten_outputs(self._run_layers(microbatch, values))
        except RuntimeError as error:
            has_leaves = behavior.mutates_inputs is False and inputs_with_grad
            if isinstance(error, PenstockError) or not has_leaves:
                raise
            # PyTorch refuses to change a leaf in place, and copies show whether that is the cause.
            # The step has failed anyway, so what else the layers change does not matter.
            if not self._mutates_copies(microbatch, input_payloads):
                raise
            behavior.mutates_inputs = None
            raise RunError(
                "the layers changed their input in place, which they had not done before. They got "
                "leaves of a graph, which PyTorch does not let them change. Repeat the step: from "
                "now on they get other tensors. Or change inputs in place always or never."
            ) from error
        if behavior.mutates_inputs is None:
            behavior.mutates_inputs = before != payload_versions(input_payloads.values())
        roots = {}
        for dst, flat in outputs.items():
            roots[dst] = tuple(map(find_gradient_edge, flat[0]))
        graph = CellGraph(roots, inputs_need_grad, inputs, received_grads)
        if microbatch in self.described_microbatches:
            self.graph_descriptions[microbatch] = graph.describe()
        if not is_checked:
            behavior.written_parameter = self._find_parameter_write(versions)
            self._check_graph(graph)
        return graph, outputs

    def _check_graph(self, graph: CellGraph) -> None:
        """Raise if gradients would be lost in the graph, or would come from another stage."""
        if self._is_tracked:
            graph.check_leaves_are_parameters(set(self._used_parameters()))
            self._behavior.hides_parameters = graph.hides_parameters()
            self._behavior.uses_only_parameters = True
        else:
            self._check_stays_in_stage(graph)
            self._behavior.stays_in_stage = True

    def _mutates_copies(self, microbatch: int, input_payloads: dict[int, Payload]) -> bool:
        """Return whether the layers run on copies of these inputs, and change them in place."""
        copies = {src: p.map_tensors(_copy_leaf) for src, p in input_payloads.items()}
        before = payload_versions(copies.values())
        try:
            with torch.no_grad():
                self._run_layers(microbatch, unpack_payloads(copies))
        except Exception:  # it is not the only cause
            return False
        return before != payload_versions(copies.values())

    def _check_stays_in_stage(self, graph: CellGraph) -> None:
        """Raise if the graph of a cell goes on into that of another stage.

        A layer may keep a tensor in an attribute, which a later layer or the loss reads. It is in
        the graph of its own cell, and perhaps of another micro-batch.
        """
        own_parameters = {*self.parameters, *self._used_parameters()}
        owners: dict[Tensor, Stage] = {
            parameter: peer.stage
            for peer in (reference() for reference in self.peers)
            if peer is not None and peer is not self
            for parameter in (*peer.parameters, *peer._used_parameters())
            if parameter not in own_parameters
        }
        for leaf in graph.find_leaves() if owners else ():
            if leaf in owners:
                raise RunError(
                    f"this stage, or its loss, uses a parameter of {owners[leaf]}, directly or "
                    "through a tensor that was not returned, such as an auxiliary loss that a "
                    "layer keeps in an attribute. That tensor may be of another micro-batch. "
                    "Return it, or add the loss in the layer with penstock.add_loss."
                )

    @mark_cell_boundary
    def _run_layers(self, microbatch: int, values: NeighborValues) -> NeighborValues:
        """Run the layers under everything that this cell needs: proxies, autocast, random numbers.

        Losses that the layers add, and those of earlier stages, go on with the outputs.
        """
        losses = CollectedLosses()
        for source_values in values.values():
            if source_values and type(source_values[-1]) is CarriedLoss:
                values, losses = take_carried_losses(values)
                break
        carried_count = len(losses)
        previous_sink = thread_state.sink
        thread_state.sink = losses if self._aux_sink is None else self._aux_sink
        try:
            if self._needs_context:
                outputs = self._run_in_context(microbatch, values)
            else:
                outputs = self.stage.compute(values)
        finally:
            thread_state.sink = previous_sink
        count = losses.layer_count
        self._aux_loss_count = len(losses) if count is None else count
        if self.added_terms is not None and len(losses) > carried_count:
            terms = find_added_terms(losses[carried_count:])
            if terms is not None:  # otherwise there is no graph, or not yet
                self.added_terms[self.stage.index, microbatch] = terms
        # Without outputs this is the last stage, whose recomputation returns the losses.
        return carry_losses(outputs, losses) if losses and outputs else outputs

    def _run_in_context(self, microbatch: int, values: NeighborValues) -> NeighborValues:
        behavior, defers_weight_grads = (
            self._behavior,
            torch.is_grad_enabled() and (self.stage.index, microbatch) in self._split_cells,
        )
        rng: CellRngMode | CellRngKernels | None = None
        self._host_rng = None
        with ExitStack() as stack:
            if self.may_draw_host_random:
                self._host_rng = stack.enter_context(self._build_host_rng(microbatch))
            # Parameter proxies are installed first: the deferral of weight gradients puts its own
            # proxies on top of them.
            if self._proxies is not None:
                stack.enter_context(self._proxies.activate())
            stack.enter_context(self._context.apply_for_forward())
            if defers_weight_grads:
                self._pending_weight_grads[microbatch] = stack.enter_context(
                    self._weight_grad_deferral.activate()
                )
            if self.may_draw_random or self._fills_empty:
                rng = self._build_rng(microbatch)
                stack.enter_context(rng)
            outputs = self.stage.compute(values)
        # A layer that draws from its own generator is refused in a forward that will be recomputed,
        # so the mode has to stay: it is not known whether this stage draws.
        is_known = rng is not None and not rng.redirect.used_own_generator
        # Neither is it known before a loss has run, which runs in the recomputation.
        is_known &= not (self._has_loss and in_checkpointed_forward())
        if rng is not None and not self._has_drawn:
            # What it has drawn in another call says nothing: a model may draw between its units,
            # by modes and attributes that are not those of the stage.
            self._has_drawn = rng.redirect.has_drawn
            if self._has_drawn or (is_known and not behavior.draws_random):
                behavior.draws_random = self._has_drawn
        if isinstance(rng, CellRngMode) and self._is_observed:
            behavior.uses_empty = rng.used_empty
        if self._host_rng is not None:
            self._record_host_draws(self._host_rng)
        return outputs

    def _build_rng(self, microbatch: int) -> CellRngMode | CellRngKernels:
        """Return the context in which the layers draw random numbers of the cell's own.

        A stage whose behavior is not known runs under the mode, which detects more. So does one
        with compiled layers: the compiler guards on dispatch keys, and would compile them again.
        """
        source = self.rng_source(microbatch)
        is_first = self._behavior.draws_random is None
        if (
            is_first
            or self._fills_empty
            or self._has_compiled
            or not CellRngKernels.are_available()
        ):
            return CellRngMode(source, is_first, self._fills_empty)
        return CellRngKernels(DrawRedirect(source))

    @cached_property
    def _has_compiled(self) -> bool:
        return has_compiled_module(self._modules)

    def _build_host_rng(self, microbatch: int) -> HostRngCell:
        lock = nullcontext() if self.host_rng_lock is None else self.host_rng_lock
        return HostRngCell(self.call_seed, self.stage.index, microbatch, lock)

    def _record_host_draws(self, host_rng: HostRngCell) -> None:
        """Remember whether the layers have drawn from `random` or `numpy.random`."""
        if host_rng.used and self.host_rng_lock is None:
            raise RunError(
                f"these layers draw from {' and '.join(sorted(host_rng.used))}, which the threads "
                "of all stages share. Stages that wait for other processes in their forward cannot "
                "take turns. Draw with torch, whose random numbers are repeated."
            )
        self.used_host_generators |= host_rng.used
        # Otherwise it is not known yet, and the next forward is looked at, too.
        is_known = not (host_rng.was_overwritten or (self._has_loss and in_checkpointed_forward()))
        if host_rng.used or is_known:
            has_drawn = bool(host_rng.used or self._behavior.draws_host_random)
            self._behavior.draws_host_random = has_drawn
        if not self._behavior.draws_host_random:
            self._host_rng = None

    @cached_property
    def _weight_grad_deferral(self) -> WeightGradDeferral:
        return WeightGradDeferral(self._static_modules, self.stage.wrappers)

    # ---- backward ------------------------------------------------------------------------------

    def backward(
        self, microbatch: int, gradients: Mapping[int, Payload], retain_graph: bool
    ) -> dict[int, Payload]:
        """Return the gradients for each source stage, from those of each destination stage.

        If the cell has a W, the gradients of most weights are left for it. With `retain_graph` the
        backward of the cell can run again: from the same graph, or, if the graph was recomputed,
        after another recomputation.
        """
        graph = self._graphs.pop(microbatch)
        if not retain_graph:
            self._recompute_inputs.pop(microbatch, None)
        elif microbatch not in self._recompute_inputs:
            self._graphs[microbatch] = graph
        try:
            if self.collected_grads is None:
                self._check_loss_requires_grad(graph, gradients)
                return graph.backward_accumulate(gradients, retain_graph)
            parameters = self.parameters if self._proxies is None else self._used_parameters()
            input_grads, parameter_grads = graph.backward_collect(
                gradients, parameters, retain_graph, self._behavior.hides_parameters
            )
        except RuntimeError as error:
            write = self._behavior.written_parameter
            if write is None:
                raise
            raise RunError(
                f"the forward of {write[0]} changes its parameter '{write[1]}', and the backward "
                f"of micro-batch {microbatch} needs the value that its own forward has used, but "
                "later micro-batches have changed it. Compute with a clone of it, or pass chunks=1."
            ) from error
        self._collect_grads(parameter_grads, self.collected_grads)
        return input_grads

    def _check_loss_requires_grad(self, graph: CellGraph, gradients: Mapping[int, Payload]) -> None:
        """Raise if the loss does not require grad although a parameter or an input does."""
        if (
            OUTSIDE in gradients
            and not any(graph.roots[OUTSIDE])
            and self._needs_backward(graph.inputs_need_grad.values())
        ):
            raise RunError(
                "the loss does not require grad, although parameters or inputs of this stage do. "
                "It was detached, or it does not depend on the output. Compute it from the output."
            )

    def backward_weights(self, microbatch: int) -> None:
        """Compute the weight gradients that the backward of the inputs has left, and add them."""
        accumulate_weight_grads(self._pending_weight_grads.pop(microbatch))

    def find_hooked_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with hooks on their gradients.

        `fully_shard` runs those of its parameters by itself, when it has reduced the gradients.
        """
        # In every step, so without a call for each parameter.
        hooked = [p for p in self.parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked and self.stage.resharding_modules:
            static_ids = {id(p) for m in self._static_modules for p in m._parameters.values()}
            hooked = [parameter for parameter in hooked if id(parameter) in static_ids]
        return hooked

    def find_leaves(self, microbatch: int) -> list[Tensor]:
        """Return all tensors whose `.grad` the backwards of the cell may add to.

        These are the parameters, their proxies, and unregistered leaves of the graph. The proxies
        are listed by themselves: those whose gradient is left for W are not in the graph.
        """
        return [
            *self.parameters,
            *self._used_parameters(),
            *self._graphs[microbatch].find_leaves(),
        ]

    def _used_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the layers compute with: proxies where there are any."""
        if self._proxies is None:
            return self.parameters
        return [self._proxies.get_proxy(parameter) for parameter in self.parameters]

    def iter_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each parameter with the gradient that the backwards have summed so far."""
        if self.collected_grads is not None:
            yield from zip(self.parameters, self.collected_grads, strict=True)
        else:
            used = zip(self.parameters, self._used_parameters(), strict=True)
            yield from ((parameter, proxy.grad) for parameter, proxy in used)

    def start_collecting_grads(self) -> None:
        """Let the next backwards sum parameter gradients in `collected_grads`, not in `.grad`."""
        if not all(parameter.requires_grad for parameter in self.parameters):
            raise RunError(
                f"a parameter of {self.stage} was frozen with requires_grad_(False) between "
                "pipe(x) and its backward, which computes a gradient for it. Freeze parameters "
                "before the call of the pipe, or after the backward."
            )
        self.collected_grads = [None] * len(self.parameters)
        self._owned_sums.clear()

    def _collect_grads(self, gradients: Gradients, totals: list[Tensor | None]) -> None:
        """Add the gradients of the parameters to their totals."""
        # Autograd may return one tensor as the gradient of several parameters (of both terms of an
        # addition, for example). The first sum allocates new memory, and only that is added to in
        # place.
        for index, gradient in enumerate(gradients):
            total = totals[index]
            if total is None:
                totals[index] = gradient
            elif gradient is not None and index in self._owned_sums:
                total.add_(gradient)
            elif gradient is not None:
                totals[index] = total + gradient
                self._owned_sums.add(index)

    def clear(self) -> None:
        """Drop everything that was kept for backwards."""
        self._graphs.clear()
        self._recompute_inputs.clear()
        self._pending_weight_grads.clear()
        self.collected_grads = None


_get_training: Callable[[nn.Module], bool] = attrgetter("training")
_get_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")


def _find_detached(outputs: FlatValues, flow: GradientFlow) -> tuple[dict[int, tuple[int]], bool]:
    """Return the destination and the index of a single output if it needs no gradient.

    Also return whether this is not known.
    """
    sent = [
        (dst, index, tensor)
        for dst, (tensors, _) in outputs.items()
        for index, tensor in enumerate(tensors)
        if dst != OUTSIDE and is_differentiable(tensor)
    ]
    if len(sent) != 1:
        return {}, False
    dst, index, tensor = sent[0]
    need = flow.find_need(tensor)
    return {dst: (index,)} if need is GradientNeed.NO else {}, need is GradientNeed.PERHAPS


def _copy_returned_inputs(outputs: FlatValues, input_payloads: Mapping[int, Payload]) -> FlatValues:
    """Return outputs with copies of those that are inputs from other stages, or views of them.

    The recomputation needs the inputs as they are, and the next stage may change what it gets in
    place, as it may in the unsplit model. Two cases are left alone, so that such a change is
    refused: the caller's batch, which the unsplit model would change for the caller, too, and
    several views of one input, of which a change of one would change the others.
    """
    addresses: set[int] = set()
    for src, payload in input_payloads.items():
        if src != OUTSIDE:
            addresses |= storage_addresses(payload.tensors)
    for tensors, _ in outputs.values():
        if not addresses.isdisjoint(storage_addresses(tensors)):
            break
    else:
        return outputs  # as most stages
    output_tensors = [t for flat in outputs.values() for t in flat[0]]
    returned = {id(t): t for t in output_tensors if addresses & storage_addresses([t])}
    if len(storage_addresses(returned.values())) < len(returned):
        return outputs
    copies = {key: tensor.clone() for key, tensor in returned.items()}
    return {
        dst: (tuple([copies.get(id(tensor), tensor) for tensor in flat[0]]), flat[1])
        for dst, flat in outputs.items()
    }


def _let_require_grad(payload: Payload) -> None:
    """Let inputs of a call without gradients require them, as the caller's do: a layer may ask."""
    for tensor in compress(payload.tensors, payload.needs_grad):
        if tensor is not None and tensor.is_leaf:
            tensor.requires_grad_()


def _copy_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _is_cast(old: Tensor, new: Tensor) -> bool:
    """Return whether a tensor in other memory has the values of the old one, in its own dtype."""
    is_alike = old.shape == new.shape and old.device == new.device
    return is_alike and old.data_ptr() != new.data_ptr() and torch.equal(old.to(new.dtype), new)
