"""SimDisk: the file system under a log, in memory, that loses what a real one may lose.

Every file has what the operating system shows, and what is on the platter: a write is on the
platter once its file was synced, a name once its directory was. `kill` is the end of a process:
handles and locks go, everything written stays, and the write that it died in may be there in part.
`power_off` is the end of the machine: of what was not synced any part may be there, to the byte.

    full        writes are refused, half done                    ENOSPC
    lying       a sync returns and has done nothing
    tearing     the next write that is as long as this: the process dies in it
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

from hisparse.errors import LogError
from hisparse.fsm.log_files import OpenMode


class SimFile:
    """One file: what is seen, what is durable, and the writes since the last sync."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = b""
        self.unsynced: list[tuple[int, bytes | None]] = []  # offset; None: cut off there

    def sync(self) -> None:
        self.durable, self.unsynced = bytes(self.data), []

    def lose(self, rng: random.Random) -> None:
        """The power goes: some of the unsynced writes, in order, the last one in part."""
        kept = bytearray(self.durable)
        writes = self.unsynced[: rng.randrange(len(self.unsynced) + 1)]
        for number, (offset, data) in enumerate(writes):
            if data is None:
                del kept[offset:]
                continue
            if number == len(writes) - 1:
                data = data[: rng.randrange(len(data) + 1)]
            _put(kept, data, offset)
        self.data = kept
        self.sync()


def _put(into: bytearray, data: bytes, offset: int) -> None:
    if len(into) < offset:
        into.extend(bytes(offset - len(into)))
    into[offset : offset + len(data)] = data


class SimDisk:
    """A `Disk` (`hisparse.fsm.log_files`) whose faults its owner decides."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(f"{seed} disk")
        self.full = False
        self.lying = self.lied = False
        self.on_write: Callable[[int], Exception | None] | None = None  # of so many bytes
        self.synced = 0
        self._files: dict[Path, SimFile] = {}
        self._durable: dict[Path, SimFile] = {}
        self._handles: dict[int, SimFile] = {}
        self._locks: dict[int, Path] = {}
        self._next = 100

    # -- what becomes of it -----------------------------------------------------------------------
    def kill(self) -> None:
        """The process ends: its handles and locks go."""
        self._handles.clear()
        self._locks.clear()

    def power_off(self) -> None:
        """The machine ends: what was not synced is lost, in any part."""
        self.kill()
        if self.rng.random() < 0.5:
            self._files = dict(self._durable)
        for file in self._files.values():
            file.lose(self.rng)
        self._durable = dict(self._files)

    def flip_bit(self, path: Path, last_bytes: int | None = None) -> int:
        """Turn one bit of the file round, or of its last bytes; returns the offset of that byte, -1
        if the file is empty."""
        file = self._files[path]
        size = len(file.data)
        if not size:
            return -1
        at = self.rng.randrange(size if last_bytes is None else min(size, last_bytes))
        at = at if last_bytes is None else size - 1 - at
        file.data[at] ^= 1 << self.rng.randrange(8)
        return at

    def paths(self, suffix: str) -> list[Path]:
        """Of files whose name ends so, in order."""
        return sorted(path for path in self._files if path.name.endswith(suffix))

    # -- the protocol -----------------------------------------------------------------------------
    def make_directory(self, path: Path) -> None:
        """A directory is there wherever a file is."""

    def names(self, directory: Path) -> list[str]:
        return [path.name for path in self._files if path.parent == directory]

    def lock(self, path: Path) -> int:
        if path in self._locks.values():
            raise LogError(f"log {path.parent.name!r} is being written: one writer a stream")
        self._next += 1
        self._locks[self._next] = path
        return self._next

    def open(self, path: Path, mode: OpenMode) -> int:
        there = path in self._files
        if mode == "create" and there:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        if mode in ("read", "write") and not there:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        if not there:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._files[path] = SimFile()
        self._next += 1
        self._handles[self._next] = self._files[path]
        if mode == "replace" and there:
            self.truncate(self._next, 0)
        return self._next

    def close(self, fd: int) -> None:
        self._handles.pop(fd, None)
        self._locks.pop(fd, None)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self._file(fd).data[offset : offset + size])

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        file, data = self._file(fd), bytes(data)
        death = self.on_write(len(data)) if self.on_write is not None else None
        if self.full or death is not None:
            part = data[: self.rng.randrange(len(data) + 1)]
            file.unsynced.append((offset, part))
            _put(file.data, part, offset)
            raise death or OSError(errno.ENOSPC, "No space left on device")
        file.unsynced.append((offset, data))
        _put(file.data, data, offset)
        return len(data)

    def size(self, fd: int) -> int:
        return len(self._file(fd).data)

    def truncate(self, fd: int, size: int) -> None:
        file = self._file(fd)
        del file.data[size:]
        file.unsynced.append((size, None))

    def sync(self, fd: int) -> None:
        if self.lying:
            self.lied = True
            return
        self._file(fd).sync()
        self.synced += 1

    def sync_directory(self, path: Path) -> None:
        if self.lying:
            return
        self._durable = {p: f for p, f in self._durable.items() if p.parent != path}
        self._durable |= {p: f for p, f in self._files.items() if p.parent == path}

    def rename(self, old: Path, new: Path) -> None:
        self._files[new] = self._files.pop(old)

    def remove(self, path: Path) -> None:
        del self._files[path]

    def _file(self, fd: int) -> SimFile:
        file = self._handles.get(fd)
        if file is None:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return file
