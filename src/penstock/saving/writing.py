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

from penstock.errors import RunError
from penstock.saving.folder import commit, write_synced
from penstock.saving.savers import Savers, decided, together

EXTRA = "extra.pt"


class Planner(DefaultSavePlanner):
    """Gives the tensors as they are, or, after `copy`, as they were then."""

    _copies: Mapping[MetadataIndex, torch.Tensor | BytesIO] = {}

    def copy(self, plan: SavePlan) -> None:
        """To the host, all that the plan writes."""
        found = {item.index: self.resolve_data(item) for item in plan.items}
        self._copies = {
            index: data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data
            for index, data in found.items()
        }

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        """What is to be written."""
        if write_item.index in self._copies:
            return self._copies[write_item.index]
        data = super().resolve_data(write_item)
        return data.detach() if isinstance(data, torch.Tensor) else data


@dataclass(frozen=True)
class Planned:
    """What this process writes, and what all write together."""

    planner: Planner
    mine: SavePlan
    metadata: Metadata


def plan(savers: Savers, doing: str, writer: StorageWriter, state: dict[str, Any]) -> Planned:
    """Agree who writes what: each tensor once, though several ranks have it."""
    planner = Planner()

    def local() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), savers.rank == 0)
        writer.set_up_storage_writer(savers.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    locals_ = together(savers, doing, local)

    def whole() -> tuple[list[SavePlan], Metadata]:
        plans, metadata = planner.create_global_plan(locals_)
        return writer.prepare_global_plan(plans), metadata

    plans, metadata = decided(savers, doing, whole)
    return Planned(planner, planner.finish_plan(plans[savers.rank]), metadata)


def write(savers: Savers, doing: str, writer: StorageWriter, planned: Planned) -> None:
    """Write; if all could, it counts."""
    results = together(
        savers, doing, lambda: writer.write_data(planned.mine, planned.planner).wait()
    )
    decided(savers, doing, lambda: writer.finish(planned.metadata, results))


class CheckpointWriter(FileSystemWriter):
    """Writes a folder that torch.distributed.checkpoint can read, with `extra.pt` in it.

    same: further names of what is saved, which lead to the same bytes
    """

    def __init__(self, place: Path, same: Mapping[str, str], extra: bytes) -> None:
        super().__init__(place, overwrite=False)
        self._place, self._same, self._extra = place, same, extra

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """By the first rank, when all have written."""
        self._check_here(results)
        self._add_names(metadata, results)
        super().finish(metadata, results)
        write_synced(self._place / EXTRA, self._extra)
        commit(self._place)

    def _check_here(self, results: list[list[WriteResult]]) -> None:
        here = set(os.listdir(self._place))
        for rank, written in enumerate(results):
            missing = {one.storage_data.relative_path for one in written} - here
            if missing:
                raise RunError(
                    f"rank {rank} has written '{missing.pop()}', and rank 0 does not find it in "
                    f"'{self._place}': save to a folder that all machines share"
                )

    def _add_names(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Under a further name, a tied tensor is read from where it stands under the first."""
        for other, kept in self._same.items():
            if kept not in metadata.state_dict_metadata:  # a buffer that is in no state_dict
                continue
            metadata.state_dict_metadata[other] = metadata.state_dict_metadata[kept]
            top = metadata.planner_data[kept][0]
            metadata.planner_data[other] = (top, other.removeprefix(f"{top}."))
            found = [one for written in results for one in written if one.index.fqn == kept]
            results[0] += [replace(one, index=replace(one.index, fqn=other)) for one in found]
