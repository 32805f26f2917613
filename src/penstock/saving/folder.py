"""Where checkpoints stand on disk, so that there is a whole one at every moment.

    folder/
      save-000007/        what torch.distributed.checkpoint has written, and extra.pt
      latest              a link to it

A save writes beside the last one, then replaces the link, in one atomic step: it alone decides
which one counts. What else is there, of saves that were killed, goes with the next save.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from penstock.errors import ArgumentError

LATEST = "latest"
_NEW = ".latest.new"
_SAVE = re.compile(r"save-(\d+)")


def saved(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that was last saved in the folder; None if there is none yet.

    A script that may have been restarted asks it before it loads:

    >>> saved("nothing/here") is None
    True
    """
    link = Path(folder) / LATEST
    try:
        found = Path(folder) / os.readlink(link)
    except OSError:  # it is not there, or no link
        return None
    return found if (found / ".metadata").exists() else None


def next_place(folder: Path) -> Path:
    """The path of the save that comes now, made ready: what killed saves have left is removed."""
    if (folder / LATEST).exists() and not (folder / LATEST).is_symlink():
        raise ArgumentError(
            f"'{folder / LATEST}' is no link that a save has made, and saving would replace it: "
            "save to another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)
    clean(folder)
    taken = [int(found[1]) for found in map(_SAVE.fullmatch, os.listdir(folder)) if found]
    place = folder / f"save-{max(taken, default=0) + 1:06d}"
    place.mkdir()
    return place


def commit(place: Path) -> None:
    """From here on, the save at `place` is the one that counts; the one before it is removed."""
    folder = place.parent
    sync(place)
    (folder / _NEW).symlink_to(place.name)
    os.replace(folder / _NEW, folder / LATEST)
    sync(folder)
    clean(folder)


def clean(folder: Path) -> None:
    """Remove every save but the one that counts. What cannot be removed is left for later."""
    counts = saved(folder)
    (folder / _NEW).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SAVE.fullmatch(path.name) and path != counts:
            shutil.rmtree(path, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    """A small file, on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """The names in it reach the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
