"""The log on disk: writing, reopening, locking, and readers elsewhere."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import msgspec
import pytest
from log_disk_rig import CODEC, Clock, FailingDisk, Paged, event, expected, fill, opened

from hisparse.config import LogConfig
from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import Codec, UnknownEvent
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_open import open_log
from hisparse.fsm.log_reader import DiskReader


def test_what_is_committed_is_read_back_over_segments(tmp_path):
    log = opened(tmp_path, segment_bytes=2000)
    for _ in range(100):
        fill(log, 10)
        log.commit()
    log.close()
    assert log.statistics().segments > 10
    reader = DiskReader(tmp_path, CODEC)
    assert list(reader) == expected(1, 1000)
    assert list(reader.read(777)) == expected(777, 1000)
    assert reader.loss is None


def test_reopening_continues_the_seq_in_the_same_segment(tmp_path):
    for start in (0, 5, 10):
        log = opened(tmp_path)
        assert log.last_seq == log.committed_seq == start
        fill(log, 5)
        log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 15)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.seg", "lock"]


@pytest.mark.parametrize("change", [{"salt": b"other"}, {"config_json": '{"a":1}'}])
def test_reopening_with_another_header_begins_a_segment(tmp_path, change):
    for options in ({}, change):
        log = opened(tmp_path, **options)
        fill(log, 5)
        log.close()
    assert (tmp_path / "00000002.seg").exists()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 10)


def test_an_old_position_is_served_from_disk_and_a_new_one_from_memory(tmp_path):
    log = opened(tmp_path, ring=10, segment_bytes=3000)
    for _ in range(50):
        fill(log, 20)
        log.commit()
    fill(log, 5)
    assert log.statistics().kept_events < 200
    assert list(log.read(1)) == expected(1, 1005)
    with LogCursor(log, 3) as old, LogCursor(log, 1000) as new:
        assert new.take() == expected(1001, 1005)
        assert old.take(500) == expected(4, 500)
        fill(log, 1000)
        assert old.take() == expected(501, 2005)
    log.close()


def test_a_ring_in_front_of_the_disk_holds_what_is_not_committed(tmp_path):
    log = opened(tmp_path, ring=0)
    fill(log, 300)
    assert list(log.read(1)) == expected(1, 300)
    log.commit()
    fill(log, 1)
    assert log.statistics().kept_events == 1
    log.close()


def test_an_unknown_kind_survives_a_rewrite(tmp_path):
    log = opened(tmp_path / "new")
    fill(log, 20)
    log.close()
    old = Codec(())
    copy = DiskLog(tmp_path / "copy", old, clock=Clock())
    for _, unknown in DiskReader(tmp_path / "new", old):
        assert isinstance(unknown, UnknownEvent)
        copy.append(unknown)
    copy.close()
    assert list(DiskReader(tmp_path / "copy", CODEC)) == expected(1, 20)
    frames = [list(DiskReader(tmp_path / d, CODEC).frames()) for d in ("new", "copy")]
    assert frames[0] == frames[1]


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path):
    log = opened(tmp_path)
    with pytest.raises(LogError, match=rf"written by pid {os.getpid()}\b"):
        opened(tmp_path)
    log.close()
    opened(tmp_path).close()


def test_only_the_owner_may_look(tmp_path):
    previous = os.umask(0)
    try:
        log = open_log(LogConfig(mode="disk", dir=tmp_path / "a"), CODEC, stream="rank-0")
    finally:
        os.umask(previous)
    log.append(event(1))
    log.close()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a").rglob("*")}
    assert modes == {"rank-0": 0o700, "00000001.seg": 0o600, "lock": 0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_open_log_passes_the_options_of_the_config_on(tmp_path):
    config = LogConfig(
        mode="disk",
        dir=tmp_path,
        segment_bytes=1000,
        fsync="interval",
        fsync_interval_s=7.0,
        snapshot_events=30,
        compress=True,
        on_error="continue",
    )
    disk, clock = FailingDisk(), Clock()
    log = open_log(config, CODEC, stream="scheduler", clock=clock, disk=disk)
    fill(log, 29)
    clock.now += 4
    log.commit()
    assert not log.snapshot_due and log.statistics().syncs == 0  # the interval has not passed
    clock.now += 3
    fill(log, 1)
    log.commit()
    assert log.snapshot_due and log.statistics().syncs == 1
    fill(log, 100)
    log.commit()
    assert log.statistics().segments > 1
    disk.plan = [("write", 3)]
    fill(log, 1)
    log.commit()
    assert log.statistics().dropped_events == 1
    log.close()
    assert (tmp_path / "scheduler" / "00000001.seg.zst").exists()


@pytest.mark.parametrize(("fsync", "syncs"), [("never", 0), ("interval", 2), ("commit", 40)])
def test_the_disk_is_synced_as_asked(tmp_path, fsync, syncs):
    disk, clock = FailingDisk(), Clock()
    log = opened(tmp_path, disk=disk, clock=clock, fsync=fsync, fsync_interval_s=1.0)
    disk.syncs = 0
    for _ in range(40):
        fill(log, 1)
        clock.now += 0.0625
        log.commit()
    assert disk.syncs == syncs
    log.close()
    assert log.synced_seq == (0 if fsync == "never" else 40)


def test_an_event_that_cannot_be_encoded_changes_nothing(tmp_path):
    log = opened(tmp_path)
    large = Paged(0, tuple(range(2**32, 2**32 + 2_000_000)))
    for bad in (Paged(0, (object(),)), "text", large, UnknownEvent(0x10000, b"")):
        with pytest.raises((UsageError, LogError)):
            log.append(bad)
    fill(log, 2)
    log.close()
    assert list(DiskReader(tmp_path, CODEC)) == expected(1, 2)


def test_a_closed_log_is_closed(tmp_path):
    log = opened(tmp_path)
    fill(log, 1)
    log.close()
    log.close()
    with pytest.raises(UsageError):
        log.append(event(2))
    with pytest.raises(UsageError):
        log.commit()


def test_the_header_says_what_wrote_it(tmp_path):
    opened(tmp_path, config_json='{"page_size":64}').close()
    data = (tmp_path / "00000001.seg").read_bytes()
    header = msgspec.msgpack.decode(data[14:-4])
    assert json.loads(header.pop("config")) == {"page_size": 64}
    assert header == {
        "segment": 1,
        "first_seq": 1,
        "schema_digest": CODEC.schema_digest,
        "salt": b"pepper",
        "created": 100.0,
        "compression": "none",
        "snapshot_seq": 0,
        "gap_after": -1,
        "raw_bytes": 0,
        "chunks": [],
    }


TAIL = """
import sys, msgspec
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.log_reader import DiskReader
cursor = LogCursor(DiskReader(sys.argv[1], Codec(())), 0)
for line in sys.stdin:
    print(*[seq for seq, _ in cursor.take()], flush=True)
"""


def test_another_process_tails_committed_frames_only(tmp_path):
    command = [sys.executable, "-c", TAIL, str(tmp_path)]
    log = opened(tmp_path, segment_bytes=300)
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) as tail:

        def seen():
            tail.stdin.write("\n")
            return [int(word) for word in tail.stdout.readline().split()]

        assert seen() == []
        for first in range(1, 60, 6):  # several segments
            fill(log, 6)
            assert seen() == []
            log.commit()
            assert seen() == [*range(first, first + 6)]
        tail.stdin.close()
    log.close()
    assert log.statistics().segments > 2


def test_a_reader_waits_for_a_log_that_does_not_exist_yet_and_peeks_without_moving(tmp_path):
    cursor = LogCursor(DiskReader(tmp_path, CODEC))
    assert cursor.take() == []
    log = opened(tmp_path)
    fill(log, 10)
    log.commit()
    assert cursor.peek(4) == cursor.peek(4) == expected(1, 4)
    assert cursor.take(7) == expected(1, 7)
    assert cursor.take() == expected(8, 10)
    assert cursor.take() == []
    log.close()
