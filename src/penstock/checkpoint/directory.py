"""The layout of a checkpoint folder, and which of its entries a save may remove.

    folder/
      save-000007/        the files of torch.distributed.checkpoint, extra.pt and the marker
      latest              a symbolic link to it

A save writes beside the last one and then replaces the link in one atomic step. The link alone
decides which checkpoint counts.

A save removes only what this library has written. Each save carries the file `.penstock-save`
from the moment it has its name, and a folder without that marker belongs to the user, whatever it
is called. A checkpoint is removed only after the next one is complete:

    before a save    marked folders without `.metadata`: saves that were killed
    after a save     marked folders that `latest` does not name, and the folder that it named before
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from penstock.errors import ArgumentError

LATEST_LINK = "latest"
_LATEST_LINK_TMP = ".latest.new"
_SAVE_DIRECTORY = re.compile(r"save-(\d+)")
_MARKER_FILE = ".penstock-save"
_TEMPORARY_DIRECTORY = re.compile(r"\.(new|removed)-save-\d+")


def saved(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was last saved in the folder; None if there is none yet.

    A script that may have been restarted asks it before it loads:

    >>> saved("nothing/here") is None
    True
    """
    link = Path(folder) / LATEST_LINK
    try:
        found = Path(folder) / os.readlink(link)
    except OSError:  # it is not there, or no link
        return None
    return found if (found / ".metadata").exists() else None


def create_save_directory(folder: Path) -> Path:
    """Create the folder of the next save and return its path; remove saves that were killed."""
    if (folder / LATEST_LINK).exists() and not (folder / LATEST_LINK).is_symlink():
        raise ArgumentError(
            f"'{folder / LATEST_LINK}' is no link that a save has made, and saving would replace it: "
            "save to another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fsync_directory(folder.parent)
    remove_incomplete_saves(folder)
    taken = [int(found[1]) for found in map(_SAVE_DIRECTORY.fullmatch, os.listdir(folder)) if found]
    place = folder / f"save-{max(taken, default=0) + 1:06d}"
    # The folder gets its name only once it carries the marker: a save that is killed in between
    # would leave a folder that looks like the user's own.
    new = folder / f".new-{place.name}"
    new.mkdir()
    write_file_synced(
        new / _MARKER_FILE, b"A checkpoint that penstock has written, and may remove.\n"
    )
    new.rename(place)
    return place


def commit_save(save_directory: Path) -> None:
    """Make the save at `place` the one that counts, then remove those before it."""
    folder = save_directory.parent
    previous = saved(folder)
    fsync_directory(save_directory)
    (folder / _LATEST_LINK_TMP).symlink_to(save_directory.name)
    os.replace(folder / _LATEST_LINK_TMP, folder / LATEST_LINK)
    fsync_directory(folder)
    remove_incomplete_saves(folder)
    for path in folder.iterdir():
        # The checkpoint that the link named before may be older than the marker.
        if (
            path != save_directory
            and _SAVE_DIRECTORY.fullmatch(path.name)
            and (_is_marked(path) or path == previous)
        ):
            _remove_save(path)


def remove_incomplete_saves(folder: Path) -> None:
    """Remove what killed saves have left. What cannot be removed is left for later."""
    (folder / _LATEST_LINK_TMP).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _TEMPORARY_DIRECTORY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif _SAVE_DIRECTORY.fullmatch(path.name) and _is_marked(path) and not _is_complete(path):
            _remove_save(path)


def _is_marked(path: Path) -> bool:
    return (path / _MARKER_FILE).is_file()


def _is_complete(path: Path) -> bool:
    return (path / ".metadata").exists() and (path / "extra.pt").exists()


def _remove_save(path: Path) -> None:
    """Rename, then remove: a removal that is killed half-way must not lose the marker first."""
    removed = path.parent / f".removed-{path.name}"
    try:
        path.rename(removed)
    except OSError:
        return
    shutil.rmtree(removed, ignore_errors=True)


def write_file_synced(path: Path, data: bytes) -> None:
    """A small file, on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(folder: Path) -> None:
    """The names in it reach the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
