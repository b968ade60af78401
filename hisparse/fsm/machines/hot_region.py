"""HotRegion: a request's small GPU buffer of hot rows.

Only a request whose region is LEASED may lose resident pages: a page on the host is read through
the hot rows. A region given back when pressure is gone may be wanted again.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class HotState(enum.IntEnum):
    NONE = 0
    WANTED = 1
    LEASED = 2
    RELEASED = 3


class HotTrigger(enum.IntEnum):
    wanted = 0
    leased = 1
    released = 2


_S, _T = HotState, HotTrigger

HOT_REGION = Machine(
    "HotRegion",
    HotState,
    HotTrigger,
    [
        (_T.wanted, [_S.NONE, _S.RELEASED], _S.WANTED),
        (_T.leased, _S.WANTED, _S.LEASED),
        (_T.released, [_S.WANTED, _S.LEASED], _S.RELEASED),
    ],
    final=[_S.NONE, _S.RELEASED],
)
