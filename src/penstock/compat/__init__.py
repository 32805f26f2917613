"""Old imports kept alive: `torch.distributed.pipeline.sync`, `torchgpipe` and `fairscale.nn.Pipe`.

Each has a mirror here, a package of the same shape. `install` puts the mirrors where old code
looks for them, and `python -m penstock.compat script.py` does that for a whole script.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from types import ModuleType

__all__ = ["install"]

_OLD_NAMES = {
    "torch_sync": "torch.distributed.pipeline.sync",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
}


def install(*, force: bool = False) -> None:
    """Register the mirrors under the old names, for this process.

    A library that is really there is left alone, unless you `force` its mirror into its place.

    >>> import penstock.compat
    >>> penstock.compat.install()
    >>> from torch.distributed.pipeline.sync import Pipe, WithDevice
    >>> Pipe
    <class 'penstock.compat.torch_sync.pipe.Pipe'>
    """
    for mirror, old in _OLD_NAMES.items():
        if force or not _is_installed(old):
            _register_mirror(import_module(f"{__name__}.{mirror}"), old)


def _is_installed(name: str) -> bool:
    """Can it be imported, and is not ours?"""
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
    for found in walk_packages(mirror.__path__, f"{mirror.__name__}."):
        name = old + found.name.removeprefix(mirror.__name__)
        _add_to_sys_modules(name, import_module(found.name))
        if name.endswith(".skip"):  # a package in the old days
            skip = import_module(f"{__name__}.skip")
            sys.modules.update({f"{name}.skippable": skip, f"{name}.namespace": skip})


def _add_to_sys_modules(name: str, module: ModuleType) -> None:
    """Make it importable under a name, with a parent made up where there is none."""
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        try:
            import_module(parent)
        except ModuleNotFoundError:
            _add_to_sys_modules(
                parent, ModuleType(parent, "Made up by Penstock, for what is below it.")
            )
        setattr(sys.modules[parent], leaf, module)
