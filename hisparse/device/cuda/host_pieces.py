"""`Pieces`: the registrations that one pinned allocation is made of, and in which order.

Pure bookkeeping, without a lock: `HostMemory` holds one around every call. Borders are whole pages
and whole granules, so that a copy of one granule never spans two registrations (copy engines refuse
that; kernels may cross borders).

    [piece 0)[piece 1) ... [piece n-1)      each: absent -> taken -> registered -> absent

Taken are first those that somebody waits for; then, where the allocation is layers of equal size,
the beginnings of all layers, and so on: its users hand pages out from the lowest number on, and a
page has a part in every layer.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hisparse.config import ceil_div
from hisparse.errors import UsageError


@dataclass(frozen=True)
class Progress:
    """How far pinning is. `placement`: where the pages should lie; `local_share`: of their pages,
    how many do, once all are pinned, and None if that is unknown or does not matter."""

    registered_bytes: int
    total_bytes: int
    elapsed_s: float
    state: str
    placement: str
    local_share: float | None


class Piece:
    """One registration, bytes ``[offset, end)``; `told`: somebody was told that it is ready."""

    __slots__ = ("end", "number", "offset", "state", "told")

    def __init__(self, number: int, offset: int, end: int) -> None:
        self.number, self.offset, self.end = number, offset, end
        self.state, self.told = "absent", False

    @property
    def size(self) -> int:
        return self.end - self.offset


class Pieces:
    """The pieces of `size_bytes`, in whole pages.

    Args:
        size_bytes: of the allocation.
        piece_bytes: most bytes of a piece; one page-and-granule unit at least.
        granule_bytes: bytes, from the start on, that no border falls into.
        what: the allocation's name in messages.
        layer_bytes: of each layer of it; 0: it has none.
    """

    def __init__(
        self,
        size_bytes: int,
        piece_bytes: int,
        granule_bytes: int,
        what: str,
        layer_bytes: int = 0,
    ) -> None:
        self.size_bytes, self.what = size_bytes, what
        self.mapped_bytes = ceil_div(size_bytes, mmap.PAGESIZE) * mmap.PAGESIZE
        unit = math.lcm(granule_bytes, mmap.PAGESIZE)
        self.step_bytes = max(piece_bytes // unit, 1) * unit
        starts = range(0, self.mapped_bytes, self.step_bytes)
        self.all = [
            Piece(number, at, min(at + self.step_bytes, self.mapped_bytes))
            for number, at in enumerate(starts)
        ]
        self._layer_bytes = layer_bytes or size_bytes
        self._in_turn = sorted(self.all, key=self._first_use)
        self._wanted: deque[Piece] = deque()

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.all)

    @property
    def registered_bytes(self) -> int:
        """Of the allocation; what fills up its last page is not counted."""
        done = sum(piece.size for piece in self.all if piece.state == "registered")
        return min(done, self.size_bytes)

    @property
    def complete(self) -> bool:
        return all(piece.state == "registered" for piece in self.all)

    def told(self, piece: Piece) -> str:
        return f"piece {piece.number + 1} of {len(self.all)} (bytes {piece.offset}..{piece.end})"

    def covering(self, offset: int, size: int | None) -> list[Piece]:
        """The pieces of ``[offset, offset + size)``, to the end if `size` is None."""
        end = self.size_bytes if size is None else offset + size
        if not 0 <= offset < end <= self.size_bytes:
            raise UsageError(
                f"{self.what}: bytes {offset}..{end} are not within 0..{self.size_bytes}"
            )
        return self.all[offset // self.step_bytes : ceil_div(end, self.step_bytes)]

    def holding(self, offsets: npt.NDArray[np.int64], size: int) -> list[Piece]:
        """The pieces of the `size` bytes, a granule at most, at each of `offsets`."""
        least, most = int(offsets.min()), int(offsets.max()) + size
        if not 0 <= least < most <= self.size_bytes or not 0 < size <= self.step_bytes:
            raise UsageError(
                f"{self.what}: {size} bytes each in {least}..{most}: they must be within "
                f"0..{self.size_bytes}, and at most {self.step_bytes}"
            )
        ends = (offsets // self.step_bytes, (offsets + size - 1) // self.step_bytes)
        return [self.all[number] for number in np.union1d(*ends).tolist()]

    def cut(self, offset: int, size: int) -> list[tuple[int, int]]:
        """The interval, cut at the borders of pieces: (offset, size) of each part."""
        parts = []
        for piece in self.covering(offset, size):
            start = max(offset, piece.offset)
            parts.append((start, min(offset + size, piece.end) - start))
        return parts

    def want(self, pieces: Sequence[Piece]) -> None:
        """Take these up before others."""
        self._wanted.extend(piece for piece in pieces if piece.state == "absent")

    def take(self) -> Piece | None:
        """The next piece to be pinned, now ``taken``; None if none is absent."""
        while self._wanted and self._wanted[0].state != "absent":
            self._wanted.popleft()
        absent = (piece for piece in self._in_turn if piece.state == "absent")
        piece = self._wanted.popleft() if self._wanted else next(absent, None)
        if piece is not None:
            piece.state = "taken"
        return piece

    def _first_use(self, piece: Piece) -> int:
        """Of the piece's bytes, how far the nearest is from the beginning of its layer."""
        used = min(piece.end, self.size_bytes) - piece.offset
        into_layer = piece.offset % self._layer_bytes
        return 0 if -into_layer % self._layer_bytes < used else into_layer
