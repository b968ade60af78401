"""Prefix identity: the chained, salted hash of a page's tokens.

A page's hash covers its own tokens and every token before it, and the salt (adapter, model,
layout), so that equal hashes mean equal KV rows. Tokens are hashed here and never logged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hisparse.fsm.state import State

HASH_BYTES = 16
Tokens = npt.NDArray[np.int64] | Sequence[int]


class PageHasher:
    """Hashes whole pages of one request, in order.

    Args:
        page_size: tokens a page.
        salt: bytes that separate caches which must not share (at most 64 bytes).
    """

    def __init__(self, page_size: int, salt: bytes = b"") -> None:
        self.page_size = page_size
        self.salt = salt

    def extend(self, parent: bytes, tokens: Tokens) -> list[bytes]:
        """Hashes of the whole pages in `tokens`, which follow the page with hash `parent`."""
        data = np.ascontiguousarray(tokens, dtype="<i8")
        hashes = []
        for start in range(0, len(data) - self.page_size + 1, self.page_size):
            h = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=self.salt)
            h.update(data[start : start + self.page_size].tobytes())
            parent = h.digest()
            hashes.append(parent)
        return hashes


def find_prefix(state: State, hashes: Sequence[bytes], most: int) -> int:
    """Leading pages that are published on the host *and* whose indexer rows are on the GPU.

    The two prefixes may differ; every group falls back to the shorter one. At most `most`.
    """
    pages = 0
    for page_hash in hashes[:most]:
        if page_hash not in state.prefix or page_hash not in state.index_prefix:
            break
        pages += 1
    return pages
