"""The saves of a folder: which one is the newest, and the rules for what a save may remove.

    folder/
      save-000006/            the save before; `keep=` says how many there are
      save-000007/
        .metadata  *.distcp   the files of torch.distributed.checkpoint
        extra.pt
        penstock-save.txt     shows that there should be a manifest
        manifest.json         written last: it makes the save whole
      save-000008/
        writing.json          a save that is being written, or whose writer was killed
      .penstock-writer-...    the lock of that writer

The newest save is the whole one with the highest number. There are no links, so a folder may be
copied by any tool, and to any file system.

A save removes only what this library wrote: directories with a manifest, and those with the file
`writing.json`, which is in a directory from the moment that it has its name. Only the holder of
the lock removes anything, and a whole save only after a newer one is whole:

    before a save    directories with `writing.json` alone: their writer is dead, or it has failed
    after a save     whole saves, except for the newest `keep`

A directory that looks like a save, but is not one, raises if it is newer than the others: a run
must not start from the beginning, or from an older save, because a manifest was lost.

Earlier versions wrote no manifest. A symbolic link `latest` named the newest save. Where the link
was lost, a save of theirs is one with `.metadata` and `extra.pt`, which was written last. They are
loaded. They are removed only if they have the marker `.penstock-save`, which some versions wrote.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from penstock.checkpoint.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    UnknownFormatError,
    Writer,
    check_size,
    describe_damage,
    fsync_directory,
    read_manifest,
    write_file_synced,
    write_manifest,
)
from penstock.checkpoint.writer_lock import WriterLock, acquire_lock
from penstock.errors import CheckpointError

EXTRA_FILE, METADATA_FILE = "extra.pt", ".metadata"
_WRITING_FILE, _SIGN_FILE = "writing.json", "penstock-save.txt"
_SIGN = b"A checkpoint of penstock. manifest.json lists its files; without it, it is damaged.\n"
_OLD_LINK, _OLD_MARKER = "latest", ".penstock-save"
_OWN_FILES = (MANIFEST_FILE, _WRITING_FILE, _OLD_MARKER)  # each shows that this library wrote it
_SAVE_DIRECTORY = re.compile(r"save-(\d+)")
_TEMPORARY_DIRECTORY = re.compile(r"\.(new|removed)-save-\d+(-[0-9a-f]+)?")

SaveId = tuple[int, str]  # the number and the token of the writer

#   whole        it has a manifest
#   old          a complete save of an earlier version, without a manifest
#   unfinished   it is being written, or its writer was killed
#   unknown      its manifest is one of another version of the library
#   damaged      its manifest is missing, unreadable or of another save
SaveState = Literal["whole", "old", "unfinished", "unknown", "damaged"]


@dataclass(frozen=True)
class SaveEntry:
    """A directory in a folder of saves that this library wrote, or that looks like it."""

    path: Path
    number: int
    state: SaveState
    manifest: Manifest | None = None
    problem: str = ""

    @property
    def save_id(self) -> SaveId:
        """The number and the writer: another writer may use the same number."""
        return self.number, "" if self.manifest is None else self.manifest.writer.token

    @property
    def is_loadable(self) -> bool:
        """Whether this is a complete save, as far as can be told without reading its files."""
        return self.state in ("whole", "old")


# -------------------------------------------------------------------------------------------------
# Finding saves. Other processes may add and remove saves meanwhile.
# -------------------------------------------------------------------------------------------------


def saved(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path of the newest complete checkpoint in a folder, or None if there is none.

    A script that may have been restarted calls this to decide whether to load.

    Args:
        folder: A folder that `Pipe.save` writes to. It need not exist.

    Returns:
        The directory of the newest complete save, or None.

    Raises:
        CheckpointError: If there is a newer save that is damaged. Otherwise a restarted script
            would go on from an older one, or from the beginning.

    Example:
        >>> saved("nothing/here") is None
        True
    """
    newest = find_newest(Path(folder))
    return None if newest is None else newest.path


def find_newest(folder: Path) -> SaveEntry | None:
    """Return the newest complete save. Raise if a damaged one is newer."""
    entries = list_saves(folder)
    loadable = [entry for entry in entries if entry.is_loadable]
    newest = loadable[-1] if loadable else None
    for entry in entries:
        if entry.problem and (newest is None or entry.number > newest.number):
            older = f" The newest complete save is '{newest.path}'." if newest else ""
            repair = (
                f", or let `penstock saved {folder} --repair` restore the manifest or set the "
                "damaged save aside"
            )
            raise CheckpointError(
                f"{entry.problem}{older} Load an older save by its own path"
                f"{'' if entry.state == 'unknown' else repair}."
            )
    return newest


def list_saves(folder: Path) -> list[SaveEntry]:
    """Return the saves of a folder, the oldest first."""
    while True:
        names = _list_names(folder)
        try:
            numbers = {n: int(m[1]) for n in names if (m := _SAVE_DIRECTORY.fullmatch(n))}
            entries = [_examine(folder / name, number) for name, number in numbers.items()]
        except _Vanished:
            # It was removed, so there is a newer save, which may not have been in the list.
            continue
        checkpoints = [entry for entry in entries if entry is not None]
        return sorted(
            [*checkpoints, *_examine_old_link(folder, checkpoints)], key=lambda entry: entry.number
        )


