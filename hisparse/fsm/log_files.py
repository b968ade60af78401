"""The file operations of a log: the `Disk` that the log modules call, and the real one.

Owns      nothing. All I/O of `hisparse.fsm` goes through a `Disk`, so that a test can pass its own.
Makes     no events.
Needs     a file system with `flock` and positioned reads and writes.
Edges     an operation does what it says or raises OSError, as `os` does; nothing is retried here.
Crash     what was written and not synced may be lost, and a rename may not have happened.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Literal, Protocol

from hisparse.errors import LogError

OpenMode = Literal["read", "write", "create", "replace"]
_FLAGS = {
    "read": os.O_RDONLY,
    "write": os.O_RDWR,
    "create": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "replace": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
}


class Disk(Protocol):
    """Every file operation of a log; each raises OSError as `os` does. Offsets are in bytes."""

    def make_directory(self, path: Path) -> None: ...
    def names(self, directory: Path) -> list[str]: ...
    def lock(self, path: Path) -> int: ...
    def open(self, path: Path, mode: OpenMode) -> int: ...
    def close(self, fd: int) -> None: ...
    def read(self, fd: int, size: int, offset: int) -> bytes: ...
    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int: ...
    def size(self, fd: int) -> int: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def sync_directory(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...
    def remove(self, path: Path) -> None: ...


class OsDisk:
    """The real disk. What it creates is its owner's only: directories 0700, files 0600."""

    def make_directory(self, path: Path) -> None:
        if not path.is_dir():
            if path.parent != path:
                self.make_directory(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def lock(self, path: Path) -> int:
        """Lock the file for this process; LogError names the pid of whoever holds it.

        The lock belongs to the open file: a forked child shares it until both have closed it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise LogError(
                f"log {path.parent.name!r} is being written by pid {holder}: one writer a stream; "
                "give this one a directory of its own"
            ) from None
        except OSError:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def open(self, path: Path, mode: OpenMode) -> int:
        return os.open(path, _FLAGS[mode] | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)


def write_all(disk: Disk, fd: int, data: bytes, offset: int) -> None:
    """All of `data`, in as many writes as the disk takes for it. Raises OSError."""
    left: bytes | memoryview = data
    while left:
        count = disk.write(fd, left, offset)
        if count == len(left):
            return
        if not 0 < count < len(left):
            raise OSError(errno.EIO, f"a write of {len(left)} B returned {count}")
        left, offset = memoryview(left)[count:], offset + count


def write_file(disk: Disk, path: Path, data: bytes, *, sync: bool) -> None:
    """Make or replace the file at `path`: all of `data` under that name, or as it was before."""
    temporary = path.with_name(path.name + ".tmp")
    fd = disk.open(temporary, "replace")
    try:
        write_all(disk, fd, data, 0)
        if sync:
            disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, path)
    if sync:
        disk.sync_directory(path.parent)
