"""HostPages: a page that a prefix finds holds, on every rank, what its prefix says.

Reads of a simulation's steps come to few host pages. So those that were published since the last
look are read here, where they lie, and all of them once more at the end. What a page must hold is a
function of its hash: the tags of the tokens behind it (`hisparse.testing.content`), which are noted
when the hash is first seen, and outlive schedulers. Shares nothing with the code under test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hisparse.errors import InvariantViolation
from hisparse.fsm.state import Key
from hisparse.testing.content import U64, row_bytes

if TYPE_CHECKING:
    from hisparse.testing.rank import SimRank
    from hisparse.testing.replica import SimReplica


class HostPages:
    """Of one replica, over restarts of its scheduler."""

    def __init__(self, replica: SimReplica) -> None:
        self.replica = replica
        self._tags: dict[bytes, U64] = {}
        self._noted: dict[Key, int] = {}  # leading pages whose tags are known
        self._seen: set[tuple[bytes, int, int]] = set()  # hash, page, epoch

    def learn(self) -> None:
        """Note what computed pages hold whose hashes are new."""
        state, size = self.replica.state, self.replica.state.page_size
        noted = {}
        for request in [request for request in state.by_row if request is not None]:
            chain = self.replica.model.chains.get(request.request)
            if chain is None or not request.live:
                continue
            whole = min(len(request.hashes), int(state.rows.computed[request.row]) // size)
            for page in range(min(self._noted.get(request.key, 0), whole), whole):
                self._tags[request.hashes[page]] = chain.known[page * size : (page + 1) * size]
            noted[request.key] = whole
        self._noted = noted

    def check(self, *, again: bool = False) -> None:
        """Those that were published since; with `again` all. Raises InvariantViolation ``content``
        for a page that holds something else."""
        state = self.replica.state
        epochs = state.pages.epoch
        there = {(name, page, int(epochs[page])) for name, page in state.prefix.items()}
        fresh = sorted(there if again else there - self._seen)
        self._seen = there
        fresh = [found for found in fresh if found[0] in self._tags]
        if not fresh or state.lost:
            return
        for rank in self.replica.ranks:
            if not rank.dead:
                self._read(rank, fresh)

    def _read(self, rank: SimRank, found: list[tuple[bytes, int, int]]) -> None:
        tags = np.concatenate([self._tags[name] for name, _, _ in found])
        pages = [page for _, page, _ in found]
        for handle in rank.worker.handles:
            have = handle.runtime.host.array[pages]
            want = row_bytes(tags, handle.layer, have.shape[-1]).reshape(have.shape)
            if (have != want).any():
                at = int(np.argmax((have != want).any(axis=(1, 2))))
                text = f"rank {rank.number}, layer {handle.layer}: host page {pages[at]} is found "
                text += "by prefix, and holds other bytes"
                raise InvariantViolation("content", text, seq=self.replica.state.seq)
