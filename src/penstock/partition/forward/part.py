"""A stage of a divided forward: computes its part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition.forward.absent import FORWARD_COUNTER
from penstock.partition.forward.performer import StageFinished, StageInterpreter
from penstock.partition.forward.skeleton import ProxyModel, sync_attributes
from penstock.partition.forward.state import ModelSettings
from penstock.partition.forward.trees import unflatten
from penstock.partition.forward.whole import ForwardRequest
from penstock.stage.checkpointing import is_recomputing
from penstock.stage.stage import OUTSIDE


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
            leaves[handed.tensor_positions[at]] = given[score.input_proxies[at].value] = tensor
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
