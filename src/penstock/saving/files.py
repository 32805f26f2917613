"""A model read from safetensors files: only the tensors that are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.errors import ArgumentError, MissingExtra
from penstock.saving.naming import PretrainedNameMap, map_stored_names
from penstock.saving.one_file import DTYPE_NAMES

_DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SafetensorsReader(StorageReader):
    """Reads tensors by their names out of safetensors files, and nothing else of them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._path_by_name = files, dict[str, Path]()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """It is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From the headers alone."""
        found: dict[str, Any] = {}
        for path in self._files:
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118  (it is no dict)
                    part = file.get_slice(name)
                    size = torch.Size(part.get_shape())
                    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                    dtype = _parse_dtype(path, name, part.get_dtype())
                    found[name] = TensorStorageMetadata(TensorProperties(dtype), size, [whole])
                    self._path_by_name[name] = path
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """It knows the files already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """The parts that the plan names, file by file."""
        items = sorted(plan.items, key=lambda item: str(self._path_by_name[item.storage_index.fqn]))
        for path in dict.fromkeys(self._path_by_name[item.storage_index.fqn] for item in items):
            with open_safetensors(path) as file:
                for item in items:
                    name = item.storage_index.fqn
                    if self._path_by_name[name] != path:
                        continue
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_slice(file, name, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def _read_slice(
    file: Any, name: str, offsets: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    part = file.get_slice(name)
    if not lengths or list(lengths) == part.get_shape():
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    cut: torch.Tensor = part[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    return cut


def open_safetensors(path: Path) -> Any:
    """The file, opened by the safetensors library."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingExtra("safetensors", "safetensors", "reading a safetensors file") from None
    return safe_open(path, framework="pt")


def _parse_dtype(path: Path, name: str, dtype_name: str) -> torch.dtype:
    if dtype_name not in _DTYPE_BY_NAME:
        raise ArgumentError(
            f"'{path}' has {name} as {dtype_name}, which is none of PyTorch's dtypes here: convert it, "
            f"to {', '.join(sorted(_DTYPE_BY_NAME))}"
        )
    return _DTYPE_BY_NAME[dtype_name]


class PretrainedReader(SafetensorsReader):
    """The same under a model's names, where the files have others, or have it in other parts."""

    name_map: PretrainedNameMap

    def __init__(
        self, files: Sequence[Path], model: nn.Module, shapes: Mapping[str, torch.Size | None]
    ) -> None:
        super().__init__(files)
        self.model, self._shapes = model, shapes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is put together has the shape that it has in the model."""
        stored = super().read_metadata().state_dict_metadata
        self.name_map = map_stored_names(self.model, stored, self._shapes)
        return Metadata({name: self._metadata_for(name, stored) for name in self.name_map.recipes})

    def _metadata_for(self, name: str, stored: Mapping[str, Any]) -> Any:
        recipe = self.name_map.recipes[name]
        if recipe.converter is None:
            return stored[recipe.sources[0]]
        size = self._shapes[name] or torch.Size([])
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(stored[recipe.sources[0]].properties, size, [whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """One by one, each file opened once."""
        with ExitStack() as opened:
            files: dict[Path, Any] = {}

            def open_file_of(source: str) -> Any:
                path = self._path_by_name[source]
                if path not in files:
                    files[path] = opened.enter_context(open_safetensors(path))
                return files[path]

            for item in plan.items:
                recipe = self.name_map.recipes[item.storage_index.fqn]
                target = planner.resolve_tensor(item).detach()
                if recipe.converter is None:
                    source = recipe.sources[0]
                    part = _read_slice(
                        open_file_of(source), source, item.storage_offsets, item.lengths
                    )
                else:
                    made = recipe.build(lambda key: open_file_of(key).get_tensor(key), self.model)
                    at = zip(item.storage_offsets, item.lengths, strict=True)
                    part = made[tuple(slice(begin, begin + length) for begin, length in at)]
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
