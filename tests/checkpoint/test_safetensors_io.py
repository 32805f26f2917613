"""`pipe.export` and `pipe.load` with safetensors files, compared with the safetensors library."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock import ArgumentError, CheckpointError, MissingExtra, Pipe
from penstock.checkpoint import safetensors_io
from penstock.checkpoint.safetensors_io import DTYPE_NAMES, SafetensorsWriter, contiguous_runs
from tests.checkpoint.saved_models import build, differences


def piped(model: nn.Sequential, stages: int = 2) -> Pipe:
    return Pipe(model, chunks=2, stages=stages, devices=["cpu"] * stages)


class Many(nn.Module):
    """A module with a buffer of every dtype, in odd sizes, and an empty one."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        for dtype in DTYPE_NAMES:
            value = torch.full((3, 1), fill, dtype=torch.uint8).to(dtype)
            self.register_buffer(f"of_{DTYPE_NAMES[dtype]}", value)
        self.register_buffer("empty", torch.ones(0, 4))
        self.register_buffer("number", torch.tensor(fill + 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x


def bits(tensor: Tensor) -> list[int]:
    numbers: list[int] = tensor.flatten().view(torch.uint8).tolist()
    return numbers


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    entries: dict[str, Any] = json.loads(data[8 : 8 + length])
    ends = [one["data_offsets"][1] for name, one in entries.items() if name != "__metadata__"]
    assert len(data) == 8 + length + max(ends)
    return entries


def test_export_is_read_by_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = build().append(Many(1))
    path = piped(model).export(tmp_path / "new" / "model.safetensors")
    assert os.listdir(path.parent) == ["model.safetensors"]
    found = safetensors.load_file(path)
    expected = model.state_dict()
    del expected["7.weight"]
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert bits(found[name]) == bits(value), name


def test_export_of_tied_weights_uses_safetensors_metadata(tmp_path: Path) -> None:
    path = piped(build()).export(tmp_path / "model.safetensors")
    assert header(path)["__metadata__"] == {"format": "pt", "7.weight": "0.weight"}
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(1)
    assert safetensors.load_model(model, path) == (set(), [])
    assert differences(model.state_dict(), build().state_dict()) == []


def test_load_of_an_exported_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, other = build().append(Many(1)), build(1).append(Many(0))
    piped(model).export(tmp_path / "model.safetensors")
    assert piped(other, 3).load(tmp_path / "model.safetensors") is None
    for name, value in model.state_dict().items():
        assert bits(other.state_dict()[name]) == bits(value), name


def test_load_of_a_file_with_the_other_name_of_a_tied_weight(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = dict(build().state_dict())
    del state["0.weight"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    model = build(1)
    piped(model).load(tmp_path / "model.safetensors")
    assert differences(model.state_dict(), build().state_dict()) == []


def test_load_of_an_index_reads_each_tensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = dict(build().state_dict())
    del state["7.weight"]
    where = {name: f"part-{int(name[0]) % 3}.safetensors" for name in state}
    for file in set(where.values()):
        mine = {name: state[name] for name in state if where[name] == file}
        safetensors.save_file(mine, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    read: list[str] = []
    opened = safetensors_io.open_safetensors

    class Watched:
        def __init__(self, path: Path) -> None:
            self._file = opened(path)

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors_io, "open_safetensors", Watched)
    model = build(1)
    piped(model).load(index)
    assert differences(model.state_dict(), build().state_dict()) == []
    assert sorted(read) == sorted(state)  # each once


def test_load_and_export_errors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = piped(build()).export(tmp_path / "model.safetensors")
    with pytest.raises(ArgumentError, match=r"which the model does not have"):
        piped(nn.Sequential(*list(build())[:3])).load(path)
    pipe = piped(build())
    with pytest.raises(ArgumentError, match="no optimizer state"):
        pipe.load(path, optimizer=torch.optim.SGD(pipe.parameters()))
    with pytest.raises(ArgumentError, match=r"export writes a .safetensors file, not 'a.pt'"):
        pipe.export(tmp_path / "a.pt")
    strange = nn.Linear(2, 2)
    strange.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ArgumentError, match=r"'2.wide', which is of dtype torch.complex128"):
        piped(nn.Sequential(nn.ReLU(), nn.ReLU(), strange)).export(tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    for name in ("cut.safetensors", "notes.txt", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(path.read_bytes()[:100])
        with pytest.raises(CheckpointError, match=f"/{name}' is not .* or is damaged"):
            pipe.load(tmp_path / name)


def test_failed_export_keeps_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = piped(build()).export(tmp_path / "model.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr(SafetensorsWriter, "finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        piped(build(1)).export(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_load_without_safetensors_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = piped(build()).export(tmp_path / "model.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(MissingExtra, match=r"penstock\[safetensors\]"):
        piped(build()).load(path)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    size = draw(st.lists(st.integers(1, 4), max_size=4))
    offsets = [draw(st.integers(0, n - 1)) for n in size]
    sizes = [draw(st.integers(0, n - o)) for n, o in zip(size, offsets, strict=True)]
    return size, offsets, sizes


@given(chunks())
def test_contiguous_runs_equal_slicing(case: tuple[list[int], list[int], list[int]]) -> None:
    size, offsets, sizes = case
    whole = torch.arange(math.prod(size)).reshape(size)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    found = [
        n
        for start, length in contiguous_runs(size, offsets, sizes)
        for n in range(start, start + length)
    ]
    assert found == part.flatten().tolist()
