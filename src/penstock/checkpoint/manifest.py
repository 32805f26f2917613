"""The manifest of a save: who wrote it, and the size and digests of each of its files.

    save-000007/
      manifest.json    {"library": "penstock", "format": 1, "number": 7, "step": 3500, ...}

The manifest is written last and gets its name in one atomic step, so a save is whole if and only if
it has one. The digests are computed while the files are written, and compared while they are read:

    DigestingFile    a file that is being written
    VerifiedFile     a file that is being read; nothing that does not match leaves it

A file has one SHA-256 digest per block of 4 MiB, because a rank reads only parts of the files. It
verifies the blocks that it reads, and nothing else. The digests find damage. They do not prove who
wrote a save: whoever can change the files can change the manifest, too.

SHA-256 takes 0.6 s per GB on a processor with instructions for it (1.8 GB/s; BLAKE2b 0.5 GB/s).
CRC-32 is twice as fast, but lets one in four billion damaged blocks pass.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
_NEW_FILE = f".{MANIFEST_FILE}.new"  # while it is written
BLOCK_SIZE = 4 << 20
_FORMAT = 1
_LIBRARY = "penstock"


@dataclass(frozen=True)
class FileRecord:
    """The size of a file and the digest of each of its blocks."""

    size: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Writer:
    """The process that wrote, or is writing, a save.

    `machine` is equal for processes that can see each other's process numbers. `started` is the
    time at which the process was started, because its number may be used again.
    """

    host: str
    machine: str
    pid: int
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Numbers count the saves of a folder. `step` is the user's own, if `extra` tells it.
    """

    number: int
    writer: Writer
    saved_at: str
    files: Mapping[str, FileRecord]
    version: str = ""
    step: int | None = None

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(record.size for record in self.files.values())


# -------------------------------------------------------------------------------------------------
# The manifest as a file.
# -------------------------------------------------------------------------------------------------


def find_step(extra: Any) -> int | None:
    """Return the step in the `extra` of a save: a number, or that under "step" in a dict."""
    step = extra.get("step") if isinstance(extra, dict) else extra
    return step if type(step) is int else None


def write_manifest(
    directory: Path,
    number: int,
    writer: Writer,
    files: Mapping[str, FileRecord],
    step: int | None,
) -> None:
    """Write the manifest of a save. With the last rename, the save is whole."""
    content = {
        "library": _LIBRARY,
        "version": sys.modules["penstock"].__version__,
        "format": _FORMAT,
        "number": number,
        "step": step,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "writer": asdict(writer),
        "block_size": BLOCK_SIZE,
        "files": {name: {"size": f.size, "sha256": f.digests} for name, f in files.items()},
    }
    text = json.dumps({**content, "digest": _digest_content(content)}, indent=1)
    new = directory / _NEW_FILE
    write_file_synced(new, text.encode())
    os.replace(new, directory / MANIFEST_FILE)
    fsync_directory(directory)


