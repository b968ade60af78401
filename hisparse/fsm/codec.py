"""Bytes of the log: events to bodies, bodies to frames, and the header of a segment. Pure.

Owns      the on-disk format, version 1. Numbers are little-endian.
Makes     ``bytes`` and frozen structs; no events of its own.
Needs     event structs with distinct integer tags; nothing here opens a file.
Edges     a length is bounded before it is trusted; a frame is whole, of the expected seq and of
          its segment (CRC), or it is not a frame. Kinds from 0xFF00 are kept for the log itself.
Crash     holds no state that a crash could lose.

    segment  = header frame*
    header   = magic 8 B | format u16 | length u32 | msgpack map | crc32c u32 (all before it)
    frame    = length u32 | kind u16 | seq u64 | crc32c u32 | body
    crc      = CRC-32C over (segment salt, number, first_seq), then length, kind, seq, body

The header's layout is the same in every format version, so that any reader can name a version that
it does not know. Its map may gain fields: a reader ignores those it does not know.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import numpy as np

from hisparse.errors import LogError, UsageError
from hisparse.fsm.events import Event

MAGIC = b"hisplog\n"
FORMAT_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
RESERVED_KINDS = 0xFF00
RESYNC_SEQS = 64
RESYNC_BYTES = 256 << 20  # most bytes that one search for a frame computes checksums of
_SCAN = 1 << 20
_FRAME = struct.Struct("<IHQI")
_CHECKED = struct.Struct("<IHQ")  # the part of a frame's head that its CRC covers
_PREFIX = struct.Struct("<8sHI")
_CRC = struct.Struct("<I")
_SEED = struct.Struct("<QQ")
FRAME_HEAD_BYTES = _FRAME.size
MAX_BODY_BYTES = MAX_FRAME_BYTES - FRAME_HEAD_BYTES
Frame = tuple[int, int, bytes]  # seq, kind, body
Body = tuple[int, bytes]  # kind, body


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event of a kind that this version does not declare; re-encodes to the same bytes."""

    kind: int
    body: bytes


LoggedEvent = Event | UnknownEvent


def _without_words(schema: Any) -> Any:
    """The schema less its descriptions: a reworded docstring is not another format."""
    if isinstance(schema, dict):
        return {k: _without_words(v) for k, v in schema.items() if k != "description"}
    if isinstance(schema, list | tuple):
        return [_without_words(item) for item in schema]
    return schema


@cache
def _decoder(kind: type[Event]) -> Any:
    return msgspec.msgpack.Decoder(kind).decode


