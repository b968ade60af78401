"""What `invariants.facts` keeps of one request, and of one copy between the tiers."""

from __future__ import annotations

import msgspec

from hisparse.fsm.wire import TransferKind


class Tenant(msgspec.Struct, eq=False):
    """A request of one epoch. It outlives its row for as long as a block holds rows of it."""

    request: str
    epoch: int
    hashes: list[bytes]
    prompt_tokens: int = 0
    computed: int = 0
    planned: int = 0
    published: int = 0  # pages, those included that it leased of others
    leased: int = 0
    last_step: int = 0
    live: bool = False


class Copy(msgspec.Struct, eq=False):
    """A transfer as it was planned, and the ranks that really answered."""

    ident: int
    kind: TransferKind
    row: int
    entry: int
    epoch: int
    block: int
    page: int
    readers: int
    writers: int
    rows_end: int  # rows of the request that were computed when the copy was planned
    enqueued: int = 0
    completed: int = 0
    failed: int = 0  # ranks that said so
    told: bool = False  # that it failed, by a decision
    assumed: bool = False  # what ranks answered is not known, and counts as whatever is claimed
    settled: bool = False

    @property
    def queued(self) -> bool:
        """Whether every reading rank has it in its stream, or could not copy: stream order protects
        what it reads."""
        answered = self.enqueued | self.completed | self.failed
        return answered & self.readers == self.readers

    @property
    def readable(self) -> bool:
        """Whether a resolve may read what it writes."""
        return not self.failed and self.queued

    @property
    def complete(self) -> bool:
        return not self.failed and self.completed & self.writers == self.writers
