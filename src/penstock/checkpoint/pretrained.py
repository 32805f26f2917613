"""`Pipe.save_pretrained`: write a folder that `from_pretrained` of transformers or peft can read.

a transformers model    rank 0 lets the model write everything but its weights; then all ranks
                        write model.safetensors together, as in `Pipe.export`
a peft model            adapters are small, so rank 0 gathers them and lets peft write its folder
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

from penstock.checkpoint.manifest import fsync_directory
from penstock.checkpoint.pretrained_names import (
    INDEX_FILE,
    WEIGHTS_FILE,
    extract_adapter_state,
    is_peft_model,
    is_pretrained,
)
from penstock.checkpoint.safetensors_io import SafetensorsWriter
from penstock.checkpoint.save_group import SaveGroup
from penstock.checkpoint.writer import execute_save, plan_save
from penstock.errors import PenstockTypeError

_SHARD_FILE = re.compile(r"model-\d+-of-\d+\.safetensors")


def write_pretrained(
    model: nn.Module | None,
    get_state: Callable[[], dict[str, Any]],
    save_group: SaveGroup,
    folder: Path,
) -> None:
    """Write the folder of a transformers or peft model. Every rank calls this.

    `get_state` returns the tensors of the model that this process saves.
    """
    description = f"saving to '{folder}'"
    if model is None or not is_pretrained(model):
        raise PenstockTypeError(
            "save_pretrained needs a transformers or peft model (with a save_pretrained method and "
            f"a config), not {'a Sequential' if model is None else type(model).__name__}"
            ". Use pipe.save(folder) or pipe.export(file)."
        )
    # A peft model also has a config and a `save_pretrained`, so it must be recognised first.
    if is_peft_model(model):

        def extract_adapters() -> dict[str, torch.Tensor]:
            tensors = {n: v for n, v in get_state().items() if isinstance(v, torch.Tensor)}
            state = extract_adapter_state(model, tensors)
            return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}

        gathered = save_group.run_and_gather(description, extract_adapters)
        adapters = {name: tensor for part in gathered for name, tensor in part.items()}
        save_group.run_on_rank_zero(description, lambda: _write_adapters(model, folder, adapters))
        return
    # The weights come after the config, and old shards are removed last. A kill in between leaves
    # any older weights complete.
    save_group.run_on_rank_zero(description, lambda: _write_config_files(model, folder))
    writer = SafetensorsWriter(folder / WEIGHTS_FILE, {})
    state = save_group.run_on_each_rank(
        description, lambda: _revert_weight_conversion(model, get_state())
    )
    with save_group.clean_up_on_failure(writer.remove_partial_file):
        planned = plan_save(save_group, description, writer, state)
        execute_save(save_group, description, writer, planned)
    save_group.run_on_rank_zero(description, lambda: _remove_old_shards(folder))


def _revert_weight_conversion(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the names and the parts that transformers uses in files.

    transformers 5 renames and merges tensors when it loads a model, and has a function that undoes
    this. Earlier versions store tensors as they are in the model.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    saved_state = {name: value for name, value in state.items() if name not in ignored}
    # The model exists, so transformers has been imported. This never imports it.
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        return saved_state
    reverted: dict[str, Any] = revert(model, saved_state)
    return reverted


def _write_adapters(model: Any, folder: Path, adapters: dict[str, torch.Tensor]) -> None:
    """Let peft write its folder from the adapters of all ranks.

    `adapters` has the names that peft uses in files, but `save_pretrained` expects the names of the
    model. Passing each name of the model through peft, with an empty tensor, shows which names
    belong together.
    """
    state: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        extracted = extract_adapter_state(model, {name: torch.empty(0, device="meta")})
        for key in extracted.keys() & adapters.keys():
            state[name] = adapters[key]
    with _staging_directory(folder) as staging, _progress_bar_disabled():
        model.save_pretrained(staging, state_dict=state)


def _write_config_files(model: Any, folder: Path) -> None:
    """Let the model write its config and its other small files, but no weights."""
    with _staging_directory(folder) as staging, _progress_bar_disabled():
        model.save_pretrained(staging, state_dict={})
        # Older versions of transformers write an empty weights file for an empty state.
        (staging / WEIGHTS_FILE).unlink(missing_ok=True)


@contextmanager
def _staging_directory(folder: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder, and move its files into `folder` at the end.

    Each file is replaced in one atomic step, so a kill never leaves half a file in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".part-", dir=folder))
    try:
        yield staging
        for path in sorted(staging.rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        fsync_directory(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _progress_bar_disabled() -> Iterator[None]:
    """Context manager: hide the progress bar that transformers shows, even for no weights."""
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
    """Remove the shards and the index of a model that was saved there before in several files.

    `from_pretrained` must not find two sets of weights.
    """
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SHARD_FILE.fullmatch(path.name):
            path.unlink()
