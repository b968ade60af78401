"""An intact log as it becomes where it lies, behind right checksums.

`spoil` writes a log directory whose events, header, snapshot or bytes were changed as `pick` says:
numbers that are huge, negative or of another event, lists that are long or of another length,
events left out, doubled, out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import zstandard

from hisparse.fsm import snapshot as snapshots
from hisparse.fsm.codec import Codec, SegmentHeader, encode_frame, encode_header
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.state import digest

Pick = Callable[[int], int]  # a number below its argument
CODEC = Codec(EVENT_TYPES)
NUMBERS = (0, 1, -1, 2, 3, 5, 8, 31, 64, 255, 256, 65_535, (1 << 31) - 1, 1 << 31, -(1 << 31))
NUMBERS += ((1 << 32) - 1, 1 << 40, (1 << 62), (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
TEXTS = ("", "r0", "r1/2", "\x00", "x" * 5000, "{}", "d2h", "gpu", "host", "compute")


class Base:
    """An intact log: its header and events, of each stream."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.streams: dict[str, tuple[SegmentHeader, list[Any]]] = {}
        for path in sorted(directory.iterdir()):
            history = LogHistory.open(directory, stream=path.name)
            self.streams[path.name] = (history.header, [e for _, e in history.read(1)])
        history = LogHistory.open(directory)
        self.states = {seq: history.state_at(seq) for seq in (50, 120, history.last_seq)}


def spoil(base: Base, pick: Pick, out: Path) -> None:
    """Write a spoilt copy of `base` to `out`."""
    where = pick(10)
    for name, (header, events) in base.streams.items():
        hit = name == ("rank-0" if where == 0 else "scheduler")
        events = _events(list(events), pick) if hit and where not in (1, 2) else events
        header = _header(header, pick) if hit and where == 1 else header
        write(out / name, header, events)
        if hit and where == 3:
            _bytes(out / name / "00000001.seg", pick)
    if where in (2, 4):
        _snapshot(base, pick, out)


def write(stream: Path, header: SegmentHeader, events: list[Any]) -> None:
    """One segment of `events`, with right checksums whatever they say."""
    stream.mkdir(parents=True, exist_ok=True)
    frames = []
    for seq, event in enumerate(events, header.first_seq):
        try:
            kind, body = CODEC.encode(event)
        except Exception:  # a number that msgpack cannot hold
            kind, body = 7, b"\x92\x00\x01"
        frames.append(encode_frame(header.seed, seq, kind, body))
    (stream / "00000001.seg").write_bytes(encode_header(header) + b"".join(frames))


def _events(events: list[Any], pick: Pick) -> list[Any]:
    for _ in range(1 + pick(3)):
        at = pick(len(events))
        match pick(6):
            case 0:
                del events[at]
            case 1:
                events.insert(pick(len(events)), events[at])
            case 2:
                other = pick(len(events))
                events[at], events[other] = events[other], events[at]
            case _:
                events[at] = _event(events[at], events, pick)
        if not events:
            break
    return events


def _event(event: Any, events: list[Any], pick: Pick) -> Any:
    names = event.__struct_fields__
    name = names[pick(len(names))]
    value = _value(getattr(event, name), events, pick)
    return msgspec.structs.replace(event, **{name: value})


def _value(value: Any, events: list[Any], pick: Pick) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return TEXTS[pick(len(TEXTS))]
    if isinstance(value, bytes):
        return b"\x00" * NUMBERS[pick(10)] if pick(2) else value[:-1]
    if isinstance(value, tuple):
        return _tuple(value, events, pick)
    if isinstance(value, int):  # an enum of small integers too
        return _number(int(value), pick)
    return value


def _number(value: int, pick: Pick) -> int:
    return NUMBERS[pick(len(NUMBERS))] if pick(3) else value + pick(5) - 2


