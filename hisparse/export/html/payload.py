"""What a page carries of a log: columns of numbers, compressed as one; texts, compressed in chunks.

    columns   zlib( length u32 | JSON directory | the bytes of each array ) as one line of base64
    texts     a line of base64 a chunk: zlib( JSON [[fields, words], …] ) of `CHUNK` events

A page opens the columns at once and a chunk of texts when it is asked for. Arrays of uint32 lie in
four planes, least significant bytes first, which compress better; ascending ones as differences.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1024
Numbers = Iterable[int] | npt.NDArray[Any]


class Columns:
    """Named arrays and one JSON object, on their way into a page."""

    def __init__(self) -> None:
        self._directory: list[dict[str, Any]] = []
        self._bodies: list[bytes] = []

    def u8(self, name: str, values: Numbers) -> None:
        """Add an array of 0..255."""
        self._add(name, "u8", np.asarray(values, dtype=np.uint8))

    def u32(self, name: str, values: Numbers, *, ascending: bool = False) -> None:
        """Add an array of 0..2^32-1; `ascending` says that neighbours are near each other."""
        column = np.asarray(values, dtype="<u4")
        if ascending and len(column):
            column = np.diff(column, prepend=column.dtype.type(0))  # wraps where it descends
        planes = column.view(np.uint8).reshape(-1, 4).T
        self._add(name, "delta" if ascending else "u32", np.ascontiguousarray(planes))

    def _add(self, name: str, form: str, column: npt.NDArray[np.uint8]) -> None:
        length = column.size if form == "u8" else column.size // 4
        self._directory.append({"name": name, "form": form, "length": length})
        self._bodies.append(column.tobytes())

    def encoded(self, meta: dict[str, Any]) -> str:
        """All of it as base64."""
        head = json.dumps({"meta": meta, "arrays": self._directory}).encode()
        return packed(b"".join([len(head).to_bytes(4, "little"), head, *self._bodies]))


class Texts:
    """Two texts an event, a chunk a line."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str]] = []

    def take(self, fields: str, words: str) -> str | None:
        """Add an event's texts; the line of a chunk that it fills."""
        self._rows.append((fields, words))
        return self.rest() if len(self._rows) == CHUNK else None

    def rest(self) -> str | None:
        """The line of the last chunk, if anything is left for one."""
        if not self._rows:
            return None
        rows, self._rows = self._rows, []
        return packed(json.dumps(rows).encode())


def packed(data: bytes) -> str:
    """`data` compressed, as base64."""
    return base64.b64encode(zlib.compress(data, 6)).decode()
