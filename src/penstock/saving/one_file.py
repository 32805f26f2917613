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
from penstock.saving.folder import sync

DTYPES = {
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


class OneFileWriter(StorageWriter):
    """Writes `path`, beside it first; `same` are the further names of tied tensors."""

    def __init__(self, path: Path, same: Mapping[str, str]) -> None:
        self._path, self._same = path, same
        self._part = path.with_name(f".{path.name}.part")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """It is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """What a killed export has left goes."""
        if is_coordinator:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.undo()

    def undo(self) -> None:
        """Remove what was written."""
        self._part.unlink(missing_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to prepare, but everything has to be a tensor that the format knows."""
        for item in plan.items:
            data = item.tensor_data
            if data is None or data.properties.dtype not in DTYPES:
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
        notes = {other: kept for other, kept in self._same.items() if kept in facts}
        begin, header = header_of(facts, {"format": "pt", **notes})
        with open(self._part, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(map(_bytes, facts.values())))
        places = {name: len(header) + at for name, at in begin.items()}
        return [replace(one, storage_data=places) for one in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One tensor at a time, or the part of it that is here."""
        opened = os.open(self._part, os.O_WRONLY)
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
        os.replace(self._part, self._path)
        sync(self._path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def header_of(
    facts: Mapping[str, TensorWriteData], notes: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    """Where each tensor begins after the header, and the header.

    Wide elements stand first, so that each tensor begins at a multiple of its element's size.
    """
    names = sorted(facts, key=lambda name: (-facts[name].properties.dtype.itemsize, name))
    begin: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": dict(notes)}
    at = 0
    for name in names:
        begin[name], end = at, at + _bytes(facts[name])
        entries[name] = {
            "dtype": DTYPES[facts[name].properties.dtype],
            "shape": list(facts[name].size),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return begin, len(text).to_bytes(8, "little") + text


def _bytes(data: TensorWriteData) -> int:
    return prod(data.size) * data.properties.dtype.itemsize


def _write_chunk(opened: int, chunk: torch.Tensor, begin: int, data: TensorWriteData) -> None:
    """Run by run: a run is what stands together both in the chunk and in the tensor."""
    memory = memoryview((ctypes.c_char * chunk.nbytes).from_address(chunk.data_ptr())).cast("B")
    width = chunk.element_size()
    done = 0
    for start, length in runs(data.size, data.chunk.offsets, data.chunk.sizes):
        left = memory[done : done + length * width]
        at = begin + start * width
        while left:
            wrote = os.pwrite(opened, left, at)
            left, at = left[wrote:], at + wrote
        done += length * width


def runs(
    size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Where the rows of a chunk stand in a whole tensor, in elements: start and length.

    >>> list(runs((4, 6), (2, 0), (2, 6)))
    [(12, 12)]
    >>> list(runs((4, 6), (0, 3), (2, 3)))
    [(3, 3), (9, 3)]
    """
    if not prod(sizes):
        return
    inner = len(size)
    while inner and sizes[inner - 1] == size[inner - 1]:
        inner -= 1
    cut = max(inner - 1, 0)  # from this dimension on, a run is in one piece
    strides = [prod(size[d + 1 :]) for d in range(len(size))]
    length = prod(sizes[cut:])
    last = offsets[cut] * strides[cut] if size else 0
    for at in product(*(range(o, o + s) for o, s in zip(offsets[:cut], sizes[:cut], strict=True))):
        yield sum(i * stride for i, stride in zip(at, strides, strict=False)) + last, length
