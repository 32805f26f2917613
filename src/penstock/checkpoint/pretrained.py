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

from penstock.checkpoint.directory import fsync_directory
from penstock.checkpoint.pretrained_names import (
    INDEX_FILE,
    WEIGHTS_FILE,
    extract_adapter_state,
    is_peft_model,
    is_pretrained,
)
from penstock.checkpoint.safetensors_io import SafetensorsWriter
from penstock.checkpoint.save_group import (
    SaveGroup,
    run_and_gather,
    run_on_each_rank,
    run_on_rank_zero,
)
from penstock.checkpoint.writer import execute_save, plan_save
from penstock.errors import PenstockTypeError

_SHARD_FILE = re.compile(r"model-\d+-of-\d+\.safetensors")


def write_pretrained(
    model: nn.Module | None,
    get_state: Callable[[], dict[str, Any]],
    save_group: SaveGroup,
    folder: Path,
) -> None:
    """The state is what this process saves of the model."""
    doing = f"saving to '{folder}'"
    if model is None or not is_pretrained(model):
        raise PenstockTypeError(
            "save_pretrained is for models of transformers and peft, which have a save_pretrained "
            f"and a config, and this is {'a Sequential' if model is None else type(model).__name__}"
            ": use pipe.save(folder) or pipe.export(file)"
        )
    if is_peft_model(model):
        found = run_and_gather(
            save_group,
            doing,
            lambda: _copy_to_cpu(extract_adapter_state(model, _select_tensors(get_state()))),
        )
        whole = {name: tensor for part in found for name, tensor in part.items()}
        run_on_rank_zero(save_group, doing, lambda: _write_adapters(model, folder, whole))
        return
    run_on_rank_zero(save_group, doing, lambda: _write_config_files(model, folder))
    writer = SafetensorsWriter(folder / WEIGHTS_FILE, {})
    mine = run_on_each_rank(
        save_group, doing, lambda: _revert_weight_conversion(model, get_state())
    )
    try:
        planned = plan_save(save_group, doing, writer, mine)
        execute_save(save_group, doing, writer, planned)
    except BaseException:
        if save_group.rank == 0:
            writer.remove_partial_file()
        raise
    run_on_rank_zero(save_group, doing, lambda: _remove_old_shards(folder))


def _revert_weight_conversion(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names, and in the parts, in which transformers has it in files."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {name: value for name, value in state.items() if name not in ignored}
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        return kept
    found: dict[str, Any] = revert(model, kept)
    return found


def _select_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _copy_to_cpu(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def _write_adapters(model: Any, folder: Path, adapters: dict[str, torch.Tensor]) -> None:
    """peft takes adapters out of a state by the names that they have in the model."""
    ours: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        found = extract_adapter_state(model, {name: torch.empty(0, device="meta")})
        for key in found.keys() & adapters.keys():
            ours[name] = adapters[key]
    with _staging_directory(folder) as place, _progress_bar_disabled():
        model.save_pretrained(place, state_dict=ours)


def _write_config_files(model: Any, folder: Path) -> None:
    with _staging_directory(folder) as place, _progress_bar_disabled():
        model.save_pretrained(place, state_dict={})
        (place / WEIGHTS_FILE).unlink(
            missing_ok=True
        )  # of older versions, which write an empty one


@contextmanager
def _staging_directory(folder: Path) -> Iterator[Path]:
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
        fsync_directory(folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _progress_bar_disabled() -> Iterator[None]:
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


def _remove_old_shards(folder: Path) -> None:
    """Of a model that was saved there before, in several files."""
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SHARD_FILE.fullmatch(path.name):
            path.unlink()
