"""A whole script with the old names in place, in its own process and in those it spawns."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.compat import install


class ScriptPath(str):
    """The path of a script that needs the old names.

    A spawned process imports the script anew, but first it unpickles its parent's `sys.argv`:
    with this in it, the names are there in time.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_script_path, (str(self),)


def _unpickle_script_path(path: str) -> ScriptPath:
    install()
    return ScriptPath(path)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run the script as `python script.py arguments...` would."""
    install()
    script = ScriptPath(path)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(script, run_name="__main__")
