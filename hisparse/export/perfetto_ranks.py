"""The tracks of one rank: a slice a command, and on each stream what was queued there.

A rank's events follow each other by 1 ns from the moment of the last scheduler event that their
command projects: the log orders them, it does not say how long they took.
"""

from __future__ import annotations

from hisparse.export.perfetto_packets import Packets
from hisparse.fsm import events as ev
from hisparse.fsm.describe import fields, runs
from hisparse.fsm.timeline import Clock

_COPY, _WAIT = 2 << 60, 3 << 60
_LOW = (1 << 40) - 1


def copy_flow(rank: int, transfer: int) -> int:
    """Flow id from a transfer's slice to its accesses on the `rank`-th stream of a rank."""
    return _COPY | (rank & 0xFFFF) << 40 | transfer & _LOW


class RankTracks:
    """Takes a rank's stream in, in order."""

    def __init__(self, packets: Packets, name: str, rank: int, when: Clock) -> None:
        self._packets, self._rank, self._when = packets, rank, when
        self._parent = packets.track(name, rank=rank)
        self._steps = packets.track("steps", self._parent)
        self._streams: dict[str, int] = {}
        self._open = False
        self._now = 0

    def take(self, event: object) -> None:
        if isinstance(event, ev.CommandApplied):
            self._now = max(self._now + 1, self._when.at(event.to_seq))
            self.finish()
            args = {"from_seq": event.from_seq, "to_seq": event.to_seq}
            self._packets.begin(self._steps, self._now, f"step {event.step}", args)
            self._open = True
            return
        self._now += 1
        match event:
            case ev.StreamRecorded():
                self._instant(event.stream, f"record {event.event}", event, [self._wait(event)])
            case ev.StreamWaited():
                self._instant(event.stream, f"wait {event.event}", event, [self._wait(event)])
            case ev.MemoryAccessed():
                verb = "write" if event.write else "read"
                flows = [copy_flow(self._rank, event.transfer)] if event.transfer else []
                name = f"{verb} {event.pool} {runs(event.ids)}"
                self._instant(event.stream, name, event, flows)
            case ev.Event():
                self._instant("acknowledgements", type(event).__name__, event, [])

    def finish(self) -> None:
        """End the slice of the last command."""
        if self._open:
            self._packets.end(self._steps, self._now)
            self._open = False

    def _wait(self, event: ev.StreamRecorded | ev.StreamWaited) -> int:
        return _WAIT | (self._rank & 0xFFFF) << 40 | event.event & _LOW

    def _instant(self, stream: str, name: str, event: ev.Event, flows: list[int]) -> None:
        track = self._streams.get(stream)
        if track is None:
            rank = len(self._streams) + 1
            track = self._streams[stream] = self._packets.track(stream, self._parent, rank)
        self._packets.instant(track, self._now, name, {"fields": fields(event)}, flows)
