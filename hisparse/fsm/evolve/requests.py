"""evolve: inputs, and the life of requests.

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

import numpy as np

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, ids, same, some
from hisparse.fsm.machines import REQUEST, RequestTrigger, TransferState
from hisparse.fsm.state import Request, State
from hisparse.fsm.wire import Table


def move(request: Request, trigger: RequestTrigger, seq: int) -> None:
    request.state = type(request.state)(
        REQUEST.next(request.state, trigger, request.request, epoch=request.epoch, seq=seq)
    )


def request_arrived(state: State, e: ev.RequestArrived, seq: int) -> None:
    assert e.epoch == state.next_epoch, (e.epoch, state.next_epoch)
    state.next_epoch += 1
    request = Request(
        e.request, e.epoch, e.prompt_tokens, e.max_tokens, list(e.page_hashes), seq, reserved=[]
    )
    state.requests[request.key] = request
    state.waiting[request.key] = None


def request_admitted(state: State, e: ev.RequestAdmitted, seq: int) -> None:
    request = state.requests[(e.request, e.epoch)]
    rows = state.rows
    assert not state.asleep, "a request is admitted to pools that have no memory"
    assert not state.lost, "a request is admitted to ranks of which one is lost"
    assert not rows.used[e.row], f"request row {e.row} is given out twice (seq {seq})"
    move(request, RequestTrigger.admitted, seq)
    del state.waiting[request.key]
    request.row, request.steady_blocks, request.hit_tokens = e.row, e.steady_blocks, e.hit_tokens
    state.suffix_answers.pop(request.key, None)
    state.by_row[e.row] = request
    rows.used[e.row] = rows.live[e.row] = True
    rows.computed[e.row] = rows.planned[e.row] = rows.confirmed[e.row] = e.hit_tokens
    rows.pages[e.row] = e.hit_tokens // state.page_size
    rows.prompt[e.row], rows.limit[e.row] = request.prompt_tokens, request.max_tokens
    rows.pages_max[e.row] = ceil_div(request.max_tokens, state.page_size)


def step_planned(
    state: State, e: ev.StepPlanned, at: I64, starts: I64, ends: I64, seq: int
) -> None:
    """`at`, `starts` and `ends` are the event's columns."""
    assert e.step == state.step + 1, (e.step, state.step)
    rows = state.rows
    assert not some(~rows.live[at] | (ends <= starts)), (
        f"step {e.step} plans a row that is not live"
    )
    assert same(starts, rows.computed[at]) and same(starts, rows.planned[at]), (
        f"step {e.step} plans {e.starts} of rows {e.rows}, computed {rows.computed[at]} (seq {seq})"
    )
    prefill = starts < rows.prompt[at]
    if some(prefill):
        for row in at[prefill].tolist():
            move(state.request_of(row), RequestTrigger.prefilled, seq)
    rows.planned[at] = ends
    rows.last_step[at] = e.step
    state.step = e.step


def rows_computed(state: State, e: ev.RowsComputed, seq: int) -> None:
    rows, at = state.rows, ids(e.rows)
    for row, page_hash in zip(e.hash_rows, e.page_hashes, strict=True):
        state.request_of(row).hashes.append(page_hash)
    before = rows.computed[at]
    after = before + ids(e.counts)
    assert not some((after < before) | (after > rows.planned[at])), (
        f"step {e.step} accepts {e.counts} of rows {e.rows}, planned {rows.planned[at]} (seq {seq})"
    )
    rows.computed[at] = rows.planned[at] = after
    prompts = rows.prompt[at]
    prefill = before < prompts
    if some(prefill):
        for row in at[prefill & (prompts <= after)].tolist():
            move(state.request_of(row), RequestTrigger.decoded, seq)
    sealed = before // state.page_size < after // state.page_size
    if np.count_nonzero(rows.unsettled):
        certain = rows.unsettled[at] == 0
        at, after, sealed = at[certain], after[certain], sealed[certain]
    for row in at[sealed].tolist():
        confirm_rows(state, row)
    rows.confirmed[at] = after


