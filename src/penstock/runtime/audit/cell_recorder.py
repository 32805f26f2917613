"""Record what the cells of one micro-batch compute in the pipe, as digests.

The recorder is the observer of the workers in an audited call. It looks at the cells of the audited
micro-batch only, and keeps no tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.runtime.audit.digest import Digest, Digester
from penstock.runtime.audit.state_watch import (
    AttributeKey,
    BufferKey,
    collect_buffers,
    read_plain_attributes,
)
from penstock.runtime.worker import CellIO
from penstock.schedules.ir import Compute, Op
from penstock.stage.payload import Payload, unflatten_values
from penstock.stage.stage import OUTSIDE, Stage
from penstock.stage.stage_runner import StageRunner
from penstock.torch_compat import pytree


@dataclass
class CellRecord:
    """The results of the audited micro-batch in the pipe."""

    gradients: dict[int, Digest] = field(default_factory=dict)  # by id of the parameter
    # What cells of other stages may have added. See `_find_foreign_gradients`.
    foreign_gradients: dict[int, Digest] = field(default_factory=dict)
    buffers: dict[BufferKey, Digest] = field(default_factory=dict)
    outputs: dict[str, Digest] = field(default_factory=dict)  # of `pipe(x)`, by path
    output_paths: list[str | None] = field(default_factory=list)  # of the tensors in the output
    object_paths: frozenset[str] = frozenset()  # of what else is in the output
    recounted: set[AttributeKey] = field(default_factory=set)  # changed by a recomputation


class CellRecorder:
    """Records the results of one micro-batch while the pipe runs. It observes the workers.

    Attributes:
        record: The results so far.

    Args:
        stages: The stages of the pipe.
        microbatch: The micro-batch to record.
        digester: Makes the digests.
        cell_io: What goes into the cells of the call and comes out of them.
        records_outputs: Whether to record the outputs, as in `pipe(x)`.
        has_own_gradients: Whether backwards may give gradients to parameters of other stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatch: int,
        digester: Digester,
        cell_io: CellIO,
        records_outputs: bool,
        has_own_gradients: bool,
    ) -> None:
        self._stages, self._microbatch = stages, microbatch
        # Not the execution, whose workers refer to their observer: it would keep its tensors.
        self._digester, self._cell_io = digester, cell_io
        self._records_outputs = records_outputs
        self._has_own_gradients = has_own_gradients
        self.record = CellRecord()
        self._lock, self._backward_lock = threading.Lock(), threading.Lock()
        self._grads_before: dict[tuple[int, int], dict[int, Digest]] = {}
        # Of parameters of other stages, before a backward. See `_find_foreign_gradients`.
        self._other_grads_before: dict[int, Digest] = {}
        self._attributes_before: dict[int, dict[AttributeKey, Any]] = {}  # by stage

    def take_turn(self, action: Compute) -> AbstractContextManager[object]:
        """Return a context for a computation.

        If a backward may give gradients to other stages, one backward runs at a time in this call,
        so that it is known which one has given what.
        """
        is_backward = action.op not in (Op.F, Op.R)
        return self._backward_lock if is_backward and self._has_own_gradients else nullcontext()

    def before_compute(self, stage_runner: StageRunner, action: Compute) -> None:
        """Note the gradients before a backward, and attributes before a recomputation."""
        if action.microbatch != self._microbatch or action.op is Op.F:
            return
        if action.op is Op.R:
            attributes = read_plain_attributes(stage_runner.stage.modules())
            self._attributes_before[action.stage] = attributes
            return
        loss = self._cell_io.loss
        if loss is not None and action.op is not Op.W:
            # It sets gradients of earlier steps aside, if it has to.
            loss.before_backward(stage_runner, action.microbatch)
        self._grads_before[action.stage, action.microbatch] = self._digest_gradients(stage_runner)
        self._other_grads_before = self._digest_other_gradients(action.stage)

    def after_compute(
        self, stage_runner: StageRunner, action: Compute, payloads: Mapping[int, Payload]
    ) -> None:
        """Note what the cell has added to the gradients, or written to its buffers."""
        record = self.record
        if action.microbatch != self._microbatch:
            return
        if self._records_outputs and action.op is Op.F and OUTSIDE in payloads:
            payload = payloads[OUTSIDE]
            values = unflatten_values(payload.tensors, payload.layout)  # type: ignore[arg-type]
            tensors = list_by_path(values[0])
            record.outputs = self._digester.digest_all(tensors)
            paths = {id(tensor): path for path, tensor in tensors.items()}
            record.output_paths = [paths.get(id(tensor)) for tensor in payload.tensors]
            record.object_paths = frozenset(list_objects_by_path(values[0]))
        if action.op is Op.F:
            record.buffers.update(
                self._digester.digest_all(collect_buffers(stage_runner.stage.modules()))
            )
        elif action.op is Op.R:
            attributes = self._attributes_before.pop(action.stage)
            now = read_plain_attributes(stage_runner.stage.modules())
            record.recounted |= {key for key, old in attributes.items() if now.get(key) != old}
        else:
            before = self._grads_before.pop((action.stage, action.microbatch))
            after = self._digest_gradients(stage_runner)
            with self._lock:  # a tied parameter is on several ranks
                for key, old, new in self._find_foreign_gradients(action.stage):
                    added = new.minus(old)
                    record.foreign_gradients[key] = added.plus(record.foreign_gradients.get(key))
                for key, digest in after.items():
                    added = digest.minus(before.get(key))
                    record.gradients[key] = added.plus(record.gradients.get(key))

    def _digest_gradients(self, stage_runner: StageRunner) -> dict[int, Digest]:
        gradients = {
            id(parameter): gradient
            for parameter, gradient in stage_runner.iter_gradients()
            if gradient is not None
        }
        return self._digester.digest_all(gradients)

    def _find_foreign_gradients(self, stage_index: int) -> Iterator[tuple[int, Digest, Digest]]:
        """Yield the gradients that a backward gave to parameters of other stages, before and after.

        The backward of an `autograd.Function` that spans stages may call `backward` by itself, as
        that of reversible layers does. It gives gradients to the parameters of earlier stages, in
        whose own cells nothing is added any more. A rank that ends its lane meanwhile may change
        gradients, too, so these count only where the gradient of a parameter differs without them.
        """
        before = self._other_grads_before
        for key, digest in self._digest_other_gradients(stage_index).items():
            old = before.get(key, Digest(0.0, 0.0))
            if digest != old:
                yield key, old, digest

    def _digest_other_gradients(self, stage_index: int) -> dict[int, Digest]:
        """Return the gradients of all stages but one. No backward changes them meanwhile."""
        if not self._has_own_gradients:
            return {}
        gradients = {
            id(parameter): parameter.grad
            for stage in self._stages
            if stage.index != stage_index
            for module in stage.modules()
            for parameter in module.parameters(recurse=False)
            if parameter.grad is not None
        }
        return self._digester.digest_all(gradients)


def list_by_path(value: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by where they are in it."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def list_objects_by_path(value: Any) -> dict[str, Any]:
    """Return what an output has beside tensors and None, by where it is."""
    leaves = pytree.tree_flatten_with_path(value)[0]
    objects = (pair for pair in leaves if not isinstance(pair[1], Tensor | None))
    return {pytree.keystr(path): leaf for path, leaf in objects}
