"""Watching one block, host page, request or transfer through a fold. Pure.

`facts` says what the state knows of the target, as short words; `changes` folds a log and yields
each event that changed them, with the words before and after. An id is watched over all its epochs,
a request under its last epoch at each moment, unless ``id/epoch`` names one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from hisparse.errors import HiSparseError, InvariantViolation, UsageError
from hisparse.fsm.events import Event
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import Request, State
from hisparse.fsm.wire import Table

What = Literal["block", "page", "request", "transfer"]
WHATS: tuple[What, ...] = ("block", "page", "request", "transfer")
Facts = dict[str, str]


class Target(NamedTuple):
    """What is asked about; `ident` as it was given."""

    what: What
    ident: str

    @property
    def number(self) -> int:
        return int(self.ident)


class Change(NamedTuple):
    """An event that changed the target: only the facts that differ."""

    seq: int
    event: Event
    before: Facts
    after: Facts


def target(what: str, ident: str) -> Target:
    """Raises UsageError for no kind of target, and for an id that is no number."""
    if what not in WHATS:
        raise UsageError(f"{what!r} cannot be watched: give one of {', '.join(WHATS)}")
    if what != "request" and not ident.isdecimal():
        raise UsageError(f"{what} {ident!r} is not a number")
    return Target(what, ident)


def parse(text: str) -> Target:
    """``block=17``, ``page=3``, ``request=r0``, ``transfer=5``. Raises UsageError."""
    what, _, ident = text.partition("=")
    return target(what, ident)


def check_exists(state: State, wanted: Target) -> None:
    """Raise UsageError for a block or page that the pools do not have."""
    sizes = {"block": len(state.blocks.state), "page": len(state.pages.state)}
    size = sizes.get(wanted.what)
    if size is not None and not 0 < wanted.number < size:
        raise UsageError(f"there is no {wanted.what} {wanted.ident}: ids are 1..{size - 1}")


def request_of(state: State, ident: str) -> Request | None:
    """The request ``id`` of the last epoch that is there, or ``id/epoch``."""
    found = [r for (name, epoch), r in state.requests.items() if ident in (name, f"{name}/{epoch}")]
    return max(found, key=lambda r: r.epoch, default=None)


def facts(state: State, wanted: Target) -> Facts:
    """What the state says of the target; empty where it knows nothing of it."""
    if wanted.what == "block":
        return _block(state, wanted.number)
    if wanted.what == "page":
        return _page(state, wanted.number)
    if wanted.what == "transfer":
        return _transfer(state, wanted.number)
    request = request_of(state, wanted.ident)
    return {} if request is None else _request(state, request)


def _block(state: State, block: int) -> Facts:
    b = state.blocks
    found = {"state": BlockState(int(b.state[block])).name, "epoch": str(int(b.epoch[block]))}
    if found["state"] != "FREE":
        found["role"] = BlockRole(int(b.role[block])).name
        names = (Table.RESIDENT, Table.INDEX, Table.HOT)
        found["held by"] = _places(state, block, *names)
        if b.partner[block]:
            found["copy on page"] = str(int(b.partner[block]))
    return found


def _page(state: State, page: int) -> Facts:
    p = state.pages
    found = {"state": PageState(int(p.state[page])).name, "epoch": str(int(p.epoch[page]))}
    if found["state"] != "FREE":
        found["references"] = str(int(p.refs[page]))
        found["held by"] = _places(state, page, Table.HOST)
        if p.partner[page]:
            found["copy in block"] = str(int(p.partner[page]))
    return found


def _places(state: State, ident: int, *tables: Table) -> str:
    found = [
        f"row {row} {table.name} entry {entry}"
        for table in tables
        for row, entry in np.argwhere(state.table(table) == ident).tolist()
    ]
    return ", ".join(found) or "no table"


def _transfer(state: State, ident: int) -> Facts:
    t = state.transfers.get(ident)
    if (copy := state.suffix_copies.get(ident)) is not None:
        return {
            "state": "PINNED",
            "kind": "SUFFIX_LOAD" if copy.load else "SUFFIX_STORE",
            "row": str(copy.row),
            "page of the request": str(copy.entry),
            "block": f"{copy.block}@{copy.block_epoch}",
            "suffix page": f"{copy.suffix}@{copy.suffix_epoch}",
            "answered by": f"{copy.answered:b} of {copy.writers:b}",
        }
    if t is None:
        return {"state": "SETTLED"} if ident < state.next_transfer else {}
    return {
        "state": t.state.name,
        "kind": t.kind.name,
        "row": str(t.row),
        "page of the request": str(t.entry),
        "block": f"{t.block}@{t.block_epoch}",
        "host page": f"{t.page}@{t.page_epoch}",
        "enqueued on": f"{t.enqueued:b} of {t.readers:b}",
        "completed on": f"{t.completed:b} of {t.writers:b}",
        "holds block": "yes" if t.holds_block else "no",
    }


def _request(state: State, request: Request) -> Facts:
    found = {"state": request.state.name, "epoch": str(request.epoch)}
    if request.deferred and request.row < 0:
        found["waits for"] = request.deferred
    if request.reason:
        found["reason"] = request.reason
    if request.row < 0:
        return found
    row, rows = request.row, state.rows
    return found | {
        "row": str(row),
        "computed": str(int(rows.computed[row])),
        "planned": str(int(rows.planned[row])),
        "published pages": str(int(rows.published[row])),
        "resident pages": str(np.count_nonzero(state.table(Table.RESIDENT)[row])),
        "host pages": str(np.count_nonzero(state.table(Table.HOST)[row])),
        "reserved pages": str(len(request.reserved)),
        "hot": request.hot.name,
        "copies in flight": str(request.in_flight),
    }


def changes(
    state: State, events: Iterable[tuple[int, Event]], wanted: Target, upto: int | None = None
) -> Iterator[Change]:
    """Fold `events` onto `state`, up to seq `upto`, and yield what changed the target.

    Raises UsageError for an id that does not exist, InvariantViolation ``replay_equal`` for an
    event that contradicts the state.
    """
    check_exists(state, wanted)
    before = facts(state, wanted)
    for seq, event in events:
        if upto is not None and seq > upto:
            return
        try:
            evolve(state, event, seq)
        except HiSparseError:
            raise
        except Exception as error:  # ids and lengths of a foreign log may be anything
            why = error or type(error).__name__
            text = f"{type(event).__name__} cannot follow the state: {why}"
            raise InvariantViolation("replay_equal", text, seq=seq) from error
        after = facts(state, wanted)
        if after != before:
            keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
            yield Change(
                seq,
                event,
                {k: before[k] for k in keys if k in before},
                {k: after[k] for k in keys if k in after},
            )
        before = after


def words(change: Change) -> str:
    """``state FREE -> RESERVED, epoch 0 -> 1``."""
    keys = {**change.before, **change.after}
    return ", ".join(
        f"{key} {change.before.get(key, '-')} -> {change.after.get(key, '-')}" for key in keys
    )
