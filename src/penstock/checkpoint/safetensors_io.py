"""Read and write safetensors files, as storage back ends of torch.distributed.checkpoint.

    SafetensorsWriter    one file; each rank writes the bytes of its own tensors
    SafetensorsReader    one or more files; reads only the tensors that the plan names
    PretrainedReader     the same for a transformers or peft folder, with its names translated

The format (https://huggingface.co/docs/safetensors):

    8 bytes      length of the header, little-endian
    header       JSON: the dtype, shape and data_offsets of each tensor, and `__metadata__`
    the rest     the bytes of the tensors, row by row; data_offsets count from here
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

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
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
)
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from penstock.checkpoint.manifest import fsync_directory
from penstock.checkpoint.pretrained_names import PretrainedNameMap, map_stored_names
from penstock.checkpoint.writer import RankWriter
from penstock.errors import ArgumentError, CheckpointError, MissingExtra

T = TypeVar("T")

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


# -------------------------------------------------------------------------------------------------
# Writing. Rank 0 knows the sizes of all tensors from the plans, so it can write the header and fix
# the offset of each tensor first. Then all ranks write into the same file at the same time, each at
# its own offsets. No process ever has the whole model in memory.
#
# The file is written under a temporary name and gets its own name when every rank has finished.
# -------------------------------------------------------------------------------------------------


class SafetensorsWriter(RankWriter):
    """A writer of one safetensors file that all ranks share.

    `tied_names` maps the further names of tied tensors to the names that they are saved under. They
    go into the file's metadata, as in files that `safetensors.torch.save_model` writes.
    """

    def __init__(self, path: Path, tied_names: Mapping[str, str]) -> None:
        self._path, self._tied_names = path, tied_names
        self._partial_path = path.with_name(f".{path.name}.part")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used for one file."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the folder, and remove the partial file of an export that was killed."""
        if is_coordinator:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.remove_partial_file()

    def remove_partial_file(self) -> None:
        """Remove the file that is not complete yet."""
        self._partial_path.unlink(missing_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. Raise if the format cannot store one of its items."""
        for item in plan.items:
            data = item.tensor_data
            if data is None or data.properties.dtype not in DTYPE_NAMES:
                kind = "not a tensor" if data is None else f"of dtype {data.properties.dtype}"
                raise ArgumentError(
                    f"a safetensors file cannot store '{item.index.fqn}', which is {kind}. Use "
                    "pipe.save(folder)."
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Write the header, and add the offset of each tensor in the file to the plans.

        Rank 0 calls this. The file gets its full size here, so that the other ranks can write
        anywhere in it.
        """
        tensors = {
            item.index.fqn: item.tensor_data
            for plan in plans
            for item in plan.items
            if item.tensor_data is not None
        }
        aliases = {
            alias: saved_name
            for alias, saved_name in self._tied_names.items()
            if saved_name in tensors
        }
        begin, header = build_header(tensors, {"format": "pt", **aliases})
        with open(self._partial_path, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_byte_count, tensors.values())))
        file_offsets = {name: len(header) + offset for name, offset in begin.items()}
        return [replace(plan, storage_data=file_offsets) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, or its shards of them, one at a time."""
        descriptor = os.open(self._partial_path, os.O_WRONLY)
        try:
            for item in plan.items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                assert item.tensor_data is not None
                begin = plan.storage_data[item.index.fqn]
                _write_chunk(descriptor, data.cpu().contiguous(), begin, item.tensor_data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _completed([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the file its final name. Rank 0 calls this when all ranks have written."""
        os.replace(self._partial_path, self._path)
        fsync_directory(self._path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: every path is accepted."""
        return True


def build_header(
    tensors: Mapping[str, TensorWriteData], metadata: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    """Return the offset of each tensor behind the header, and the bytes of the header.

    Tensors with wide elements come first, so that each tensor starts at a multiple of its element
    size. The header is padded to a multiple of eight bytes for the same reason. A reader can then
    map the file into memory and use the tensors in place.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))
    begin: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        begin[name], end = offset, offset + _byte_count(tensors[name])
        entries[name] = {
            "dtype": DTYPE_NAMES[tensors[name].properties.dtype],
            "shape": list(tensors[name].size),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return begin, len(text).to_bytes(8, "little") + text


def _byte_count(data: TensorWriteData) -> int:
    return prod(data.size) * data.properties.dtype.itemsize


def _write_chunk(
    file_descriptor: int, chunk: torch.Tensor, file_offset: int, tensor_data: TensorWriteData
) -> None:
    """Write one chunk of a tensor, run by run.

    A run is a range of elements that is contiguous both in the chunk and in the whole tensor.
    """
    # A view of the tensor's memory as bytes. `Tensor.numpy()` does not know bfloat16 and float8.
    memory = memoryview((ctypes.c_char * chunk.nbytes).from_address(chunk.data_ptr())).cast("B")
    width = chunk.element_size()
    written = 0
    for start, length in contiguous_runs(
        tensor_data.size, tensor_data.chunk.offsets, tensor_data.chunk.sizes
    ):
        remaining = memory[written : written + length * width]
        position = file_offset + start * width
        # `pwrite` may write less than it was given. It does not move the file position, so ranks
        # that share the file do not disturb each other.
        while remaining:
            count = os.pwrite(file_descriptor, remaining, position)
            remaining, position = remaining[count:], position + count
        written += length * width


def contiguous_runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each run of a chunk inside the whole tensor, in elements.

    `shape` is that of the whole tensor; `offsets` and `sizes` describe the chunk.

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
    # All dimensions behind `cut` are complete in the chunk, so from `cut` on it is contiguous.
    cut = max(inner - 1, 0)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    length = prod(sizes[cut:])
    run_offset = offsets[cut] * strides[cut] if shape else 0
    for index in product(
        *(range(o, o + s) for o, s in zip(offsets[:cut], sizes[:cut], strict=True))
    ):
        yield (
            sum(i * stride for i, stride in zip(index, strides, strict=False)) + run_offset,
            length,
        )


# -------------------------------------------------------------------------------------------------
# Reading. The header alone tells the name, shape and dtype of each tensor. The safetensors library
# maps the file into memory, so only the tensors or slices that the plan names are read.
#
# torch.distributed.checkpoint has a HuggingFaceStorageReader. It reads all safetensors files of a
# directory. It accepts neither one file nor an index, and it cannot translate names.
# -------------------------------------------------------------------------------------------------

_DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SafetensorsReader(StorageReader):
    """A reader of tensors from one or more safetensors files, by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._path_by_name = files, dict[str, Path]()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all tensors, from the headers alone."""
        entries: dict[str, Any] = {}
        for path in self._files:
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118  (it is not a dict)
                    part = file.get_slice(name)
                    dtype = _parse_dtype(path, name, part.get_dtype())
                    entries[name] = _whole_tensor(TensorProperties(dtype), part.get_shape())
                    self._path_by_name[name] = path
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the constructor got the files."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors or slices that the plan names. Each file is opened once."""
        with ExitStack() as open_files:
            files: dict[Path, Any] = {}

            def get_file(stored_name: str) -> Any:
                path = self._path_by_name[stored_name]
                if path not in files:
                    files[path] = open_files.enter_context(open_safetensors(path))
                return files[path]

            for item in plan.items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(self._read_item(item, get_file))
                planner.commit_tensor(item, target)
        return _completed(None)

    def _read_item(self, item: ReadItem, get_file: Callable[[str], Any]) -> torch.Tensor:
        """Return the tensor, or the slice of it, that one item of a plan names."""
        name = item.storage_index.fqn
        return _read_slice(get_file(name), name, item)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: every path is accepted."""
        return True


def _completed(result: T) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(result)
    return done


def _whole_tensor(properties: TensorProperties, shape: Sequence[int]) -> TensorStorageMetadata:
    """Return the metadata of a tensor that is stored in one piece."""
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(properties, size, [whole])


def _read_slice(file: Any, stored_name: str, item: ReadItem) -> torch.Tensor:
    """Return a slice of a stored tensor, or the whole tensor if the slice covers it."""
    part = file.get_slice(stored_name)
    covers_all = list(item.lengths) == part.get_shape()
    values: torch.Tensor = file.get_tensor(stored_name) if covers_all else part[_get_slices(item)]
    return values


def _get_slices(item: ReadItem) -> tuple[slice, ...]:
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    return tuple(slice(begin, begin + length) for begin, length in ranges)


_TORCH_SAVE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")


def open_safetensors(path: Path) -> Any:
    """Open a file with the safetensors library. Raise `MissingExtra` if it is not installed."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra("safetensors", "safetensors", "reading a safetensors file") from None
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        if path.suffix in _TORCH_SAVE_SUFFIXES:
            raise CheckpointError(
                f"'{path}' looks like a file of torch.save, which pipe.load does not read. Write "
                "pipe.load_state_dict(torch.load(path, weights_only=True)). Nothing was loaded."
            ) from None
        raise CheckpointError(
            f"'{path}' is not a safetensors file, or is damaged: {error}. Nothing was loaded."
        ) from None


def _parse_dtype(path: Path, name: str, dtype_name: str) -> torch.dtype:
    if dtype_name not in _DTYPE_BY_NAME:
        raise ArgumentError(
            f"'{path}' stores {name} as {dtype_name}, which is not a supported dtype. Convert it "
            f"to one of {', '.join(sorted(_DTYPE_BY_NAME))}."
        )
    return _DTYPE_BY_NAME[dtype_name]


class PretrainedReader(SafetensorsReader):
    """A reader of a transformers or peft folder, under the names of the model.

    The files may use other names than the model, or store a tensor in several parts, for example
    one tensor per expert. `name_map` says how each tensor of the model is built. `shapes` has the
    shape of each tensor that this process holds, and None for the others.
    """

    name_map: PretrainedNameMap

    def __init__(
        self, files: Sequence[Path], model: nn.Module, shapes: Mapping[str, torch.Size | None]
    ) -> None:
        super().__init__(files)
        self.model, self._shapes = model, shapes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the model's tensors, from the headers alone.

        A tensor that is built from several stored ones has the shape that it has in the model.
        """
        stored = super().read_metadata().state_dict_metadata
        self.name_map = map_stored_names(self.model, stored, self._shapes)
        return Metadata({name: self._metadata_for(name, stored) for name in self.name_map.recipes})

    def _metadata_for(self, name: str, stored: Mapping[str, Any]) -> Any:
        recipe = self.name_map.recipes[name]
        if recipe.converter is None:
            return stored[recipe.sources[0]]
        return _whole_tensor(stored[recipe.sources[0]].properties, self._shapes[name] or ())

    def _read_item(self, item: ReadItem, get_file: Callable[[str], Any]) -> torch.Tensor:
        """Read or build the tensor that one item of a plan names."""
        recipe = self.name_map.recipes[item.storage_index.fqn]
        if recipe.converter is None:
            return _read_slice(get_file(recipe.sources[0]), recipe.sources[0], item)
        # A converted tensor is built whole, and this rank's shard is cut out of it.
        tensor = recipe.build(lambda name: get_file(name).get_tensor(name), self.model)
        return tensor[_get_slices(item)]
