"""One load: each process finds its own tensors in a checkpoint, and reads nothing else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from penstock.checkpoint import local_state as states
from penstock.checkpoint.directory import saved
from penstock.checkpoint.local_state import LocalState
from penstock.checkpoint.pretrained_names import KeyMismatch, find_weights_file
from penstock.checkpoint.safetensors_io import PretrainedReader, SafetensorsReader
from penstock.checkpoint.writer import EXTRA_FILE
from penstock.errors import ArgumentError

MODEL_KEY, OPTIMIZER_KEY, RNG_KEY = "model", "optimizer", "random"


@dataclass(frozen=True)
class CheckpointSource:
    """What is stored at a path: facts about each entry, by name, and how to read it."""

    path: Path
    reader: StorageReader
    metadata: Metadata
    prefix: str  # before the names of the model; a file, or a checkpoint by others, has none

    @property
    def entries(self) -> dict[str, Any]:
        """What is known of each, without reading it."""
        return self.metadata.state_dict_metadata

    def entries_under(self, prefix: str) -> dict[str, Any]:
        """The entries that begin so, without it."""
        found = self.entries.items()
        return {k.removeprefix(prefix): v for k, v in found if k.startswith(prefix)}


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that is meant: in a folder of saves, the last."""
    if path.is_file() or (path / ".metadata").exists():
        return path
    last = saved(path) or find_weights_file(path)
    if last is not None:
        return last
    missing = "is not there" if not path.exists() else "has no checkpoint in it yet"
    raise ArgumentError(
        f"'{path}' {missing}: give a folder that pipe.save has written to (penstock.saved(folder) "
        "tells whether it has), a folder of torch.distributed.checkpoint or of save_pretrained, a "
        ".safetensors file or its .safetensors.index.json"
    )


def open_checkpoint(
    path: Path, names: Collection[str], local_state: LocalState
) -> CheckpointSource:
    """What is stored there, perhaps of a model with these names; only headers are read.

    (A model may have a layer that is called "model".)
    """
    reader: StorageReader
    if path.is_dir():
        reader = FileSystemReader(path)
    elif local_state.pretrained_model is not None:
        mine = {
            n: value.shape
            for n, (_, value) in local_state.unique_state().items()
            if _is_tensor(value)
        }
        further = (*local_state.tied_names, *local_state.tied_names.values())
        shapes = {n: mine.get(n) for n in (*names, *further)}
        reader = PretrainedReader(_safetensors_files(path), local_state.pretrained_model, shapes)
    else:
        reader = SafetensorsReader(_safetensors_files(path))
    metadata = reader.read_metadata()
    ours = not isinstance(reader, PretrainedReader)
    below = ours and any(f"{MODEL_KEY}.{name}" in metadata.state_dict_metadata for name in names)
    return CheckpointSource(path, reader, metadata, f"{MODEL_KEY}." if below else "")


