"""The layout of a checkpoint folder, and the rules for what a save may remove from it.

    folder/
      save-000007/        the files of torch.distributed.checkpoint, extra.pt and the marker
      latest              a symbolic link to it

A save writes a new directory beside the previous one and then replaces the link in one atomic
step. The link alone decides which checkpoint is current.

A save removes only directories that this library wrote. Each of them contains the marker file
`.penstock-save` from the moment it has its name. A directory without the marker belongs to the
user, whatever its name is. A checkpoint is removed only after the next one is complete:

    before a save    marked directories without `.metadata` or `extra.pt`: saves that were killed
    after a save     marked directories other than the new one, and the previous target of `latest`
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
    """Return the path of the last complete checkpoint in a folder, or None if there is none.

    A script that may have been restarted calls this to decide whether to load.

    Args:
        folder: A folder that `Pipe.save` writes to. It need not exist.

    Returns:
        The directory that the link `latest` points to, or None.

    Example:
        >>> saved("nothing/here") is None
        True
    """
    link = Path(folder) / LATEST_LINK
    try:
        save_directory = Path(folder) / os.readlink(link)
    except OSError:  # it does not exist, or is not a link
        return None
    return save_directory if (save_directory / ".metadata").exists() else None


def create_save_directory(folder: Path) -> Path:
    """Create the directory of the next save and return its path. Remove saves that were killed."""
    if (folder / LATEST_LINK).exists() and not (folder / LATEST_LINK).is_symlink():
        raise ArgumentError(
            f"'{folder / LATEST_LINK}' is not a link created by a save, and saving would replace "
            "it. Save to another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    fsync_directory(folder.parent)  # or a crash could lose the folder itself
    remove_incomplete_saves(folder)
    numbers = [
        int(match[1]) for match in map(_SAVE_DIRECTORY.fullmatch, os.listdir(folder)) if match
    ]
    place = folder / f"save-{max(numbers, default=0) + 1:06d}"
    # The directory gets its final name only after it contains the marker. Otherwise a save that
    # is killed in between would leave a directory that looks like the user's own.
    new = folder / f".new-{place.name}"
    new.mkdir()
    write_file_synced(
        new / _MARKER_FILE, b"A checkpoint that penstock has written, and may remove.\n"
    )
    new.rename(place)
    return place


def commit_save(save_directory: Path) -> None:
    """Point `latest` to a complete save, then remove the earlier saves.

    The order matters, because the process may be killed between any two lines: the files of the
    new save reach the disk before the link names them, and the old save is removed last.
    """
    folder = save_directory.parent
    previous = saved(folder)
    fsync_directory(save_directory)
    # A symbolic link cannot be changed in place, but renaming one over another is atomic.
    (folder / _LATEST_LINK_TMP).symlink_to(save_directory.name)
    os.replace(folder / _LATEST_LINK_TMP, folder / LATEST_LINK)
    fsync_directory(folder)
    remove_incomplete_saves(folder)
    for path in folder.iterdir():
        # The previous checkpoint may come from a version that did not write the marker.
        if (
            path != save_directory
            and _SAVE_DIRECTORY.fullmatch(path.name)
            and (_is_marked(path) or path == previous)
        ):
            _remove_save(path)


def remove_incomplete_saves(folder: Path) -> None:
    """Remove the remains of killed saves. Whatever cannot be removed is left for the next save."""
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
    """Rename a save, then delete it.

    A plain deletion that is killed half-way could delete the marker first, and the rest would then
    look like the user's. Directories with a temporary name are always removed.
    """
    removed = path.parent / f".removed-{path.name}"
    try:
        path.rename(removed)
    except OSError:
        return
    shutil.rmtree(removed, ignore_errors=True)


def write_file_synced(path: Path, data: bytes) -> None:
    """Write a small file. It is on the disk when this function returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(folder: Path) -> None:
    """Flush the entries of a directory to the disk, so that new names survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
