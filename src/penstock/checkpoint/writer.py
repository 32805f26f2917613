"""One save: plan it with all ranks, write on each rank, commit on rank 0.

    every rank    make a local plan: the tensors that this rank has
    rank 0        make the global plan: which rank writes which tensor, each tensor once
    every rank    take a snapshot of its tensors, if the save runs in the background
    every rank    write its tensors
    rank 0        write the metadata, `extra.pt` and the manifest, which commits the save

The plans, the files and their format are those of torch.distributed.checkpoint. This module calls
its planner and its storage writer directly instead of `torch.distributed.checkpoint.save`, for two
reasons. A background save copies only the tensors that this process will write, and a save of a
single process does not need torch.distributed to be initialised.

The ranks exchange their plans, and the digests of what they wrote, as JSON. Nothing is pickled.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from penstock.checkpoint.directory import EXTRA_FILE
from penstock.checkpoint.manifest import DigestingFile, FileRecord, write_file_synced
from penstock.checkpoint.save_group import SaveGroup
from penstock.errors import RunError
from penstock.torch_compat import silence_storage_warning


class SnapshotSavePlanner(DefaultSavePlanner):
    """A planner that returns the current tensors, or copies of them after `take_snapshot`."""

    # Empty until `take_snapshot`. Then `resolve_data` returns the copies in it.
    _snapshot: Mapping[MetadataIndex, torch.Tensor | BytesIO] = {}

    def take_snapshot(self, plan: SavePlan) -> None:
        """Copy everything that the plan writes to the CPU, so that training may go on."""
        data_by_index = {item.index: self.resolve_data(item) for item in plan.items}
        self._snapshot = {
            index: data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data
            for index, data in data_by_index.items()
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """Return the tensor or the bytes to write for one item of the plan."""
        if write_item.index in self._snapshot:
            return self._snapshot[write_item.index]
        data = super().resolve_data(write_item)
        return data.detach() if isinstance(data, torch.Tensor) else data


@dataclass(frozen=True)
class AgreedSavePlan:
    """The plan of this process. On rank 0 the planner also has the metadata of the whole save."""

    planner: SnapshotSavePlanner
    local_plan: SavePlan


def plan_save(
    save_group: SaveGroup, description: str, writer: StorageWriter, state: dict[str, Any]
) -> AgreedSavePlan:
    """Agree with all ranks on who writes what. A tensor that several ranks have is written once."""
    planner = SnapshotSavePlanner()

    def make_local_plan() -> str:
        planner.set_up_planner(state, writer.storage_meta(), save_group.rank == 0)
        writer.set_up_storage_writer(save_group.rank == 0)
        return encode_records(writer.prepare_local_plan(planner.create_local_plan()))

    # The protocol of torch.distributed.checkpoint: every rank describes what it has, rank 0 removes
    # duplicates and fixes the layout of the files, and every rank gets its part of the result.
    local_plans = save_group.run_and_gather(description, make_local_plan)

    def make_global_plan() -> list[str]:
        plans, _ = planner.create_global_plan([decode_records(text) for text in local_plans])
        return [encode_records(plan) for plan in writer.prepare_global_plan(plans)]

    plans = save_group.run_on_rank_zero(description, make_global_plan)
    return AgreedSavePlan(planner, planner.finish_plan(decode_records(plans[save_group.rank])))


def execute_save(
    save_group: SaveGroup, description: str, writer: RankWriter, save_plan: AgreedSavePlan
) -> None:
    """Write on every rank. If all ranks succeeded, rank 0 commits the save."""
    silence_storage_warning()
    planner = save_plan.planner

    def write() -> tuple[str, dict[str, tuple[int, tuple[str, ...]]]]:
        results = writer.write_data(save_plan.local_plan, planner).wait()
        files = writer.get_written_files()
        return encode_records(results), {n: (f.size, f.digests) for n, f in files.items()}

    written = save_group.run_and_gather(description, write)

    def commit() -> None:
        results = [decode_records(text) for text, _ in written]
        files = {n: FileRecord(*record) for _, files in written for n, record in files.items()}
        writer.commit(planner.metadata, results, files)

    save_group.run_on_rank_zero(description, commit)


class RankWriter(StorageWriter):
    """A storage writer that also tells which files its rank has written."""

    def get_written_files(self) -> Mapping[str, FileRecord]:
        """Return the sizes and digests of the files of this rank. By default none is known."""
        return {}

    def commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        files: Mapping[str, FileRecord],
    ) -> None:
        """Finish the save on rank 0. `files` are those of all ranks."""
        self.finish(metadata, results)


# -------------------------------------------------------------------------------------------------
# Plans and results as text. They consist of records (dataclasses and enums) that
# torch.distributed.checkpoint defines, so a record travels as its class and its fields.
# -------------------------------------------------------------------------------------------------

_RECORD_PACKAGE = "torch.distributed.checkpoint."


def encode_records(value: Any) -> str:
    """Return a plan, or a list of write results, as JSON text."""
    return json.dumps(_encode(value))


def decode_records(text: str) -> Any:
    """Return the value that `encode_records` has written as text."""
    return _decode(json.loads(text))


def _encode(value: Any) -> Any:
    """Return a value as JSON. Types that JSON lacks become a list that starts with their name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):  # torch.Size is a tuple
        return [type(value).__name__, *map(_encode, value)]
    if isinstance(value, dict):
        return ["dict", *([_encode(k), _encode(v)] for k, v in value.items())]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ["torch", str(value).removeprefix("torch.")]
    record = type(value)
    if not record.__module__.startswith(_RECORD_PACKAGE):
        raise TypeError(f"a {record.__name__} in a save plan cannot be sent to another rank")
    path = [record.__module__.removeprefix(_RECORD_PACKAGE), record.__qualname__]
    if isinstance(value, Enum):
        return ["enum", path, value.name]
    return ["record", path, {f.name: _encode(getattr(value, f.name)) for f in fields(value)}]


