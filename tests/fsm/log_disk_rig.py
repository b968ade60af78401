"""Small events, and a log of them on disk, also on one that fails."""

from __future__ import annotations

import errno

import msgspec

from hisparse.fsm.codec import Codec
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk


class Paged(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    cause: int
    pages: tuple[int, ...]


CODEC = Codec((Paged,))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def opened(path, **options):
    return DiskLog(path, CODEC, **{"clock": Clock(), "salt": b"pepper", **options})


def event(seq):
    return Paged(seq - 1, tuple(range(seq % 7)))


def fill(log, count):
    for _ in range(count):
        log.append(event(log.next_seq))


def expected(first, last):
    return [(seq, event(seq)) for seq in range(first, last + 1)]


class FailingDisk(OsDisk):
    """Fails the calls that `plan` says: (call, bytes written before it fails)."""

    def __init__(self):
        self.plan, self.syncs = [], 0

    def _fail(self, call):
        if self.plan and self.plan[0][0] == call:
            return self.plan.pop(0)[1]
        return None

    def write(self, fd, data, offset):
        partial = self._fail("write")
        if partial is None:
            return super().write(fd, data, offset)
        if partial:
            super().write(fd, bytes(data[:partial]), offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    def short(self, fd, data, offset):
        return super().write(fd, data[:1], offset)

    def truncate(self, fd, size):
        if self._fail("truncate") is not None:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(fd, size)

    def sync(self, fd):
        if self._fail("sync") is not None:
            raise OSError(errno.EIO, "Input/output error")
        self.syncs += 1
        super().sync(fd)
