"""One save: planned together, then written by each process, then made to count by the first.

The plans, the files and their format are torch.distributed.checkpoint's. It is driven from here,
and not by its own `save`, so that only what this process will write is copied for the background,
and so that a save of one process needs no torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from penstock.checkpoint.directory import commit_save, write_file_synced
from penstock.checkpoint.save_group import SaveGroup, run_and_gather, run_on_rank_zero
from penstock.errors import RunError

EXTRA_FILE = "extra.pt"


class SnapshotSavePlanner(DefaultSavePlanner):
    """Gives the tensors as they are, or, after `copy`, as they were then."""

    _snapshot: Mapping[MetadataIndex, torch.Tensor | BytesIO] = {}

    def take_snapshot(self, plan: SavePlan) -> None:
        """To the host, all that the plan writes."""
        found = {item.index: self.resolve_data(item) for item in plan.items}
        self._snapshot = {
            index: data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data
            for index, data in found.items()
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """What is to be written."""
        if write_item.index in self._snapshot:
            return self._snapshot[write_item.index]
        data = super().resolve_data(write_item)
        return data.detach() if isinstance(data, torch.Tensor) else data


@dataclass(frozen=True)
class AgreedSavePlan:
    """What this process writes, and what all write together."""

    planner: SnapshotSavePlanner
    local_plan: SavePlan
    metadata: Metadata


def plan_save(
    save_group: SaveGroup, description: str, writer: StorageWriter, state: dict[str, Any]
) -> AgreedSavePlan:
    """Agree who writes what: each tensor once, though several ranks have it."""
    planner = SnapshotSavePlanner()

    def make_local_plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), save_group.rank == 0)
        writer.set_up_storage_writer(save_group.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    locals_ = run_and_gather(save_group, description, make_local_plan)

    def make_global_plan() -> tuple[list[SavePlan], Metadata]:
        plans, metadata = planner.create_global_plan(locals_)
        return writer.prepare_global_plan(plans), metadata

    plans, metadata = run_on_rank_zero(save_group, description, make_global_plan)
    return AgreedSavePlan(planner, planner.finish_plan(plans[save_group.rank]), metadata)


def execute_save(
    save_group: SaveGroup, description: str, writer: StorageWriter, save_plan: AgreedSavePlan
) -> None:
    """Write; if all could, it counts."""
    results = run_and_gather(
        save_group,
        description,
        lambda: writer.write_data(save_plan.local_plan, save_plan.planner).wait(),
    )
    run_on_rank_zero(save_group, description, lambda: writer.finish(save_plan.metadata, results))


class CheckpointWriter(FileSystemWriter):
    """Writes a folder that torch.distributed.checkpoint can read, with `extra.pt` in it.

    same: further names of what is saved, which lead to the same bytes
    """

    def __init__(self, directory: Path, tied_names: Mapping[str, str], extra: bytes) -> None:
        super().__init__(directory, overwrite=False)
        self._directory, self._tied_names, self._extra = directory, tied_names, extra

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the first rank, when all have written."""
        self._check_files_visible(results)
        self._add_tied_names(metadata, results)
        super().finish(metadata, results)
        write_file_synced(self._directory / EXTRA_FILE, self._extra)
        commit_save(self._directory)

    def _check_files_visible(self, results: list[list[WriteResult]]) -> None:
        here = set(os.listdir(self._directory))
        for rank, written in enumerate(results):
            missing = {one.storage_data.relative_path for one in written} - here
            if missing:
                raise RunError(
                    f"rank {rank} has written '{missing.pop()}', and rank 0 does not find it in "
                    f"'{self._directory}': save to a folder that all machines share"
                )

    def _add_tied_names(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Under a further name, a tied tensor is read from where it stands under the first."""
        for other, kept in self._tied_names.items():
            if kept not in metadata.state_dict_metadata:  # a buffer that is in no state_dict
                continue
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata[kept]
            top = metadata.planner_data[kept][0]
            metadata.planner_data[other] = (top, other.removeprefix(f"{top}."))
            found = [one for written in results for one in written if one.index.fqn == kept]
            results[0] += [replace(one, index=replace(one.index, fqn=other)) for one in found]
