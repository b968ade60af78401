"""fold: events in, state out. ``fold(log)`` rebuilds any moment of any run.

`evolve` applies one event to a state in place and raises seq by one. Live scheduler, replay, checks
and tests all run this very function: there is no second path by which state could change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.errors import LogError
from hisparse.fsm import events as ev
from hisparse.fsm.columns import ids
from hisparse.fsm.evolve import blocks, pages, ranks, requests, suffix
from hisparse.fsm.state import State

Handler = Callable[[State, Any, int], None]


def _step_planned(state: State, e: ev.StepPlanned, seq: int) -> None:
    rows, starts = ids(e.rows), ids(e.starts)
    ends = starts + ids(e.counts)
    blocks.blocks_written(state, rows, starts, ends)
    requests.step_planned(state, e, rows, starts, ends, seq)


def _request_rewound(state: State, e: ev.RequestRewound, seq: int) -> None:
    requests.request_rewound(state, e, seq)
    blocks.blocks_reopened(state, e)


def _request_drained(state: State, e: ev.RequestDrained, seq: int) -> None:
    if state.suffix_index:
        suffix.touch_suffix(state, state.requests[(e.request, e.epoch)])
    requests.request_drained(state, e, seq)


HANDLERS: dict[type[ev.Event], Handler] = {
    ev.RequestArrived: requests.request_arrived,
    ev.StepPlanned: _step_planned,
    ev.RowsComputed: requests.rows_computed,
    ev.RequestFinished: requests.request_finished,
    ev.RequestAborted: requests.request_aborted,
    ev.RequestPreempted: requests.request_preempted,
    ev.Tick: requests.tick,
    ev.AcknowledgementsTaken: requests.acknowledgements_taken,
    ev.LogGap: requests.unchanged,
    ev.PolicyChosen: requests.unchanged,
    ev.PrefixCacheReset: requests.unchanged,
    ev.SuffixAsked: suffix.suffix_asked,
    ev.RankLost: ranks.rank_lost,
    ev.RankJoined: ranks.rank_joined,
    ev.SchedulerRecovered: requests.unchanged,
    ev.MemoryReleased: requests.memory_released,
    ev.MemoryRestored: requests.memory_restored,
    ev.RequestAdmitted: requests.request_admitted,
    ev.AdmissionDeferred: requests.admission_deferred,
    ev.RequestRefused: requests.request_refused,
    ev.RequestDrained: _request_drained,
    ev.RequestRewound: _request_rewound,
    ev.RequestResumed: requests.request_resumed,
    ev.BlocksReserved: blocks.blocks_reserved,
    ev.BlocksAdopted: blocks.blocks_adopted,
    ev.BlocksEvicted: blocks.blocks_evicted,
    ev.BlocksSealed: blocks.blocks_sealed,
    ev.BlocksReleased: blocks.blocks_released,
    ev.PagesSpilled: blocks.pages_spilled,
    ev.IndexPagesCopied: blocks.index_pages_copied,
    ev.HostPagesReserved: pages.host_pages_reserved,
    ev.PrefixLeased: pages.prefix_leased,
    ev.HostPagesReleased: pages.host_pages_released,
    ev.HostPagesEvicted: pages.host_pages_evicted,
    ev.PagesPublished: pages.pages_published,
    ev.TransferPinned: pages.transfer_pinned,
    ev.TransferEnqueued: pages.transfer_enqueued,
    ev.TransferCompleted: pages.transfer_completed,
    ev.TransferFailed: pages.transfer_failed,
    ev.HotWanted: blocks.hot_wanted,
    ev.HotLeased: blocks.hot_leased,
    ev.HotReleased: blocks.hot_released,
    ev.PromotionHeld: requests.promotion_held,
    ev.SuffixPinned: suffix.suffix_pinned,
    ev.SuffixEvicted: suffix.suffix_evicted,
    ev.SuffixCompleted: suffix.suffix_completed,
    ev.SuffixFailed: suffix.suffix_failed,
}


def evolve(state: State, event: ev.Event, seq: int) -> None:
    """Apply the event with number `seq` to `state`, in place.

    Raises LogError on a gap in seq, IllegalTransition and StaleEpoch on an event that cannot follow
    the state, AssertionError on one that contradicts it.
    """
    if seq != state.seq + 1:
        raise LogError(f"the state is at seq {state.seq}, the next event has seq {seq}")
    HANDLERS[type(event)](state, event, seq)
    state.seq = seq


def fold(config: HiSparseConfig, events: Iterable[tuple[int, ev.Event]]) -> State:
    """The state after `events`, from the first one on."""
    state = State(config)
    for seq, event in events:
        evolve(state, event, seq)
    return state
