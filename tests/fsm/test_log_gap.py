"""A disk that refuses, with on_error "continue": what it drops is counted, and a gap says so."""

from __future__ import annotations

import pytest
from log_rig import CODEC, FullDisk, opened, recorded, write

from hisparse.errors import LogError
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import LogGap
from hisparse.fsm.fold import evolve
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.snapshot import snapshot
from hisparse.fsm.state import State, digest


def fill(log, count):
    for _, event in recorded()[1][log.last_seq : log.last_seq + count]:
        log.append(event)
    log.commit()


@pytest.fixture
def disk():
    return FullDisk()


def gapped(directory, disk, *refuse, **options):
    """A log of 40 events of which 11 to 25 were refused; open."""
    log = opened(directory, disk=disk, on_error="continue", **options)
    fill(log, 10)
    disk.refuse = set(refuse)
    fill(log, 10)
    fill(log, 5)
    disk.refuse = set()
    fill(log, 15)
    return log


@pytest.mark.parametrize(
    ("refuse", "fsync"),
    [(["write"], "never"), (["write", "truncate"], "never"), (["sync"], "commit")],
)
def test_what_was_refused_is_dropped_counted_and_marked(tmp_path, disk, refuse, fsync):
    log = gapped(tmp_path, disk, *refuse, fsync=fsync)
    assert (log.last_seq, log.committed_seq) == (40, 40)
    assert (log.statistics().dropped_events, log.statistics().gaps) == (15, 1)
    log.close()
    reader = DiskReader(tmp_path / "scheduler", CODEC)
    (*before, (seq, gap)), after = list(reader)[:11], list(reader)[11:]
    events = recorded()[1]
    assert before == events[:10] and after == events[25:40]
    assert seq == 25 and isinstance(gap, LogGap) and gap.after_seq == 10
    assert gap.reason in ("No space left on device", "Input/output error")


def test_stop_raises_and_keeps_the_batch(tmp_path, disk):
    log = opened(tmp_path, disk=disk, on_error="stop")
    disk.refuse = {"write"}
    with pytest.raises(LogError, match="No space left"):
        fill(log, 10)
    disk.refuse = set()
    log.close()
    assert list(DiskReader(tmp_path / "scheduler", CODEC)) == recorded()[1][:10]


def test_one_event_refused_is_a_gap_as_well(tmp_path, disk):
    log = opened(tmp_path, disk=disk, on_error="continue")
    disk.refuse = {"write"}
    fill(log, 1)
    disk.refuse = set()
    log.close()
    assert [(g.first_seq, g.last_seq) for g in LogHistory.open(tmp_path).gaps] == [(1, 1)]


def test_readers_report_the_gap_as_loss(tmp_path, disk):
    gapped(tmp_path, disk, "write").close()
    reader = DiskReader(tmp_path / "scheduler", CODEC)
    list(reader)
    (gap,) = reader.gaps
    assert (gap.first_seq, gap.last_seq, gap.segment) == (11, 25, "00000002.seg")
    assert LogHistory.open(tmp_path).gaps == [gap]


def test_a_cursor_on_disk_stops_at_the_gap_and_one_in_memory_does_not(tmp_path, disk):
    log = gapped(tmp_path, disk, "write")
    with LogCursor(log) as cursor:
        assert cursor.take() == recorded()[1][:40]
    log.close()
    with LogCursor(DiskReader(tmp_path / "scheduler", CODEC)) as cursor:
        assert cursor.take(10) == recorded()[1][:10]
        with pytest.raises(LogError, match="gap after seq 10"):
            cursor.take()


def test_a_writer_goes_on_behind_a_gap_after_a_restart(tmp_path, disk):
    gapped(tmp_path, disk, "write").close()
    log = opened(tmp_path)
    assert log.last_seq == 40
    fill(log, 10)
    log.close()
    assert list(DiskReader(tmp_path / "scheduler", CODEC))[-10:] == recorded()[1][40:50]


def test_a_gap_that_could_not_be_written_is_an_end(tmp_path, disk):
    log = opened(tmp_path, disk=disk, on_error="continue")
    fill(log, 10)
    disk.refuse = {"write"}
    fill(log, 5)
    log.close()
    assert log.statistics().dropped_events == 5
    assert LogHistory.open(tmp_path).last_seq == 10


def test_the_fold_resumes_at_the_snapshot_behind_the_gap(tmp_path, disk):
    log = gapped(tmp_path, disk, "write")
    config, events, digests = recorded()
    state = State(config)
    for seq, event in events[:40]:
        evolve(state, event, seq)
    assert log.snapshot_due
    log.snapshot(40, snapshot(state))
    assert not log.snapshot_due
    fill(log, 20)
    log.close()
    history = LogHistory.open(tmp_path)
    assert digest(history.state_at(60)) == digests[60]
    assert digest(history.state_at(10)) == digests[10]
    with pytest.raises(LogError, match=r"dropped seqs 11 to 25 .*No space left"):
        history.state_at(30)


def test_a_log_without_failures_has_no_gap(tmp_path):
    log = write(tmp_path, on_error="continue", segment_bytes=4000)
    assert (log.statistics().dropped_events, log.statistics().gaps) == (0, 0)
    assert LogHistory.open(tmp_path).gaps == []
