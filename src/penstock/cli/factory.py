"""MODULE:FACTORY on the command line: the user's model, and a batch for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from penstock.cli.report import describe_exception
from penstock.errors import ArgumentError, PenstockError

_FACTORY_KEYS = ("model", "batch", "target", "loss_fn", "reduction", "side", "units")


class FactoryResult(NamedTuple):
    """A model, and a batch in the form of `example=`."""

    model: nn.Module
    example: Any
    units: Any = None


def call_factory(path: str) -> dict[str, Any]:
    """Import MODULE, call FACTORY, and return its result as a dict, with the batch as a tuple."""
    return _parse_factory_result(_import_and_call(path), path)


def load_factory(path: str) -> FactoryResult:
    """Import MODULE, call FACTORY, and return the model with an example."""
    result = call_factory(path)
    inputs: list[Any] = list(result["batch"])
    side = dict(result.get("side") or {})
    if len(inputs) == 1 and isinstance(inputs[0], dict):
        side |= inputs.pop()
    if inputs and side:
        raise ArgumentError(
            f"{path} returns inputs by position and by name. An example has one or the other: "
            "return all of them by name, as the batch."
        )
    return FactoryResult(result["model"], side or tuple(inputs), result.get("units"))


@contextmanager
def run_user_code(problem: str) -> Iterator[None]:
    """Turn what the user's code raises into an error that names the problem.

    `sys.exit(0)` counts as an error, too: nothing has been checked then.
    """
    try:
        yield
    except (PenstockError, KeyboardInterrupt):  # the message is meant for the user as it is
        raise
    except BaseException as error:
        raise ArgumentError(f"{problem}: {describe_exception(error)}") from error


def _import_and_call(path: str) -> Any:
    """Import MODULE, which may be in the current directory, and return what FACTORY() returns."""
    name, _, factory = path.partition(":")
    if not name or not factory:
        raise ArgumentError(f"expected MODULE:FACTORY, such as my_model:make, not '{path}'")
    if name.endswith(".py") or "/" in name:
        module_name = Path(name).with_suffix("").name
        raise ArgumentError(
            f"'{name}' is a file, and MODULE is a name: write {module_name}:{factory}, in the "
            "folder of the file"
        )
    # A console script does not have the current directory on its path, unlike `python -m`.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with run_user_code(f"importing {name} failed"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The module itself, or a package above it, is missing; or it imports one that is.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise ArgumentError(f"{name} needs {error.name}, which is not installed") from error
            raise ArgumentError(
                f"there is no module '{name}', neither in {here} nor among the installed packages"
            ) from None
        make = getattr(module, factory, None)
    if not callable(make):
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
        problem = "is not a function" if hasattr(module, factory) else "is not defined"
        raise ArgumentError(
            f"{name} has no factory '{factory}', which {problem}. The module defines "
            f"{', '.join(defined) or 'nothing'}"
        )
    with run_user_code(f"{path} failed"):
        return make()


def _parse_factory_result(factory_result: Any, path: str) -> dict[str, Any]:
    """Return the factory's result as a dict, with the batch as a tuple of inputs."""
    if isinstance(factory_result, tuple) and 2 <= len(factory_result) <= 4:
        factory_result = dict(zip(_FACTORY_KEYS, factory_result, strict=False))
    if not isinstance(factory_result, dict) or not {"model", "batch"} <= factory_result.keys():
        actual = _describe_type(factory_result)
        raise ArgumentError(
            f"{path} must return (model, batch), (model, batch, target, loss_fn), or a dict with "
            f"'model' and 'batch', not {actual}"
        )
    unknown = [str(key) for key in factory_result if key not in _FACTORY_KEYS]
    if unknown:
        raise ArgumentError(
            f"{path} returns a dict with unknown keys: {', '.join(unknown)}. It may have "
            f"{', '.join(_FACTORY_KEYS)}"
        )
    if not isinstance(factory_result["model"], nn.Module):
        raise ArgumentError(
            f"{path}: the model must be an nn.Module, not {_describe_type(factory_result['model'])}"
        )
    batch = factory_result["batch"]
    return {**factory_result, "batch": batch if isinstance(batch, tuple) else (batch,)}


def _describe_type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(str, value))}"
    return f"an object of type {type(value).__name__}"
