"""A real segment, cut, zeroed and flipped everywhere: always the longest valid prefix.

HISPARSE_EVERY_BIT=1 flips every bit for salvage and the compressed segment too, which by default
see one bit of each byte, another one in each.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from log_rig import CODEC, MemoryDisk, recorded, segment_files, write

from hisparse.errors import LogError
from hisparse.fsm.codec import FRAME_HEAD_BYTES
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_reader import DiskReader
from hisparse.fsm.log_salvage import Salvage
from hisparse.fsm.log_seal import seal

RECORDS = 200
EVERY_BIT = os.environ.get("HISPARSE_EVERY_BIT") == "1"


class Whole:
    """A segment's bytes, its frames, and where each of them ends (`ends[0]`: the header)."""

    def __init__(self, directory):
        write(directory, last=RECORDS)
        (path,) = segment_files(directory)
        self.data = path.read_bytes()
        self.frames = list(DiskReader(directory / "scheduler", CODEC).frames())
        sizes = [FRAME_HEAD_BYTES + len(body) for _, _, body in self.frames]
        self.ends = [len(self.data) - sum(sizes)]
        for size in sizes:
            self.ends.append(self.ends[-1] + size)

    def intact(self, at):
        """How many frames end at or before offset `at`."""
        return max(sum(end <= at for end in self.ends) - 1, 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


def read(data, name="00000001_seg"):
    """(frames, loss) of a segment of these bytes."""
    reader = DiskReader(Path("log"), CODEC, strict=False, disk=MemoryDisk(**{name: data}))
    return list(reader.frames()), reader.loss


def salvaged(data):
    found = Salvage(Path("log"), disk=MemoryDisk(**{"00000001_seg": data}))
    return list(found.frames())


def bits(data):
    """The bits to flip: all of them, or one a byte, another one in each."""
    if EVERY_BIT:
        return range(len(data) * 8)
    return range(0, len(data) * 8, 9)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(changed)


def test_the_segment_is_a_real_one(whole):
    assert len(whole.frames) == RECORDS and len(whole.data) > 8000
    assert len({kind for _, kind, _ in whole.frames}) > 12
    events = [(seq, CODEC.decode(kind, body)) for seq, kind, body in whole.frames]
    assert events == recorded()[1][:RECORDS]


def test_cut_at_every_offset(whole):
    for cut in range(len(whole.data) + 1):
        got, loss = read(whole.data[:cut])
        assert got == whole.frames[: whole.intact(cut)]
        assert (loss is None) == (cut in whole.ends)
        assert loss is None or loss.torn


def test_zeroed_in_every_sector(whole):
    for at in range(0, len(whole.data), 512):
        zeroed = whole.data[:at] + bytes(len(whole.data[at : at + 512])) + whole.data[at + 512 :]
        first = next(i for i, (a, b) in enumerate(zip(zeroed, whole.data, strict=True)) if a != b)
        got, loss = read(zeroed)
        assert got == whole.frames[: whole.intact(first)]
        assert loss is not None and loss.expected_seq == len(got) + 1


def test_every_bit_flipped(whole):
    for bit in range(len(whole.data) * 8):
        got, loss = read(flipped(whole.data, bit))
        assert got == whole.frames[: whole.intact(bit >> 3)]
        assert loss is not None and loss.expected_seq == len(got) + 1


def test_salvage_behind_a_flipped_bit_finds_all_other_records(whole):
    start = whole.ends[0]
    for bit in bits(whole.data)[:: 1 if EVERY_BIT else 4]:
        byte = bit >> 3
        hit = whole.intact(byte)
        expected = whole.frames[:hit] + whole.frames[hit + 1 :] if byte >= start else []
        assert salvaged(flipped(whole.data, bit)) == expected


def test_every_bit_of_a_compressed_segment_flipped(tmp_path, whole):
    write(tmp_path, last=RECORDS)
    seal(OsDisk(), tmp_path / "scheduler", 1)
    (path,) = segment_files(tmp_path)
    data = path.read_bytes()
    for bit in bits(data):
        try:
            got, loss = read(flipped(data, bit), "00000001_seg_zst")
        except LogError:
            continue  # a version or compression that is not known
        assert got == [] and loss is not None
    assert read(data, "00000001_seg_zst") == (whole.frames, None)
