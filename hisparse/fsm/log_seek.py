"""Jumping in a segment: a frame at or shortly before a seq, found by bisection over its bytes.

Owns      nothing; it reads through the `Segment` that it is given, and sets its position.
Makes     no events.
Edges     only whole frames of the segment, by checksum, are jumped to; where none is found, the
          jump ends earlier, at worst at the segment's first frame. Frames jumped over are not
          looked at.
"""

from __future__ import annotations

from hisparse.fsm.codec import FRAME_HEAD_BYTES, find_frame
from hisparse.fsm.log_segment import Segment

NEAR_BYTES = 32 << 10


def jump(segment: Segment, first_seq: int, seq: int) -> int:
    """Set `segment` to a frame at or before `seq`; returns that frame's seq.

    `first_seq` is that of the segment's first frame. For a `seq` beyond its end, the place is
    shortly before the end.
    """
    low, at_seq, high = segment.offset, first_seq, segment.bytes.size()
    while high - low > 2 * NEAR_BYTES:
        middle = (low + high) // 2
        window = segment.bytes.read(min(NEAR_BYTES, high - middle), middle)
        most = at_seq + (high - low) // FRAME_HEAD_BYTES
        found, _ = find_frame(window, segment.seed, at_seq + 1, most)
        there = -1 if found < 0 else _seq_at(window[found:])
        if 0 <= there <= seq:
            low, at_seq = middle + found, there
        else:
            high = middle
    segment.offset = low
    return at_seq


def _seq_at(frame: bytes) -> int:
    return int.from_bytes(frame[6:14], "little")
