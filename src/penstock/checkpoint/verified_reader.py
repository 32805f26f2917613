"""Read the directories of torch.distributed.checkpoint without running code from them.

Two kinds of files are pickles, and unpickling a file can run any code that its author chose:

    .metadata    PyTorch reads it with `pickle`; here an unpickler that knows the few classes of
                 such a file reads it, and refuses all others
    *.distcp     PyTorch reads tensors safely, and other entries, such as a learning rate or the
                 extra state of a layer, with `weights_only=False`; here both are read safely

`trust=True` reads both as PyTorch does. Where there is a manifest, everything is also verified.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from penstock.checkpoint.directory import EXTRA_FILE, METADATA_FILE
from penstock.checkpoint.manifest import MANIFEST_FILE, Manifest, VerifiedFile, damage_error
from penstock.errors import CheckpointError, PenstockError
from penstock.torch_compat import OLD_METADATA_MODULE

# The classes in a `.metadata` that PyTorch writes. None of them runs code of its arguments.
_DCP = "torch.distributed.checkpoint"
_KNOWN_CLASSES = {
    "collections": ("OrderedDict",),
    "torch": ("Size",),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    f"{_DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    OLD_METADATA_MODULE: ("MEM_FORMAT_ENCODING", "TensorProperties"),
}


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that builds only the records that PyTorch writes to `.metadata`."""

    def load(self) -> Any:
        """Return the value. Raise if the pickle contains anything else."""
        self._attributes: dict[type, dict[str, Any]] = {}
        try:
            return super().load()
        finally:
            self._check_classes_unchanged()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a known class, dtype or layout. Raise for everything else."""
        if global_name in _KNOWN_CLASSES.get(module_name, ()):
            cls = super().find_class(module_name, global_name)
            self._attributes.setdefault(cls, dict(vars(cls)))
            return cls
        if module_name == "torch" and _is_torch_constant(getattr(torch, global_name, None)):
            return getattr(torch, global_name)
        # Two things are written as a function and its arguments.
        if (module_name, global_name) == ("torch.serialization", "_get_layout"):
            return _parse_layout
        if module_name.partition(".")[0] == "pathlib" and global_name.endswith("Path"):
            return _join_path  # the folder that it was written to, perhaps on another system
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}.")

    def _check_classes_unchanged(self) -> None:
        """Undo what a pickle has set on a class instead of on an object, and raise."""
        for cls, attributes in self._attributes.items():
            changed = [n for n, v in vars(cls).items() if attributes.get(n) is not v]
            for name in changed:
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)
            if changed:
                raise pickle.UnpicklingError(f"it changes {cls.__name__}.{changed[0]}.")


def _is_torch_constant(value: object) -> bool:
    return isinstance(value, torch.dtype | torch.layout | torch.memory_format)


def _parse_layout(name: str) -> Any:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"it refers to the layout {name}.")
    return layout


def _join_path(*parts: str) -> str:
    return "/".join(parts)


class VerifiedFileSystem(FileSystem):
    """Opens files for reading. Where there is a manifest, they are verified as they are read."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file of a checkpoint."""
        if self._manifest is None:
            with open(path, mode) as plain:
                yield plain
            return
        record = self._manifest.files.get(Path(path).name)
        if record is None:
            raise damage_error(Path(path), f"{MANIFEST_FILE} does not list it")
        with VerifiedFile(Path(path), record) as verified:
            yield verified


class VerifiedReader(FileSystemReader):
    """A reader of one directory. Its errors name the file."""

    def __init__(self, directory: Path, manifest: Manifest | None, trust: bool) -> None:
        super().__init__(directory)
        self.fs = VerifiedFileSystem(manifest)
        self.manifest, self.trust, self._directory = manifest, trust, directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all entries."""
        path = self._directory / METADATA_FILE
        with _name_file(path), self.fs.create_stream(path, "rb") as file:
            unpickler = pickle.Unpickler(file) if self.trust else MetadataUnpickler(file)
            metadata = unpickler.load()
            _check_metadata(metadata)
        assert isinstance(metadata, Metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the entries of a plan, file by file."""
        items_by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            file_name = self.storage_data[item.storage_index].relative_path
            items_by_file.setdefault(file_name, []).append(item)
        for file_name, items in items_by_file.items():
            with _name_file(self._directory / file_name):
                super().read_data(replace(plan, items=items), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Context manager: raise a `CheckpointError` that names the file for every error inside."""
    try:
        yield
    except PenstockError:
        raise
    except pickle.UnpicklingError as error:
        # The text of PyTorch's error is long, and recommends to load the file without protection.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"'{path}' cannot be loaded without running code from it, or is damaged: {reason} "
            "Nothing was loaded. If you trust whoever wrote the file as you trust your own code, "
            "pass trust=True."
        ) from None
    except FileNotFoundError:
        raise damage_error(path, "the file is missing") from None
    except Exception as error:
        raise damage_error(path, f"{type(error).__name__}: {error}") from error


def _check_metadata(metadata: Any) -> None:
    """Raise if the metadata is not what PyTorch writes, or names files outside its directory."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}, not Metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise TypeError(f"the entry {name} is a {type(entry).__name__}")
    for place in (metadata.storage_data or {}).values():
        path = PurePosixPath(place.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names the file '{path}', outside its directory")


class VerifiedLoadPlanner(DefaultLoadPlanner):
    """A planner that reads entries that are not tensors safely, unless they are trusted."""

    def __init__(self, trust: bool) -> None:
        super().__init__()
        self._trust = trust

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Put one entry that is not a tensor into the state dict."""
        *path, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict
        for key in path:
            container = container[key]
        container[last] = torch.load(value, map_location="cpu", weights_only=not self._trust)


def load_extra_file(path: Path, manifest: Manifest | None, trust: bool) -> Any:
    """Return the value in `extra.pt`."""
    with _name_file(path), VerifiedFileSystem(manifest).create_stream(path, "rb") as file:
        content = BytesIO(file.read())
        return torch.load(content, map_location="cpu", weights_only=not trust)


def read_every_entry(directory: Path) -> None:
    """Read everything in a directory without a manifest. Raise `CheckpointError` if that fails."""
    metadata = VerifiedReader(directory, None, trust=False).read_metadata()
    for place in (metadata.storage_data or {}).values():
        path = directory / place.relative_path
        with _name_file(path), open(path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
            if len(data) != place.length:
                raise EOFError(f"it ends at {place.offset + len(data)}")
            torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    load_extra_file(directory / EXTRA_FILE, None, trust=False)
