"""CachedPages: a page that a prefix finds holds, on every rank and in both tiers, what it should.

The reads of a simulation's steps come to few of them. So host pages that were published, and GPU
blocks with a copy of one that are cached, are read where they lie: those that are new since the
last look, and all of them again when memory was given up or taken back, and at the end. What a page
must hold is a function of its hash, the tags of the tokens behind it (`hisparse.testing.content`):
they are noted when the hash is first seen, and outlive schedulers. Nothing writes such a page
before it is evicted, so it does not matter how far a rank has got. Shares nothing with the code
under test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hisparse.errors import InvariantViolation
from hisparse.fsm.machines import BlockRole, BlockState
from hisparse.fsm.state import Key, State
from hisparse.testing.content import U64, row_bytes

if TYPE_CHECKING:
    from hisparse.testing.rank import SimRank
    from hisparse.testing.replica import SimReplica

HOST, GPU = "host page", "block"
Place = tuple[bytes, str, int, int]  # hash, HOST or GPU, page or block, its epoch


class CachedPages:
    """Of one replica, over restarts of its scheduler."""

    def __init__(self, replica: SimReplica) -> None:
        self.replica = replica
        self._tags: dict[bytes, U64] = {}
        self._noted: dict[Key, int] = {}  # leading pages whose tags are known
        self._seen: set[Place] = set()
        self._asleep = 0

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
        """Those that are new; with `again` all. Raises InvariantViolation ``content`` for one that
        holds something else."""
        there, asleep = _places(self.replica.state), self.replica.state.asleep
        again, self._asleep = again or asleep != self._asleep, asleep
        fresh = sorted(there if again else there - self._seen)
        self._seen = there
        if self.replica.state.lost:
            return
        for tier in (HOST, GPU):
            found = [place for place in fresh if place[1] == tier and place[0] in self._tags]
            for rank in self.replica.ranks if found else ():
                if not rank.dead:
                    self._read(rank, found)

    def _read(self, rank: SimRank, found: list[Place]) -> None:
        tags = np.concatenate([self._tags[name] for name, *_ in found])
        ids = [ident for _, _, ident, _ in found]
        for handle in rank.worker.handles:
            view = handle.runtime.host if found[0][1] == HOST else handle.resident
            if not isinstance(view.base, np.ndarray):
                return  # bytes of a real GPU, where reading them would wait for it
            have = view.array[ids]
            want = row_bytes(tags, handle.layer, have.shape[-1]).reshape(have.shape)
            if (have != want).any():
                at = int(np.argmax((have != want).any(axis=(1, 2))))
                text = f"rank {rank.number}, layer {handle.layer}: {found[at][1]} {ids[at]} is "
                text += "found by prefix, and holds other bytes"
                raise InvariantViolation("content", text, seq=self.replica.state.seq)


def _places(state: State) -> set[Place]:
    pages, blocks = state.pages, state.blocks
    there = {(name, HOST, page, int(pages.epoch[page])) for name, page in state.prefix.items()}
    cached = (blocks.state == BlockState.CACHED) & (blocks.role == BlockRole.RESIDENT)
    for block in np.flatnonzero(cached).tolist():
        page = int(blocks.partner[block])
        if page in pages.hash_of and pages.partner[page] == block:
            there.add((pages.hash_of[page], GPU, block, int(blocks.epoch[block])))
    return there
