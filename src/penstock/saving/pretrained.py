"""A folder as `save_pretrained` of transformers writes it, each rank its own tensors of it.

The model itself writes all but the weights. Those of an adapter are small: the first rank gets
them all, and peft writes its folder.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import KindError
from penstock.saving import writing
from penstock.saving.folder import sync
from penstock.saving.naming import INDEX, WEIGHTS, adapted, adapters_of, is_pretrained
from penstock.saving.one_file import OneFileWriter
from penstock.saving.savers import Savers, decided, each, together

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def write(
    model: nn.Module | None, state: Callable[[], dict[str, Any]], savers: Savers, folder: Path
) -> None:
    """The state is what this process saves of the model."""
    doing = f"saving to '{folder}'"
    if model is None or not is_pretrained(model):
        raise KindError(
            "save_pretrained is for models of transformers and peft, which have a save_pretrained "
            f"and a config, and this is {'a Sequential' if model is None else type(model).__name__}"
            ": use pipe.save(folder) or pipe.export(file)"
        )
    if adapted(model):
        found = together(savers, doing, lambda: _on_host(adapters_of(model, _tensors(state()))))
        whole = {name: tensor for part in found for name, tensor in part.items()}
        decided(savers, doing, lambda: _write_adapters(model, folder, whole))
        return
    decided(savers, doing, lambda: _write_all_but_weights(model, folder))
    writer = OneFileWriter(folder / WEIGHTS, {})
    mine = each(savers, doing, lambda: _as_stored(model, state()))
    try:
        planned = writing.plan(savers, doing, writer, mine)
        writing.write(savers, doing, writer, planned)
    except BaseException:
        if savers.rank == 0:
            writer.undo()
        raise
    decided(savers, doing, lambda: _remove_shards(folder))


def _as_stored(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names, and in the parts, in which transformers has it in files."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: value for name, value in state.items() if name not in ignored}
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        return kept
    found: dict[str, Any] = revert(model, kept)
    return found


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _on_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def _write_adapters(model: Any, folder: Path, adapters: dict[str, torch.Tensor]) -> None:
    """peft takes adapters out of a state by the names that they have in the model."""
    ours: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        found = adapters_of(model, {name: torch.empty(0, device="meta")})
        for key in found.keys() & adapters.keys():
            ours[name] = adapters[key]
    with _beside(folder) as place, _quiet():
        model.save_pretrained(place, state_dict=ours)


def _write_all_but_weights(model: Any, folder: Path) -> None:
    with _beside(folder) as place, _quiet():
        model.save_pretrained(place, state_dict={})
        (place / WEIGHTS).unlink(missing_ok=True)  # of older versions, which write an empty one


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose files are then moved, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        yield place
        for path in sorted(place.rglob("*")):
            if path.is_file():
                goal = folder / path.relative_to(place)
                goal.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, goal)
        sync(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar for no weights."""
    logs: Any = sys.modules.get("transformers.utils.logging")
    shown = logs is not None and logs.is_progress_bar_enabled()
    if shown:
        logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


def _remove_shards(folder: Path) -> None:
    """Of a model that was saved there before, in several files."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name):
            path.unlink()
