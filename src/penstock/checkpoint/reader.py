"""One load: each process finds its own tensors in a checkpoint and reads nothing else.

    find_checkpoint      the path that is meant: the last save in a folder, or a weights file
    open_checkpoint      read the headers: the name, shape and dtype of each entry
    check_stored_names   compare the stored names with those of the whole model
    read_...             read the model, the optimizers, the random state, `extra`
    StagedLoad           everything that was read; only then is anything changed

A checkpoint is one of these:

    a directory of `Pipe.save`                    names below `model.`, `optimizer.`, `random.`
    another torch.distributed.checkpoint          names below `model.`, or without a prefix
    a safetensors file or its index               names without a prefix
    a transformers or peft folder                 the names of its library, translated on reading
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from penstock.checkpoint import local_state as states
from penstock.checkpoint.directory import (
    EXTRA_FILE,
    METADATA_FILE,
    check_needs_no_manifest,
    find_newest,
    has_extra,
)
from penstock.checkpoint.local_state import LocalState
from penstock.checkpoint.manifest import Manifest, check_file, read_manifest
from penstock.checkpoint.pretrained_names import find_weights_file, split_at_base_model
from penstock.checkpoint.safetensors_io import PretrainedReader, SafetensorsReader
from penstock.checkpoint.verified_reader import (
    VerifiedLoadPlanner,
    VerifiedReader,
    load_extra_file,
)
from penstock.errors import ArgumentError, CheckpointError

MODEL_KEY, OPTIMIZER_KEY, RNG_KEY = "model", "optimizer", "random"


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that is open for reading: the metadata of its entries, and their reader.

    `prefix` comes before the names of the model. A safetensors file has none, and a checkpoint
    that another program wrote may have none. `manifest` is that of a save of this library.
    """

    path: Path
    reader: StorageReader
    metadata: Metadata
    prefix: str
    manifest: Manifest | None = None
    trust: bool = False

    @property
    def entries(self) -> dict[str, Any]:
        """The metadata of each entry, by name."""
        return self.metadata.state_dict_metadata

    def entries_under(self, prefix: str) -> dict[str, Any]:
        """Return the entries whose names begin with a prefix, under the rest of their names."""
        items = self.entries.items()
        return {k.removeprefix(prefix): v for k, v in items if k.startswith(prefix)}


def find_checkpoint(path: Path) -> Path:
    """Return the path of the checkpoint to load. In a folder of saves, that is the last one."""
    if path.is_file() or read_manifest(path) is not None:
        return path
    if (path / METADATA_FILE).exists():
        check_needs_no_manifest(path)
        return path
    newest = find_newest(path)
    last = find_weights_file(path) if newest is None else newest.path
    if last is not None:
        return last
    problem = "does not exist" if not path.exists() else "contains no checkpoint yet"
    raise ArgumentError(
        f"'{path}' {problem}. Pass a folder written by pipe.save (penstock.saved(folder) returns "
        "None if it has no checkpoint), a folder of torch.distributed.checkpoint or of "
        "save_pretrained, a .safetensors file or its .safetensors.index.json."
    )


def open_checkpoint(
    path: Path, names: Collection[str], local_state: LocalState, trust: bool
) -> CheckpointSource:
    """Read the metadata of a checkpoint. `names` are the names of the whole model.

    The names decide whether the entries have the prefix `model.`, because a model may itself have
    a layer called "model".
    """
    reader: StorageReader
    manifest = read_manifest(path)
    if path.is_dir():
        if manifest is not None and local_state.save_group.rank == 0:
            # Each rank verifies what it reads. A file that is missing or cut short, and damage in
            # the small ones, is noticed even if no rank needs them.
            for name, record in manifest.files.items():
                check_file(path / name, record, all_bytes=not name.endswith(DEFAULT_SUFFIX))
        reader = VerifiedReader(path, manifest, trust)
    elif local_state.pretrained_model is not None:
        # The reader needs the shapes of the tensors of this process. It converts no others.
        local_shapes = {
            n: value.shape
            for n, (_, value) in local_state.unique_state().items()
            if isinstance(value, torch.Tensor)
        }
        tied = (*local_state.tied_names, *local_state.tied_names.values())
        shapes = {n: local_shapes.get(n) for n in (*names, *tied)}
        reader = PretrainedReader(_safetensors_files(path), local_state.pretrained_model, shapes)
    else:
        reader = SafetensorsReader(_safetensors_files(path))
    metadata = reader.read_metadata()
    may_have_prefix = not isinstance(reader, PretrainedReader)
    has_prefix = may_have_prefix and any(
        f"{MODEL_KEY}.{name}" in metadata.state_dict_metadata for name in names
    )
    prefix = f"{MODEL_KEY}." if has_prefix else ""
    return CheckpointSource(path, reader, metadata, prefix, manifest, trust)


