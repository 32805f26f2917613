"""Submodules of the mirrors, created from lists of their names.

The old libraries have modules such as `torchgpipe.balance` or `fairscale.nn.pipe.skip` with a few
names each. A mirror lists the contents of each of them, and this module creates them without files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def add_submodules(package: str, **contents: Iterable[Any]) -> None:
    """Make modules below the module `package`, each holding some functions, classes or modules.

    They are imported like files: `import package.name`, `from package.name import member`.
    """
    parent = sys.modules[package]
    parent.__path__ = []  # the import system takes a module that has a path for a package
    for name, members in contents.items():
        module = ModuleType(f"{package}.{name}", f"The names of `{name}` in the old library.")
        held = {member.__name__.rpartition(".")[2]: member for member in members}
        vars(module).update(held, __all__=sorted(held))
        sys.modules[module.__name__] = module
        setattr(parent, name, module)
