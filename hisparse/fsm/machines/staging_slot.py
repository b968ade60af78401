"""StagingSlot: one slot of the bounded GPU pool that host imports pass through."""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class SlotState(enum.IntEnum):
    FREE = 0
    RECEIVING = 1  # a peer is writing it
    COPYING = 2  # a copy to the host reads it


class SlotTrigger(enum.IntEnum):
    received = 0
    copied = 1
    released = 2


_S, _T = SlotState, SlotTrigger

STAGING_SLOT = Machine(
    "StagingSlot",
    SlotState,
    SlotTrigger,
    [
        (_T.received, _S.FREE, _S.RECEIVING),
        (_T.copied, _S.RECEIVING, _S.COPYING),
        (_T.released, [_S.COPYING, _S.RECEIVING], _S.FREE),
    ],
    final=[_S.FREE],
)
