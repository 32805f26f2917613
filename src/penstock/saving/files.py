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
from penstock.saving.naming import Named, named
from penstock.saving.one_file import DTYPES

_NAMED = {name: dtype for dtype, name in DTYPES.items()}


class FilesReader(StorageReader):
    """Reads tensors by their names out of safetensors files, and nothing else of them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._file_of = files, dict[str, Path]()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """It is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """From the headers alone."""
        found: dict[str, Any] = {}
        for path in self._files:
            with open_file(path) as file:
                for name in file.keys():  # noqa: SIM118  (it is no dict)
                    part = file.get_slice(name)
                    size = torch.Size(part.get_shape())
                    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                    dtype = _dtype(path, name, part.get_dtype())
                    found[name] = TensorStorageMetadata(TensorProperties(dtype), size, [whole])
                    self._file_of[name] = path
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
        items = sorted(plan.items, key=lambda item: str(self._file_of[item.storage_index.fqn]))
        for path in dict.fromkeys(self._file_of[item.storage_index.fqn] for item in items):
            with open_file(path) as file:
                for item in items:
                    name = item.storage_index.fqn
                    if self._file_of[name] != path:
                        continue
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, name, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def _read(file: Any, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    part = file.get_slice(name)
    if not lengths or list(lengths) == part.get_shape():
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    cut: torch.Tensor = part[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    return cut


def open_file(path: Path) -> Any:
    """The file, opened by the safetensors library."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingExtra("safetensors", "safetensors", "reading a safetensors file") from None
    return safe_open(path, framework="pt")


def _dtype(path: Path, name: str, called: str) -> torch.dtype:
    if called not in _NAMED:
        raise ArgumentError(
            f"'{path}' has {name} as {called}, which is none of PyTorch's dtypes here: convert it, "
            f"to {', '.join(sorted(_NAMED))}"
        )
    return _NAMED[called]


class PretrainedReader(FilesReader):
    """The same under a model's names, where the files have others, or have it in other parts."""

    named: Named

    def __init__(
        self, files: Sequence[Path], model: nn.Module, shapes: Mapping[str, torch.Size | None]
    ) -> None:
        super().__init__(files)
        self.model, self._shapes = model, shapes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is put together has the shape that it has in the model."""
        stored = super().read_metadata().state_dict_metadata
        self.named = named(self.model, stored, self._shapes)
        return Metadata({name: self._entry(name, stored) for name in self.named.recipes})

    def _entry(self, name: str, stored: Mapping[str, Any]) -> Any:
        recipe = self.named.recipes[name]
        if recipe.converts is None:
            return stored[recipe.sources[0]]
        size = self._shapes[name] or torch.Size([])
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(stored[recipe.sources[0]].properties, size, [whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """One by one, each file opened once."""
        with ExitStack() as opened:
            files: dict[Path, Any] = {}

            def file_with(source: str) -> Any:
                path = self._file_of[source]
                if path not in files:
                    files[path] = opened.enter_context(open_file(path))
                return files[path]

            for item in plan.items:
                recipe = self.named.recipes[item.storage_index.fqn]
                target = planner.resolve_tensor(item).detach()
                if recipe.converts is None:
                    source = recipe.sources[0]
                    part = _read(file_with(source), source, item.storage_offsets, item.lengths)
                else:
                    made = recipe.made(lambda key: file_with(key).get_tensor(key), self.model)
                    at = zip(item.storage_offsets, item.lengths, strict=True)
                    part = made[tuple(slice(begin, begin + length) for begin, length in at)]
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
