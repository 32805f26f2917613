"""Tensors that a forward leaves behind: in an attribute of a layer, or in a list of a hook.

A script may take such a tensor (features, attention maps, an auxiliary loss) for a loss of its own
after `pipe(x)`. In a pipe that would be wrong without a word: the tensor has the rows of the last
micro-batch only, its graph ends where its stage begins, and a forward that is recomputed has none.
Its numbers may be looked at, though. So the tensor is replaced by one with the same memory whose
backward raises.

The audit finds the places: those where the unsplit model leaves a tensor with a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.state_copy import MODULE_INTERNALS, Variable


class KeptPlace(NamedTuple):
    """A place where a forward leaves tensors: an attribute, a variable, a dict or a list.

    Attributes:
        owner: The module that has the attribute, or the variable, dict or list.
        key: The name of the attribute, or the key; None for a variable and a list.
        name: What a message calls it.
    """

    owner: Any
    key: Any
    name: str


def find_kept_places(
    module_names: Mapping[nn.Module, str],
    variables: Iterable[Variable],
    containers: Iterable[Any],
) -> list[KeptPlace]:
    """Return the places where tensors with a graph are, after a forward of the unsplit model.

    Args:
        module_names: The modules, and their names.
        variables: Variables outside of modules. They may hold copies now: the places are in what
            they held before.
        containers: Other dicts and lists.
    """
    places = []
    for module, path in module_names.items():
        for name, value in vars(module).items():
            if name not in MODULE_INTERNALS and any(map(_has_graph, _list_entries(value))):
                full_name = f"'{path}.{name}'".replace("'.", "'")
                places.append(KeptPlace(module, name, full_name))
    for variable in variables:
        value = variable.read()
        name = f"'{variable.name}'" if variable.name else "a variable"
        if _has_graph(value):
            places.append(KeptPlace(variable, None, name))
        elif type(value) is type(variable.value):
            places += _find_entries(value, variable.value, name)
    for container in containers:
        places += _find_entries(container, container, f"a {type(container).__name__}")
    return places


def _find_entries(container: Any, original: Any, name: str) -> list[KeptPlace]:
    if isinstance(container, dict):
        keys = [key for key, value in container.items() if _has_graph(value)]
        return [KeptPlace(original, key, name) for key in keys]
    if isinstance(container, list) and any(map(_has_graph, container)):
        return [KeptPlace(original, None, name)]
    return []


def guard_kept_tensors(places: Iterable[KeptPlace]) -> None:
    """Let a backward from the tensors in these places raise."""
    for owner, key, name in places:
        if isinstance(owner, nn.Module):
            value = vars(owner).get(key)
            if isinstance(value, dict | list):
                _guard_entries(value, name)
            elif _is_unguarded(value):
                vars(owner)[key] = _guard(value, name)
        elif isinstance(owner, Variable):
            if _is_unguarded(value := owner.read()):
                owner.set(_guard(value, name))
        elif isinstance(owner, dict):
            if _is_unguarded(value := owner.get(key)):
                owner[key] = _guard(value, name)
        else:
            _guard_entries(owner, name)


def _guard_entries(container: dict[Any, Any] | list[Any], name: str) -> None:
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(pairs):
        if _is_unguarded(value):
            container[key] = _guard(value, name)


def _list_entries(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else (value,)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _is_unguarded(value: Any) -> TypeGuard[Tensor]:
    is_plain = type(value) is Tensor and value.is_floating_point()
    return is_plain and not isinstance(value.grad_fn, KeptTensorFunction._backward_cls)


def _guard(tensor: Tensor, name: str) -> Tensor:
    anchor = torch.zeros((), device=tensor.device, requires_grad=True)
    guarded: Tensor = KeptTensorFunction.apply(anchor, tensor.detach(), name)  # type: ignore[no-untyped-call]
    return guarded


class KeptTensorFunction(torch.autograd.Function):
    """The autograd node of a tensor that a forward has left behind."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, name: str) -> Tensor:
        """Return the tensor."""
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise an error."""
        raise RunError(
            f"a backward begins at a tensor that a layer or a hook has kept in {ctx.name} during a "
            "call of a pipe. It has the rows of one micro-batch only, and its gradient would not "
            "reach the stages before. Return it as an output of the model, or add the loss with "
            "penstock.add_loss inside the layer."
        )
