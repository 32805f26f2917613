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

from penstock.errors import ArgumentError
from penstock.saving import optimizers as states
from penstock.saving.files import FilesReader, PretrainedReader
from penstock.saving.folder import saved
from penstock.saving.holding import Holding
from penstock.saving.naming import Differences, weights_in
from penstock.saving.writing import EXTRA

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"


@dataclass(frozen=True)
class Source:
    """What is stored at a path: facts about each entry, by name, and how to read it."""

    path: Path
    reader: StorageReader
    metadata: Metadata
    prefix: str  # before the names of the model; a file, or a checkpoint by others, has none

    @property
    def entries(self) -> dict[str, Any]:
        """What is known of each, without reading it."""
        return self.metadata.state_dict_metadata

    def below(self, prefix: str) -> dict[str, Any]:
        """The entries that begin so, without it."""
        found = self.entries.items()
        return {k.removeprefix(prefix): v for k, v in found if k.startswith(prefix)}


def found_at(path: Path) -> Path:
    """The checkpoint that is meant: in a folder of saves, the last."""
    if path.is_file() or (path / ".metadata").exists():
        return path
    last = saved(path) or weights_in(path)
    if last is not None:
        return last
    missing = "is not there" if not path.exists() else "has no checkpoint in it yet"
    raise ArgumentError(
        f"'{path}' {missing}: give a folder that pipe.save has written to (penstock.saved(folder) "
        "tells whether it has), a folder of torch.distributed.checkpoint or of save_pretrained, a "
        ".safetensors file or its .safetensors.index.json"
    )


def opened(path: Path, names: Collection[str], holding: Holding) -> Source:
    """What is stored there, perhaps of a model with these names; only headers are read.

    (A model may have a layer that is called "model".)
    """
    reader: StorageReader
    if path.is_dir():
        reader = FileSystemReader(path)
    elif holding.model is not None:
        mine = {n: value.shape for n, (_, value) in holding.state().items() if _is_tensor(value)}
        further = (*holding.same, *holding.same.values())
        shapes = {n: mine.get(n) for n in (*names, *further)}
        reader = PretrainedReader(_files(path), holding.model, shapes)
    else:
        reader = FilesReader(_files(path))
    metadata = reader.read_metadata()
    ours = not isinstance(reader, PretrainedReader)
    below = ours and any(f"{MODEL}.{name}" in metadata.state_dict_metadata for name in names)
    return Source(path, reader, metadata, f"{MODEL}." if below else "")


