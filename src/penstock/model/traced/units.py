"""Which submodules of a model are units: the smallest parts that a stage takes whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from penstock.errors import ArgumentError, PenstockTypeError

UnitSelector = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Collection[Any] | None


def find_units(
    model: nn.Module, selector: UnitSelector = None, expanded: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The units by name, in the order in which they are registered.

    They are the elements of the outermost lists (ModuleList, ModuleDict, Sequential) and other
    submodules with parameters that have no such list inside. What is asked for comes first, and
    what is `opened` is none, but its parts are.
    """
    wanted = _resolve_selector(model, selector)
    above = {path for name in (*wanted, *expanded) for path in _iter_ancestor_names(name)}
    found: dict[nn.Module, str] = {}
    for name, module in _iter_units(model, "", set(wanted) - set(expanded), above | set(expanded)):
        found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def is_expandable(module: nn.Module) -> bool:
    """Could it be opened?"""
    return any(_has_parameters(child) for child in module.children())


def parameter_bytes(module: nn.Module) -> int:
    """Of all its parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def has_layer_list(module: nn.Module) -> bool:
    """Is there a list of parts in it?"""
    return any(_is_layer_list(inner) for inner in module.modules())


def _iter_units(
    module: nn.Module, name: str, selected: Collection[str], expanded: Collection[str]
) -> Iterator[tuple[str, nn.Module]]:
    if name in selected:
        yield name, module
        return
    if (
        name
        and name not in expanded
        and (not _has_parameters(module) or not has_layer_list(module))
    ):
        if _has_parameters(module):
            yield name, module
        return
    elements = _is_layer_list(module)
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is None:
            continue
        if (
            elements
            and path not in expanded
            and path not in selected
            and not _is_list_without_forward(child)
        ):
            if _has_parameters(child):
                yield path, child
        else:
            yield from _iter_units(child, path, selected, expanded)


def _is_layer_list(module: nn.Module) -> bool:
    """A container of parts, and not one with a computation of its own."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return any(map(_has_parameters, module.children()))
    if isinstance(module, nn.Sequential):
        return sum(map(_has_parameters, module.children())) > 1
    return False


def _is_list_without_forward(module: nn.Module) -> bool:
    """A list that nobody can call, as it has no forward: a list in a list."""
    lists = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return lists and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _iter_ancestor_names(name: str) -> Iterator[str]:
    """The names of what it is in, and the model's own."""
    parts = name.split(".")
    return (".".join(parts[:at]) for at in range(len(parts)))


def _resolve_selector(model: nn.Module, selector: UnitSelector) -> list[str]:
    if selector is None:
        return []
    if isinstance(selector, str):
        return _resolve_path(model, selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        found = [name for name, m in model.named_modules() if name and isinstance(m, selector)]
        return _select_outermost(found, f"of the class {selector.__name__}")
    if callable(selector) and not isinstance(selector, type):
        says: Any = selector
        found = [name for name, module in model.named_modules() if name and says(name, module)]
        return _select_outermost(found, "for which the function says so")
    if isinstance(selector, list | tuple | set | frozenset):
        return [name for one in selector for name in _resolve_selector(model, one)]
    raise PenstockTypeError(
        f"units is a path such as 'model.layers', a class, a function of name and module, or a "
        f"list of these, not {selector!r}"
    )


def _resolve_path(model: nn.Module, path: str) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules or not path:
        lists = [name for name, m in modules.items() if name and _is_layer_list(m)]
        raise ArgumentError(
            f"units='{path}', and the model has no such submodule: its lists are "
            f"{', '.join(lists) or 'none'}"
        )
    module = modules[path]
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return [f"{path}.{key}" for key in module._modules]
    return [path]


def _select_outermost(names: list[str], description: str) -> list[str]:
    if not names:
        raise ArgumentError(f"units: the model has no submodule {description}")
    return [
        name
        for name in names
        if not any(other in names for other in _iter_ancestor_names(name) if other)
    ]
