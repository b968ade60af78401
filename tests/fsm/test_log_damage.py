"""What a crash or a flipped bit leaves: the longest valid prefix, and never a wrong record."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from hisparse.errors import LogError
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_reader import DiskReader


class Paged(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    cause: int
    pages: tuple[int, ...]


CODEC = Codec((Paged,))
EVENTS = 50


def opened(path, **options):
    return DiskLog(path, CODEC, clock=lambda: 1.0, config_json="{}", salt=b"pepper", **options)


def event(seq):
    return Paged(seq - 1, tuple(range(seq % 5)))


def expected(last):
    return [(seq, event(seq)) for seq in range(1, last + 1)]


def write(path, batches, **options):
    log = opened(path, **options)
    for batch in batches:
        for _ in range(batch):
            log.append(event(log.next_seq))
        log.commit()
    log.close()


@pytest.fixture
def small(tmp_path):
    """(directory, segment file, its bytes, the offset after each frame; [0]: of the header)."""
    write(tmp_path, [EVENTS])
    path = tmp_path / "00000001.seg"
    data = path.read_bytes()
    sizes = [18 + len(CODEC.encode(event(seq))[1]) for seq in range(1, EVENTS + 1)]
    ends = [len(data) - sum(sizes)]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] == len(data)
    return tmp_path, path, data, ends


def test_truncation_at_every_offset_leaves_exactly_the_longest_valid_prefix(small):
    directory, path, data, ends = small
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = max(sum(end <= cut for end in ends) - 1, 0)
        reader = DiskReader(directory, CODEC, strict=True)
        assert list(reader) == expected(whole)
        if cut in ends:
            assert reader.loss is None
        else:
            assert reader.loss.torn
            assert reader.loss.expected_seq == whole + 1
            assert reader.loss.offset + reader.loss.lost_bytes == cut


def test_reopening_after_truncation_keeps_the_torn_bytes_aside_and_goes_on(small):
    directory, path, data, ends = small
    for cut in [*range(0, len(data), 13), ends[0], ends[0] + 1, ends[20], ends[20] + 7]:
        shutil.rmtree(directory)
        directory.mkdir()
        path.write_bytes(data[:cut])
        whole = max(sum(end <= cut for end in ends) - 1, 0)
        good = max((end for end in ends if end <= cut), default=0)
        log = opened(directory)
        assert log.last_seq == whole
        log.append(event(whole + 1))
        log.close()
        assert list(DiskReader(directory, CODEC)) == expected(whole + 1)
        torn = list(directory.glob("*.torn"))
        assert [p.read_bytes() for p in torn] == ([] if cut in ends else [data[good:cut]])
        assert (log.loss is None) == (not torn)


def test_torn_bytes_of_an_earlier_crash_are_not_overwritten(small):
    directory, path, data, _ = small
    for tail in (b"first", b"second!"):
        path.write_bytes(data + tail)
        opened(directory).close()
    assert sorted(p.read_bytes() for p in directory.glob("*.torn")) == [b"first", b"second!"]


def test_no_flipped_bit_ever_yields_a_wrong_record(small):
    directory, path, data, ends = small
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        path.write_bytes(flipped)
        whole = max(sum(end <= bit >> 3 for end in ends) - 1, 0)
        reader = DiskReader(directory, CODEC, strict=False)
        assert list(reader) == expected(whole)
        assert reader.loss is not None
        assert reader.loss.expected_seq == whole + 1


def test_strict_raises_at_damage_and_names_segment_offset_and_seq(small):
    directory, path, data, ends = small
    for at in (ends[10] + 2, ends[10] + 9, ends[10] + 15, ends[10] + 19):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        path.write_bytes(flipped)
        reader = DiskReader(directory, CODEC, strict=True)
        with pytest.raises(LogError, match=rf"damage in 00000001.seg at offset {ends[10]}.*seq 11"):
            list(reader)


def test_damage_in_the_last_record_is_a_torn_tail(small):
    directory, path, data, ends = small
    path.write_bytes(data[:-1] + b"\x00" + b"\x00" * 4096)
    reader = DiskReader(directory, CODEC, strict=True)
    assert list(reader) == expected(EVENTS - 1)
    assert reader.loss.torn
    assert reader.loss.offset == ends[-2]


def test_a_writer_refuses_damage_in_its_last_segment_and_leaves_it(small):
    directory, path, data, ends = small
    flipped = bytearray(data)
    flipped[ends[10] + 2] ^= 0x10
    path.write_bytes(flipped)
    with pytest.raises(LogError, match=rf"damage in 00000001.seg at offset {ends[10]}"):
        opened(directory)
    assert path.read_bytes() == flipped


def test_a_length_is_bounded_before_it_is_trusted(small):
    directory, path, data, ends = small
    for length in (0xFFFFFFFF, 1 << 24, len(data)):
        path.write_bytes(data[: ends[5]] + length.to_bytes(4, "little") + data[ends[5] + 4 :])
        reader = DiskReader(directory, CODEC, strict=False)
        assert list(reader) == expected(5)
        assert "does not fit" in reader.loss.reason


def test_recycled_bytes_of_another_segment_never_parse(tmp_path):
    write(tmp_path / "a", [20])
    write(tmp_path / "b", [10])
    old = (tmp_path / "a" / "00000001.seg").read_bytes()
    log = DiskLog(tmp_path / "b", CODEC, clock=lambda: 1.0, salt=b"new salt")
    log.close()
    with (tmp_path / "b" / "00000002.seg").open("ab") as file:
        file.write(old[len(old) // 2 :] + old)
    reader = DiskReader(tmp_path / "b", CODEC)
    assert list(reader) == expected(10)
    assert reader.loss.torn


@pytest.fixture
def rotated(tmp_path):
    write(tmp_path, [10] * 5, segment_bytes=1)
    assert len(list(tmp_path.glob("*.seg"))) == 6  # the last has no frames yet
    return tmp_path


@pytest.mark.parametrize("where", [5, 40, -3])
def test_damage_before_the_last_segment_is_never_skipped(rotated, where):
    path = rotated / "00000003.seg"
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    reader = DiskReader(rotated, CODEC, strict=False)
    got = list(reader)
    assert got == expected(len(got))
    assert 20 <= len(got) < 30
    assert not reader.loss.torn
    with pytest.raises(LogError, match=r"damage in 00000003.seg"):
        list(DiskReader(rotated, CODEC))
    with pytest.raises(LogError, match=r"damage in 00000003.seg"):
        opened(rotated)


@pytest.mark.parametrize("change", ["missing", "cut at a frame"])
def test_a_hole_between_segments_is_never_skipped(rotated, change):
    path = rotated / "00000003.seg"
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -18 - len(CODEC.encode(event(30))[1])])
    with pytest.raises(LogError, match=r"damage in 00000004.seg.*begins with seq 31"):
        list(DiskReader(rotated, CODEC))
    with pytest.raises(LogError, match="begins with seq 31"):
        opened(rotated)


def test_a_cursor_below_the_oldest_segment_is_told_what_is_kept(rotated):
    (rotated / "00000001.seg").unlink()
    with pytest.raises(LogError, match="event 1 is gone: the oldest kept is 11"):
        LogCursor(DiskReader(rotated, CODEC)).take()
    log = opened(rotated)
    assert log.oldest_seq == 11
    assert [seq for seq, _ in log.read(11)] == [*range(11, 51)]
    log.close()


def test_a_segment_whose_header_was_torn_is_set_aside(rotated):
    path = rotated / "00000006.seg"
    for header in (b"", b"hisplog", bytes(200)):
        path.write_bytes(header)
        log = opened(rotated)
        assert log.last_seq == 50
        assert log.loss.torn
        log.close()
        assert list(DiskReader(rotated, CODEC)) == expected(50)


def test_a_format_of_the_future_is_named(small):
    import google_crc32c

    directory, path, data, ends = small
    header = data[:8] + b"\x02\x00" + data[10 : ends[0] - 4]
    path.write_bytes(header + google_crc32c.value(header).to_bytes(4, "little") + data[ends[0] :])
    with pytest.raises(LogError, match="log format 2"):
        list(DiskReader(directory, CODEC))
