"""A model written to one safetensors file, each rank its own bytes of it.

The format: the header's length in eight bytes, the header as JSON with each tensor's dtype, shape
and place, then the tensors' bytes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import prod
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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.directory import fsync_directory
from penstock.checkpoint.pretrained_names import PretrainedNameMap, map_stored_names
from penstock.errors import ArgumentError, MissingExtra

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class SafetensorsWriter(StorageWriter):
    """Writes `path`, beside it first; `same` are the further names of tied tensors."""

    def __init__(self, path: Path, tied_names: Mapping[str, str]) -> None:
        self._path, self._tied_names = path, tied_names
        self._partial_path = path.with_name(f".{path.name}.part")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """It is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """What a killed export has left goes."""
        if is_coordinator:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.remove_partial_file()

    def remove_partial_file(self) -> None:
        """Remove what was written."""
        self._partial_path.unlink(missing_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to prepare, but everything has to be a tensor that the format knows."""
        for item in plan.items:
            data = item.tensor_data
            if data is None or data.properties.dtype not in DTYPE_NAMES:
                kind = "no tensor" if data is None else f"of dtype {data.properties.dtype}"
                raise ArgumentError(
                    f"'{item.index.fqn}' is {kind}, which a safetensors file cannot hold: use "
                    "pipe.save(folder)"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Where each tensor stands; the first rank writes the header."""
        facts = {
            item.index.fqn: item.tensor_data
            for one in plans
            for item in one.items
            if item.tensor_data is not None
        }
        notes = {other: kept for other, kept in self._tied_names.items() if kept in facts}
        begin, header = build_header(facts, {"format": "pt", **notes})
        with open(self._partial_path, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_byte_count, facts.values())))
        places = {name: len(header) + at for name, at in begin.items()}
        return [replace(one, storage_data=places) for one in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One tensor at a time, or the part of it that is here."""
        opened = os.open(self._partial_path, os.O_WRONLY)
        try:
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                assert item.tensor_data is not None
                begin = plan.storage_data[item.index.fqn]
                _write_chunk(opened, data.cpu().contiguous(), begin, item.tensor_data)
            os.fsync(opened)
        finally:
            os.close(opened)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All have written: the file takes its name."""
        os.replace(self._partial_path, self._path)
        fsync_directory(self._path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def build_header(
    tensors: Mapping[str, TensorWriteData], metadata: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    """Where each tensor begins after the header, and the header.

    Wide elements stand first, so that each tensor begins at a multiple of its element's size.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))
    begin: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        begin[name], end = at, at + _byte_count(tensors[name])
        entries[name] = {
            "dtype": DTYPE_NAMES[tensors[name].properties.dtype],
            "shape": list(tensors[name].size),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return begin, len(text).to_bytes(8, "little") + text


def _byte_count(data: TensorWriteData) -> int:
    return prod(data.size) * data.properties.dtype.itemsize


def _write_chunk(
    file_descriptor: int, chunk: torch.Tensor, file_offset: int, tensor_data: TensorWriteData
) -> None:
    """Run by run: a run is what stands together both in the chunk and in the tensor."""
    memory = memoryview((ctypes.c_char * chunk.nbytes).from_address(chunk.data_ptr())).cast("B")
    width = chunk.element_size()
    done = 0
    for start, length in contiguous_runs(
        tensor_data.size, tensor_data.chunk.offsets, tensor_data.chunk.sizes
    ):
        left = memory[done : done + length * width]
        at = file_offset + start * width
        while left:
            wrote = os.pwrite(file_descriptor, left, at)
            left, at = left[wrote:], at + wrote
        done += length * width


def contiguous_runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where the rows of a chunk stand in a whole tensor, in elements: start and length.

    >>> list(contiguous_runs((4, 6), (2, 0), (2, 6)))
    [(12, 12)]
    >>> list(contiguous_runs((4, 6), (0, 3), (2, 3)))
    [(3, 3), (9, 3)]
    """
    if not prod(sizes):
        return
    inner = len(shape)
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    cut = max(inner - 1, 0)  # from this dimension on, a run is in one piece
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    length = prod(sizes[cut:])
    last = offsets[cut] * strides[cut] if shape else 0
    for at in product(*(range(o, o + s) for o, s in zip(offsets[:cut], sizes[:cut], strict=True))):
        yield sum(i * stride for i, stride in zip(at, strides, strict=False)) + last, length


# -------------------------------------------------------------------------------------------------
# A model read from safetensors files: only the tensors that are asked for.
# -------------------------------------------------------------------------------------------------

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
