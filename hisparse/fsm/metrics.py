"""Metrics: counters that are a fold over events, so that they can be recomputed from any log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse.fsm import events as ev
from hisparse.fsm.wire import TransferKind

_PLANNED = {
    TransferKind.SPILL: "spills_planned",
    TransferKind.WRITE_BACK: "write_backs",
    TransferKind.RESTORE: "restores",
}

NAMES = (
    "requests_arrived",
    "requests_admitted",
    "requests_refused",
    "requests_finished",
    "requests_aborted",
    "requests_failed",
    "preemptions",
    "rewinds",
    "steps",
    "rows_computed",
    "prefix_hit_pages",
    "spills",
    "spills_planned",
    "write_backs",
    "restores",
    "transfers_completed",
    "transfers_failed",
    "pages_published",
    "pages_evicted",
    "blocks_adopted",
    "index_pages_copied",
    "suffix_pages_asked",
    "suffix_pages_loaded",
    "suffix_pages_stored",
    "suffix_pages_evicted",
    "suffix_copies_failed",
    "hot_regions_leased",
    "hot_regions_released",
    "pages_promoted",
    "pressure_raised",
    "admissions_deferred",
)


class Metrics:
    """Counts of what happened. ``spills`` are pages whose GPU block was given back to be read from
    the host, whether their copy was made for that (``spills_planned``) or earlier (write-back).
    ``rewinds`` and ``requests_failed`` are the two answers to a copy that failed after it was read;
    such a request is not among ``requests_aborted``."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(NAMES, 0)

    def take(self, event: ev.Event) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            name, amount = handler(event)
            self.counts[name] += amount


_HANDLERS: dict[type[ev.Event], Callable[[Any], tuple[str, int]]] = {
    ev.RequestArrived: lambda e: ("requests_arrived", 1),
    ev.RequestRefused: lambda e: ("requests_refused", 1),
    ev.RequestFinished: lambda e: ("requests_finished", 1),
    ev.RequestAborted: lambda e: (
        "requests_failed" if e.reason.startswith("copy failed") else "requests_aborted",
        1,
    ),
    ev.RequestRewound: lambda e: ("rewinds", 1),
    ev.RequestPreempted: lambda e: ("preemptions", 1),
    ev.StepPlanned: lambda e: ("steps", 1),
    ev.RowsComputed: lambda e: ("rows_computed", sum(e.counts)),
    ev.RequestAdmitted: lambda e: ("requests_admitted", 1),
    ev.PrefixLeased: lambda e: ("prefix_hit_pages", len(e.pages)),
    ev.PagesSpilled: lambda e: ("spills", len(e.entries)),
    ev.TransferPinned: lambda e: (_PLANNED[e.kind], len(e.transfers)),
    ev.TransferCompleted: lambda e: ("transfers_completed", len(e.transfers) if e.last else 0),
    ev.TransferFailed: lambda e: ("transfers_failed", len(e.transfers)),
    ev.PagesPublished: lambda e: ("pages_published", sum(1 for page in e.pages if page)),
    ev.HostPagesEvicted: lambda e: ("pages_evicted", len(e.pages)),
    ev.BlocksAdopted: lambda e: ("blocks_adopted", len(e.blocks)),
    ev.IndexPagesCopied: lambda e: ("index_pages_copied", len(e.blocks)),
    ev.HotLeased: lambda e: ("hot_regions_leased", 1),
    ev.HotReleased: lambda e: ("hot_regions_released", 1),
    ev.PolicyChosen: lambda e: (
        ("pages_promoted", e.need) if e.resource == "promotion" else ("pressure_raised", 1)
    ),
    ev.SuffixAsked: lambda e: ("suffix_pages_asked", e.asked),
    ev.SuffixPinned: lambda e: (
        "suffix_pages_loaded" if e.load else "suffix_pages_stored",
        len(e.transfers),
    ),
    ev.SuffixEvicted: lambda e: ("suffix_pages_evicted", len(e.suffixes)),
    ev.SuffixFailed: lambda e: ("suffix_copies_failed", len(e.transfers)),
    ev.AdmissionDeferred: lambda e: ("admissions_deferred", 1),
}
