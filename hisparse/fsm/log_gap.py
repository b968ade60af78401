"""Gaps: how a log says that it lacks events, and why, in the segment that goes on behind them.

The first frame of that segment is a LogGap in place of the last event that is not there. Its reason
is the disk's, where the writer dropped what the disk refused, or `SALVAGED`, where the log is what
a salvage could read of another, damaged one.
"""

from __future__ import annotations

import msgspec

from hisparse.fsm.codec import Body, Frame, SegmentHeader
from hisparse.fsm.events import LogGap
from hisparse.fsm.log_segment import Segment

SALVAGED = "lost to damage"
KIND = LogGap.__struct_config__.tag
_decode = msgspec.msgpack.Decoder(LogGap).decode


def gap_body(after_seq: int, reason: str) -> Body:
    """A LogGap as a frame's kind and body, whatever events the log's codec knows."""
    assert isinstance(KIND, int)
    return KIND, msgspec.msgpack.encode(LogGap(0, after_seq, reason))


def gap_of(frame: Frame) -> LogGap | None:
    """The LogGap that a frame holds, if it does."""
    _, kind, body = frame
    try:
        return _decode(body) if kind == KIND else None
    except msgspec.DecodeError:
        return None


def gap_reason(segment: Segment) -> str:
    """Why events lack before `segment`; "" where none do, or its first frame is damaged."""
    header = segment.header
    if not isinstance(header, SegmentHeader) or header.gap_after < 0:
        return ""
    frame = segment.first(header.first_seq)
    gap = None if frame is None else gap_of(frame)
    return "" if gap is None else gap.reason


def lacking(first_seq: int, last_seq: int, reason: str, before: str = "") -> str:
    """What happened to the seqs of a gap, by its reason; `before`: the segment behind it."""
    seqs = f"seqs {first_seq} to {last_seq}" + (f" before {before}" if before else "")
    if reason == SALVAGED:
        return f"{seqs} were lost to damage, and a salvage read past them"
    return f"the writer dropped {seqs}"