def _files(path: Path) -> list[Path]:
    if path.suffix != ".json":
        return [path]
    shards = json.loads(path.read_text())["weight_map"].values()
    return [path.parent / name for name in dict.fromkeys(shards)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def check_all(source: Source, names: Collection[str], same: Mapping[str, str]) -> None:
    """What is stored of the model is somewhere in it: `names` are those of all ranks."""
    if source.path.is_dir() and not source.prefix:
        return  # by others: what is there beside the model cannot be told from it
    if isinstance(source.reader, PretrainedReader):
        _check_pretrained(source, source.reader, names, same)
        return
    known = {*names, *same, *same.values()}
    stored = source.below(source.prefix)
    strange = [name for name in stored if name not in known and not _within(name, known)]
    if strange:
        raise ArgumentError(
            f"'{source.path}' has {_some(strange)}, which the model has not: it was saved from "
            "another model"
        )


def _check_pretrained(
    source: Source, reader: PretrainedReader, names: Collection[str], same: Mapping[str, str]
) -> None:
    """The base model has to be there as it is; what is around it may be another: that is told."""
    named = reader.named
    there = {same.get(name, name) for name in named.recipes}
    gone = [n for n in names if n in named.covers and same.get(n, n) not in there]
    missing = Differences.of(reader.model, gone, names, "missing")
    strange = Differences.of(reader.model, named.besides, named.stored, "unexpected")
    told = []
    for inside, outside, what in (
        (missing.inside, missing.outside, "has nothing for"),
        (strange.inside, strange.outside, "has what the model has not,"),
    ):
        if inside:
            raise ArgumentError(
                f"'{source.path}' {what} {_some(inside)}: it was saved from another model"
            )
        told += [f"{what} {_some(outside)}"] if outside else []
    if told:
        warnings.warn(
            f"'{source.path}' {'; and it '.join(told)}: what is not there stays as it is, and the "
            "rest is not read",
            stacklevel=2,
        )


def _within(name: str, known: set[str]) -> bool:
    """Of a value in several parts, such as a module's extra state."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in known for end in range(1, len(parts)))


def read_model(holding: Holding, source: Source) -> None:
    """Into this process's own parameters and buffers."""
    stored = source.below(source.prefix)
    state = holding.state()
    if isinstance(source.reader, PretrainedReader):  # what is missing there is allowed to
        state = {n: v for n, v in state.items() if any(o in stored for o in holding.names(n))}
    chosen = {
        name: next((one for one in [name, *holding.names(name)] if one in stored), name)
        for name in state
    }
    _check_fits(state, source, chosen)
    wanted = {chosen[name]: value for name, (_, value) in state.items()}
    nested = {MODEL: wanted} if source.prefix else wanted
    read(source, nested)
    if isinstance(source.reader, PretrainedReader):
        _check_ties(holding, source, {chosen[n]: value for n, (_, value) in state.items()})
    holding.module.load_state_dict(
        {**holding.module.state_dict(), **{k: wanted[chosen[n]] for n, (k, _) in state.items()}}
    )


def _check_ties(holding: Holding, source: Source, found: Mapping[str, Any]) -> None:
    """What the model has once may be stored twice, and then it has to be the same."""
    for name, value in found.items():
        for other in holding.names(name):
            if other == name or other not in source.entries:
                continue
            room = {other: torch.empty_like(value)}
            read(source, room)
            if not torch.equal(room[other], value):
                raise ArgumentError(
                    f"'{source.path}' has other numbers for '{other}' than for '{name}', and the "
                    "model ties them: build it untied (config.tie_word_embeddings = False)"
                )


def _check_fits(
    state: Mapping[str, tuple[str, Any]], source: Source, chosen: Mapping[str, str]
) -> None:
    missing, other = [], []
    for name, (_, value) in state.items():
        stored = source.entries.get(source.prefix + chosen[name])
        if not isinstance(value, torch.Tensor):
            continue
        if stored is None:
            missing.append(name)
        elif isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            other.append(f"{name}, {tuple(stored.size)} there and {tuple(value.shape)} here")
    if missing:
        raise ArgumentError(
            f"'{source.path}' has nothing for {_some(missing)}: it was saved from another model"
        )
    if other:
        raise ArgumentError(
            f"'{source.path}' has other shapes: {_some(other)}: it was saved from another model"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def read_optimizers(holding: Holding, source: Source, optimizers: Sequence[Optimizer]) -> None:
    """Into this process's optimizers."""
    room = {OPTIMIZER: states.blank(holding, optimizers, source.below(f"{OPTIMIZER}."))}
    read(source, room)
    states.restore(holding, optimizers, room[OPTIMIZER])


def read_random(holding: Holding, source: Source) -> None:
    """The generator of random numbers stands where it stood, if this replica was saved."""
    stored = source.below(f"{RANDOM}.").get(str(holding.replica))
    if isinstance(stored, TensorStorageMetadata):
        room = {RANDOM: {str(holding.replica): torch.empty(stored.size, dtype=torch.uint8)}}
        read(source, room)
        torch.set_rng_state(room[RANDOM][str(holding.replica)])


def read_extra(source: Source) -> Any:
    """What the user has saved beside; None for a checkpoint that has nothing of the kind."""
    path = source.path / EXTRA
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)


def read(source: Source, state: dict[str, Any]) -> None:
    """Fill the state with what is stored under its names: this process alone, and only that."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, source.metadata, True)
    source.reader.set_up_storage_reader(source.metadata, True)
    plan = source.reader.prepare_local_plan(planner.create_local_plan())
    [plan] = planner.create_global_plan(source.reader.prepare_global_plan([plan]))
    with torch.no_grad():
        source.reader.read_data(planner.finish_plan(plan), planner).wait()
