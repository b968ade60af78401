"""Hostile logs: whatever the bytes, reading ends, in bounds, with right records or a LogError."""

from __future__ import annotations

import ast
import tracemalloc
from pathlib import Path

import google_crc32c
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_rig import CODEC, MemoryDisk, recorded

import hisparse.fsm
from hisparse.errors import LogError
from hisparse.fsm import codec
from hisparse.fsm.codec import (
    FRAME_HEAD_BYTES,
    MAX_BODY_BYTES,
    RESYNC_BYTES,
    SegmentHeader,
    encode_frame,
    encode_header,
)
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_salvage import MAX_LOSSES, Salvage
from hisparse.fsm.log_segment import CHUNK_BYTES, MAX_RAW_BYTES
from hisparse.fsm.log_snapshots import Snapshots

HEADER = SegmentHeader(
    segment=1, first_seq=1, schema_digest="", salt=b"s", config="{}", created=0.0
)
HEAD = encode_header(HEADER)
FRAMES = [encode_frame(HEADER.seed, seq, *CODEC.encode(event)) for seq, event in recorded()[1][:20]]
WHOLE = HEAD + b"".join(FRAMES)


def reads(data, name="00000001_seg"):
    """Read and salvage these bytes; returns the records, which are those written or a LogError."""
    disk = MemoryDisk(**{name: data})
    reader = DiskReader(Path("log"), CODEC, strict=False, disk=disk)
    got = []
    try:
        for one in reader.read():
            got.append(one)
    except LogError:
        pass
    try:
        found = list(Salvage(Path("log"), disk=disk).frames())
    except LogError:
        found = []
    assert [seq for seq, _, _ in found] == sorted({seq for seq, _, _ in found})
    return got


edits = st.lists(
    st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 40), st.binary(max_size=40)), max_size=4
)


@given(st.binary(max_size=400))
def test_arbitrary_bytes_give_no_record(data):
    assert reads(data) == []


@given(st.binary(max_size=400))
def test_arbitrary_bytes_behind_a_header_give_no_record(data):
    assert reads(HEAD + data) == []


@settings(max_examples=300)
@given(edits)
def test_an_edited_segment_gives_a_prefix_of_its_records(changes):
    data = WHOLE
    for at, count, new in changes:
        data = data[:at] + new + data[at + count :]
    got = reads(data)
    assert got == recorded()[1][: len(got)]


def test_a_record_that_is_there_twice_is_read_once():
    assert reads(HEAD + FRAMES[0] + FRAMES[0] + FRAMES[1]) == recorded()[1][:1]


@given(st.integers(0, 0xFFFF), st.binary(max_size=60))
def test_a_frame_with_a_right_checksum_around_anything_is_an_event_or_an_error(kind, body):
    for seq, event in reads(HEAD + encode_frame(HEADER.seed, 1, kind, body)):
        assert seq == 1 and CODEC.encode(event)[0] == kind


@given(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.lists(st.tuples(st.integers(-10, 1 << 40), st.integers(0, 1 << 32)), max_size=5),
    st.binary(max_size=200),
)
def test_a_compressed_header_that_lies_gives_no_record(raw, chunks, data):
    lying = msgspec.structs.replace(HEADER, compression="zstd", raw_bytes=raw, chunks=tuple(chunks))
    assert reads(encode_header(lying) + data, "00000001_seg_zst") == []


@given(st.binary(max_size=300), st.booleans())
def test_a_snapshot_of_arbitrary_bytes_is_none(data, headed):
    if headed:  # a right head, with sizes that may lie
        head = b"hispsnap" + (1).to_bytes(2, "little") + (7).to_bytes(8, "little")
        head += (len(data) << 30).to_bytes(8, "little")
        data = head + google_crc32c.value(b"s" + head + data).to_bytes(4, "little") + data
    snapshots = Snapshots(MemoryDisk(**{"7_snap": data}), Path("log"), b"s")
    assert snapshots.seqs() == [7] and snapshots.read(7) is None


def peak_of(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("raw", [MAX_RAW_BYTES, 1 << 50])
def test_a_small_file_cannot_ask_for_much_memory(raw):
    """It claims gigabytes, chunk for chunk, of which none is there."""
    count = -(-raw // CHUNK_BYTES)
    chunks = ((10, 0),) * min(count, 1 << 17)
    lying = msgspec.structs.replace(HEADER, compression="zstd", raw_bytes=raw, chunks=chunks)
    data = encode_header(lying) + b"z" * 100
    reader = DiskReader(
        Path("log"), CODEC, strict=False, disk=MemoryDisk(**{"00000001_seg_zst": data})
    )
    assert peak_of(lambda: list(reader.read())) < 256 << 20


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_BODY_BYTES])
def test_decoys_cannot_make_a_search_long(monkeypatch, size):
    """Heads of the seq that is looked for, all over the file, none with a right checksum."""
    decoy = size.to_bytes(4, "little") + bytes(2) + (1).to_bytes(8, "little") + bytes(4)
    data = HEAD + decoy * ((20 << 20) // FRAME_HEAD_BYTES)
    summed = []
    plain = google_crc32c.extend
    monkeypatch.setattr(
        codec.google_crc32c, "extend", lambda c, d: (summed.append(len(d)), plain(c, d))[1]
    )
    reader = DiskReader(Path("log"), CODEC, strict=False, disk=MemoryDisk(**{"00000001_seg": data}))
    assert list(reader.read()) == []
    assert sum(summed) < 4 * RESYNC_BYTES and len(summed) < 4 * RESYNC_BYTES // 1024


def test_a_segment_that_is_damaged_all_over_is_given_up():
    data = HEAD + b"".join(
        encode_frame(HEADER.seed, seq, 7, b"") + b"x" for seq in range(1, MAX_LOSSES + 50)
    )
    salvage = Salvage(Path("log"), disk=MemoryDisk(**{"00000001_seg": data}))
    assert len(list(salvage.frames())) == MAX_LOSSES + 1
    assert "given up" in salvage.lost[-1].reason


def test_nothing_that_reads_a_log_can_execute_what_it_reads():
    """No unpickling, no evaluation, no import by name in what bytes of a log pass through."""
    folder = Path(hisparse.fsm.__file__).parent
    files = [*folder.glob("log*.py"), folder / "codec.py", folder / "snapshot.py"]
    assert len(files) > 8
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        forbidden = {"pickle", "marshal", "shelve", "eval", "exec", "compile", "__import__"}
        assert names & (forbidden | {"importlib", "yaml", "subprocess"}) == set(), file.name