@cache
def _schema_digest(types: tuple[type[Event], ...]) -> str:
    schema = _without_words(msgspec.json.schema_components(types))
    text = json.dumps(schema, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Codec:
    """Bodies of the events in `types`: msgpack, the tag doubling as the frame's kind.

    Raises UsageError for a type without an integer tag in ``[0, 0xFF00)``, or for a tag used twice.
    """

    __slots__ = ("_decoders", "_encode", "_kinds", "_types")

    def __init__(self, types: tuple[type[Event], ...]) -> None:
        self._types = types
        self._encode = msgspec.msgpack.Encoder().encode
        self._kinds: dict[type, int] = {}
        self._decoders: dict[int, Any] = {}
        for cls in types:
            kind = cls.__struct_config__.tag
            if type(kind) is not int or not 0 <= kind < RESERVED_KINDS:
                raise UsageError(f"{cls.__name__} needs an integer tag below 0xFF00, not {kind!r}")
            if kind in self._decoders:
                raise UsageError(f"{cls.__name__} reuses kind {kind}: a kind names one event")
            self._kinds[cls] = kind
            self._decoders[kind] = _decoder(cls)

    @property
    def schema_digest(self) -> str:
        """Of the declarations, without their words."""
        return _schema_digest(self._types)

    def encode(self, event: LoggedEvent) -> Body:
        """Kind and body, which a frame can hold.

        Raises UsageError for an undeclared type or an unencodable field, LogError as `check_body`.
        """
        kind = self._kinds.get(type(event))
        if kind is None:
            if isinstance(event, UnknownEvent):
                check_body(event.kind, event.body)
                return event.kind, event.body
            raise UsageError(f"{type(event).__name__} is not an event that this codec declares")
        try:
            body = self._encode(event)
        except (TypeError, OverflowError, ValueError) as error:
            raise UsageError(f"{type(event).__name__} cannot be encoded: {error}") from error
        if len(body) > MAX_BODY_BYTES:
            check_body(kind, body)
        return kind, body

    def decode(self, kind: int, body: bytes) -> LoggedEvent:
        """The event. Raises LogError for a body that its kind's declaration does not allow."""
        decode = self._decoders.get(kind)
        if decode is None:
            return UnknownEvent(kind, body)
        try:
            event: Event = decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LogError(f"an event of kind {kind} does not decode: {error}") from error
        return event


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment says of itself. `created` is in seconds of the writer's injected clock.

    `gap_after`, if not -1: the writer dropped the seqs in ``(gap_after, first_seq)``, and the first
    frame is a LogGap in place of the last of them. A compressed segment states in `raw_bytes` how
    many bytes its frames have, and in `chunks` the (length, crc32c) of each compressed chunk.
    """

    segment: int
    first_seq: int
    schema_digest: str
    salt: bytes
    config: str
    created: float
    compression: str = "none"
    snapshot_seq: int = 0  # of the snapshot that the segment begins with; 0: none
    gap_after: int = -1
    raw_bytes: int = 0
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def seed(self) -> int:
        """Start value of each frame's CRC: bytes of another segment never check out here."""
        place = _SEED.pack(self.segment, self.first_seq)
        return int(google_crc32c.value(self.salt + place))


def encode_header(header: SegmentHeader) -> bytes:
    body = msgspec.msgpack.encode(header)
    data = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    return data + _CRC.pack(google_crc32c.value(data))


def header_room(data: bytes, room: int) -> int:
    """Bytes of the header that `data` begins, 0 where the `room` bytes of the file are too few."""
    if len(data) < _PREFIX.size:
        return 0
    size = _PREFIX.size + int(_PREFIX.unpack_from(data)[2]) + _CRC.size
    return size if size <= min(room, MAX_FRAME_BYTES) else 0


def decode_header(data: bytes) -> SegmentHeader | str:
    """The header that `data` is, or a sentence that says why it is none.

    Raises LogError for an intact header of a format or compression that this version cannot read.
    """
    if not data or header_room(data, len(data)) != len(data):
        return "the header is cut short or its length is wrong"
    magic, version, _ = _PREFIX.unpack_from(data)
    if _CRC.unpack(data[-_CRC.size :])[0] != google_crc32c.value(data[: -_CRC.size]):
        return "the header's checksum does not match"
    if magic != MAGIC:
        return f"the file begins with {magic!r}, not {MAGIC!r}"
    if version != FORMAT_VERSION:
        raise LogError(f"log format {version} is not one this version reads ({FORMAT_VERSION})")
    try:
        header = msgspec.msgpack.decode(data[_PREFIX.size : -_CRC.size], type=SegmentHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"the header does not decode: {error}"
    if header.compression not in ("none", "zstd"):
        raise LogError(f"segment compression {header.compression!r} is not one this version reads")
    return header


def check_body(kind: int, body: bytes) -> None:
    """Raises LogError for a body above `MAX_BODY_BYTES` or a kind that is no u16."""
    if len(body) > MAX_BODY_BYTES:
        raise LogError(f"an event of kind {kind} has {len(body)} B, above {MAX_BODY_BYTES}")
    if not 0 <= kind <= 0xFFFF:
        raise LogError(f"an event has kind {kind}, which a frame cannot hold")


def encode_frames(seed: int, first_seq: int, bodies: Iterable[Body]) -> bytes:
    """Frames of the seqs from `first_seq` on, of bodies that `check_body` lets pass."""
    extend, checked, pack_crc = google_crc32c.extend, _CHECKED.pack, _CRC.pack
    parts: list[bytes] = []
    seq = first_seq
    for kind, body in bodies:
        head = checked(len(body), kind, seq)
        parts += (head, pack_crc(extend(seed, head + body)), body)  # a copy is cheaper than a call
        seq += 1
    return b"".join(parts)


def encode_frame(seed: int, seq: int, kind: int, body: bytes) -> bytes:
    """One frame. Raises LogError as `check_body`."""
    check_body(kind, body)
    return encode_frames(seed, seq, ((kind, body),))


class Parsed(NamedTuple):
    """Frames at the start of some bytes. `need`: whole bytes of the next, which the file has."""

    frames: list[Frame]
    used: int
    need: int
    fault: str


def parse_frames(data: bytes, room: int, seed: int, expected: int) -> Parsed:
    """The frames that `data` begins with, the first of seq `expected`.

    `room` (bytes) is how much the file holds from the first byte of `data` on. The parse stops at
    the end, at the first byte that is not of a valid frame (`fault` says why), or where `data`
    stops short of what the file has (`need`).
    """
    frames: list[Frame] = []
    pos, have = 0, len(data)
    extend, unpack, head = google_crc32c.extend, _FRAME.unpack_from, FRAME_HEAD_BYTES
    while True:
        left = room - pos
        if left <= 0:
            return Parsed(frames, pos, 0, "")
        if left < head:
            return Parsed(frames, pos, 0, f"{left} B are left, fewer than a frame's head")
        if pos + head > have:
            return Parsed(frames, pos, head, "")
        size, kind, seq, crc = unpack(data, pos)
        if seq != expected:
            return Parsed(frames, pos, 0, f"the frame's seq reads {seq}")
        if size > MAX_BODY_BYTES or head + size > left:
            return Parsed(frames, pos, 0, f"a body of {size} B does not fit the {left} B left")
        end = pos + head + size
        if end > have:
            return Parsed(frames, pos, head + size, "")
        body = data[pos + head : end]
        if extend(seed, data[pos : pos + _CHECKED.size] + body) != crc:
            return Parsed(frames, pos, 0, "the frame's checksum does not match")
        frames.append((seq, kind, body))
        pos, expected = end, expected + 1


def find_frame(
    data: bytes, seed: int, first: int, last: int, starts: int = MAX_FRAME_BYTES
) -> tuple[int, bool]:
    """(offset of the first valid frame of a seq in ``[first, last]`` in `data`, or -1; sure).

    The frame begins among the first `starts` bytes, and ends within `data`.

    Looks at every byte for such a seq, so that it never depends on a length that may be wrong. The
    checksums that it computes are bounded: `sure` is False if it gave up before the end.
    """
    count = min(len(data) - FRAME_HEAD_BYTES + 1, starts)
    if count <= 0 or last < first:
        return -1, True
    budget = RESYNC_BYTES
    for base in range(0, count, _SCAN):
        size = min(_SCAN, count - base)
        raw = np.frombuffer(data, np.uint8, size + FRAME_HEAD_BYTES - 1, base)
        seqs = np.lib.stride_tricks.as_strided(raw[6:14].view("<u8"), (size,), (1,))
        sizes = np.lib.stride_tricks.as_strided(raw[:4].view("<u4"), (size,), (1,))
        fits = sizes <= len(data) - FRAME_HEAD_BYTES - base - np.arange(size)
        likely = (seqs >= first) & (seqs <= last) & fits & (sizes <= MAX_BODY_BYTES)
        for at in np.flatnonzero(likely).tolist():
            end = FRAME_HEAD_BYTES + int(sizes[at])
            budget -= end + 1024  # a candidate costs more than its bytes
            if budget < 0:
                return -1, False
            start = base + at
            if parse_frames(data[start : start + end], end, seed, int(seqs[at])).used:
                return start, True
    return -1, True
