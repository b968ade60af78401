"""Names and places of the invariants; the functions are in `state.py` and `run.py`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Invariant(msgspec.Struct, frozen=True):
    """`where` it can run: on a log alone, live beside the scheduler, or on the device."""

    name: str
    where: Literal["log", "live", "device"]
    promise: str


INVARIANTS: tuple[Invariant, ...] = (
    Invariant(
        "spill_before_free",
        "log",
        "a block with the only copy of accepted rows of a live request is never freed, reused or "
        "overwritten before its copy is enqueued on every reading rank",
    ),
    Invariant(
        "complete_before_publish", "log", "a page is found by prefix only after its copy completed"
    ),
    Invariant("publish_accepted_only", "log", "never past computed and accepted rows"),
    Invariant("one_content", "log", "a (block or page, epoch) holds one (prefix page, group)"),
    Invariant("rank_quorum", "log", "every rank that was declared has answered, no other counts"),
    Invariant("settle_once", "log", "a transfer settles exactly once"),
    Invariant(
        "host_reuse_after_readers",
        "log",
        "a host page is given back only when every rank retired the last step that could read it",
    ),
    Invariant(
        "conservation", "log", "every block and page is in exactly one place; null is in none"
    ),
    Invariant("refcount_exact", "log", "references equal the table entries that name an id"),
    Invariant(
        "always_readable",
        "log",
        "every computed row of a live request has a copy that the next resolve may read",
    ),
    Invariant("replay_equal", "live", "the fold of the log is the live state, byte for byte"),
    Invariant("table_truth", "live", "the worker's tables equal the scheduler's"),
    Invariant(
        "no_silent_loss",
        "device",
        "rows computed from the page of a failed copy are never confirmed, published or emitted",
    ),
    Invariant("content", "device", "attention reads the bytes that were written"),
    Invariant("disjoint_views", "device", "views of layers and groups never overlap"),
)
