"""Decide which submodules of a model are units.

A unit is a submodule that is never divided: each of its calls runs on one stage. All modules that
are not in a unit are *parents*. Every stage runs their forward, and their own computations are the
operations between units.

    GPT                          parent
      embed   Embedding          unit     has parameters, contains no list
      blocks  ModuleList         parent
        0     Block              unit     element of an outermost list
        1     Block              unit
      drop    Dropout            parent   has no parameters
      head    Linear             unit
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from penstock.errors import ArgumentError, PenstockTypeError

UnitSelector = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Collection[Any] | None


def find_units(
    model: nn.Module, selector: UnitSelector = None, expanded: Collection[str] = ()
) -> dict[str, nn.Module]:
    """Return the units by name, in the order in which they are registered.

    By default the units are the elements of the outermost lists (ModuleList, ModuleDict,
    Sequential) and all other submodules with parameters that do not contain such a list.

    Args:
        model: The whole model.
        selector: Submodules that are units in any case. See `units=` of `Pipe`.
        expanded: Names of submodules that are not units. Their submodules are units instead.
    """
    selected = _resolve_selector(model, selector)
    ancestors = {path for name in (*selected, *expanded) for path in _iter_ancestor_names(name)}
    # A module that is registered under several names is one unit, with its first name.
    names: dict[nn.Module, str] = {}
    for name, module in _iter_units(
        model, "", set(selected) - set(expanded), ancestors | set(expanded)
    ):
        names.setdefault(module, name)
    return {name: module for module, name in names.items()}


def is_expandable(module: nn.Module) -> bool:
    """Return whether a unit could be expanded: a child with parameters can be a unit."""
    return any(_has_parameters(child) for child in module.children())


def parameter_bytes(module: nn.Module) -> int:
    """Return the size of all parameters of a module in bytes."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def has_layer_list(module: nn.Module) -> bool:
    """Return whether a module is, or contains, a list of layers."""
    return any(_is_layer_list(inner) for inner in module.modules())


def _iter_units(
    module: nn.Module, name: str, selected: Collection[str], expanded: Collection[str]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the units inside a module, depth first. `expanded` are the names that are not units."""
    if name in selected:
        yield name, module
        return
    # A module that contains no list of layers is a unit as a whole, if it has parameters.
    if name and name not in expanded and not has_layer_list(module):
        if _has_parameters(module):
            yield name, module
        return
    is_list = _is_layer_list(module)
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is None:
            continue
        # An element of a list is a unit, whatever it contains. All other children are searched.
        if (
            is_list
            and path not in expanded
            and path not in selected
            and not _is_list_without_forward(child)
        ):
            if _has_parameters(child):
                yield path, child
        else:
            yield from _iter_units(child, path, selected, expanded)


def _is_layer_list(module: nn.Module) -> bool:
    """Return whether a module is a container of layers. A Sequential must have two or more."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return any(map(_has_parameters, module.children()))
    if isinstance(module, nn.Sequential):
        return sum(map(_has_parameters, module.children())) > 1
    return False


def _is_list_without_forward(module: nn.Module) -> bool:
    """Return whether a module is a list without a `forward`.

    Such a list inside a list cannot be a unit, because nothing can call it. Its elements are units.
    """
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_list and type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _iter_ancestor_names(name: str) -> Iterator[str]:
    """Return the names of all modules around a module, including the model itself (`""`)."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(len(parts)))


def _resolve_selector(model: nn.Module, selector: UnitSelector) -> list[str]:
    """Return the names of the submodules that the user selected with `units=`."""
    if selector is None:
        return []
    if isinstance(selector, str):
        return _resolve_path(model, selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        names = [name for name, m in model.named_modules() if name and isinstance(m, selector)]
        return _select_outermost(names, f"of the class {selector.__name__}")
    if callable(selector) and not isinstance(selector, type):
        predicate: Any = selector
        names = [name for name, module in model.named_modules() if name and predicate(name, module)]
        return _select_outermost(names, "for which the function returns True")
    if isinstance(selector, list | tuple | set | frozenset):
        return [name for item in selector for name in _resolve_selector(model, item)]
    raise PenstockTypeError(
        f"units must be a path such as 'model.layers', a class, a function of name and module, or "
        f"a list of these, not {selector!r}."
    )


def _resolve_path(model: nn.Module, path: str) -> list[str]:
    """Return the elements of the list at a path, or the path itself if it is not a list."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules or not path:
        lists = [name for name, m in modules.items() if name and _is_layer_list(m)]
        raise ArgumentError(
            f"units='{path}' is not a submodule of the model. The lists of layers in the model "
            f"are: {', '.join(lists) or 'none'}."
        )
    module = modules[path]
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return [f"{path}.{key}" for key in module._modules]
    return [path]


def _select_outermost(names: list[str], description: str) -> list[str]:
    """Return the names that are not inside another one. Raise if there are none at all."""
    if not names:
        raise ArgumentError(f"units: the model has no submodule {description}.")
    return [
        name
        for name in names
        if not any(other in names for other in _iter_ancestor_names(name) if other)
    ]
