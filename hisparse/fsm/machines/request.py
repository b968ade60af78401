"""Request: one id and epoch, from arrival until the last device read of its pages is known.

Abort is legal in every state: after an end it changes nothing. DRAINING ends when every transfer
has settled and every rank has retired the last step that could read the request's pages.

REWINDING: a copy failed whose page steps had read. Rows beyond the last valid boundary are taken
back; it computes nothing until what held them has settled, and then computes them again.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class RequestState(enum.IntEnum):
    WAITING = 0
    ADMITTED = 1
    PREFILL = 2
    DECODE = 3
    FINISHED = 4
    ABORTED = 5
    PREEMPTED = 6
    DRAINING = 7
    GONE = 8
    REWINDING = 9


class RequestTrigger(enum.IntEnum):
    admitted = 0
    prefilled = 1  # rows of its prompt were planned, or are to be computed again
    decoded = 2  # the last prompt row was computed, or is still
    finished = 3
    aborted = 4
    preempted = 5
    drained = 6  # its leases are handed to what is still in flight
    forgotten = 7  # nothing of it is left
    rewound = 8  # rows that a failed copy made doubtful are taken back


_S, _T = RequestState, RequestTrigger
_LIVE = [_S.ADMITTED, _S.PREFILL, _S.DECODE, _S.REWINDING]
_ENDED = [_S.FINISHED, _S.ABORTED, _S.PREEMPTED, _S.DRAINING, _S.GONE]

REQUEST = Machine(
    "Request",
    RequestState,
    RequestTrigger,
    [
        (_T.admitted, _S.WAITING, _S.ADMITTED),
        (_T.prefilled, [_S.ADMITTED, _S.PREFILL, _S.REWINDING], _S.PREFILL),
        (_T.decoded, [_S.PREFILL, _S.REWINDING], _S.DECODE),
        (_T.rewound, _LIVE, _S.REWINDING),
        (_T.finished, _S.DECODE, _S.FINISHED),
        (_T.aborted, [_S.WAITING, *_LIVE], _S.ABORTED),
        *[(_T.aborted, ended, ended) for ended in _ENDED],
        (_T.preempted, _LIVE, _S.PREEMPTED),
        (_T.drained, [_S.FINISHED, _S.ABORTED, _S.PREEMPTED], _S.DRAINING),
        (_T.forgotten, _S.DRAINING, _S.GONE),
    ],
    final=[_S.GONE],
)

LIVE = tuple(_LIVE)