def confirm_rows(state: State, row: int) -> None:
    """All computed rows of `row` are certain: whole pages of them may be found by prefix."""
    rows, request = state.rows, state.request_of(row)
    first, end = int(rows.confirmed[row]), int(rows.computed[row])
    rows.confirmed[row] = end
    for page in range(first // state.page_size, end // state.page_size):
        register_index_page(state, request, page)


def register_index_page(state: State, request: Request, page: int) -> None:
    """The indexer rows of `page` are final: a prefix may find them in this block's slot."""
    if page >= len(request.hashes):
        return
    per_block = state.index_pages_per_block
    block = int(state.table(Table.INDEX)[request.row, page // per_block])
    if not block:
        return  # the request ended before its rows were certain, and its index blocks went back
    page_hash = request.hashes[page]
    state.index_prefix[page_hash] = (block, page % per_block)
    state.index_hashes.setdefault(block, []).append(page_hash)


def _ended(state: State, key: tuple[str, int], trigger: RequestTrigger, why: str, seq: int) -> None:
    request = state.requests[key]
    move(request, trigger, seq)
    move(request, RequestTrigger.drained, seq)
    request.reason = why
    state.waiting.pop(key, None)
    state.rewinding.pop(key, None)
    state.suffix_answers.pop(key, None)
    state.draining[key] = None
    if request.row >= 0:
        state.rows.live[request.row] = False
        state.rows.planned[request.row] = state.rows.computed[request.row]


def request_finished(state: State, e: ev.RequestFinished, seq: int) -> None:
    _ended(state, (e.request, e.epoch), RequestTrigger.finished, e.reason, seq)


def request_preempted(state: State, e: ev.RequestPreempted, seq: int) -> None:
    _ended(state, (e.request, e.epoch), RequestTrigger.preempted, e.reason, seq)


def request_aborted(state: State, e: ev.RequestAborted, seq: int) -> None:
    request = state.requests.get((e.request, e.epoch))
    if request is None or (request.state is not request.state.WAITING and not request.live):
        return  # abort is legal in every state, and after an end it changes nothing
    _ended(state, request.key, RequestTrigger.aborted, e.reason, seq)


def admission_deferred(state: State, e: ev.AdmissionDeferred, seq: int) -> None:
    state.requests[(e.request, e.epoch)].deferred = e.resource


def request_refused(state: State, e: ev.RequestRefused, seq: int) -> None:
    _ended(state, (e.request, e.epoch), RequestTrigger.aborted, f"refused: {e.resource}", seq)


def request_drained(state: State, e: ev.RequestDrained, seq: int) -> None:
    request = state.requests.pop((e.request, e.epoch))
    assert request.in_flight == 0 and not request.reserved, f"{request.key} still holds leases"
    assert request.row == e.row
    move(request, RequestTrigger.forgotten, seq)
    del state.draining[request.key]
    if e.row < 0:
        return
    rows = state.rows
    for table in Table:
        assert not np.count_nonzero(state.table(table)[e.row]), (
            f"{request.key} still names {table.name} ids"
        )
    state.by_row[e.row] = None
    rows.used[e.row] = False
    counters = (rows.computed, rows.planned, rows.published, rows.last_step, rows.pages)
    rows.unsettled[e.row] = 0
    for column in (*counters, rows.pages_max, rows.prompt, rows.limit, rows.confirmed):
        column[e.row] = 0


def request_rewound(state: State, e: ev.RequestRewound, seq: int) -> None:
    request, rows, row = state.requests[(e.request, e.epoch)], state.rows, e.row
    assert request.row == row, f"{request.key} holds row {request.row}, not {row}"
    computed, certain = int(rows.computed[row]), int(rows.confirmed[row])
    assert certain == e.certain and e.rows <= certain, (e, certain)
    move(request, RequestTrigger.rewound, seq)
    first = ceil_div(e.rows, state.page_size)
    rows.published[row] = min(int(rows.published[row]), first)
    for page in range(first, certain // state.page_size):
        _forget_index_page(state, request, page)
    # Whole pages of the prompt had their hashes at arrival; those of generated tokens may be false.
    del request.hashes[max(request.prompt_tokens, e.rows) // state.page_size :]
    if rows.planned[row] == computed:  # else a step is under way, of which nothing is accepted
        rows.planned[row] = e.rows
    rows.computed[row] = rows.confirmed[row] = e.rows
    rows.pages[row] = first
    rows.unsettled[row] = sum(
        t.row == row and t.is_read and t.state is not TransferState.FAILING
        for t in state.transfers.values()
    )
    rows.unsettled[row] += sum(c.row == row and c.load for c in state.suffix_copies.values())
    state.rewinding[request.key] = None


def _forget_index_page(state: State, request: Request, page: int) -> None:
    """Indexer rows that will be written again are not found by prefix any more. A block that others
    share is not written again: what is found in it stays."""
    per_block = state.index_pages_per_block
    block = int(state.table(Table.INDEX)[request.row, page // per_block])
    if page >= len(request.hashes) or state.blocks.refs[block] > 1:
        return
    page_hash = request.hashes[page]
    if state.index_prefix.get(page_hash) == (block, page % per_block):
        del state.index_prefix[page_hash]
        kept = [h for h in state.index_hashes[block] if h != page_hash]
        state.index_hashes[block] = kept
        if not kept:
            del state.index_hashes[block]


def request_resumed(state: State, e: ev.RequestResumed, seq: int) -> None:
    request, rows = state.requests[(e.request, e.epoch)], state.rows
    assert request.row == e.row and rows.planned[e.row] == rows.computed[e.row], (e, request)
    whole = rows.computed[e.row] >= rows.prompt[e.row]
    move(request, RequestTrigger.decoded if whole else RequestTrigger.prefilled, seq)
    del state.rewinding[request.key]


def tick(state: State, e: ev.Tick, seq: int) -> None:
    assert e.now_us >= state.now_us, f"time went back: {e.now_us} < {state.now_us} (seq {seq})"
    state.now_us = e.now_us


def acknowledgements_taken(state: State, e: ev.AcknowledgementsTaken, seq: int) -> None:
    assert e.worker_epoch == state.worker_epoch[e.rank]
    assert e.first_seq == state.acked[e.rank] + 1, (e.first_seq, state.acked[e.rank])
    assert e.retired_step >= state.retired[e.rank]
    state.acked[e.rank] = e.last_seq
    state.retired[e.rank] = e.retired_step


def promotion_held(state: State, e: ev.PromotionHeld, seq: int) -> None:
    assert e.until_step > max(state.step, state.promotion_held_until), (e.until_step, state.step)
    state.promotion_held_until = e.until_step


def memory_released(state: State, e: ev.MemoryReleased, seq: int) -> None:
    assert not state.asleep and e.level in (1, 2), (state.asleep, e.level)
    assert not state.rows.used.any(), "memory is released under requests that hold some of it"
    state.asleep = e.level


def memory_restored(state: State, e: ev.MemoryRestored, seq: int) -> None:
    assert state.asleep, "memory is restored that was not released"
    state.asleep = 0


def unchanged(state: State, e: ev.Event, seq: int) -> None:
    """Events that tell why and change nothing."""
