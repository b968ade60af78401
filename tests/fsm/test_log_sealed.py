"""Compressed segments: they read like plain ones, and damage or lies in them are never believed."""

from __future__ import annotations

import google_crc32c
import msgspec
import pytest
import zstandard
from log_rig import CODEC, flip, recorded, segment_files, write

from hisparse.errors import LogError
from hisparse.fsm.codec import decode_header, encode_header, header_room
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_seal import seal
from hisparse.fsm.log_segment import CHUNK_BYTES, MAX_RAW_BYTES, Segment


def read(directory, **options):
    reader = DiskReader(directory / "scheduler", CODEC, **options)
    return list(reader), reader.loss


@pytest.fixture
def sealed(tmp_path):
    write(tmp_path, segment_bytes=4000, compress=True)
    return tmp_path


def restated(path, **changes):
    """Give a segment another header, with a right checksum."""
    data = path.read_bytes()
    room = header_room(data, len(data))
    header = msgspec.structs.replace(decode_header(data[:room]), **changes)
    path.write_bytes(encode_header(header) + data[room:])


def test_sealed_segments_are_compressed_and_read_like_plain_ones(sealed):
    names = [p.name for p in segment_files(sealed)]
    assert len(names) > 3
    assert all(name.endswith(".seg.zst") for name in names[:-1]) and names[-1].endswith(".seg")
    assert read(sealed) == (recorded()[1], None)


def test_the_header_of_a_compressed_segment_stays_readable(sealed):
    data = segment_files(sealed)[0].read_bytes()
    header = decode_header(data[: header_room(data, len(data))])
    assert (header.segment, header.first_seq, header.compression) == (1, 1, "zstd")


def test_a_writer_goes_on_behind_compressed_segments(sealed):
    log = write(sealed, last=0)
    assert log.last_seq == len(recorded()[1])


def test_a_reader_goes_on_where_a_segment_is_sealed_under_it(tmp_path):
    write(tmp_path, segment_bytes=4000)
    directory, events = tmp_path / "scheduler", recorded()[1]
    with LogCursor(DiskReader(directory, CODEC)) as cursor:
        got = cursor.take(5)
        for number in range(1, len(segment_files(tmp_path))):
            seal(OsDisk(), directory, number)
        assert got + cursor.take() == events


def test_a_crash_before_the_original_is_removed_loses_nothing(tmp_path):
    class Stops(OsDisk):
        def remove(self, path):
            raise OSError(5, "crash")

    write(tmp_path, segment_bytes=4000)
    with pytest.raises(OSError):
        seal(Stops(), tmp_path / "scheduler", 1)
    assert len([p for p in segment_files(tmp_path) if "00000001" in p.name]) == 2
    assert read(tmp_path) == (recorded()[1], None)
    seal(OsDisk(), tmp_path / "scheduler", 1)
    assert segment_files(tmp_path)[0].name == "00000001.seg.zst"
    assert read(tmp_path) == (recorded()[1], None)


def test_a_damaged_segment_is_not_compressed(tmp_path):
    write(tmp_path, segment_bytes=4000)
    first = segment_files(tmp_path)[0]
    flip(first, -40)
    with pytest.raises(LogError, match="damaged"):
        seal(OsDisk(), tmp_path / "scheduler", 1)
    assert first.exists()


def test_a_flipped_bit_in_a_compressed_segment_is_damage(sealed):
    flip(segment_files(sealed)[1], -20)
    got, loss = read(sealed, strict=False)
    assert got == recorded()[1][: len(got)] and 0 < len(got) < len(recorded()[1])
    assert not loss.torn and loss.segment == "00000002.seg.zst"
    with pytest.raises(LogError, match=r"damage in 00000002\.seg\.zst"):
        read(sealed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"raw_bytes": MAX_RAW_BYTES + 1}, "above"),
        ({"raw_bytes": -1}, "above"),
        ({"raw_bytes": 100 * CHUNK_BYTES}, "chunks"),
        ({"chunks": ((1 << 40, 0),)}, "compressed chunk"),
    ],
)
def test_stated_sizes_are_checked_before_they_are_trusted(sealed, changes, said):
    path = segment_files(sealed)[0]
    restated(path, **changes)
    got, loss = read(sealed, strict=False)
    assert got == [] and said in loss.reason


def test_a_chunk_that_would_grow_beyond_its_size_is_not_decompressed(sealed, monkeypatch):
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * CHUNK_BYTES))
    path = segment_files(sealed)[0]
    data = path.read_bytes()
    path.write_bytes(data[: header_room(data, len(data))] + bomb)
    restated(path, raw_bytes=CHUNK_BYTES, chunks=((len(bomb), google_crc32c.value(bomb)),))
    grown = []

    class Watched:
        def decompress(self, data):
            grown.append(len(data))
            return b""

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    segment = Segment(OsDisk(), sealed / "scheduler", 1)
    assert segment.frames(1)[0] == [] and grown == []
    segment.close()


def test_a_damaged_compressed_segment_at_the_end_is_damage_and_left_as_it_is(sealed):
    *_, last, open_one = segment_files(sealed)
    open_one.unlink()
    flip(last, -20)
    before = last.read_bytes()
    with pytest.raises(LogError, match=rf"damage in {last.name}"):
        write(sealed, last=0)
    assert last.read_bytes() == before
