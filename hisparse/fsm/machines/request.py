"""Request: one id and epoch, from arrival until the last device read of its pages is known.

Abort is legal in every state: after an end it changes nothing. DRAINING ends when every transfer
has settled and every rank has retired the last step that could read the request's pages.
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


class RequestTrigger(enum.IntEnum):
    admitted = 0
    prefilled = 1  # rows of its prompt were planned
    decoded = 2  # the last prompt row was computed
    finished = 3
    aborted = 4
    preempted = 5
    drained = 6  # its leases are handed to what is still in flight
    forgotten = 7  # nothing of it is left


_S, _T = RequestState, RequestTrigger
_ENDED = [_S.FINISHED, _S.ABORTED, _S.PREEMPTED, _S.DRAINING, _S.GONE]

REQUEST = Machine(
    "Request",
    RequestState,
    RequestTrigger,
    [
        (_T.admitted, _S.WAITING, _S.ADMITTED),
        (_T.prefilled, [_S.ADMITTED, _S.PREFILL], _S.PREFILL),
        (_T.decoded, _S.PREFILL, _S.DECODE),
        (_T.finished, _S.DECODE, _S.FINISHED),
        (_T.aborted, [_S.WAITING, _S.ADMITTED, _S.PREFILL, _S.DECODE], _S.ABORTED),
        *[(_T.aborted, ended, ended) for ended in _ENDED],
        (_T.preempted, [_S.ADMITTED, _S.PREFILL, _S.DECODE], _S.PREEMPTED),
        (_T.drained, [_S.FINISHED, _S.ABORTED, _S.PREEMPTED], _S.DRAINING),
        (_T.forgotten, _S.DRAINING, _S.GONE),
    ],
    final=[_S.GONE],
)

LIVE = (RequestState.ADMITTED, RequestState.PREFILL, RequestState.DECODE)