def remove_manifest(directory: Path) -> None:
    """Remove the manifest of a save, or what is left of one, before another is written."""
    for name in (MANIFEST_FILE, _NEW_FILE):
        (directory / name).unlink(missing_ok=True)


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a save, or None if it has none.

    Raises:
        CheckpointError: If the manifest is damaged, or of a newer version of the library.
    """
    path = directory / MANIFEST_FILE
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise damage_error(path, "it is a directory") from None
    try:
        content = json.loads(text)
        digest = content.pop("digest")
        is_intact = digest == _digest_content(content) and content["library"] == _LIBRARY
        file_format = content["format"], content["block_size"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise damage_error(path, "it is not the text that was written")
    if file_format != (_FORMAT, BLOCK_SIZE):
        raise UnknownFormatError(
            f"'{path}' has format {file_format[0]}, and this version of penstock reads format "
            f"{_FORMAT}. It was written by penstock {content.get('version')}: use that version."
        )
    try:
        return _parse_content(content)
    except ValueError as error:
        # A digest proves nothing about who wrote the text.
        raise damage_error(path, str(error)) from None
    except (KeyError, TypeError, AttributeError):
        raise damage_error(path, "a value is missing, or has the wrong type") from None


def _parse_content(content: Mapping[str, Any]) -> Manifest:
    """Return the content of a manifest. Raise for anything that `write_manifest` cannot write."""
    records = {n: FileRecord(f["size"], tuple(f["sha256"])) for n, f in content["files"].items()}
    for name, record in records.items():
        if name in ("", "..") or name != Path(name).name:
            raise ValueError(f"it lists {name!r}, which is not a file in its directory")
        if type(record.size) is not int or len(record.digests) != -(-record.size // BLOCK_SIZE):
            raise ValueError(f"it has a size and digests for {name!r} that do not fit")
    writer, number = Writer(**content["writer"]), content["number"]
    texts = content["saved_at"], content["version"], writer.host, writer.token
    step = content.get("step")  # missing in the first manifests
    if {type(number), type(step)} - {int, type(None)} or number is None:
        raise TypeError
    if not all(text.isprintable() for text in texts):
        raise ValueError("it contains characters that control a terminal")
    return Manifest(number, writer, content["saved_at"], records, content["version"], step)


class UnknownFormatError(CheckpointError):
    """Raised for a manifest of another version of the library, which is not damaged."""


def _digest_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damage_error(path: Path, problem: str) -> CheckpointError:
    """Return the error for a file of a save that is not as it was written."""
    return CheckpointError(
        f"'{path}' is damaged: {problem}. Nothing was loaded. `penstock saved {path.parent.parent} "
        "--verify` examines every save of the folder, and --repair sets damaged ones aside."
    )


def describe_damage(error: Exception) -> str:
    """Return what is wrong, without the advice of `damage_error`."""
    return str(error).partition(" Nothing was loaded.")[0]


# -------------------------------------------------------------------------------------------------
# Digests of files that are written and read.
# -------------------------------------------------------------------------------------------------


class DigestingFile(io.BufferedWriter):
    """A new file whose digests are computed from the bytes that are written, in order.

    The file must not exist: no writer overwrites what another has written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self.error: BaseException | None = None  # why the file could not be written
        self._path, self._size = path, 0
        self._digests: list[str] = []
        self._block = hashlib.sha256()

    def write(self, data: Any, /) -> int:
        """Write bytes behind the others."""
        remaining = memoryview(data).cast("B")
        while remaining:
            part = remaining[: BLOCK_SIZE - self._size % BLOCK_SIZE]
            self._block.update(part)
            self._size += len(part)
            if self._size % BLOCK_SIZE == 0:
                self._digests.append(self._block.hexdigest())
                self._block = hashlib.sha256()
            remaining = remaining[len(part) :]
        with self._keep_error():
            return super().write(data)

    def flush(self) -> None:
        """Hand everything to the operating system. `close` calls this, too."""
        with self._keep_error():
            super().flush()

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        """Context manager: keep an error, such as that of a full disk, and let it name the file."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self._path)
            self.error = error
            raise

    @property
    def record(self) -> FileRecord:
        """The size and digests of everything that was written."""
        last = [self._block.hexdigest()] if self._size % BLOCK_SIZE else []
        return FileRecord(self._size, (*self._digests, *last))


class VerifiedFile(io.RawIOBase):
    """A file that is open for reading, and raises `CheckpointError` for a block that has changed.

    Readers of zip files jump between the end of an entry and its beginning, so the last few blocks
    are kept.
    """

    _KEPT_BLOCKS = 4

    def __init__(self, path: Path, record: FileRecord) -> None:
        super().__init__()
        check_size(path, record)
        self._path, self._record, self._position = path, record, 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by `close`)

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, or as much of it as the file has left."""
        target = memoryview(buffer).cast("B")
        count = 0
        while count < len(target) and self._position < self._record.size:
            index, offset = divmod(self._position, BLOCK_SIZE)
            length = min(len(target) - count, self._get_length(index) - offset)
            part = target[count : count + length]
            if length == BLOCK_SIZE and index not in self._blocks:
                self._read_block(index, part)  # a large tensor: there is no need to keep it
            else:
                part[:] = self._get_block(index)[offset : offset + length]
            count += length
            self._position += length
        return count

    def _get_length(self, index: int) -> int:
        return min(BLOCK_SIZE, self._record.size - index * BLOCK_SIZE)

    def _get_block(self, index: int) -> memoryview:
        if index not in self._blocks:
            data = memoryview(bytearray(self._get_length(index)))
            self._read_block(index, data)
            self._blocks[index] = data
            if len(self._blocks) > self._KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[index]

    def _read_block(self, index: int, target: memoryview) -> None:
        """Read a block and compare its digest."""
        offset = index * BLOCK_SIZE
        self._file.seek(offset)
        length = _read_into(self._file, target)
        if hashlib.sha256(target[:length]).hexdigest() != self._record.digests[index]:
            raise damage_error(
                self._path,
                f"its bytes {offset} to {offset + len(target) - 1} are not those written",
            )

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a position and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._record.size}
        self._position = base[whence] + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


def _read_into(file: io.FileIO, target: memoryview) -> int:
    """Fill a buffer and return how much the file had. One call of `readinto` may read less."""
    length = 0
    while length < len(target) and (count := file.readinto(target[length:])):
        length += count
    return length


def check_size(path: Path, record: FileRecord) -> None:
    """Raise if a file is missing or has another size than it was written with."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise damage_error(path, "the file is missing") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise damage_error(path, "it is not a file")
    if status.st_size != record.size:
        raise damage_error(
            path, f"it has {status.st_size} bytes and was written with {record.size}"
        )


def check_file(path: Path, record: FileRecord, all_bytes: bool) -> None:
    """Raise if a file has another size than it was written with, or, if asked, other bytes."""
    with VerifiedFile(path, record) as file:
        buffer = bytearray(min(record.size, BLOCK_SIZE))
        while all_bytes and file.readinto(buffer):
            pass


def find_damage(directory: Path, manifest: Manifest) -> Iterator[str]:
    """Read every file of a save, and yield a sentence for each that has changed."""
    for name, record in manifest.files.items():
        try:
            check_file(directory / name, record, all_bytes=True)
        except (CheckpointError, OSError) as error:
            yield describe_damage(error)


def describe_file(path: Path) -> FileRecord:
    """Return the size and digests of a file that was written before there were manifests."""
    digests, buffer = [], memoryview(bytearray(BLOCK_SIZE))
    with open(path, "rb", buffering=0) as file:
        while length := _read_into(file, buffer):
            digests.append(hashlib.sha256(buffer[:length]).hexdigest())
        return FileRecord(file.tell(), tuple(digests))


# -------------------------------------------------------------------------------------------------
# Files that survive a crash of the machine.
# -------------------------------------------------------------------------------------------------


def write_file_synced(path: Path, data: bytes) -> FileRecord:
    """Write a small file and return its record. It is on the disk when this function returns."""
    with DigestingFile(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return file.record


def fsync_directory(folder: Path) -> None:
    """Flush the entries of a directory to the disk, so that new names survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory. They have nothing to flush.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
