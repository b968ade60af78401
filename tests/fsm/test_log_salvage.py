"""Salvage: reads on past damage, and says exactly what it lost."""

from __future__ import annotations

import pytest
from log_rig import CODEC, FullDisk, flip, opened, recorded, segment_files, write

from hisparse.errors import LogError
from hisparse.fsm.codec import FRAME_HEAD_BYTES
from hisparse.fsm.events import LogGap
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_repair import compact_stream
from hisparse.fsm.log_salvage import Salvage, rewrite
from hisparse.fsm.log_segment import Segment

LAST = 200


def salvaged(directory):
    """({seq: event}, what was lost)."""
    found = Salvage(directory / "scheduler")
    got = {seq: CODEC.decode(kind, body) for seq, kind, body in found.frames()}
    assert list(got) == sorted(got)
    return got, found.lost


def right(got, lost):
    """Every record is the one written, and each seq is either there or in exactly one loss."""
    events = dict(recorded()[1])
    assert all(events[seq] == event for seq, event in got.items())
    missing = [s for one in lost if one.first_seq for s in range(one.first_seq, one.last_seq + 1)]
    return sorted([*missing, *got]) == list(range(1, LAST + 1))


@pytest.fixture
def log(tmp_path):
    write(tmp_path, last=LAST, segment_bytes=4000)
    return tmp_path


def test_an_intact_log_loses_nothing(log):
    got, lost = salvaged(log)
    assert right(got, lost) and lost == []


def test_a_flipped_bit_loses_one_record_and_names_it(log):
    path = segment_files(log)[1]
    reader = DiskReader(log / "scheduler", CODEC, strict=False)
    flip(path, path.stat().st_size // 2)
    list(reader)
    got, lost = salvaged(log)
    (one,) = lost
    assert right(got, lost) and len(got) == LAST - 1
    assert (one.segment, one.offset) == (reader.loss.segment, reader.loss.offset)
    assert one.first_seq == one.last_seq == reader.loss.expected_seq


@pytest.mark.parametrize("compressed", [False, True])
def test_whatever_is_zeroed_the_rest_is_found(tmp_path, compressed):
    write(tmp_path, last=LAST, segment_bytes=4000, compress=compressed)
    path = segment_files(tmp_path)[1]
    data = path.read_bytes()
    for at in range(0, len(data) - 64, 512):
        path.write_bytes(data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :])
        got, lost = salvaged(tmp_path)
        assert right(got, lost) and lost


def test_a_segment_whose_header_is_gone_is_lost_as_a_whole(log):
    flip(segment_files(log)[1], 30)
    got, lost = salvaged(log)
    assert right(got, lost) and [one.segment for one in lost] == ["00000002.seg"]


def test_a_missing_segment_is_named_by_its_seqs(log):
    segment_files(log)[1].unlink()
    got, lost = salvaged(log)
    assert right(got, lost) and "a segment is missing" in lost[0].reason


def test_a_torn_tail_holds_no_whole_seq(log):
    path = [p for p in segment_files(log) if p.stat().st_size > 600][-1]
    path.write_bytes(path.read_bytes() + b"torn")
    for later in segment_files(log):
        if later.name > path.name:
            later.unlink()
    (one,) = salvaged(log)[1]
    assert (one.first_seq, one.last_seq, one.lost_bytes) == (0, 0, 4)


def with_gap(folder, dropped=10):
    """A log whose writer dropped events from seq 11 on, so many, and wrote ten more."""
    disk = FullDisk()
    log = opened(folder, disk=disk, on_error="continue")
    for refuse, count in (((), 10), (("write",), dropped), ((), 10)):
        disk.refuse = set(refuse)
        for _, event in recorded()[1][log.last_seq : log.last_seq + count]:
            log.append(event)
        log.commit()
    log.close()


def test_a_gap_of_the_writer_is_lost(tmp_path):
    with_gap(tmp_path)
    got, (one,) = salvaged(tmp_path)
    assert (one.first_seq, one.last_seq) == (11, 19) and "dropped" in one.reason
    assert isinstance(got[20], LogGap)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dropped", [1, 2, 10])
@pytest.mark.parametrize("damaged", [(), (5,), (10,), (9, 10)])
def test_what_a_salvage_lost_and_what_the_writer_dropped_are_told_apart(
    tmp_path, dropped, damaged, compressed
):
    """Also where both lie side by side, and after a second salvage."""
    log = tmp_path / "0"
    with_gap(log, dropped)
    flip_frames(segment_files(log)[0], damaged)
    want = dict.fromkeys(damaged, "lost to damage")
    want |= dict.fromkeys(range(11, 11 + dropped), "No space left on device")
    for number in (1, 2):
        out = tmp_path / str(number)
        salvage = Salvage(log / "scheduler")
        rewrite(salvage, out / "scheduler")
        if compressed:
            compact_stream(out / "scheduler")
        history, log = LogHistory.open(out), out
        walked = DiskReader(out / "scheduler", CODEC)
        assert len(list(walked)) == 20 + 1 - len(damaged) + marks(damaged)
        assert walked.gaps == history.gaps
        told = {seq: gap for gap in history.gaps for seq in range(gap.first_seq, gap.last_seq + 1)}
        assert {seq: gap.reason for seq, gap in told.items()} == want
        for gap in history.gaps:
            assert ("the writer dropped" in str(gap)) == ("No space" in gap.reason), str(gap)
            assert ("a salvage read" in str(gap)) == (gap.reason == "lost to damage"), str(gap)
    again = {lost.reason for lost in salvage.lost if lost.first_seq in damaged}
    assert again <= {"an earlier salvage had lost them"}


def marks(damaged):
    """LogGaps that stand for what damage took: one a stretch."""
    return sum(seq - 1 not in damaged for seq in damaged)


def flip_frames(path, seqs):
    """A bit in the body of each of these frames of the log's first segment."""
    segment = Segment(OsDisk(), path.parent, 1)
    places = [segment.find(seq, seq, segment.start)[0] for seq in seqs]
    segment.close()
    for at in places:
        flip(path, at + FRAME_HEAD_BYTES + 1)


def test_what_is_rewritten_reads_strictly_with_gaps_where_something_was_lost(log, tmp_path):
    path = segment_files(log)[1]
    flip(path, path.stat().st_size // 2)
    got, (one,) = salvaged(log)
    out = tmp_path / "out"
    assert rewrite(Salvage(log / "scheduler"), out / "scheduler") == LAST - 1
    history = LogHistory.open(out)
    again = dict(history.read(1))
    gap = again.pop(one.first_seq)
    assert isinstance(gap, LogGap) and again == got
    assert [(g.first_seq, g.last_seq) for g in history.gaps] == [(one.first_seq, one.last_seq)]
    assert history.config == recorded()[0]


def test_a_rewrite_never_touches_a_log_that_is_there(log):
    with pytest.raises(LogError, match="already holds a log"):
        rewrite(Salvage(log / "scheduler"), log / "scheduler")