def _safetensors_files(path: Path) -> list[Path]:
    """Return the file itself, or the files that an index lists."""
    if path.suffix != ".json":
        return [path]
    try:
        shards = json.loads(path.read_text())["weight_map"].values()
        return [path.parent / name for name in dict.fromkeys(shards)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"'{path}' is not the index of safetensors files, or is damaged. Nothing was loaded."
        ) from None


def check_stored_names(
    source: CheckpointSource, names: Collection[str], tied_names: Mapping[str, str]
) -> None:
    """Raise if the checkpoint has tensors that the model lacks. `names` are those of all ranks."""
    if source.path.is_dir() and not source.prefix:
        # Another program wrote it, and may have saved other entries beside those of the model.
        return
    if isinstance(source.reader, PretrainedReader):
        _check_pretrained_names(source, source.reader, names, tied_names)
        return
    known_names = {*names, *tied_names, *tied_names.values()}
    stored = source.entries_under(source.prefix)
    unexpected = [
        name
        for name in stored
        if name not in known_names and not _is_below_known_name(name, known_names)
    ]
    if unexpected:
        raise ArgumentError(
            f"'{source.path}' has {_format_names(unexpected)}, which the model does not have. "
            "It was saved from another model."
        )


def _check_pretrained_names(
    source: CheckpointSource,
    reader: PretrainedReader,
    names: Collection[str],
    tied_names: Mapping[str, str],
) -> None:
    """Raise if a folder does not fit the base model. Warn if only the layers around it differ.

    Loading a trained base model under a new head is common, so the head may be missing.
    """
    name_map = reader.name_map
    available = {tied_names.get(name, name) for name in name_map.recipes}
    absent = [n for n in names if n in name_map.expected and tied_names.get(n, n) not in available]
    notes = []
    for kind, mismatches, all_names, problem in (
        ("missing", absent, names, "has no tensor for"),
        (
            "unexpected",
            name_map.unexpected,
            name_map.stored,
            "has tensors that the model does not have:",
        ),
    ):
        inside, outside = split_at_base_model(reader.model, mismatches, all_names, kind)
        if inside:
            raise ArgumentError(
                f"'{source.path}' {problem} {_format_names(inside)}. It was saved from another "
                "model."
            )
        notes += [f"{problem} {_format_names(outside)}"] if outside else []
    if notes:
        warnings.warn(
            f"'{source.path}' {'; and it '.join(notes)}. Tensors missing from the file keep their "
            "values, and tensors that the model does not have are not read.",
            stacklevel=2,
        )


def _is_below_known_name(name: str, known_names: set[str]) -> bool:
    """Return True for a part of a nested value, such as the extra state of a module."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in known_names for end in range(1, len(parts)))


def read_model(local_state: LocalState, source: CheckpointSource) -> dict[str, Any]:
    """Return what is stored of this process's parameters and buffers, by state_dict key."""
    stored = source.entries_under(source.prefix)
    state = local_state.unique_state()
    if isinstance(source.reader, PretrainedReader):
        # Tensors that the file lacks keep their values: `check_stored_names` has allowed that.
        state = {
            n: v for n, v in state.items() if any(o in stored for o in local_state.all_names(n))
        }
    # A tied tensor may be stored under any of its names.
    stored_names = {
        name: next(
            (alias for alias in [name, *local_state.all_names(name)] if alias in stored), name
        )
        for name in state
    }
    _check_stored_shapes(state, source, stored_names)
    values = {stored_names[name]: _allocate_like(value) for name, (_, value) in state.items()}
    nested = {MODEL_KEY: values} if source.prefix else values
    read_entries(source, nested)
    if isinstance(source.reader, PretrainedReader):
        _check_tied_values(local_state, source, values)
    return {key: values[stored_names[name]] for name, (key, _) in state.items()}


