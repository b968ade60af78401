"""Metrics: counters that are a fold over events, so that they can be recomputed from any log.

Prefix look-ups count tokens of admitted prompts, and each tier is asked for what the one before it
did not have: of a prompt of 1000 tokens of which the GPU still has 600 and the host 200 more, the
GPU was asked for 1000 and hit 600, the host was asked for 400 and hit 200. What is not looked up (a
prompt without a whole page, a policy without a host tier) counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.state import Key
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
    "gpu_prefix_queries",
    "gpu_prefix_hits",
    "host_prefix_queries",
    "host_prefix_hits",
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

    def __init__(self, config: HiSparseConfig) -> None:
        self.counts: dict[str, int] = dict.fromkeys(NAMES, 0)
        self._page_size, self._looks_up = config.pools.page_size, config.offload
        self._prompts: dict[Key, int] = {}  # tokens of those who wait and will be looked up
        self._admitted = (-1, 0)  # row and cause of the last admission

    def statistics(self) -> dict[str, int]:
        """The counts by their names, `NAMES`: a copy, which later events do not change."""
        return dict(self.counts)

    def take(self, event: ev.Event) -> None:
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            name, amount = handler(event)
            self.counts[name] += amount
        if self._looks_up and type(event) in _PREFIX:
            self._take_prefix(event)

    def _take_prefix(self, event: ev.Event) -> None:
        """What the tiers were asked for is known with the admission; what of the hit lies on the
        GPU, with the adoptions that follow in the same decision."""
        match event:
            case ev.RequestArrived() if event.page_hashes:
                self._prompts[event.request, event.epoch] = event.prompt_tokens
            case ev.RequestRefused() | ev.RequestAborted():
                self._prompts.pop((event.request, event.epoch), None)
            case ev.RequestAdmitted():
                prompt = self._prompts.pop((event.request, event.epoch), 0)
                self._admitted = (event.row, event.cause)
                self._count_prefix(prompt, 0, prompt, event.hit_tokens)
            case ev.BlocksAdopted() if (event.row, event.cause) == self._admitted:
                if event.role is BlockRole.RESIDENT:
                    found = len(event.blocks) * self._page_size
                    self._count_prefix(0, found, -found, -found)

    def _count_prefix(self, asked: int, hit: int, host_asked: int, host_hit: int) -> None:
        self.counts["gpu_prefix_queries"] += asked
        self.counts["gpu_prefix_hits"] += hit
        self.counts["host_prefix_queries"] += host_asked
        self.counts["host_prefix_hits"] += host_hit


_PREFIX = frozenset(
    {ev.RequestArrived, ev.RequestAdmitted, ev.RequestRefused, ev.RequestAborted, ev.BlocksAdopted}
)
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
