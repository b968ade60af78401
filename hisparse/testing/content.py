"""The content oracle: what the bytes of a row must be, as a function of (prefix, layer, position).

Shares nothing with the code under test. A row's bytes are mixed from the chain of the request's
tokens up to its position and from the layer, so that a row from another place, another prefix,
another layer or another time is a different row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    """A 64-bit finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


class Chain:
    """Per position, a 64-bit tag of all tokens up to and with it. Kept from call to call."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._tags: list[int] = []

    def tags(self, tokens: Sequence[int]) -> U64:
        """uint64 [len(tokens)], of tokens that mostly continue those of the last call."""
        known = 0
        for old, new in zip(self._tokens, tokens, strict=False):
            if old != new:
                break
            known += 1
        del self._tokens[known:], self._tags[known:]
        state = np.array([self._tags[-1] if self._tags else 1], dtype=np.uint64)
        for token in tokens[known:]:
            with np.errstate(over="ignore"):
                state = _mix(state + _GOLDEN * np.uint64(token + 1))
            self._tokens.append(token)
            self._tags.append(int(state[0]))
        return np.array(self._tags, dtype=np.uint64)


def row_bytes(tags: U64, cache: int, width: int) -> npt.NDArray[np.uint8]:
    """uint8 [n, width]: the rows of positions with `tags` in cache number `cache`."""
    words = np.arange(-(-width // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        seeds = tags[:, None] + _GOLDEN * (words * np.uint64(977) + np.uint64(cache + 1))
    data = _mix(seeds).astype("<u8").view(np.uint8)
    return np.ascontiguousarray(data.reshape(len(tags), 8 * len(words))[:, :width])