def _tuple(value: tuple[Any, ...], events: list[Any], pick: Pick) -> tuple[Any, ...]:
    match pick(5):
        case 0:
            return value[:-1]
        case 1:
            return value * 2
        case 2:
            one = value[0] if value else NUMBERS[pick(len(NUMBERS))]
            return (*value, *([one] * (1 << pick(16))))
        case 3:
            return tuple(range(pick(70), pick(70)))
        case _:
            if not value:
                return (NUMBERS[pick(len(NUMBERS))],)
            at = pick(len(value))
            return (*value[:at], _value(value[at], events, pick), *value[at + 1 :])


def _header(header: SegmentHeader, pick: Pick) -> SegmentHeader:
    if pick(4) == 0:
        name = ("first_seq", "gap_after", "raw_bytes", "snapshot_seq")[pick(4)]
        number = max(min(NUMBERS[pick(len(NUMBERS))], (1 << 63) - 1), 0)
        return msgspec.structs.replace(header, **{name: number})
    config = msgspec.json.decode(header.config)
    for _ in range(1 + pick(3)):
        sections = [key for key, value in config.items() if isinstance(value, dict) and value]
        part = config[sections[pick(len(sections))]]
        names = [name for name in part if name != "dir"]
        name = names[pick(len(names))]
        old = part[name]
        if isinstance(old, int | float):
            part[name] = NUMBERS[pick(len(NUMBERS))] if pick(3) else old + pick(9) - 4
        elif isinstance(old, list):
            part[name] = [[pick(3)] * (1 + pick(4))] * (1 + pick(300))
    return msgspec.structs.replace(header, config=msgspec.json.encode(config).decode())


def _bytes(path: Path, pick: Pick) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(1 + pick(4)):
        at = pick(len(data) + 1)
        data[at : at + pick(40)] = bytes(pick(256) for _ in range(pick(12)))
    path.write_bytes(data)


def _snapshot(base: Base, pick: Pick, out: Path) -> None:
    """A snapshot with a right digest and checksum of a state that never was."""
    seq = (50, 120, max(base.states))[pick(3)]
    taken = snapshots._DECODER.decode(snapshots.snapshot(base.states[seq]))
    records, columns = taken.records, list(taken.columns)
    for _ in range(1 + pick(3)):
        if pick(2):
            at = pick(len(columns))
            data = bytearray(columns[at])
            for _ in range(pick(8)):
                if data:
                    data[pick(len(data))] = pick(256)
            columns[at] = bytes(data[: len(data) - pick(2) * 4] if pick(4) == 0 else data)
        else:
            names = records.__struct_fields__
            name = names[pick(len(names))]
            records = msgspec.structs.replace(
                records, **{name: _record(getattr(records, name), pick)}
            )
    mangled = snapshots.Snapshot(taken.format, "", columns, records)
    state = base.states[seq].__class__(base.states[seq].config)
    try:
        snapshots._fill(state, mangled)
        mangled = snapshots.Snapshot(taken.format, digest(state), columns, records)
        data = msgspec.msgpack.encode(mangled)
    except Exception:  # it would be refused before its digest is looked at
        data = msgspec.msgpack.encode(taken)
    name, (header, _) = "scheduler", base.streams["scheduler"]
    folder = out / name / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    body = zstandard.ZstdCompressor(write_content_size=True).compress(data)
    head = b"hispsnap" + (1).to_bytes(2, "little") + seq.to_bytes(8, "little")
    head += len(data).to_bytes(8, "little")
    crc = google_crc32c.value(header.salt + head + body).to_bytes(4, "little")
    (folder / f"{seq}.snap").write_bytes(head + crc + body)


def _record(value: Any, pick: Pick) -> Any:
    if isinstance(value, list):
        if not value or pick(4) == 0:
            return value[:-1]
        at = pick(len(value))
        return [*value[:at], _record(value[at], pick), *value[at + 1 :]]
    if isinstance(value, tuple):
        at = pick(len(value))
        return (*value[:at], _record(value[at], pick), *value[at + 1 :])
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
        name = names[pick(len(names))]
        return msgspec.structs.replace(value, **{name: _record(getattr(value, name), pick)})
    if isinstance(value, str):
        return TEXTS[pick(len(TEXTS))]
    return _number(int(value), pick) if isinstance(value, int) else value
