"""The simulated disk loses what a real one may lose; and each kind of fault that strikes at disk or
memory is the one that finds the code that breaks its rule."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from kinds_rig import found_by

from hisparse.device.worker import HiSparseWorker
from hisparse.errors import LogError
from hisparse.fsm import codec
from hisparse.fsm.log_batch import BatchWriter
from hisparse.fsm.log_files import write_file
from hisparse.kv import acknowledgements, coordinator
from hisparse.testing.atlas import ATLAS
from hisparse.testing.disk import SimDisk

HERE = Path("/sim")


def written(disk, name, *parts, sync=False):
    fd = disk.open(HERE / name, "create")
    at = 0
    for part in parts:
        at += disk.write(fd, part, at)
    if sync:
        disk.sync(fd)
        disk.sync_directory(HERE)
    return fd


def content(disk, name):
    fd = disk.open(HERE / name, "read")
    return disk.read(fd, 1 << 20, 0)


def test_a_killed_process_leaves_what_it_wrote_and_its_lock():
    disk = SimDisk("kill")
    disk.lock(HERE / "lock")
    fd = written(disk, "a", b"one", b"two")
    with pytest.raises(LogError, match="one writer"):
        disk.lock(HERE / "lock")
    disk.kill()
    assert content(disk, "a") == b"onetwo" and disk.lock(HERE / "lock")
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.write(fd, b"three", 6)


def test_without_power_any_part_of_what_was_not_synced_is_there():
    left = set()
    for seed in range(60):
        disk = SimDisk(f"power {seed}")
        fd = written(disk, "a", b"one", sync=True)
        disk.write(fd, b"two", 3)
        disk.write(fd, b"three", 6)
        disk.power_off()
        left.add(content(disk, "a"))
    assert all(b"onetwothree".startswith(data) and data >= b"one" for data in left)
    assert {b"one", b"onetw", b"onetwothree"} <= left


def test_a_name_is_there_for_certain_once_its_directory_was_synced():
    kept = set()
    for seed in range(20):
        disk = SimDisk(f"names {seed}")
        write_file(disk, HERE / "synced", b"data", sync=True)
        write_file(disk, HERE / "loose", b"data", sync=False)
        disk.power_off()
        names = set(disk.names(HERE))
        assert "synced" in names and content(disk, "synced") == b"data"
        kept.add("loose" in names)
    assert kept == {False, True}


def test_a_sync_that_lies_keeps_nothing():
    disk = SimDisk("lie")
    disk.lying = True
    written(disk, "a", b"one", sync=True)
    disk._files = dict(disk._durable)
    assert disk.names(HERE) == []


def test_a_full_disk_takes_a_part_and_says_so():
    disk = SimDisk("full")
    fd = written(disk, "a", b"one")
    disk.full = True
    with pytest.raises(OSError) as refused:
        disk.write(fd, b"two", 3)
    assert refused.value.errno == errno.ENOSPC and b"onetwo".startswith(content(disk, "a"))


# -- each kind against code that breaks its rule ---------------------------------------------------


@contextmanager
def commits_are_not_synced():
    write = BatchWriter._write

    def unsynced(self):
        self._fsync, kept = "never", self._fsync
        try:
            write(self)
        finally:
            self._fsync = kept

    with mock.patch.object(BatchWriter, "_write", unsynced):
        yield


@contextmanager
def checksums_are_not_compared():
    with (
        mock.patch.object(codec.google_crc32c, "extend", lambda crc, data: 0),
        mock.patch.object(codec.google_crc32c, "value", lambda data: 0),
    ):
        yield


@contextmanager
def dropped_events_leave_no_gap():
    def quietly(self, error):
        self.pending.clear()
        self._memory.commit()

    with mock.patch.object(BatchWriter, "_drop", quietly):
        yield


@contextmanager
def a_start_that_fails_keeps_its_memory():
    with mock.patch.object(HiSparseWorker, "_release_pools", lambda self: None):
        yield


@contextmanager
def any_worker_is_taken_for_the_right_one():
    with mock.patch.object(HiSparseWorker, "_check", lambda self, command: None):
        yield


@contextmanager
def old_epochs_are_listened_to():
    as_input = acknowledgements.as_input

    def forgiving(state, acks):
        now, expected = state.worker_epoch[acks.rank], state.acked[acks.rank] + 1
        acks = msgspec.structs.replace(acks, worker_epoch=now)
        if acks.first_seq > expected:
            acks = msgspec.structs.replace(acks, first_seq=expected)
        return as_input(state, acks)

    with mock.patch.object(coordinator, "as_input", forgiving):
        yield


BROKEN = {
    "power_loss": commits_are_not_synced,
    "log_flipped": checksums_are_not_compared,
    "disk_full": dropped_events_leave_no_gap,
    "memory_refused": a_start_that_fails_keeps_its_memory,
    "rank_stale_cursor": any_worker_is_taken_for_the_right_one,
    "ack_old_worker": old_epochs_are_listened_to,
}
# What has to strike beside it, for it to have a chance.
BESIDE = {"ack_old_worker": ["rank_crash"], "disk_full": ["log_torn"]}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_rule_is_found_by_the_kind_that_tries_it(kind):
    often = mock.patch.object(ATLAS[kind], "rates", (0.1,))
    with BROKEN[kind](), often:
        found_by(kind, *BESIDE.get(kind, ()))
