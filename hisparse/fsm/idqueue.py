"""IdQueue: ids in the order in which they were pushed, removable from the middle, as two arrays.

The free lists of both pools. No Python object an id: a ring of (id, stamp) pairs, and one stamp an
id. An entry of the ring counts only while its stamp is still the id's own, so removal from the
middle is one store, and the head skips what was removed.

    ring   | dead | live | dead | live | live |      |
             ^ head                            ^ tail
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class IdQueue:
    """A FIFO of distinct ids below `size`. Raises AssertionError on a double push or removal."""

    __slots__ = ("_head", "_ids", "_next_stamp", "_own", "_stamps", "_tail", "count")

    def __init__(self, size: int, ids: I64 | None = None) -> None:
        capacity = 2 * max(size, 2)
        self._ids = np.zeros(capacity, dtype=np.int32)
        self._stamps = np.zeros(capacity, dtype=np.int64)
        self._own = np.zeros(size, dtype=np.int64)  # 0: not in the queue
        self._next_stamp = 1
        self._head = self._tail = 0
        self.count = 0
        if ids is not None and len(ids):
            self.push(ids)

    def __len__(self) -> int:
        return self.count

    def __contains__(self, ident: int) -> bool:
        return bool(self._own[ident])

    def members(self) -> npt.NDArray[np.bool_]:
        """bool [size]: which ids are in the queue."""
        return np.not_equal(self._own, 0)

    def push(self, ids: I64) -> None:
        """Append ids at the tail, in order."""
        n = len(ids)
        assert not self._own[ids].any(), f"id in the queue twice: {ids[self._own[ids] != 0][:4]}"
        if self._tail + n > len(self._ids):
            self._compact()
        stamps = np.arange(self._next_stamp, self._next_stamp + n)
        self._ids[self._tail : self._tail + n] = ids
        self._stamps[self._tail : self._tail + n] = stamps
        self._own[ids] = stamps
        assert int(np.count_nonzero(self._own[ids] == stamps)) == n, "an id was pushed twice"
        self._next_stamp += n
        self._tail += n
        self.count += n

    def remove(self, ids: I64) -> None:
        """Take ids out, wherever they stand."""
        assert self._own[ids].all(), f"not in the queue: {ids[self._own[ids] == 0][:4]}"
        self._own[ids] = 0
        self.count -= len(ids)
        head, tail = self._head, self._tail
        while head < tail and self._own[self._ids[head]] != self._stamps[head]:
            head += 1
        self._head = head

    def peek(self, n: int) -> I64:
        """The first `n` ids (fewer if there are fewer), oldest first; changes nothing."""
        found: list[I64] = []
        missing, at = min(n, self.count), self._head
        while missing > 0:
            end = min(at + max(2 * missing, 16), self._tail)
            ids = self._ids[at:end]
            live = ids[self._own[ids] == self._stamps[at:end]][:missing]
            found.append(live.astype(np.int64))
            missing -= len(live)
            at = end
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def ordered(self) -> I64:
        """All ids, oldest first: the canonical content, for digests."""
        return self.peek(self.count)

    def _compact(self) -> None:
        live = self.ordered()
        stamps = self._own[live]
        self._ids[: len(live)] = live
        self._stamps[: len(live)] = stamps
        self._head, self._tail = 0, len(live)
