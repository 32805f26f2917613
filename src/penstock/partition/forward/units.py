"""Which submodules of a model are units: the smallest parts that a stage takes whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from penstock.errors import ArgumentError, KindError

Asked = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Collection[Any] | None


def units_of(
    model: nn.Module, asked: Asked = None, opened: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The units by name, in the order in which they are registered.

    They are the elements of the outermost lists (ModuleList, ModuleDict, Sequential) and other
    submodules with parameters that have no such list inside. What is asked for comes first, and
    what is `opened` is none, but its parts are.
    """
    wanted = _wanted(model, asked)
    above = {path for name in (*wanted, *opened) for path in _above(name)}
    found: dict[nn.Module, str] = {}
    for name, module in _visit(model, "", set(wanted) - set(opened), above | set(opened)):
        found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def parts_inside(module: nn.Module) -> bool:
    """Could it be opened?"""
    return any(_owns(child) for child in module.children())


def parameter_bytes(module: nn.Module) -> int:
    """Of all its parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def has_list(module: nn.Module) -> bool:
    """Is there a list of parts in it?"""
    return any(_is_list(inner) for inner in module.modules())


def _visit(
    module: nn.Module, name: str, wanted: Collection[str], above: Collection[str]
) -> Iterator[tuple[str, nn.Module]]:
    if name in wanted:
        yield name, module
        return
    if name and name not in above and (not _owns(module) or not has_list(module)):
        if _owns(module):
            yield name, module
        return
    elements = _is_list(module)
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is None:
            continue
        if elements and path not in above and path not in wanted and not _is_bare(child):
            if _owns(child):
                yield path, child
        else:
            yield from _visit(child, path, wanted, above)


def _is_list(module: nn.Module) -> bool:
    """A container of parts, and not one with a computation of its own."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return any(map(_owns, module.children()))
    if isinstance(module, nn.Sequential):
        return sum(map(_owns, module.children())) > 1
    return False


def _is_bare(module: nn.Module) -> bool:
    """A list that nobody can call, as it has no forward: a list in a list."""
    lists = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return lists and type(module).forward is nn.Module.forward


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _above(name: str) -> Iterator[str]:
    """The names of what it is in, and the model's own."""
    parts = name.split(".")
    return (".".join(parts[:at]) for at in range(len(parts)))


def _wanted(model: nn.Module, asked: Asked) -> list[str]:
    if asked is None:
        return []
    if isinstance(asked, str):
        return _at_path(model, asked)
    if isinstance(asked, type) and issubclass(asked, nn.Module):
        found = [name for name, m in model.named_modules() if name and isinstance(m, asked)]
        return _some(found, f"of the class {asked.__name__}")
    if callable(asked) and not isinstance(asked, type):
        says: Any = asked
        found = [name for name, module in model.named_modules() if name and says(name, module)]
        return _some(found, "for which the function says so")
    if isinstance(asked, list | tuple | set | frozenset):
        return [name for one in asked for name in _wanted(model, one)]
    raise KindError(
        f"units is a path such as 'model.layers', a class, a function of name and module, or a "
        f"list of these, not {asked!r}"
    )


def _at_path(model: nn.Module, path: str) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules or not path:
        lists = [name for name, m in modules.items() if name and _is_list(m)]
        raise ArgumentError(
            f"units='{path}', and the model has no such submodule: its lists are "
            f"{', '.join(lists) or 'none'}"
        )
    module = modules[path]
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return [f"{path}.{key}" for key in module._modules]
    return [path]


def _some(found: list[str], how: str) -> list[str]:
    if not found:
        raise ArgumentError(f"units: the model has no submodule {how}")
    return [name for name in found if not any(other in found for other in _above(name) if other)]
