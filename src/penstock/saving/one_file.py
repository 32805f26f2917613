"""A model written to one safetensors file, each rank its own bytes of it.

The format: the header's length in eight bytes, the header as JSON with each tensor's dtype, shape
and place, then the tensors' bytes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.errors import ArgumentError
from penstock.saving.folder import fsync_directory

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

    >>> list(runs((4, 6), (2, 0), (2, 6)))
    [(12, 12)]
    >>> list(runs((4, 6), (0, 3), (2, 3)))
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
