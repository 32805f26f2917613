"""Old imports kept alive: `torch.distributed.pipeline.sync`, `torchgpipe` and `fairscale.nn.Pipe`.

Each library has a mirror here, a module of the same shape. `install` registers the mirrors under
the old names, and `python -m penstock.compat script.py` does that for a whole script.

    torch_sync.py, torchgpipe.py, fairscale.py   the mirrors
    legacy_pipe.py                               the pipes, over `penstock.Pipe`
    balance.py, skip.py                          what else the old libraries export
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Self

__all__ = ["install"]

_OLD_NAMES = {
    "torch_sync": "torch.distributed.pipeline.sync",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
}


def install(*, force: bool = False) -> None:
    """Register the mirrors under the old names, for this process.

    Args:
        force: Also replace a library that is installed. By default it is left alone.

    Example:

    >>> import penstock.compat
    >>> penstock.compat.install()
    >>> from torch.distributed.pipeline.sync import Pipe, WithDevice
    >>> Pipe
    <class 'penstock.compat.torch_sync.pipe.Pipe'>
    """
    for mirror, old in _OLD_NAMES.items():
        if force or not _is_installed(old):
            _register_mirror(import_module(f"{__name__}.{mirror}"), old)


def add_submodules(package: str, **contents: Iterable[Any]) -> None:
    """Make modules below the module `package`, each holding some functions, classes or modules.

    The old libraries have modules such as `torchgpipe.balance` or `fairscale.nn.pipe.skip` with a
    few names each. These are made without files, and imported like files: `import package.name`,
    `from package.name import member`.
    """
    parent = sys.modules[package]
    parent.__path__ = []  # the import system takes a module that has a path for a package
    for name, members in contents.items():
        module = ModuleType(f"{package}.{name}", f"The names of `{name}` in the old library.")
        held = {member.__name__.rpartition(".")[2]: member for member in members}
        vars(module).update(held, __all__=sorted(held))
        sys.modules[module.__name__] = module
        setattr(parent, name, module)


def _is_installed(name: str) -> bool:
    """Return whether a module of this name can be imported that is not a mirror."""
    if name in sys.modules:
        return not getattr(sys.modules[name], "__name__", "").startswith(f"{__name__}.")
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor is its parent
        return False


def _register_mirror(mirror: ModuleType, old: str) -> None:
    for stale in [name for name in sys.modules if name == old or name.startswith(f"{old}.")]:
        del sys.modules[stale]
    _add_to_sys_modules(old, mirror)
    for submodule in submodules_of(mirror):
        name = old + submodule.__name__.removeprefix(mirror.__name__)
        _add_to_sys_modules(name, submodule)
        if name.endswith(".skip"):  # a package with two modules in the old libraries
            skip = import_module(f"{__name__}.skip")
            sys.modules.update({f"{name}.skippable": skip, f"{name}.namespace": skip})


def submodules_of(mirror: ModuleType) -> list[ModuleType]:
    """Return the modules below a mirror, parents first."""
    names = sorted(name for name in sys.modules if name.startswith(f"{mirror.__name__}."))
    return [sys.modules[name] for name in names]


def _add_to_sys_modules(name: str, module: ModuleType) -> None:
    """Make a module importable under a name; parents that do not exist are made empty."""
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        try:
            import_module(parent)
        except ModuleNotFoundError:
            _add_to_sys_modules(
                parent,
                ModuleType(parent, "An empty package, made by Penstock for the modules below it."),
            )
        setattr(sys.modules[parent], leaf, module)


class ScriptPath(str):
    """The path of a script that needs the old names.

    A spawned process imports the script again, but first it unpickles the `sys.argv` of its parent.
    This string installs the old names when it is unpickled, which is in time.
    """

    force: bool

    def __new__(cls, path: str, force: bool) -> Self:
        script = super().__new__(cls, path)
        script.force = force
        return script

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_script_path, (str(self), self.force)


def _unpickle_script_path(path: str, force: bool) -> ScriptPath:
    # The path of the parent arrives later than this.
    sys.path.insert(0, _find_folder(path))
    install(force=force)
    return ScriptPath(path, force)


def _find_folder(path: str) -> str:
    return str(Path(path).resolve().parent)


def run_script(path: str, arguments: Sequence[str], *, force: bool = False) -> None:
    """Run a script as `python path arguments...` would, with the old names installed.

    Says on the standard error stream which library each old name stands for.

    Args:
        path: The script's file.
        arguments: The arguments of the script.
        force: Replace libraries that are installed, too.
    """
    # First, because a library beside the script is one that the script would import.
    if not sys.flags.safe_path:
        sys.path[0] = _find_folder(path)
    install(force=force)
    for line in _describe_libraries():
        print(f"penstock.compat: {line}", file=sys.stderr)  # noqa: T201
    script = ScriptPath(path, force)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _describe_libraries() -> Iterator[str]:
    """Yield which library runs under each of the old names."""
    mirrored = [old for old in _OLD_NAMES.values() if not _is_installed(old)]
    if mirrored:
        yield f"{', '.join(mirrored)}: Penstock runs in place of the old library"
    for old in _OLD_NAMES.values():
        if old not in mirrored:
            spec = None if old in sys.modules else find_spec(old)
            origin = getattr(spec, "origin", None) or getattr(sys.modules.get(old), "__file__", "")
            yield f"{old}: the installed library runs ({origin}). Pass --force to run Penstock"
