"""Checks on the device (``checks="on"``): what both backends know of the rows that were written.

A checksum a row is kept from its write, uint32 by request row, layer and position, and compared
wherever a row is selected. Where the sums of a worker would take more than `SUMS_LIMIT_BYTES` none
is kept (`checksum_bytes` says so): then, as for rows that came with a prefix, which this request
row did not write, only poison is told from content.

Owns nothing; no torch, no CuPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.config import HiSparseConfig
from hisparse.device.layout import POISON, Geometry

SUMS_LIMIT_BYTES = 1 << 28
OTHER_BYTES = "other bytes than were written there (checksum)"
POISONED = "the row is poison: what it lay in was freed, or it was never written"
BEYOND = "the position is beyond the tables"
UNWRITTEN = "the position lies behind the token that selects it"
NO_COPY = "the position has neither a resident nor a readable host row"


class ChecksumBytes(NamedTuple):
    """Bytes of row checksums: those that are taken, or else those of which there are too many."""

    taken: int
    refused: int


def checksum_bytes(geometry: Geometry) -> ChecksumBytes:
    """What the row checksums of a worker take: on the GPU of a `cuda` one. Zeros without checks."""
    g = geometry
    if not g.checks:
        return ChecksumBytes(0, 0)
    need = 4 * g.max_requests * g.layers * g.max_pages * g.page_size
    return ChecksumBytes(need, 0) if need <= SUMS_LIMIT_BYTES else ChecksumBytes(0, need)


def checksum_sizes(config: HiSparseConfig) -> dict[str, int]:
    """`checksum_bytes` of a worker of `config`, by name, known before it is made."""
    taken, refused = checksum_bytes(Geometry.of(config))
    return {"checksum_bytes": taken, "checksum_bytes_refused": refused}


def checksums(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Of uint8 ``[n, row_bytes]``: uint32 ``[n]``, never 0. Bytes that change places change it."""
    weights = np.uint32(2654435761) * (2 * np.arange(rows.shape[1], dtype=np.uint32) + 1)
    made: Any = (rows.astype(np.uint32) + 1) @ weights
    return np.where(made == 0, np.uint32(1), made)


def find_wrong(
    rows: npt.NDArray[np.uint8], written: npt.NDArray[np.uint32]
) -> tuple[int, str] | None:
    """The first of uint8 ``[n, row_bytes]`` that is not what was written (`written`: its checksum,
    0 where nobody knows it), and what is wrong with it."""
    known = written != 0
    other = known & (checksums(rows) != written)
    poisoned = (rows == POISON).all(axis=1) & (other | ~known)
    wrong = np.flatnonzero(other | poisoned)
    if not wrong.size:
        return None
    first = int(wrong[0])
    return first, POISONED if poisoned[first] else OTHER_BYTES
