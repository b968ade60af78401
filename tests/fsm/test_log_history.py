"""LogHistory: any state of a log, from the nearest snapshot that can be trusted."""

from __future__ import annotations

import shutil
import struct

import google_crc32c
import pytest
import zstandard
from log_rig import CODEC, flip, opened, recorded, segment_files, write

from hisparse.errors import LogError, UsageError
from hisparse.fsm import log_history
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.events import StepPlanned
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_seek import jump
from hisparse.fsm.log_segment import Segment
from hisparse.fsm.log_snapshots import Snapshots
from hisparse.fsm.snapshot import snapshot
from hisparse.fsm.state import digest

EVERY = 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("history")
    write(directory, segment_bytes=4000, snapshot_events=EVERY)
    return directory


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "log")
    return tmp_path / "log"


@pytest.fixture
def folded(monkeypatch):
    """The seqs that are folded from here on."""
    seen = []

    def watched(state, event, seq):
        seen.append(seq)
        return plain(state, event, seq)

    plain = log_history.evolve
    monkeypatch.setattr(log_history, "evolve", watched)
    return seen


def test_the_state_at_any_seq_is_that_of_the_live_run(whole):
    history, (_, events, digests) = LogHistory.open(whole), recorded()
    assert history.last_seq == len(events) and history.loss is None and history.gaps == []
    for seq in [*range(0, len(events), 7), len(events)]:
        assert digest(history.state_at(seq)) == digests[seq]


def test_a_fold_begins_at_the_nearest_snapshot(whole, folded):
    LogHistory.open(whole).state_at(2 * EVERY + 5)
    assert folded == [*range(2 * EVERY + 1, 2 * EVERY + 6)]


def test_at_a_snapshot_nothing_is_folded(whole, folded):
    assert digest(LogHistory.open(whole).state_at(2 * EVERY)) == recorded()[2][2 * EVERY]
    assert folded == []


def test_a_snapshot_that_would_grow_beyond_its_size_is_not_decompressed(tmp_path, monkeypatch):
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    head = b"hispsnap" + struct.pack("<HQQ", 1, 7, 1000)
    crc = google_crc32c.value(head + bomb).to_bytes(4, "little")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "7.snap").write_bytes(head + crc + bomb)
    grown = []

    class Watched:
        def decompress(self, data):
            grown.append(len(data))
            return b""

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    assert Snapshots(OsDisk(), tmp_path, b"").read(7) is None and grown == []


@pytest.mark.parametrize("at", [0, 9, 12, 20, 27, 40, -1])
def test_a_damaged_snapshot_is_skipped_and_never_trusted(copy, folded, at):
    flip(copy / "scheduler" / "snapshots" / f"{2 * EVERY}.snap", at)
    state = LogHistory.open(copy).state_at(2 * EVERY + 5)
    assert digest(state) == recorded()[2][2 * EVERY + 5]
    assert folded[0] == EVERY + 1


def test_an_intact_snapshot_under_another_seq_is_skipped(copy, folded):
    folder = copy / "scheduler" / "snapshots"
    shutil.copy(folder / f"{EVERY}.snap", folder / f"{2 * EVERY}.snap")
    history = LogHistory.open(copy)
    assert history.snapshots.read(2 * EVERY) is None
    history.state_at(2 * EVERY)
    assert folded[0] == EVERY + 1


def test_a_snapshot_whose_state_is_of_another_seq_is_skipped(copy, folded):
    history = LogHistory.open(copy)
    wrong = snapshot(history.state_at(7))
    history.snapshots.write(2 * EVERY, wrong, sync=False)
    folded.clear()
    history.state_at(2 * EVERY)
    assert folded[0] == EVERY + 1


def test_a_snapshot_ahead_of_the_log_is_set_aside_by_the_writer(copy):
    for path in segment_files(copy)[2:]:
        path.unlink()
    last = LogHistory.open(copy).last_seq
    opened(copy).close()
    seqs = LogHistory.open(copy).snapshots.seqs()
    assert all(seq <= last for seq in seqs)
    assert list((copy / "scheduler" / "snapshots").glob("*.stale"))


def test_every_step_is_found(whole):
    history = LogHistory.open(whole)
    steps = {e.step: seq for seq, e in recorded()[1] if isinstance(e, StepPlanned)}
    assert len(steps) > 20
    assert {step: history.seq_of_step(step) for step in steps} == steps
    with pytest.raises(LogError, match="step 99999 is not in the log"):
        history.seq_of_step(99999)


def test_reading_from_any_seq_gives_what_follows_it(whole):
    history, events = LogHistory.open(whole), recorded()[1]
    for seq in range(1, len(events) + 2, 13):
        assert list(history.read(seq)) == events[seq - 1 :]
    with pytest.raises(LogError, match="is not in the log"):
        list(history.read(len(events) + 2))


def test_a_seek_in_a_large_segment_reads_little_and_lands_just_before(tmp_path, monkeypatch):
    codec, count = CODEC, 150_000
    log = DiskLog(tmp_path / "scheduler", codec, clock=lambda: 1.0, ring=0)
    for _ in range(count):
        log.append(UnknownEvent(200, b"sixteen bytes..."))
    log.close()
    segment, read = Segment(OsDisk(), tmp_path / "scheduler", 1), []
    plain = segment.bytes.read
    monkeypatch.setattr(
        segment.bytes, "read", lambda size, at: (read.append(size), plain(size, at))[1]
    )
    start = segment.start
    for seq in (1, 2, 777, 75_000, count - 1, count, count + 500):
        segment.offset, read[:] = start, []
        at = jump(segment, 1, seq)
        assert at <= seq and seq - at < 20_000
        assert segment.frames(at)[0][0][0] == at
        assert sum(read) < 2 << 20
    segment.close()


def test_damage_on_the_way_raises(copy):
    flip(segment_files(copy)[1], -30)
    history = LogHistory.open(copy)
    with pytest.raises(LogError, match=r"damage in 00000002\.seg"):
        history.verify()
    assert digest(history.state_at(history.last_seq)) == recorded()[2][history.last_seq]


def test_a_snapshot_of_a_seq_that_is_not_written_is_refused(tmp_path):
    log = opened(tmp_path)
    with pytest.raises(UsageError, match="no snapshot of seq 1"):
        log.snapshot(1, b"")
    log.close()


def test_a_disk_that_refuses_a_snapshot_is_counted_and_no_more(tmp_path):
    log = write(tmp_path, last=50)
    log = opened(tmp_path, snapshot_events=1)
    (tmp_path / "scheduler" / "snapshots").write_bytes(b"in the way")
    log.snapshot(50, b"state")
    assert log.statistics().failed_snapshots == 1 and log.statistics().snapshots == 0
    log.close()
    assert list(DiskReader(tmp_path / "scheduler", CODEC)) == recorded()[1][:50]
