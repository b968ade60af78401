"""Names in the log that was, and what they are called now. Pure.

Rows go by their tenant (the epoch of a request in the log that was), blocks and host pages by id
and epoch, copies and steps by number, table entries by tenant, table and entry. A name is current
while the state of now still knows it under what it is called now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.machine import ILLEGAL
from hisparse.fsm.machines import BLOCK_LEASE, HOST_PAGE, BlockRole, BlockTrigger, PageTrigger
from hisparse.fsm.state import Key, Request, State

RESIDENT = BlockRole.RESIDENT
E = TypeVar("E", bound=ev.Event)


class Names:
    """Of one edited log; `state` is the one of now."""

    def __init__(self, state: State, edited: Sequence[LoggedEvent | None]) -> None:
        self.state = state
        self.seqs: dict[int, int] = {}
        self.keys: dict[int, Key] = {}
        self.held: dict[int, int] = {}  # row -> tenant, in the log that was
        self.blocks: dict[tuple[int, int], int] = {}
        self.pages: dict[tuple[int, int], int] = {}
        self.suffixes: dict[tuple[int, int], int] = {}
        self.transfers: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.step = 0  # in the log that was
        self.entries: dict[tuple[int, BlockRole, int], int] = {}
        self._next: dict[tuple[int, BlockRole], int] = {}
        self.prefixes = _prefixes(edited)

    def past(self, was: LoggedEvent) -> None:
        """Go by an event of the log that was."""
        if isinstance(was, ev.RequestAdmitted):
            self.held[was.row] = was.epoch
        elif isinstance(was, ev.StepPlanned):
            self.step = was.step

    def request(self, epoch: int) -> Request | None:
        key = self.keys.get(epoch)
        return None if key is None else self.state.requests.get(key)

    def tenant(self, row: int) -> Request | None:
        """Who was admitted to `row`, if that still is so."""
        request = self.request(self.held.get(row, -1))
        return request if request is not None and request.row >= 0 else None

    def row(self, row: int) -> int:
        """-1 if its tenant has none."""
        request = self.tenant(row)
        return -1 if request is None else request.row

    def block(self, block: int, epoch: int) -> int | None:
        now = self.blocks.get((block, epoch))
        return now if now is not None and self.state.blocks.epoch.item(block) == now else None

    def page(self, page: int, epoch: int) -> int | None:
        if not page:
            return 0
        now = self.pages.get((page, epoch))
        return now if now is not None and self.state.pages.epoch.item(page) == now else None

    def entry(self, row: int, role: BlockRole, entry: int) -> int:
        """-1 if it was never given out."""
        return self.entries.get((self.held.get(row, -1), role, entry), -1)

    def new_entry(self, row: int, role: BlockRole, entry: int) -> int:
        """The next one of that table, or the one that it has had before."""
        key = (self.held[row], role, entry)
        return self.entries.get(key, self._next.get(key[:2], 0))

    def entered(self, row: int, role: BlockRole, entry: int, now: int) -> None:
        tenant = self.held[row]
        self.entries[tenant, role, entry] = now
        self._next[tenant, role] = max(self._next.get((tenant, role), 0), now + 1)

    def block_goes(self, block: int, trigger: BlockTrigger) -> bool:
        return bool(BLOCK_LEASE.table[self.state.blocks.state.item(block), trigger] != ILLEGAL)

    def page_goes(self, page: int, trigger: PageTrigger) -> bool:
        return bool(HOST_PAGE.table[self.state.pages.state.item(page), trigger] != ILLEGAL)


def _prefixes(edited: Iterable[LoggedEvent | None]) -> dict[int, ev.PrefixLeased]:
    """What is leased by prefix to each tenant, told only once it is admitted."""
    held: dict[int, int] = {}
    found: dict[int, ev.PrefixLeased] = {}
    for event in edited:
        if isinstance(event, ev.RequestAdmitted):
            held[event.row] = event.epoch
        elif isinstance(event, ev.PrefixLeased) and event.row in held:
            found[held[event.row]] = event
    return found


def with_columns(event: E, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> E:
    """`event`, its tuples `names` made of `columns`: one sequence for each place."""
    parts = zip(*columns, strict=True) if columns else ((),) * len(names)
    return msgspec.structs.replace(event, **dict(zip(names, map(tuple, parts), strict=True)))