def _decode(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        return encoded
    kind, *items = encoded
    if kind == "dict":
        return {_decode(key): _decode(value) for key, value in items}
    if kind == "torch":
        value = getattr(torch, items[0])
        if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            raise TypeError(f"torch.{items[0]} in a save plan is not a dtype or layout")
        return value
    if kind in ("enum", "record"):
        (module, name), content = items
        record = _find_record(module, name)
        if kind == "enum":
            return record[content]
        return record(**{name: _decode(value) for name, value in content.items()})
    return {"list": list, "tuple": tuple, "Size": torch.Size}[kind](map(_decode, items))


def _find_record(module: str, name: str) -> Any:
    """Return a record of torch.distributed.checkpoint. Raise for all else that its modules have."""
    record = getattr(importlib.import_module(_RECORD_PACKAGE + module), name)
    is_record = isinstance(record, type) and (is_dataclass(record) or issubclass(record, Enum))
    if not is_record or not record.__module__.startswith(_RECORD_PACKAGE):
        raise TypeError(f"{module}.{name} in a save plan is not a record")
    return record


class DigestingFileSystem(FileSystem):
    """Opens files for writing. `files` has the size and digests of each that was closed."""

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a new file."""
        file = DigestingFile(Path(path))
        try:
            with file:
                yield file
        except Exception:
            # PyTorch's writer replaces "No space left on device", and Ctrl-C, by an error about
            # positions in the file.
            if file.error is not None:
                raise file.error from None
            raise
        self.files[Path(path).name] = file.record

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class CheckpointWriter(FileSystemWriter, RankWriter):
    """A writer of directories that torch.distributed.checkpoint can read, plus `extra.pt`.

    `tied_names` maps further names of saved tensors to the name that each is saved under. Both
    names lead to the same bytes. `commit_files` gets the sizes and digests of all files.
    """

    def __init__(
        self,
        directory: Path,
        tied_names: Mapping[str, str],
        extra: bytes,
        commit_files: Callable[[Mapping[str, FileRecord]], object],
    ) -> None:
        super().__init__(directory, overwrite=False)
        self._directory, self._tied_names, self._extra = directory, tied_names, extra
        self._commit_files = commit_files
        self.fs = self._digesting = DigestingFileSystem()

    def get_written_files(self) -> Mapping[str, FileRecord]:
        """Return the sizes and digests of the files of this rank."""
        return self._digesting.files

    def commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        files: Mapping[str, FileRecord],
    ) -> None:
        """Write the metadata, `extra.pt` and the manifest. Rank 0 calls this last.

        The manifest comes last: it makes the save whole, and old ones are removed after it.
        """
        self._check_files_visible(results)
        self._add_tied_names(metadata, results)
        self.finish(metadata, results)
        extra = write_file_synced(self._directory / EXTRA_FILE, self._extra)
        self._commit_files({**files, **self._digesting.files, EXTRA_FILE: extra})

    def _check_files_visible(self, results: list[list[WriteResult]]) -> None:
        """Raise if rank 0 cannot see a file of another rank: they do not share a file system."""
        file_names = set(os.listdir(self._directory))
        for rank, written in enumerate(results):
            missing = {result.storage_data.relative_path for result in written} - file_names
            if missing:
                raise RunError(
                    f"rank {rank} wrote '{missing.pop()}', but rank 0 cannot find it in "
                    f"'{self._directory}'. Save to a folder that all machines share."
                )

    def _add_tied_names(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make each tied tensor readable under all its names, without writing it again.

        The metadata has three tables by name: the shapes, the path of each key in the nested
        state dict, and the place in the files. `FileSystemWriter.finish` builds the last one from
        `results`, so each further name gets a copy of the result of the saved name.
        """
        for alias, saved_name in self._tied_names.items():
            if saved_name not in metadata.state_dict_metadata:  # a non-persistent buffer
                continue
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[saved_name]
            top = metadata.planner_data[saved_name][0]
            metadata.planner_data[alias] = (top, alias.removeprefix(f"{top}."))
            aliased = [
                result
                for written in results
                for result in written
                if result.index.fqn == saved_name
            ]
            results[0] += [replace(r, index=replace(r.index, fqn=alias)) for r in aliased]
