"""Import: a prefix fetched from another machine (prefill/decode disaggregation).

The landing target is chosen once, at `targeted`, and kept over admission retries.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class ImportState(enum.IntEnum):
    TARGETED = 0
    WAITING = 1
    RECEIVING = 2  # straight into resident pages
    STAGING = 3  # through the GPU staging pool into host pages
    LANDED = 4
    FAILED = 5
    EXPIRED = 6


class ImportTrigger(enum.IntEnum):
    deferred = 0
    received = 1
    staged = 2
    landed = 3
    failed = 4
    expired = 5


_S, _T = ImportState, ImportTrigger

IMPORT = Machine(
    "Import",
    ImportState,
    ImportTrigger,
    [
        (_T.deferred, [_S.TARGETED, _S.WAITING], _S.WAITING),
        (_T.received, [_S.TARGETED, _S.WAITING], _S.RECEIVING),
        (_T.staged, [_S.TARGETED, _S.WAITING], _S.STAGING),
        (_T.landed, [_S.RECEIVING, _S.STAGING], _S.LANDED),
        (_T.failed, [_S.RECEIVING, _S.STAGING], _S.FAILED),
        (_T.expired, [_S.TARGETED, _S.WAITING], _S.EXPIRED),
    ],
    final=[_S.LANDED, _S.FAILED, _S.EXPIRED],
)
