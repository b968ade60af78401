"""Bytes of one log never check out in another, nor those of one stream in another's file."""

from __future__ import annotations

import pytest
from log_disk_rig import CODEC, Clock, expected, fill

from hisparse.config import LogConfig
from hisparse.fsm.codec import header_room
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_open import SALT_BYTES, open_log
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_segment import recorded_salt

FIRST = "00000001.seg"


def logged(path, count, *, stream="scheduler", **options):
    """The directory of a stream with `count` events more, by a writer that has ended."""
    config = LogConfig(mode="disk", dir=path, **options)
    log = open_log(config, CODEC, stream=stream, clock=Clock())
    fill(log, count)
    if log.snapshot_due:
        log.snapshot(log.last_seq, b"state at %d" % log.last_seq)
    log.close()
    return path / stream


def split(file):
    data = file.read_bytes()
    room = header_room(data, len(data))
    return data[:room], data[room:]


@pytest.mark.parametrize(("path", "stream"), [("b", "scheduler"), ("a", "rank-0")])
def test_no_frame_of_a_log_parses_in_another_that_says_the_same(path, stream, tmp_path):
    """As blocks of a file that is gone may lie in one that was cut short by a crash."""
    mine = logged(tmp_path / "a", 20)
    other = logged(tmp_path / path, 20, stream=stream)
    header, frames = split(mine / FIRST)
    foreign_header, foreign = split(other / FIRST)
    assert len(foreign) == len(frames) and len(foreign_header) == len(header)
    for whole in (0, len(frames) // 2):
        (mine / FIRST).write_bytes(header + frames[:whole] + foreign[whole:])
        found = [seq for seq, _ in DiskReader(mine, CODEC)]
        assert found == list(range(1, len(found) + 1)) and len(found) < 12
    (mine / FIRST).write_bytes(header + frames)
    assert list(DiskReader(mine, CODEC)) == expected(1, 20)


@pytest.mark.parametrize("compress", [False, True])
def test_a_log_that_is_gone_on_with_keeps_its_salt_its_segment_and_its_snapshots(
    compress, tmp_path
):
    options = {"snapshot_events": 10, "segment_bytes": 2000, "compress": compress}
    for _ in range(4):
        path = logged(tmp_path, 15, **options)
    log = DiskLog(path, CODEC, clock=Clock(), salt=lambda: pytest.fail("there is one"))
    assert list(log.read(1)) == expected(1, 60)
    assert list(log.stored_snapshots()) == [b"state at %d" % seq for seq in (60, 45, 30, 15)]
    assert log.statistics().segments <= 3
    log.close()


def test_a_log_of_no_salt_is_gone_on_with_as_it_is(tmp_path):
    log = DiskLog(tmp_path / "scheduler", CODEC, clock=Clock())
    fill(log, 5)
    log.close()
    path = logged(tmp_path, 5)
    assert sorted(p.name for p in path.iterdir()) == [FIRST, "lock"]
    assert list(DiskReader(path, CODEC)) == expected(1, 10)


def test_each_log_has_a_salt_of_its_own(tmp_path):
    places = [logged(tmp_path / str(n), 1, stream=s) for n in range(3) for s in ("scheduler", "r")]
    salts = {recorded_salt(OsDisk(), path) for path in places}
    assert len(salts) == len(places) and all(len(salt) == SALT_BYTES for salt in salts)
