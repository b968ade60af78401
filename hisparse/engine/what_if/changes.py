"""Changes: the same inputs with one left out or two exchanged; configurations to try. Pure.

    --drop       an arrival, and everything of that request with it
                 an abort, a preemption, a tick, a reset of the prefix cache: it does not happen
                 a sleep: its wake has nothing to do then
                 a finish: the request generates to its `max_tokens`
                 acknowledgements: lost, and sent again with the rank's next message
    --swap       two arrivals, aborts or preemptions, each in the other's place

What the engine, a policy or a suffix source answered is an input of the fold, but is asked again.
Everything else in a log follows from these. Both are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hisparse.config import HiSparseConfig, check_sizes
from hisparse.config_check import config_error
from hisparse.engine.what_if.inputs import Disturbance, RecordedRequest
from hisparse.engine.what_if.recording import ASKED_ANEW, Recording
from hisparse.errors import UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.describe import line

DROPPABLE = (
    "RequestArrived, RequestFinished, RequestAborted, RequestPreempted, Tick, PrefixCacheReset, "
    "MemoryReleased and AcknowledgementsTaken"
)
SWAPPABLE = "RequestArrived, RequestAborted and RequestPreempted"


def drop(recording: Recording, seq: int, event: ev.Event) -> Recording:
    """The inputs without the one that `event`, with number `seq`, told of.

    Raises UsageError for an event that is not an input, or follows from an earlier one.
    """
    match event:
        case ev.RequestArrived():
            request = next((r for r in recording.requests if r.seq == seq), None)
            if request is None:
                raise UsageError(
                    f"--drop {seq}: {event.request!r} comes back here after its preemption; drop "
                    "that (RequestPreempted), or its first arrival"
                )
            return replace(
                recording,
                requests=[r for r in recording.requests if r is not request],
                disturbances=[d for d in recording.disturbances if d.number != request.number],
            )
        case ev.RequestFinished():
            requests = [
                replace(r, total_tokens=None) if r.finish_seq == seq else r
                for r in recording.requests
            ]
            return replace(recording, requests=requests)
        case ev.RequestAborted() | ev.RequestPreempted():
            return _undisturbed(recording, seq, event)
        case ev.Tick():
            return replace(recording, ticks=[t for t in recording.ticks if t.seq != seq])
        case ev.PrefixCacheReset():
            return replace(recording, resets=[r for r in recording.resets if r.seq != seq])
        case ev.MemoryReleased():
            return replace(recording, memory=[m for m in recording.memory if m.seq != seq])
        case ev.AcknowledgementsTaken():
            return _lost(recording, seq)
    raise UsageError(f"--drop {seq}: {_named(event)} {_why_kept(event)}")


def _why_kept(event: ev.Event) -> str:
    if isinstance(event, ev.MemoryRestored):
        return "has to follow what it wakes from: drop the MemoryReleased before it"
    if isinstance(event, ASKED_ANEW):
        return f"is an answer that is asked for again; what can be dropped is {DROPPABLE}"
    return f"is decided anew, not an input; inputs are {DROPPABLE}"


def _undisturbed(recording: Recording, seq: int, event: ev.Event) -> Recording:
    gone = next((d for d in recording.disturbances if d.seq == seq), None)
    if gone is None:
        why = "the coordinator's own decision" if event.cause else "of a request that had ended"
        raise UsageError(f"--drop {seq}: {_named(event)} is {why}; inputs are {DROPPABLE}")
    kept = [d for d in recording.disturbances if d is not gone]
    if gone.preempts:  # what happened in later lives happens in this one
        kept = [
            _merged(d, gone) if d.number == gone.number and d.life > gone.life else d for d in kept
        ]
    return replace(recording, disturbances=kept)


def _merged(d: Disturbance, gone: Disturbance) -> Disturbance:
    """`d`, of a life behind the preemption `gone`. If it waited there, it counts from `gone` on."""
    if d.life == gone.life + 1 and d.rows < 0:
        return replace(d, life=gone.life, rows=gone.rows, lag=gone.lag + d.lag)
    return replace(d, life=d.life - 1)


def _lost(recording: Recording, seq: int) -> Recording:
    gone = next(m for m in recording.messages if m.seq == seq)
    later = (m.slot for m in recording.messages if m.rank == gone.rank and m.slot > gone.slot)
    late = replace(gone, slot=min(later, default=gone.slot + 1))
    return replace(recording, messages=[late if m is gone else m for m in recording.messages])


def swap(
    recording: Recording, first: tuple[int, ev.Event], second: tuple[int, ev.Event]
) -> Recording:
    """The inputs with two of them in each other's place.

    Raises UsageError unless both are arrivals, aborts or preemptions by a client or engine.
    """
    places = []
    for seq, event in (first, second):
        found = next((r for r in recording.requests if r.seq == seq), None)
        disturbed = next((d for d in recording.disturbances if d.seq == seq), None)
        if found is None and disturbed is None:
            raise UsageError(
                f"--swap {first[0]} {second[0]}: {_named(event)} (seq {seq}) has no place of its "
                f"own; what can be swapped is {SWAPPABLE}, as inputs"
            )
        if found is not None:
            places.append((seq, found.slot))
        elif disturbed is not None:
            places.append((seq, disturbed.seen_slot))
    (a, a_slot), (b, b_slot) = places
    to = {a: (b, b_slot), b: (a, a_slot)}
    requests = [_moved(r, to) for r in recording.requests]
    disturbances = [
        replace(d, seq=to[d.seq][0], slot=to[d.seq][1]) if d.seq in to else d
        for d in recording.disturbances
    ]
    return replace(recording, requests=requests, disturbances=disturbances)


def _moved(request: RecordedRequest, to: Mapping[int, tuple[int, int]]) -> RecordedRequest:
    if request.seq not in to:
        return request
    seq, slot = to[request.seq]
    return replace(request, seq=seq, slot=slot)


def _named(event: ev.Event) -> str:
    return " ".join(line(0, event).split()[1:3]).rstrip(",")


# -- configurations -------------------------------------------------------------------------------


def changed_config(config: HiSparseConfig, changes: Mapping[str, Any]) -> HiSparseConfig:
    """`config` with fields replaced, each named by its path (``pools.gpu_blocks``).

    Raises ConfigError that names the field, the value and the reason.
    """
    data = config.model_dump()
    for path, value in changes.items():
        section, _, name = path.partition(".")
        data[section] = {**data[section], name: value}
    try:
        return check_sizes(HiSparseConfig.model_validate(data))
    except ValidationError as error:
        raise config_error(error) from None