def _list_names(folder: Path) -> list[str]:
    """Return the names in a folder, which need not exist. Raise if it cannot be one."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        if not folder.is_symlink():
            return []
        raise CheckpointError(
            f"'{folder}' is a link to '{os.readlink(folder)}', which does not exist. Mount the "
            "disk that has the checkpoints, or remove the link to start without them."
        ) from None
    except NotADirectoryError:
        raise CheckpointError(
            f"'{folder}' is a file, or is below one. Pass a folder for checkpoints."
        ) from None


class _Vanished(Exception):
    """Raised if a directory was removed while it was examined."""


def _examine(path: Path, number: int) -> SaveEntry | None:
    """Return the entry for a directory, or None if it is none of ours."""
    # The order matters: a writer writes the manifest before it removes `writing.json`.
    is_being_written = (path / _WRITING_FILE).exists()
    try:
        manifest = read_manifest(path)
    except UnknownFormatError as error:
        return SaveEntry(path, number, "unknown", problem=str(error))
    except CheckpointError as error:
        return SaveEntry(path, number, "damaged", problem=describe_damage(error))
    if manifest is not None:
        if manifest.number == number:
            return SaveEntry(path, number, "whole", manifest)
        problem = f"'{path}' has the manifest of save {manifest.number}: it was renamed or copied."
        return SaveEntry(path, number, "damaged", manifest, problem)
    if is_being_written:
        return SaveEntry(path, number, "unfinished")
    has_metadata, has_sign = (path / METADATA_FILE).exists(), (path / _SIGN_FILE).exists()
    linked = _read_old_link(path.parent)
    if has_metadata and not has_sign and (linked is None or not linked.exists()):
        is_old = (path / EXTRA_FILE).exists()
    else:
        is_old = has_metadata and linked == path
    if is_old:
        return SaveEntry(path, number, "old")
    if has_sign or (has_metadata and linked is None):
        return SaveEntry(path, number, "damaged", problem=_describe_lost_manifest(path))
    if not path.exists():
        raise _Vanished
    return SaveEntry(path, number, "unfinished") if (path / _OLD_MARKER).exists() else None


def _examine_old_link(folder: Path, found: list[SaveEntry]) -> list[SaveEntry]:
    """Return an entry for `latest` of an earlier version, if it leads to none of the others."""
    link, target = folder / _OLD_LINK, _read_old_link(folder)
    if target is None:
        # A tool that follows links has made it a copy of the newest save.
        is_copy = (link / METADATA_FILE).exists() and (link / EXTRA_FILE).exists()
        return [SaveEntry(link, -1, "old")] if is_copy else []
    if any(entry.path == target and entry.is_loadable for entry in found):
        return []
    if (target / METADATA_FILE).exists():
        return [SaveEntry(target, -1, "old")]
    if not _SAVE_DIRECTORY.fullmatch(target.name):
        return []  # a link of the user
    problem = f"the link '{link}' names '{target}', which is not a checkpoint."
    return [SaveEntry(link, -1, "damaged", problem=problem)]


def _read_old_link(folder: Path) -> Path | None:
    try:
        return folder / os.readlink(folder / _OLD_LINK)
    except OSError:  # it does not exist, or is not a link
        return None


def check_needs_no_manifest(directory: Path) -> None:
    """Raise if a directory without a manifest is a save that should have one."""
    if (directory / _SIGN_FILE).exists():
        raise CheckpointError(
            f"{_describe_lost_manifest(directory)} Load an older save by its own path, or let "
            f"`penstock saved {directory.parent} --repair` read it and restore the manifest."
        )


def _describe_lost_manifest(directory: Path) -> str:
    return f"'{directory / MANIFEST_FILE}' is missing: the save is damaged, or not ours."


def has_extra(directory: Path, manifest: Manifest | None) -> bool:
    """Return whether a checkpoint has the user's `extra`, or should have it.

    Saves of this library always do. A folder of another program may.
    """
    is_ours = manifest is not None or (directory / _OLD_MARKER).exists()
    return is_ours or (directory / EXTRA_FILE).exists()


# -------------------------------------------------------------------------------------------------
# One save, as rank 0 sees it.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveTransaction:
    """A save that is being written. Exactly one of `commit` and `abort` ends it."""

    directory: Path
    number: int
    writer: Writer
    lock: WriterLock
    keep: int
    step: int | None
    own_files: Mapping[str, FileRecord]

    def commit(self, files: Mapping[str, FileRecord]) -> SaveId:
        """Make the save whole, remove old ones, and release the lock.

        The process may be killed between any two lines: the files reach the disk before the
        manifest names them, and old saves are removed last.
        """
        fsync_directory(self.directory)
        self.lock.check_held()
        all_files = {**self.own_files, **files}
        write_manifest(self.directory, self.number, self.writer, all_files, self.step)
        (self.directory / _WRITING_FILE).unlink()
        fsync_directory(self.directory.parent)
        try:
            self.lock.check_held()
            _remove_old_saves(self.directory.parent, self.number, self.keep)
        finally:
            self.lock.release()
        return self.number, self.writer.token

    def abort(self) -> None:
        """Remove what was written of a save that has failed, and release the lock."""
        try:
            # After `commit` has written the manifest, the save is whole and stays.
            if self.lock.path.exists() and not (self.directory / MANIFEST_FILE).exists():
                _remove(self.directory)
        finally:
            self.lock.release()


def begin_save(
    folder: Path, writer: Writer, known: SaveId | None, keep: int, step: int | None
) -> SaveTransaction:
    """Lock a folder, remove saves that were killed, and create the directory of the next save.

    `known` is the newest save that this writer has saved or loaded in the folder. If there is a
    newer one, another writer has taken the folder over.
    """
    _list_names(folder)  # raises before `mkdir` says that a link to nowhere exists
    folder.mkdir(parents=True, exist_ok=True)
    fsync_directory(folder.parent)  # or a crash could lose the folder itself
    lock = acquire_lock(folder, writer)
    try:
        entries = list_saves(folder)
        _check_not_superseded(folder, entries, writer, known)
        remove_remains(folder)
        # The number of a removed save is not used again: its writer may only have been held up,
        # and would go on to write into the directory.
        number = max((entry.number for entry in entries), default=0) + 1
        while (directory := folder / f"save-{number:06d}").exists():  # a folder of the user
            number += 1
        # The directory gets its final name only after it contains the owner's file. Otherwise a
        # save that is killed in between would leave a directory that looks like the user's own.
        new = folder / f".new-{directory.name}-{writer.token[:8]}"
        new.mkdir()
        write_file_synced(new / _WRITING_FILE, json.dumps(asdict(writer)).encode())
        sign = write_file_synced(new / _SIGN_FILE, _SIGN)
        new.rename(directory)
    except BaseException:
        lock.release()
        raise
    return SaveTransaction(directory, number, writer, lock, keep, step, {_SIGN_FILE: sign})


def _check_not_superseded(
    folder: Path, entries: list[SaveEntry], writer: Writer, known: SaveId | None
) -> None:
    """Raise if another writer has saved to the folder since this one saved or loaded."""
    if known is None:
        return
    for entry in entries:
        if entry.state != "whole" or entry.manifest is None:
            continue
        # A save of our own may be newer than the one we know of, if Ctrl-C came right after its
        # manifest was written.
        if entry.number >= known[0] and entry.save_id != known and entry.manifest.writer != writer:
            raise CheckpointError(
                f"{entry.manifest.writer} has saved '{entry.path}' since this run last saved to or "
                f"loaded from '{folder}'. Two runs would remove each other's checkpoints, so this "
                "save was not written. Stop one of them, or save to another folder."
            )


def _remove_old_saves(folder: Path, newest: int, keep: int) -> None:
    """Remove complete saves that are older than the newest `keep`. A damaged one does not count."""
    kept_count = 0
    for entry in reversed(list_saves(folder)):
        if not entry.is_loadable or entry.number > newest:
            continue
        if kept_count < keep:
            kept_count += _has_all_files(entry)
        elif entry.manifest is not None or (entry.path / _OLD_MARKER).exists():
            _remove(entry.path)
    # The link of an earlier version would name an old save, or nothing, from now on.
    target = _read_old_link(folder)
    if target is not None and target.parent == folder and _SAVE_DIRECTORY.fullmatch(target.name):
        (folder / _OLD_LINK).unlink()


def _has_all_files(entry: SaveEntry) -> bool:
    try:
        for name, record in ({} if entry.manifest is None else entry.manifest.files).items():
            check_size(entry.path / name, record)
    except CheckpointError:
        return False
    return True


def remove_remains(folder: Path) -> list[Path]:
    """Remove what killed saves have left, and return it. The caller holds the lock.

    Whatever cannot be removed is left for the next save.
    """
    (folder / f".{_OLD_LINK}.new").unlink(missing_ok=True)
    remains = [entry.path for entry in list_saves(folder) if entry.state == "unfinished"]
    for path in remains:
        _remove(path)
    for path in folder.iterdir():
        if _TEMPORARY_DIRECTORY.fullmatch(path.name):
            _delete(path)
    for entry in list_saves(folder):
        if entry.state == "whole":  # its writer was killed right after the manifest was written
            (entry.path / _WRITING_FILE).unlink(missing_ok=True)
    return remains


def _remove(path: Path) -> None:
    """Rename a save in one step, so that nobody sees half of it, then delete it."""
    removed = path.parent / f".removed-{path.name}-{uuid4().hex[:8]}"
    try:
        path.rename(removed)
    except OSError:
        return
    _delete(removed)


def _delete(path: Path) -> None:
    """Delete a directory of this library, if it is one.

    The files that show whose it is are deleted last. A deletion that is killed half-way can then
    be continued.
    """
    names = os.listdir(path)
    if names and not any(name in _OWN_FILES for name in names):
        return
    with suppress(OSError):
        for name in sorted(names, key=lambda name: name in _OWN_FILES):
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink()
        path.rmdir()