def _allocate_like(value: Any) -> Any:
    """Return a value to read a stored one into, so that the current one stays as it is.

    It is on the CPU, where there is more memory. A DTensor keeps its device, which its mesh says.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return torch.empty_like(value, device="cpu") if _is_plain(value) else torch.empty_like(value)


def _is_plain(value: Tensor) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _check_tied_values(
    local_state: LocalState, source: CheckpointSource, loaded: Mapping[str, Any]
) -> None:
    """Raise if a tensor that the model ties is stored under two names with different values.

    A model that was trained untied and is built tied would otherwise lose one of the two.
    """
    for name, value in loaded.items():
        for other in local_state.all_names(name):
            if other == name or other not in source.entries:
                continue
            alias_state = {other: torch.empty_like(value)}
            read_entries(source, alias_state)
            if not torch.equal(alias_state[other], value):
                raise ArgumentError(
                    f"'{source.path}' has different values for '{other}' and '{name}', but the "
                    "model ties them. Build it untied (config.tie_word_embeddings = False)."
                )


def _check_stored_shapes(
    state: Mapping[str, tuple[str, Any]], source: CheckpointSource, stored_names: Mapping[str, str]
) -> None:
    """Raise if a tensor of this process is not stored, or is stored with another shape."""
    missing, mismatches = [], []
    for name, (_, value) in state.items():
        stored = source.entries.get(source.prefix + stored_names[name])
        # A value that is not a tensor, such as extra state, has no shape to compare.
        if not isinstance(value, torch.Tensor):
            continue
        if stored is None:
            missing.append(name)
        elif isinstance(stored, TensorStorageMetadata) and stored.size != value.shape:
            mismatches.append(
                f"{name} is {tuple(stored.size)} there and {tuple(value.shape)} in the model"
            )
    if missing:
        raise ArgumentError(
            f"'{source.path}' has no tensor for {_format_names(missing)}. It was saved from "
            "another model."
        )
    if mismatches:
        raise ArgumentError(
            f"'{source.path}' has tensors of different shapes than the model: "
            f"{_format_names(mismatches)}. It was saved from another model."
        )


def _format_names(names: Sequence[str]) -> str:
    """Return up to eight names, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def read_optimizers(
    local_state: LocalState, source: CheckpointSource, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """Return what is stored of these optimizers, as a state dict for each."""
    state = {
        OPTIMIZER_KEY: states.allocate_optimizer_state(
            local_state, optimizers, source.entries_under(f"{OPTIMIZER_KEY}.")
        )
    }
    read_entries(source, state)
    return states.build_optimizer_state_dicts(local_state, optimizers, state[OPTIMIZER_KEY])


def read_rng_state(local_state: LocalState, source: CheckpointSource) -> Tensor | None:
    """Return the state of PyTorch's CPU generator, or None if it was not saved for this replica.

    The random numbers of a step depend on a seed that is drawn from this generator.
    """
    stored = source.entries_under(f"{RNG_KEY}.").get(str(local_state.replica))
    if not isinstance(stored, TensorStorageMetadata):
        return None
    state = {RNG_KEY: {str(local_state.replica): torch.empty(stored.size, dtype=torch.uint8)}}
    read_entries(source, state)
    return state[RNG_KEY][str(local_state.replica)]


def read_extra(source: CheckpointSource) -> Any:
    """Return the object that the user saved as `extra`. Only other programs' folders have none."""
    if not has_extra(source.path, source.manifest):
        return None
    return load_extra_file(source.path / EXTRA_FILE, source.manifest, source.trust)


def read_entries(source: CheckpointSource, state: dict[str, Any]) -> None:
    """Read the stored entries with the names in `state` into it. Nothing else is read.

    This runs the planner and the storage reader of torch.distributed.checkpoint without its
    `load`: each process plans for itself as the only rank, because each needs different names.
    """
    # `True` means "this is the coordinator": each process is the only rank of its own load.
    planner = VerifiedLoadPlanner(source.trust)
    planner.set_up_planner(state, source.metadata, True)
    source.reader.set_up_storage_reader(source.metadata, True)
    plan = source.reader.prepare_local_plan(planner.create_local_plan())
    [plan] = planner.create_global_plan(source.reader.prepare_global_plan([plan]))
    with torch.no_grad():
        source.reader.read_data(planner.finish_plan(plan), planner).wait()


# -------------------------------------------------------------------------------------------------
# From what was read to the model. Until here nothing was changed, so an error while reading leaves
# everything as it was. An error from here on, for example in a hook of the user, is undone.
# -------------------------------------------------------------------------------------------------


@dataclass
class StagedLoad:
    """Everything that one process has read from a checkpoint, and not yet put into place.

    model          values by state_dict key; `apply` swaps tensors, so that it then has the old ones
    optimizers     each optimizer with the state dict to load into it
    rng_state      the state of PyTorch's CPU generator, or None
    extra          the object that the user saved
    """

    module: nn.Module
    model: dict[str, Any]
    optimizers: list[tuple[Optimizer, dict[str, Any]]]
    rng_state: Tensor | None
    extra: Any
    _swapped: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # new and old values
    _unfinished: tuple[Tensor, Tensor] | None = None  # a tensor that is being changed, and a copy
    _old_values: dict[str, Any] = field(default_factory=dict)
    _old_optimizers: list[tuple[Optimizer, Any, Any]] = field(default_factory=list)
    _old_rng_state: Tensor | None = None

    def apply(self) -> None:
        """Change the model, the optimizers and the random state."""
        current = self.module.state_dict()
        self._old_values = {
            key: copy.deepcopy(current[key])
            for key, value in self.model.items()
            if not isinstance(value, Tensor)
        }
        for key, value in self.model.items():
            if isinstance(value, Tensor):
                for piece, new_piece in _pair_pieces(current[key], value):
                    self._swap(piece, new_piece)
            else:
                current[key] = value
        # The tensors are in place. `load_state_dict` still runs, for the values that are not
        # tensors, such as extra state, and for the user's hooks.
        self.module.load_state_dict(current)
        for optimizer, state_dict in self.optimizers:
            # `load_state_dict` replaces both objects, and does not change them.
            self._old_optimizers.append((optimizer, optimizer.state, optimizer.param_groups))
            optimizer.load_state_dict(state_dict)
        if self.rng_state is not None:
            self._old_rng_state = torch.get_rng_state()
            torch.set_rng_state(self.rng_state)

    def _swap(self, current: Tensor, value: Tensor) -> None:
        """Exchange the values of two tensors. Ctrl-C may come between any two of these lines."""
        with torch.no_grad():
            self._unfinished = current, current.clone()
            current.copy_(value)
            value.copy_(self._unfinished[1])
            self._swapped.append((current, value))
            self._unfinished = None

    def undo(self) -> None:
        """Restore what `apply` has changed, however far it came."""
        unfinished = [] if self._unfinished is None else [self._unfinished]
        with torch.no_grad():
            # The last first, because two names may share memory.
            for current, old_value in reversed([*self._swapped, *unfinished]):
                current.copy_(old_value)
        for optimizer, state, param_groups in self._old_optimizers:
            optimizer.state, optimizer.param_groups = state, param_groups
        if self._old_rng_state is not None:
            torch.set_rng_state(self._old_rng_state)
        if self._old_values:
            # The error may come from the method that takes these values, and come again.
            with suppress(Exception):
                self.module.load_state_dict({**self.module.state_dict(), **self._old_values})


def _pair_pieces(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut two tensors into pieces if both are plain and on the CPU.

    A piece stays in the cache of the processor, and needs no memory of the size of a tensor.
    """
    if not all(_is_plain(t) and t.is_cpu and t.is_contiguous() for t in (first, second)):
        return [(first, second)]
    return list(zip(first.view(-1).split(2**18), second.view(-1).split(2**18), strict=True))
