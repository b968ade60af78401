"""The log on a disk that fails: nothing is lost, nothing is there twice."""

from __future__ import annotations

import errno

import pytest
from log_disk_rig import CODEC, FailingDisk, expected, fill, opened

from hisparse.errors import LogError
from hisparse.fsm.log_reader import DiskReader


@pytest.mark.parametrize("partial", [0, 1, 17, 18, 25, 60, 100])
@pytest.mark.parametrize("cannot_truncate", [False, True])
def test_a_commit_that_failed_half_way_is_retried_without_a_duplicate(
    tmp_path, partial, cannot_truncate
):
    disk = FailingDisk()
    log = opened(tmp_path, disk=disk)
    fill(log, 5)
    log.commit()
    fill(log, 5)
    disk.plan = [("write", partial)] + [("truncate", 0)] * cannot_truncate
    with pytest.raises(LogError, match=r"seq 5 is committed.* 5 events wait.*No space left"):
        log.commit()
    assert (log.committed_seq, log.last_seq) == (5, 10)
    if not cannot_truncate:
        assert list(DiskReader(tmp_path, CODEC)) == expected(1, 5)
    fill(log, 2)
    log.commit()
    assert log.committed_seq == 12
    log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 12)


def test_short_writes_are_completed(tmp_path):
    disk = FailingDisk()
    log = opened(tmp_path, disk=disk)
    disk.write = disk.short
    fill(log, 5)
    log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 5)


def test_a_failed_sync_commits_nothing_and_writes_the_batch_again(tmp_path):
    disk = FailingDisk()
    log = opened(tmp_path, disk=disk, fsync="commit")
    fill(log, 5)
    disk.plan = [("sync", 0)]
    with pytest.raises(LogError, match="Input/output error"):
        log.commit()
    assert log.committed_seq == log.synced_seq == 0
    log.commit()
    assert log.committed_seq == log.synced_seq == 5
    log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 5)


def test_a_rotation_that_fails_leaves_the_log_usable_and_is_tried_again(tmp_path):
    disk = FailingDisk()
    log = opened(tmp_path, disk=disk, segment_bytes=1)
    fill(log, 5)
    disk.plan = [("sync", 0)]
    disk.rename = lambda old, new: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    log.commit()
    assert log.statistics().failed_rotations == 1
    del disk.rename
    disk.plan = []
    for _ in range(3):
        fill(log, 5)
        log.commit()
    log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 20)