def _safetensors_files(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return [path]
    shards = json.loads(path.read_text())["weight_map"].values()
    return [path.parent / name for name in dict.fromkeys(shards)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def check_stored_names(
    source: CheckpointSource, names: Collection[str], tied_names: Mapping[str, str]
) -> None:
    """What is stored of the model is somewhere in it: `names` are those of all ranks."""
    if source.path.is_dir() and not source.prefix:
        return  # by others: what is there beside the model cannot be told from it
    if isinstance(source.reader, PretrainedReader):
        _check_pretrained_names(source, source.reader, names, tied_names)
        return
    known = {*names, *tied_names, *tied_names.values()}
    stored = source.entries_under(source.prefix)
    strange = [
        name for name in stored if name not in known and not _is_below_known_name(name, known)
    ]
    if strange:
        raise ArgumentError(
            f"'{source.path}' has {_format_names(strange)}, which the model has not: it was saved from "
            "another model"
        )


def _check_pretrained_names(
    source: CheckpointSource,
    reader: PretrainedReader,
    names: Collection[str],
    tied_names: Mapping[str, str],
) -> None:
    """The base model has to be there as it is; what is around it may be another: that is told."""
    named = reader.name_map
    there = {tied_names.get(name, name) for name in named.recipes}
    gone = [n for n in names if n in named.expected and tied_names.get(n, n) not in there]
    missing = KeyMismatch.classify(reader.model, gone, names, "missing")
    strange = KeyMismatch.classify(reader.model, named.unexpected, named.stored, "unexpected")
    told = []
    for inside, outside, what in (
        (missing.in_base_model, missing.outside_base_model, "has nothing for"),
        (strange.in_base_model, strange.outside_base_model, "has what the model has not,"),
    ):
        if inside:
            raise ArgumentError(
                f"'{source.path}' {what} {_format_names(inside)}: it was saved from another model"
            )
        told += [f"{what} {_format_names(outside)}"] if outside else []
    if told:
        warnings.warn(
            f"'{source.path}' {'; and it '.join(told)}: what is not there stays as it is, and the "
            "rest is not read",
            stacklevel=2,
        )


def _is_below_known_name(name: str, known: set[str]) -> bool:
    """Of a value in several parts, such as a module's extra state."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in known for end in range(1, len(parts)))


def load_model(local_state: LocalState, source: CheckpointSource) -> None:
    """Into this process's own parameters and buffers."""
    stored = source.entries_under(source.prefix)
    state = local_state.unique_state()
    if isinstance(source.reader, PretrainedReader):  # what is missing there is allowed to
        state = {
            n: v for n, v in state.items() if any(o in stored for o in local_state.all_names(n))
        }
    chosen = {
        name: next((one for one in [name, *local_state.all_names(name)] if one in stored), name)
        for name in state
    }
    _check_stored_shapes(state, source, chosen)
    wanted = {chosen[name]: value for name, (_, value) in state.items()}
    nested = {MODEL_KEY: wanted} if source.prefix else wanted
    read_entries(source, nested)
    if isinstance(source.reader, PretrainedReader):
        _check_tied_values(
            local_state, source, {chosen[n]: value for n, (_, value) in state.items()}
        )
    local_state.module.load_state_dict(
        {**local_state.module.state_dict(), **{k: wanted[chosen[n]] for n, (k, _) in state.items()}}
    )


def _check_tied_values(
    local_state: LocalState, source: CheckpointSource, loaded: Mapping[str, Any]
) -> None:
    """What the model has once may be stored twice, and then it has to be the same."""
    for name, value in loaded.items():
        for other in local_state.all_names(name):
            if other == name or other not in source.entries:
                continue
            room = {other: torch.empty_like(value)}
            read_entries(source, room)
            if not torch.equal(room[other], value):
                raise ArgumentError(
                    f"'{source.path}' has other numbers for '{other}' than for '{name}', and the "
                    "model ties them: build it untied (config.tie_word_embeddings = False)"
                )


def _check_stored_shapes(
    state: Mapping[str, tuple[str, Any]], source: CheckpointSource, stored_names: Mapping[str, str]
) -> None:
    missing, other = [], []
    for name, (_, value) in state.items():
        stored = source.entries.get(source.prefix + stored_names[name])
        if not isinstance(value, torch.Tensor):
            continue
        if stored is None:
            missing.append(name)
        elif isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            other.append(f"{name}, {tuple(stored.size)} there and {tuple(value.shape)} here")
    if missing:
        raise ArgumentError(
            f"'{source.path}' has nothing for {_format_names(missing)}: it was saved from another model"
        )
    if other:
        raise ArgumentError(
            f"'{source.path}' has other shapes: {_format_names(other)}: it was saved from another model"
        )


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def load_optimizers(
    local_state: LocalState, source: CheckpointSource, optimizers: Sequence[Optimizer]
) -> None:
    """Into this process's optimizers."""
    room = {
        OPTIMIZER_KEY: states.allocate_optimizer_state(
            local_state, optimizers, source.entries_under(f"{OPTIMIZER_KEY}.")
        )
    }
    read_entries(source, room)
    states.restore_optimizer_state(local_state, optimizers, room[OPTIMIZER_KEY])


def load_rng_state(local_state: LocalState, source: CheckpointSource) -> None:
    """The generator of random numbers stands where it stood, if this replica was saved."""
    stored = source.entries_under(f"{RNG_KEY}.").get(str(local_state.replica))
    if isinstance(stored, TensorStorageMetadata):
        room = {RNG_KEY: {str(local_state.replica): torch.empty(stored.size, dtype=torch.uint8)}}
        read_entries(source, room)
        torch.set_rng_state(room[RNG_KEY][str(local_state.replica)])


def load_extra(source: CheckpointSource) -> Any:
    """What the user has saved beside; None for a checkpoint that has nothing of the kind."""
    path = source.path / EXTRA_FILE
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def read_entries(source: CheckpointSource, state: dict[str, Any]) -> None:
    """Fill the state with what is stored under its names: this process alone, and only that."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, source.metadata, True)
    source.reader.set_up_storage_reader(source.metadata, True)
    plan = source.reader.prepare_local_plan(planner.create_local_plan())
    [plan] = planner.create_global_plan(source.reader.prepare_global_plan([plan]))
    with torch.no_grad():
        source.reader.read_data(planner.finish_plan(plan), planner).wait()
