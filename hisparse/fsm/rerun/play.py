"""Rerun: plays an edited log through an audit, each event fitted to what came before. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.rerun import inputs, leases, suffixes
from hisparse.fsm.rerun.fault import told
from hisparse.fsm.rerun.names import Names
from hisparse.fsm.state import State

RETRIES = 8  # events that may prove not to follow, of one candidate

_FITTED: dict[type[ev.Event], Callable[[Names, Any], Any]] = {
    ev.RequestArrived: inputs.arrived,
    ev.StepPlanned: inputs.step_planned,
    ev.RowsComputed: inputs.rows_computed,
    ev.RequestFinished: inputs.finished,
    ev.RequestAborted: inputs.of_request,
    ev.RequestPreempted: inputs.of_request,
    ev.Tick: inputs.tick,
    ev.AcknowledgementsTaken: inputs.taken,
    ev.RequestAdmitted: inputs.admitted,
    ev.AdmissionDeferred: inputs.deferred,
    ev.RequestRefused: inputs.of_request,
    ev.RequestDrained: inputs.drained,
    ev.RequestRewound: inputs.rewound,
    ev.RequestResumed: inputs.resumed,
    ev.PromotionHeld: inputs.promotion_held,
    ev.PrefixLeased: inputs.prefix_leased,
    ev.BlocksReserved: leases.reserved,
    ev.BlocksAdopted: leases.adopted,
    ev.BlocksEvicted: leases.blocks_moved,
    ev.BlocksSealed: leases.blocks_moved,
    ev.BlocksReleased: leases.released,
    ev.PagesSpilled: leases.spilled,
    ev.IndexPagesCopied: leases.index_copied,
    ev.HostPagesReserved: leases.pages_reserved,
    ev.HostPagesReleased: leases.pages_released,
    ev.HostPagesEvicted: leases.pages_evicted,
    ev.PagesPublished: leases.published,
    ev.TransferPinned: leases.pinned,
    ev.TransferEnqueued: leases.answered,
    ev.TransferCompleted: leases.answered,
    ev.TransferFailed: leases.answered,
    ev.HotWanted: leases.hot,
    ev.HotLeased: leases.hot_leased,
    ev.HotReleased: leases.hot,
    ev.SuffixAsked: suffixes.asked,
    ev.SuffixPinned: suffixes.pinned,
    ev.SuffixEvicted: suffixes.evicted,
    ev.SuffixCompleted: suffixes.answered,
    ev.SuffixFailed: suffixes.answered,
}


class Played(NamedTuple):
    """What was left of an edited log, and what an audit said of it."""

    events: list[LoggedEvent]
    kept: list[int]  # the place of each in the log
    violations: list[Violation]
    refused: Exception | None  # why the last event could not be folded


class Rerun:
    """Plays edits of `log`, of which all but the last event can be folded."""

    def __init__(self, config: HiSparseConfig, log: Sequence[LoggedEvent]) -> None:
        self.config, self.log = config, log
        self.judged = 0  # events, so far
        self._then = self._before_fault()

    def _before_fault(self) -> State | None:
        """The state before the last event, if that cannot be folded."""
        state, last = State(self.config), self.log[-1]
        for seq, event in enumerate(self.log[:-1], 1):
            evolve(state, event, seq)  # type: ignore[arg-type]
        pools: tuple[Any, ...] = (state.blocks, state.pages, state.suffix)
        epochs = [pool.epoch.copy() for pool in pools]
        numbers = state.next_epoch, state.next_transfer, state.step, state.now_us
        columns = state.rows.computed.copy(), state.rows.confirmed.copy()
        acked, retired = list(state.acked), list(state.retired)
        try:
            evolve(state, last, len(self.log))  # type: ignore[arg-type]
        except Exception:  # half done: what it may have changed goes back
            for pool, epoch in zip(pools, epochs, strict=True):
                pool.epoch = epoch
            state.next_epoch, state.next_transfer, state.step, state.now_us = numbers
            state.rows.computed, state.rows.confirmed = columns
            state.acked, state.retired = acked, retired
            return state
        return None

    def play(self, edited: Sequence[LoggedEvent | None], *, clean: bool) -> Played | None:
        """None if an event before the last one cannot follow or, if `clean`, is a violation."""
        trial = list(edited)
        for _ in range(RETRIES):
            found = self._once(trial, clean)
            if not isinstance(found, int):
                return found
            trial[found] = None
        return None

    def _once(self, edited: list[LoggedEvent | None], clean: bool) -> Played | int | None:
        """The place of an event that could not follow, if there is one."""
        audit = Audit(self.config)
        names = Names(audit.state, edited)
        made, kept = list[LoggedEvent](), list[int]()
        for at, (was, now) in enumerate(zip(self.log, edited, strict=True)):
            last = at == len(self.log) - 1
            event = None if now is None else self._fitted(names, now, last)
            if event is not None:
                self.judged += 1
                if not audit.take(len(made) + 1, event) and not last:
                    return at
                made.append(event)
                kept.append(at)
                names.seqs[at + 1] = len(made)
                if clean and not last and audit.violations:
                    return None
            names.past(was)
        audit.finish()
        return Played(made, kept, audit.violations, audit.refused)

    def _fitted(self, names: Names, event: Any, last: bool) -> Any:
        if not isinstance(event, ev.Event):
            return event
        if last and self._then is not None:
            try:
                made = told(names, event, self._then)
            except LookupError:  # what it names was left out
                return None
        else:
            made = _FITTED.get(type(event), inputs.same)(names, event)
        if made is None:
            return None
        return msgspec.structs.replace(made, cause=names.seqs.get(event.cause, 0))
