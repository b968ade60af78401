"""The content oracle: what the bytes of a row must be, as a function of (prefix, layer, position).

Shares nothing with the code under test. A row's bytes are mixed from the chain of the request's
tokens up to its position and from the layer, so that a row from another place, another prefix,
another layer or another time is a different row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2, _GOLD, _MASK = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, int(_GOLDEN), (1 << 64) - 1


def _mix(x: U64) -> U64:
    """A 64-bit finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
        return x ^ (x >> np.uint64(31))


def _mix_one(x: int) -> int:
    """The same, of one plain int."""
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


class Chain:
    """Per position, a 64-bit tag of all tokens up to and with it, and the rows that they are.

    Kept from call to call, and from there on only what is new is mixed.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._tags = np.zeros(0, dtype=np.uint64)
        self._rows: dict[int, U8] = {}  # by cache number

    def tags(self, tokens: Sequence[int]) -> U64:
        """uint64 [len(tokens)], of tokens that mostly continue those of the last call."""
        tokens = list(tokens)
        known = len(self._tokens)
        if tokens[:known] != self._tokens:
            pairs = enumerate(zip(self._tokens, tokens, strict=False))
            known = next((i for i, (old, new) in pairs if old != new), min(known, len(tokens)))
            self._rows = {cache: rows[:known] for cache, rows in self._rows.items()}
        state = int(self._tags[known - 1]) if known else 1
        fresh = []
        for token in tokens[known:]:
            state = _mix_one((state + _GOLD * (token + 1)) & _MASK)
            fresh.append(state)
        self._tokens = tokens
        self._tags = np.concatenate([self._tags[:known], np.array(fresh, dtype=np.uint64)])
        return self._tags

    @property
    def known(self) -> U64:
        """The tags of the last `tags`."""
        return self._tags

    def rows(self, cache: int, width: int) -> U8:
        """uint8 [len(tokens), width]: the rows of all positions of the last `tags` in `cache`."""
        known = self._rows.get(cache)
        have = 0 if known is None else len(known)
        if have < len(self._tags):
            fresh = row_bytes(self._tags[have:], cache, width)
            known = fresh if known is None else np.concatenate([known, fresh])
            self._rows[cache] = known
        return np.zeros((0, width), dtype=np.uint8) if known is None else known


def row_bytes(tags: U64, cache: int, width: int) -> U8:
    """uint8 [n, width]: the rows of positions with `tags` in cache number `cache`."""
    words = np.arange(-(-width // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        seeds = tags[:, None] + _GOLDEN * (words * np.uint64(977) + np.uint64(cache + 1))
    data = _mix(seeds).astype("<u8").view(np.uint8)
    return np.ascontiguousarray(data.reshape(len(tags), 8 * len(words))[:, :width])
