"""Logs for tests: events of a simulator's run, written to disk as its scheduler would."""

from __future__ import annotations

import errno
from functools import cache

from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.fold import evolve
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.snapshot import snapshot
from hisparse.fsm.state import State, digest
from hisparse.testing.calm import CalmSimulation

CODEC = Codec(EVENT_TYPES)


@cache
def recorded(seed=13):
    """(config, [(seq, event)], {seq: digest of the state after it})."""
    simulation = CalmSimulation(seed)
    simulation.run()
    events = list(simulation.log.read(1))
    state, digests = State(simulation.config), {0: digest(State(simulation.config))}
    for seq, event in events:
        evolve(state, event, seq)
        digests[seq] = digest(state)
    return simulation.config, events, digests


def opened(directory, **options):
    config = recorded()[0].model_dump_json()
    return DiskLog(
        directory / "scheduler", CODEC, **{"clock": lambda: 1.0, "config_json": config, **options}
    )


def write(directory, *, batch=10, last=None, **options):
    """Write the run's events up to `last` in commits of `batch`, with snapshots where due."""
    config, events, _ = recorded()
    log, state = opened(directory, **options), State(config)
    for seq, event in events[:last]:
        assert log.append(event) == seq
        evolve(state, event, seq)
        if seq % batch == 0:
            log.commit()
            if log.snapshot_due:
                log.snapshot(seq, snapshot(state))
    log.close()
    return log


def segment_files(directory):
    return sorted(p for p in (directory / "scheduler").iterdir() if ".seg" in p.name)


def flip(path, at, mask=0x10):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


class FullDisk(OsDisk):
    """Refuses what `refuse` names, as a full or a broken disk does."""

    def __init__(self, *refuse):
        self.refuse = set(refuse)

    def write(self, fd, data, offset):
        if "write" in self.refuse:
            super().write(fd, bytes(data[: len(data) // 2]), offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fd, data, offset)

    def sync(self, fd):
        if "sync" in self.refuse:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)

    def truncate(self, fd, size):
        if "truncate" in self.refuse:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(fd, size)


class MemoryDisk:
    """A folder that is one dict of bytes, for reading: fast enough for a file a byte."""

    def __init__(self, **files):
        self.files = {name.replace("_", "."): data for name, data in files.items()}

    def names(self, directory):
        return list(self.files)

    def open(self, path, mode):
        assert mode == "read"
        if path.name not in self.files:
            raise FileNotFoundError(path.name)
        return path.name

    def close(self, fd):
        pass

    def read(self, fd, size, offset):
        return bytes(self.files[fd][offset : offset + size])

    def size(self, fd):
        return len(self.files[fd])
