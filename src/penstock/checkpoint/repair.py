"""`penstock saved`: examine the saves of a folder, and repair what can be repaired.

    unfinished              removed: its writer is dead
    files have changed      renamed to `damaged-save-000007`; the save before is then the newest
    an earlier version      read completely; if that succeeds, it gets a manifest
    its manifest was lost   the same
    renamed or copied       verified; if it is whole, it gets a manifest with its number

Nothing but the remains of killed saves is deleted. A repair holds the lock of the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.directory import (
    EXTRA_FILE,
    METADATA_FILE,
    SaveEntry,
    list_saves,
    remove_remains,
)
from penstock.checkpoint.manifest import (
    MANIFEST_FILE,
    describe_file,
    find_damage,
    find_step,
    fsync_directory,
    remove_manifest,
    write_manifest,
)
from penstock.checkpoint.writer_lock import acquire_lock, identify_writer
from penstock.errors import CheckpointError


class SaveReport(NamedTuple):
    """A save, and a sentence for each problem that was found in it."""

    entry: SaveEntry
    problems: list[str]


def examine_folder(folder: Path, verify: bool) -> list[SaveReport]:
    """Return a report for each save of a folder. With `verify`, all files are read."""
    return [
        SaveReport(entry, [entry.problem] if entry.problem else _verify(entry, verify))
        for entry in list_saves(folder)
    ]


def _verify(entry: SaveEntry, verify: bool) -> list[str]:
    if not verify or entry.manifest is None:
        return []
    return list(find_damage(entry.path, entry.manifest))


def repair_folder(folder: Path) -> list[str]:
    """Repair the saves of a folder, and return a sentence for everything that was done.

    Raises:
        CheckpointError: If a process is saving to the folder.
    """
    writer = identify_writer()
    lock = acquire_lock(folder, writer)
    try:
        done = [f"removed {path.name}, which was not finished" for path in remove_remains(folder)]
        for entry in list_saves(folder):
            if entry.number < 0 or entry.state == "unknown":
                continue
            damage = _find_reason_against(entry)
            if damage is not None:
                aside = _find_free_name(folder, f"damaged-{entry.path.name}")
                entry.path.rename(aside)
                done.append(f"renamed {entry.path.name} to {aside.name}: {damage}")
            elif entry.state != "whole":
                remove_manifest(entry.path)
                files = [path for path in entry.path.iterdir() if path.is_file()]
                records = {path.name: describe_file(path) for path in files}
                write_manifest(entry.path, entry.number, writer, records, _read_step(entry))
                done.append(f"wrote a manifest for {entry.path.name}, whose files can be read")
        fsync_directory(folder)
    finally:
        lock.release()
    return done


def _find_reason_against(entry: SaveEntry) -> str | None:
    """Return why a save cannot be loaded, or None if it can."""
    if entry.manifest is not None:
        return next(find_damage(entry.path, entry.manifest), None)
    if (entry.path / MANIFEST_FILE).exists():
        return entry.problem
    if not all((entry.path / name).exists() for name in (METADATA_FILE, EXTRA_FILE)):
        return f"{METADATA_FILE} or {EXTRA_FILE} is missing"
    from penstock.checkpoint.verified_reader import read_every_entry  # imports torch

    try:
        read_every_entry(entry.path)
    except CheckpointError as error:
        return str(error)
    return None


def _read_step(entry: SaveEntry) -> int | None:
    """Return the step of a save that can be read."""
    from penstock.checkpoint.verified_reader import load_extra_file  # imports torch

    return find_step(load_extra_file(entry.path / EXTRA_FILE, None, trust=False))


def _find_free_name(folder: Path, name: str) -> Path:
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    return path
