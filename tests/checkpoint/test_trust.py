"""Checkpoints with payloads: loading them runs no code, unless they are trusted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from penstock import CheckpointError, Pipe
from penstock.checkpoint.manifest import MANIFEST_FILE, describe_file, read_manifest, write_manifest
from penstock.checkpoint.writer import decode_records


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str, int, bool]]:
        return os.makedirs, (str(self.file), 0o700, True)


class Stateful(nn.Linear):
    """A layer with extra state."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make_pipe() -> tuple[Pipe, Optimizer]:
    pipe = Pipe(nn.Sequential(Stateful(2, 2), nn.Linear(2, 2)), stages=2, devices=["cpu"] * 2)
    return pipe, SGD(pipe.parameters(), lr=0.1)


def sign(directory: Path) -> None:
    """Write a manifest that fits the files, as somebody who has changed them would."""
    manifest = read_manifest(directory)
    assert manifest is not None
    files = {name: describe_file(directory / name) for name in manifest.files}
    write_manifest(directory, manifest.number, manifest.writer, files, manifest.step)


def change_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    sign(directory)


# ---- payloads in every pickle -------------------------------------------------------------


def in_metadata(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    path = pipe.save(folder, optimizer=optimizer).path
    change_metadata(path, lambda metadata: setattr(metadata, "planner_data", payload))
    return ".metadata"


def as_metadata(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    path = pipe.save(folder, optimizer=optimizer).path
    (path / ".metadata").write_bytes(pickle.dumps(payload))
    sign(path)
    return ".metadata"


def in_setting(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    optimizer.param_groups[0]["note"] = payload
    pipe.save(folder, optimizer=optimizer)
    return "__0_0.distcp"


def in_extra_state(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    layer: Any = pipe[0]
    layer.state = payload
    pipe.save(folder, optimizer=optimizer)
    return "__0_0.distcp"


def in_tensor(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    save = torch.save

    def save_payload(value: Any, stream: Any) -> None:
        save(payload if isinstance(value, Tensor) else value, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_payload)
        patch.setattr("penstock.checkpoint.saver._serialize_extra", lambda extra: b"")
        path = pipe.save(folder, optimizer=optimizer).path
    save(None, path / "extra.pt")
    sign(path)
    return "__0_0.distcp"


def in_extra(pipe: Pipe, optimizer: Optimizer, folder: Path, payload: Payload) -> str:
    path = pipe.save(folder, optimizer=optimizer).path
    torch.save(payload, path / "extra.pt")
    sign(path)
    return "extra.pt"


PAYLOADS = [in_metadata, as_metadata, in_setting, in_extra_state, in_tensor, in_extra]


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("put", PAYLOADS)
def test_payload_does_not_run(put: Any, has_manifest: bool, tmp_path: Path) -> None:
    file = put(*make_pipe(), tmp_path / "run", Payload(tmp_path / "ran"))
    if not has_manifest:  # as torch.distributed.checkpoint and earlier versions wrote it
        for name in (MANIFEST_FILE, "penstock-save.txt"):
            (tmp_path / "run" / "save-000001" / name).unlink()
    pipe, optimizer = make_pipe()
    before = {
        name: tensor.clone() for name, tensor in pipe.state_dict().items() if tensor is not None
    }
    with pytest.raises(CheckpointError) as raised:
        pipe.load(tmp_path / "run" / "save-000001", optimizer=optimizer)
    assert file in str(raised.value)
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(pipe.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("put", [in_metadata, in_setting, in_extra_state, in_extra])
def test_trusted_payload_runs(put: Any, tmp_path: Path) -> None:
    """This shows that the payloads work."""
    put(*make_pipe(), tmp_path / "run", Payload(tmp_path / "ran"))
    pipe, optimizer = make_pipe()
    pipe.load(tmp_path / "run", optimizer=optimizer, trust=True)
    assert (tmp_path / "ran").exists()


def test_error_for_a_class_says_how_to_trust_it(tmp_path: Path) -> None:
    in_metadata(*make_pipe(), tmp_path, Payload(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"it refers to os.makedirs.*pass trust=True"):
        make_pipe()[0].load(tmp_path)


# ---- other ways to abuse the metadata -----------------------------------------------------


def test_metadata_cannot_name_files_outside_its_directory(tmp_path: Path) -> None:
    path = make_pipe()[0].save(tmp_path).path

    def escape(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../../secret"

    change_metadata(path, escape)
    with pytest.raises(CheckpointError, match=r"secret', outside its directory"):
        make_pipe()[0].load(tmp_path)


def test_metadata_cannot_change_classes(tmp_path: Path) -> None:
    path = make_pipe()[0].save(tmp_path).path
    module = b"ctorch.distributed.checkpoint.metadata\n"
    # The class itself, on which BUILD sets an attribute as on an object with slots.
    attack = module + b"StorageMeta\n(N(dS'abc'\nS'def'\nstb."
    (path / ".metadata").write_bytes(attack)
    sign(path)
    with pytest.raises(CheckpointError, match=r"it changes StorageMeta\.abc"):
        make_pipe()[0].load(tmp_path)
    from torch.distributed.checkpoint.metadata import StorageMeta

    assert not hasattr(StorageMeta, "abc")


# ---- peers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '["record", ["filesystem", "os"], {}]',
        '["record", ["filesystem", "FileSystemWriter"], {"path": "x"}]',
        '["record", ["utils", "Any"], {}]',
        '["torch", "load"]',
    ],
)
def test_plan_of_a_peer_builds_nothing_but_records(text: str) -> None:
    with pytest.raises(TypeError, match="in a save plan is not a"):
        decode_records(text)
