"""The logs in memory, and the cursor: nothing that a cursor awaits is ever dropped or skipped."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.config import LogConfig
from hisparse.errors import LogError, UsageError
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.log import OFF_KEPT, MemoryLog
from hisparse.fsm.log_open import open_log


class Counted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    cause: int
    number: int


def fill(log, count):
    for _ in range(count):
        seq = log.next_seq
        assert log.append(Counted(seq - 1, seq)) == seq


def test_seqs_count_from_one_and_read_returns_what_was_appended():
    log = MemoryLog(None)
    fill(log, 2500)
    assert (log.last_seq, log.next_seq, log.oldest_seq) == (2500, 2501, 1)
    assert [e.number for _, e in log.read(1)] == [s for s, _ in log.read(1)] == [*range(1, 2501)]
    assert list(log.read(2501)) == []


@pytest.mark.parametrize("seq", [0, -1, 12])
def test_reading_a_seq_that_was_never_written_is_refused(seq):
    log = MemoryLog(None)
    fill(log, 10)
    with pytest.raises(UsageError, match=r"holds 1\.\.10"):
        log.read(seq)


def test_a_ring_keeps_the_last_n_and_names_the_oldest():
    log = MemoryLog(10)
    fill(log, 1000)
    assert [s for s, _ in log.read(991)] == [*range(991, 1001)]
    with pytest.raises(LogError, match="event 990 was dropped: the oldest kept is 991"):
        log.read(990)
    with pytest.raises(LogError, match="the oldest kept is 991"):
        LogCursor(log, 989)


def test_off_keeps_nothing_without_a_cursor_and_nothing_after_all_have_read():
    log = MemoryLog(0)
    for _ in range(10 * OFF_KEPT):
        fill(log, 1)
        assert log.statistics().kept_events == 0 and len(log._events) <= OFF_KEPT
    at = log.last_seq
    first, second = LogCursor(log, at), LogCursor(log, at)
    fill(log, 500)
    assert [s for s, _ in first.take()] == [*range(at + 1, at + 501)]
    assert log.statistics().kept_events == 500
    assert [s for s, _ in second.take()] == [*range(at + 1, at + 501)]
    assert log.statistics().kept_events == len(log._events) == 0
    assert log.last_seq == at + 500


@given(
    capacity=st.integers(0, 40),
    script=st.lists(st.tuples(st.sampled_from("atpoc"), st.integers(0, 200)), max_size=40),
)
def test_a_cursor_reads_every_seq_once_whatever_the_capacity(capacity, script):
    log = MemoryLog(capacity)
    cursors = {LogCursor(log): 0}
    for action, number in script:
        if action == "a":
            fill(log, number)
        elif action == "o" and len(cursors) < 4:
            cursors[LogCursor(log, log.last_seq)] = log.last_seq
        elif cursors:
            cursor = list(cursors)[number % len(cursors)]
            if action == "c":
                cursor.close()
                del cursors[cursor]
            elif action == "p":
                assert cursor.peek() == cursor.peek()
            else:
                upto = cursors[cursor] + number
                got = cursor.take(upto)
                end = max(min(upto, log.last_seq), cursors[cursor])
                assert [e.number for _, e in got] == [*range(cursors[cursor] + 1, end + 1)]
                cursors[cursor] = cursor.position
                assert cursor.position == end
    for cursor, position in cursors.items():
        assert [e.number for _, e in cursor.take()] == [*range(position + 1, log.next_seq)]


def test_a_ring_that_waits_for_a_slow_cursor_shrinks_once_it_has_read():
    log = MemoryLog(10)
    cursor = LogCursor(log)
    fill(log, 5000)
    assert len(log._events) == 5000
    cursor.take()
    fill(log, 700)
    cursor.close()
    fill(log, 900)
    assert len(log._events) <= 10 + 64


def test_a_cursor_ahead_of_the_log_or_after_its_end_of_life_is_refused():
    log = MemoryLog(10)
    with pytest.raises(LogError, match="ahead of the log"):
        LogCursor(log, 1)
    with LogCursor(log) as cursor:
        fill(log, 1)
    with pytest.raises(UsageError, match="closed"):
        cursor.take()
    with pytest.raises(UsageError, match="not registered"):
        log.unregister(cursor)


def test_a_gap_raises_and_moves_nothing():
    class Holed(MemoryLog):
        def since(self, position, upto=None):
            return [pair for pair in super().since(position, upto) if pair[0] != 3]

    log = Holed(None)
    cursor = LogCursor(log)
    fill(log, 5)
    with pytest.raises(LogError, match="gap after seq 0"):
        cursor.take()
    assert cursor.position == 0


def test_a_worker_sees_only_what_is_committed():
    log = MemoryLog(0)
    scheduler, worker = LogCursor(log), LogCursor(log)
    fill(log, 3)
    assert len(scheduler.take()) == 3
    assert worker.take(log.committed_seq) == []
    log.commit()
    fill(log, 1)
    assert [s for s, _ in worker.take(log.committed_seq)] == [1, 2, 3]


@pytest.mark.parametrize("capacity", [None, 0, 5])
def test_a_closed_log_takes_no_event(capacity):
    log = MemoryLog(capacity)
    fill(log, 3)
    log.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="closed"):
            log.append(Counted(0, 4))
    assert log.last_seq == 3


@pytest.mark.parametrize(("mode", "kept"), [("off", 0), ("ring", 7)])
def test_open_log_builds_what_the_config_says(mode, kept):
    log = open_log(LogConfig(mode=mode, ring_events=7), None, stream="scheduler")
    fill(log, 100)
    statistics = log.statistics()
    assert (statistics.mode, statistics.kept_events, statistics.last_seq) == (mode, kept, 100)


@pytest.mark.parametrize("stream", ["", "../x", "a/b", ".hidden", "Rank"])
def test_open_log_refuses_a_stream_that_is_no_plain_name(stream):
    with pytest.raises(UsageError, match="stream="):
        open_log(LogConfig(), None, stream=stream)
