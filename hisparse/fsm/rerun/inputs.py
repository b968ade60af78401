"""Inputs, and the life of requests, fitted to the state of now. Pure.

Each function gives the event that can happen now, or None.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.machine import ILLEGAL
from hisparse.fsm.machines import REQUEST, BlockTrigger, PageState, RequestState, RequestTrigger
from hisparse.fsm.rerun.names import RESIDENT, E, Names, with_columns
from hisparse.fsm.wire import Table

_MOVES: dict[type, RequestTrigger] = {
    ev.RequestAdmitted: RequestTrigger.admitted,
    ev.RequestFinished: RequestTrigger.finished,
    ev.RequestAborted: RequestTrigger.aborted,
    ev.RequestRefused: RequestTrigger.aborted,
    ev.RequestPreempted: RequestTrigger.preempted,
    ev.RequestDrained: RequestTrigger.forgotten,
    ev.RequestRewound: RequestTrigger.rewound,
}
ACKED = ("enqueued", "completed", "failed")
replace = msgspec.structs.replace


def arrived(names: Names, e: ev.RequestArrived) -> ev.RequestArrived:
    epoch = names.state.next_epoch
    names.keys[e.epoch] = (e.request, epoch)
    return replace(e, epoch=epoch)


def of_request(names: Names, e: E) -> E | None:
    request = names.request(e.epoch)  # type: ignore[attr-defined]
    if request is None:
        return None
    trigger = _MOVES.get(type(e))
    if trigger is not None and REQUEST.table[request.state, trigger] == ILLEGAL:
        return None
    return replace(e, epoch=request.epoch)


def finished(names: Names, e: ev.RequestFinished) -> ev.RequestFinished | ev.RequestAborted | None:
    """An abort, where it has not come as far as to its end."""
    made, request = of_request(names, e), names.request(e.epoch)
    if made is not None or request is None:
        return made
    return of_request(names, ev.RequestAborted(e.cause, e.request, e.epoch, e.reason))


def admitted(names: Names, e: ev.RequestAdmitted) -> ev.RequestAdmitted | None:
    """Fewer tokens are found by prefix where fewer of its pages are left."""
    made = of_request(names, e)
    if made is None or names.state.rows.used[e.row]:
        return None
    if e.hit_tokens:
        lease = names.prefixes.get(e.epoch)
        there = 0 if lease is None else len(_readable(names, lease))
        made = replace(made, hit_tokens=min(e.hit_tokens, there * names.state.page_size))
    return made


def _readable(names: Names, e: ev.PrefixLeased) -> list[tuple[int, int, int]]:
    """(place, page, epoch of now) of what can be leased."""
    found = []
    for at, (page, old) in enumerate(zip(e.pages, e.epochs, strict=True)):
        epoch = names.page(page, old)
        if epoch is not None and names.state.pages.state[page] == PageState.PUBLISHED:
            found.append((at, page, epoch))
    return found


def prefix_leased(names: Names, e: ev.PrefixLeased) -> ev.PrefixLeased | None:
    row, there = names.row(e.row), _readable(names, e)
    if row < 0 or not there:
        return None
    for now, (at, _, _) in enumerate(there):
        names.entered(e.row, RESIDENT, at, now)
    made = with_columns(e, ("pages", "epochs"), [part[1:] for part in there])
    return replace(made, row=row)


def drained(names: Names, e: ev.RequestDrained) -> ev.RequestDrained | None:
    made, request, state = of_request(names, e), names.request(e.epoch), names.state
    if made is None or request is None or request.in_flight or request.reserved:
        return None
    if request.row >= 0 and any(state.table(table)[request.row].any() for table in Table):
        return None
    return replace(made, row=request.row)


def rewound(names: Names, e: ev.RequestRewound) -> ev.RequestRewound | None:
    made, row = of_request(names, e), names.row(e.row)
    if made is None or row < 0:
        return None
    rows, kept = names.state.rows, list[tuple[int, int]]()
    for block, old in zip(e.blocks, e.epochs, strict=True):
        epoch = names.block(block, old)
        if epoch is not None and names.block_goes(block, BlockTrigger.reopened):
            kept.append((block, epoch))
    certain = rows.confirmed.item(row)
    made = with_columns(made, ("blocks", "epochs"), kept)
    return replace(made, row=row, rows=min(e.rows, certain), certain=certain)


def resumed(names: Names, e: ev.RequestResumed) -> ev.RequestResumed | None:
    made, request, rows = of_request(names, e), names.request(e.epoch), names.state.rows
    if made is None or request is None or request.state is not RequestState.REWINDING:
        return None
    row = request.row
    return replace(made, row=row) if rows.planned[row] == rows.computed[row] else None


def deferred(names: Names, e: ev.AdmissionDeferred) -> ev.AdmissionDeferred | None:
    request = names.request(e.epoch)
    waits = request is not None and request.state is RequestState.WAITING
    return of_request(names, e) if waits else None


def step_planned(names: Names, e: ev.StepPlanned) -> ev.StepPlanned | None:
    """From where each row is now, for as far as it has blocks to be written to."""
    rows, kept = names.state.rows, list[tuple[int, int, int]]()
    for old, count in zip(e.rows, e.counts, strict=True):
        row = names.row(old)
        if row < 0 or not rows.live[row] or rows.planned[row] != rows.computed[row]:
            continue
        start = rows.computed.item(row)
        count = min(count, _room(names, row, start, count))
        if count > 0:
            kept.append((row, start, count))
    if e.rows and not kept:
        return None
    step = names.steps[e.step] = names.state.step + 1
    return replace(with_columns(e, ("rows", "starts", "counts"), kept), step=step)


def _room(names: Names, row: int, start: int, wanted: int) -> int:
    """Rows from `start` on that have a block, of `wanted`."""
    state = names.state
    resident, index = state.table(Table.RESIDENT)[row], state.table(Table.INDEX)[row]
    page = start // state.page_size
    while page < len(resident) and page * state.page_size < start + wanted:
        pair = (resident.item(page), index.item(page // state.index_pages_per_block))
        if not all(b and names.block_goes(b, BlockTrigger.written) for b in pair):
            break
        page += 1
    return page * state.page_size - start


def rows_computed(names: Names, e: ev.RowsComputed) -> ev.RowsComputed | None:
    step, rows = names.steps.get(e.step), names.state.rows
    if step is None:
        return None
    kept = []
    for old, count in zip(e.rows, e.counts, strict=True):
        row = names.row(old)
        there = 0 if row < 0 else rows.planned.item(row) - rows.computed.item(row)
        if row >= 0 and (there or not count):
            kept.append((row, min(count, there)))
    named = zip(e.hash_rows, e.page_hashes, strict=True)
    hashes = [(row, name) for old, name in named if (row := names.row(old)) >= 0]
    if e.rows and not kept:
        return None
    made = with_columns(e, ("rows", "counts"), kept)
    return replace(with_columns(made, ("hash_rows", "page_hashes"), hashes), step=step)


def taken(names: Names, e: ev.AcknowledgementsTaken) -> ev.AcknowledgementsTaken:
    state, changed = names.state, dict[str, Any]()
    for name in ACKED:
        parts = zip(getattr(e, name), getattr(e, f"{name}_epochs"), strict=True)
        kept = [
            (names.transfers[t], names.keys[epoch][1] if epoch in names.keys else epoch)
            for t, epoch in parts
            if t in names.transfers
        ]
        changed[name] = tuple(t for t, _ in kept)
        changed[f"{name}_epochs"] = tuple(epoch for _, epoch in kept)
    first = state.acked[e.rank] + 1
    retired = max((now for old, now in names.steps.items() if old <= e.retired_step), default=0)
    return replace(
        e,
        first_seq=first,
        last_seq=first + e.last_seq - e.first_seq,
        retired_step=max(retired, state.retired[e.rank]),
        **changed,
    )


def tick(names: Names, e: ev.Tick) -> ev.Tick | None:
    return e if e.now_us >= names.state.now_us else None


def promotion_held(names: Names, e: ev.PromotionHeld) -> ev.PromotionHeld | None:
    until = names.state.step + e.until_step - names.step
    there = max(names.state.step, names.state.promotion_held_until)
    return replace(e, until_step=until) if until > there else None


def same(names: Names, e: ev.Event) -> ev.Event:
    return e
