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

from penstock.run.asking import Ready
from penstock.run.capture.standing import Inputs
from penstock.run.capture.subject import Subject
from penstock.run.capture.told import Once, Telling, Which
from penstock.run.capture.watching import Uncapturable
from penstock.stage.context import Context

_GLOBAL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

_IN_WORDS = (
    "what is asked (the loss function, the optimizer's numbers, settings of the pipe)",
    "the inputs (shapes, kinds, what is no tensor)",
    "which layers are in training",
    "the places of tensors of the layers",
    "attributes of the layers",
)


class Likeness(NamedTuple):
    """Two steps with the same are done by the same recording."""

    asked: Hashable
    inputs: Hashable
    modes: Hashable  # which layers are in training
    places: Hashable  # of parameters, buffers, and other tensors of layers; and hooks
    attributes: Hashable  # of layers, that are no tensors

    def whatever_layers_have(self) -> Likeness:
        """That of all steps that differ in nothing but what layers may change themselves."""
        return self._replace(places=None, attributes=None)

    def difference(self, other: Likeness) -> str:
        """What is not the same, for people."""
        pairs = zip(_IN_WORDS, self, other, strict=True)
        return " and ".join(name for name, a, b in pairs if a != b)


def likeness_of(ready: Ready, inputs: Inputs, subject: Subject, kinds: frozenset[str]) -> Likeness:
    """Of one step."""
    settings, lesson, fed = ready.settings, ready.lesson, ready.fed
    context = Context.here(kinds)
    if context.inference:
        raise Uncapturable("it is asked for in torch.inference_mode: take torch.no_grad")
    if context.saved_hooks is not None:
        raise Uncapturable("there are hooks on saved tensors around it, which no replay calls")
    tell = Telling()
    asked = (
        (settings.chunks, settings.checkpoint, settings.training, settings.reduction),
        (tell(lesson.loss_fn), lesson.outputs, lesson.scaler is None),
        _of_optimizer(lesson.optimizer, subject.parameters, tell),
        (context, torch.get_default_dtype(), *(tuple(vars(torch_module)[g]) for g in _GLOBAL)),
        _kernels(),
    )
    given = fed.rows, fed.chunks, fed.graph, fed.target, fed.divided, *_of_inputs(inputs, tell)
    return Likeness(Once(asked), Once(given), subject.modes, subject.places, subject.attributes)


def _kernels() -> Hashable:
    """What the caller has set that libraries choose their kernels by."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic,
    )


def _of_inputs(inputs: Inputs, tell: Telling) -> tuple[Hashable, ...]:
    memory = inputs.memory, inputs.overlap
    return inputs.kinds, inputs.places, memory, tell(inputs.rest), inputs.shape


# ---- the optimizer -------------------------------------------------------------------------


def _of_optimizer(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[nn.Parameter], tell: Telling
) -> Hashable:
    """Its numbers, where its state is, and which parameters have a gradient before the step."""
    if optimizer is None:
        return None
    groups = [
        tuple([(k, tuple(map(id, v)) if k == "params" else tell(v)) for k, v in group.items()])
        for group in optimizer.param_groups
    ]
    state = [
        (name, tell(value) if isinstance(value, Tensor) else type(value))
        for of_one in optimizer.state.values()
        for name, value in (of_one.items() if isinstance(of_one, dict) else ())
    ]
    empty = tuple([p.grad is None for p in parameters])
    return Which(optimizer), tuple(groups), tuple(state), empty


def numbers_of(optimizer: torch.optim.Optimizer | None) -> dict[tuple[int, str], float]:
    """What it has in its state that is no tensor."""
    if optimizer is None:
        return {}
    return {
        (at, name): value
        for at, of_one in enumerate(optimizer.state.values())
        for name, value in (of_one.items() if isinstance(of_one, dict) else ())
        if isinstance(value, int | float)
    }


def check_counts(optimizer: torch.optim.Optimizer | None, before: Mapping[Any, float]) -> None:
    """It does not count in Python: a replay would not."""
    now = numbers_of(optimizer)
    changed = [name for at, name in before if now.get((at, name)) != before[at, name]]
    if changed:
        raise Uncapturable(
            f"{type(optimizer).__name__} changes '{changed[0]}' of its state in every step, a "
            "number in Python, and a replay would not: call its step after pipe.step"
        )
