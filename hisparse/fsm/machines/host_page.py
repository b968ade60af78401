"""HostPage: one page of the pinned host pool.

A reservation has three exits: filled (`pinned`), `abandoned`, `failed`. PUBLISHED means findable by
prefix: the page belongs to the gap-free durable prefix of accepted, computed tokens.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class PageState(enum.IntEnum):
    FREE = 0
    RESERVED = 1  # promised to a request at admission, nothing in it
    PINNED = 2  # destination of a planned copy
    ENQUEUED = 3  # readable in stream order only
    COMPLETED = 4  # valid for every reader
    PUBLISHED = 5  # valid, and findable by prefix
    FAILED = 6  # its copy failed: never read, never published
    QUARANTINED = 7  # a copy of unknown outcome may still write it


class PageTrigger(enum.IntEnum):
    reserved = 0
    abandoned = 1
    pinned = 2
    cancelled = 3
    enqueued = 4
    completed = 5
    failed = 6
    published = 7
    evicted = 8
    released = 9
    reclaimed = 10
    quarantined = 11
    fenced = 12


_S, _T = PageState, PageTrigger

HOST_PAGE = Machine(
    "HostPage",
    PageState,
    PageTrigger,
    [
        (_T.reserved, _S.FREE, _S.RESERVED),
        (_T.abandoned, _S.RESERVED, _S.FREE),
        (_T.pinned, _S.RESERVED, _S.PINNED),
        (_T.cancelled, _S.PINNED, _S.RESERVED),
        (_T.enqueued, _S.PINNED, _S.ENQUEUED),
        (_T.completed, _S.ENQUEUED, _S.COMPLETED),
        (_T.failed, [_S.PINNED, _S.ENQUEUED], _S.FAILED),
        (_T.published, _S.COMPLETED, _S.PUBLISHED),
        (_T.evicted, _S.PUBLISHED, _S.FREE),
        (_T.released, _S.COMPLETED, _S.FREE),
        (_T.reclaimed, _S.FAILED, _S.FREE),
        (_T.quarantined, [_S.PINNED, _S.ENQUEUED], _S.QUARANTINED),
        (_T.fenced, _S.QUARANTINED, _S.FREE),
    ],
    final=[_S.FREE],
)
