"""IdQueue: ids in the order in which they were pushed, removable from the middle, as two arrays.

The free lists of both pools, at 12 bytes an id and no Python object. Ids stand in a line; each
knows its place there, counted from 1. A place counts only while its id still knows it, so removal
from the middle is one store, and the head skips what was removed.

    line   | dead | live | dead | live | live |      |
             ^ head                            ^ tail

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class IdQueue:
    """A FIFO of distinct ids below `size`. Raises AssertionError on a double push or removal."""

    __slots__ = ("_head", "_line", "_place", "_tail", "count")

    def __init__(self, size: int, ids: I64 | None = None) -> None:
        self._line = np.zeros(2 * max(size, 2), dtype=np.int32)
        self._place = np.zeros(size, dtype=np.int32)  # 0: not in the queue
        self._head = self._tail = 0
        self.count = 0
        if ids is not None and len(ids):
            self.push(ids)

    def __len__(self) -> int:
        return self.count

    def copy(self) -> IdQueue:
        """Another queue of the same ids in the same order."""
        made = object.__new__(IdQueue)
        made._line, made._place = self._line.copy(), self._place.copy()
        made._head, made._tail, made.count = self._head, self._tail, self.count
        return made

    def __contains__(self, ident: int) -> bool:
        return bool(self._place[ident])

    @property
    def places(self) -> npt.NDArray[np.int32]:
        """int32 [size]: where each id stands, 0 if it is not in the queue. Not to be written to."""
        return self._place

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._line.nbytes + self._place.nbytes

    def members(self) -> Bools:
        """bool [size]: which ids are in the queue."""
        return np.not_equal(self._place, 0)

    def push(self, ids: I64) -> None:
        """Append ids at the tail, in order."""
        n, place = len(ids), self._place
        assert not np.count_nonzero(place[ids]), (
            f"id in the queue twice: {ids[place[ids] != 0][:4]}"
        )
        if self._tail + n > len(self._line):
            self._compact()
        end = self._tail + n
        if n == 1:  # mostly one id comes: plain numbers are faster
            self._line[self._tail] = ids[0]
            place[ids[0]] = end
            self._tail = end
            self.count += 1
            return
        self._line[self._tail : end] = ids
        place[ids] = np.arange(self._tail + 1, end + 1)
        assert np.count_nonzero(self._live(self._tail, end)) == n, "an id was pushed twice"
        self._tail = end
        self.count += n

    def remove(self, ids: I64) -> None:
        """Take ids out, wherever they stand."""
        places, n = self._place[ids], len(ids)
        assert np.count_nonzero(places) == n, f"not in the queue: {ids[places == 0][:4]}"
        if n > 1:
            marks = np.arange(-n, 0)
            self._place[ids] = marks
            assert np.count_nonzero(self._place[ids] == marks) == n, "an id was removed twice"
        self._place[ids] = 0
        self.count -= n
        self._skip_dead()

    def peek(self, n: int) -> I64:
        """The first `n` ids (fewer if there are fewer), oldest first; changes nothing."""
        found: list[I64] = []
        missing, at = min(n, self.count), self._head
        while missing > 0:
            end = min(at + max(2 * missing, 16), self._tail)
            live = self._line[at:end][self._live(at, end)][:missing]
            found.append(live.astype(np.int64))
            missing -= len(live)
            at = end
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def ordered(self) -> I64:
        """All ids, oldest first: the canonical content, for digests."""
        return self.peek(self.count)

    def _live(self, start: int, end: int) -> Bools:
        """Which places in ``[start, end)`` of the line count."""
        alive: Bools = self._place[self._line[start:end]] == np.arange(start + 1, end + 1)
        return alive

    def _skip_dead(self) -> None:
        """Move the head to the first place that counts; each place is passed once."""
        head = self._head
        if head < self._tail and self._place.item(self._line.item(head)) == head + 1:
            return
        look = 16
        while self._head < self._tail:
            live = self._live(self._head, min(self._head + look, self._tail))
            first = int(live.argmax())
            if live[first]:
                self._head += first
                return
            self._head += len(live)
            look *= 2

    def _compact(self) -> None:
        live = self.ordered()
        self._line[: len(live)] = live
        self._place[live] = np.arange(1, len(live) + 1)
        self._head, self._tail = 0, len(live)
