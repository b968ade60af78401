"""Perfetto: a .pftrace that ui.perfetto.dev opens. Time is the log's own: see `fsm.timeline.Clock`.

    scheduler    inputs, decisions           an instant an event
    pools        counters of both pools, and the share of prompt tokens that a prefix gave
    requests     one track an epoch          a slice a state
    transfers    lanes                       a slice a copy, its states within
    GPU blocks, host pages                   one track an id that changes, a slice a state
    rank-N       steps, and each stream      a slice a command, an instant an access or edge

Flow arrows lead from an event to those that name it as cause, from an event to each slice that it
begins, from a copy to its accesses on each rank, from a record on a stream to what waits for it.
Tracks beyond `Caps` are left out and counted, ids that change first come first. Slices that are
open at the end stay open. Two passes over the log; an event that cannot be folded ends the second.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple

from hisparse.config import HiSparseConfig
from hisparse.errors import HiSparseError
from hisparse.export.perfetto_packets import Packets
from hisparse.export.perfetto_ranks import RankTracks, copy_flow
from hisparse.fsm import events as ev
from hisparse.fsm.describe import fields
from hisparse.fsm.state import State
from hisparse.fsm.timeline import Causes, Change, Clock, Timeline, indexed

Logged = Iterable[tuple[int, Any]]
_SLICE = 1 << 60  # flow ids: an event's seq for the arrow to it, else this and a count


class Caps(NamedTuple):
    """Most tracks of a kind."""

    block: int = 256
    page: int = 256
    request: int = 1000


class Result(NamedTuple):
    """What was written; `error` is why the fold ended before the log."""

    events: int
    packets: int
    tracks: dict[str, int]
    left_out: dict[str, int]
    error: HiSparseError | None


def write(
    config: HiSparseConfig,
    events: Logged,
    ranks: Mapping[str, Logged],
    out: BinaryIO,
    *,
    apply: Callable[[State, int, Any], None],
    caps: Caps | None = None,
    clock: Literal["seq", "step"] = "step",
) -> Result:
    """Write the trace to `out`. `events`, the scheduler's stream, is read twice; `apply` evolves a
    state and raises a HiSparseError for an event that cannot follow it."""
    packets = Packets(out)
    when, causes = indexed(events, clock)
    trace = _Trace(packets, State(config), when, causes, caps or Caps(), len(ranks))
    taken, error = 0, None
    for seq, event in events:
        try:
            apply(trace.state, seq, event)
        except HiSparseError as found:
            error = found
            break
        trace.take(seq, event)
        taken += 1
    for number, (name, stream) in enumerate(sorted(ranks.items())):
        tracks = RankTracks(packets, name, number, when)
        for _, event in stream:
            tracks.take(event)
        tracks.finish()
    counts = {what: len(group.tracks) for what, group in trace.groups.items()}
    left_out = {what: len(group.left_out) for what, group in trace.groups.items()}
    return Result(taken, packets.packets, counts | {"transfer": trace.lanes.made}, left_out, error)


class _Group:
    """The tracks of one kind of id: each at most one slice, the state that the id is in."""

    def __init__(self, packets: Packets, title: str, cap: int) -> None:
        self.parent = packets.track(title)
        self.tracks: dict[Any, int] = {}
        self.left_out: set[Any] = set()
        self._packets, self._cap = packets, cap
        self._open: set[Any] = set()

    def change(self, ident: Any, name: str, change: Change, at: int, flow: int) -> None:
        track = self.tracks.get(ident)
        if track is None:
            if len(self.tracks) >= self._cap:
                self.left_out.add(ident)
                return
            rank = change.ident if isinstance(change.ident, int) else len(self.tracks)
            track = self.tracks[ident] = self._packets.track(name, self.parent, rank)
        if ident in self._open:
            self._packets.end(track, at)
            self._open.discard(ident)
        if change.state:
            self._packets.begin(track, at, change.state, change.facts, [flow])
            self._open.add(ident)


class _Lanes:
    """Transfers in flight: each on a lane of its own until it settles."""

    def __init__(self, packets: Packets, ranks: int) -> None:
        self.parent = packets.track("transfers")
        self.made = 0
        self._packets, self._ranks = packets, ranks
        self._free: list[int] = []
        self._tracks: list[int] = []
        self._lane_of: dict[int, int] = {}

    def change(self, ident: int, change: Change, at: int, flow: int) -> None:
        lane = self._lane_of.get(ident)
        if lane is None:
            lane = self._lane_of[ident] = self._lane()
            flows = [flow, *(copy_flow(rank, ident) for rank in range(self._ranks))]
            name = f"transfer {ident} {change.facts['kind']}"
            self._packets.begin(self._tracks[lane], at, name, change.facts, flows)
        else:
            self._packets.end(self._tracks[lane], at)
        if change.state:
            self._packets.begin(self._tracks[lane], at, change.state, {})
            return
        self._packets.end(self._tracks[lane], at)
        heapq.heappush(self._free, self._lane_of.pop(ident))

    def _lane(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._tracks.append(self._packets.track(f"lane {self.made}", self.parent, self.made))
        self.made += 1
        return self.made - 1


class _Trace:
    """The scheduler's stream, event by event, after the fold has taken each."""

    def __init__(
        self, packets: Packets, state: State, when: Clock, causes: Causes, caps: Caps, ranks: int
    ) -> None:
        self.state = state
        self._packets, self._when, self._causes = packets, when, causes
        self._timeline = Timeline(state)
        scheduler = packets.track("scheduler")
        self._inputs = packets.track("inputs", scheduler, 0)
        self._decisions = packets.track("decisions", scheduler, 1)
        self._counters = _Counters(packets)
        self.groups = {"request": _Group(packets, "requests", caps.request)}
        self.lanes = _Lanes(packets, ranks)
        self.groups["block"] = _Group(packets, "GPU blocks", caps.block)
        self.groups["page"] = _Group(packets, "host pages", caps.page)
        self._flows = _SLICE

    def take(self, seq: int, event: ev.Event) -> None:
        at = self._when.at(seq)
        changes = list(self._timeline.changes(event))
        begun = range(self._flows, self._flows + len(changes))
        self._flows += len(changes)
        arrows = [*self._causes.led_to(seq), *begun]
        if 0 < event.cause < seq:
            arrows.append(seq)
        track = self._inputs if event.is_input else self._decisions
        args = {"seq": seq, "cause": event.cause, "fields": fields(event)}
        self._packets.instant(track, at, type(event).__name__, args, arrows)
        for flow, change in zip(begun, changes, strict=True):
            self._change(change, at, flow)
        self._counters.take(self.state, event, at)

    def _change(self, change: Change, at: int, flow: int) -> None:
        if isinstance(change.ident, tuple):
            request = change.ident[0]
            self.groups["request"].change(change.ident, f"request {request}", change, at, flow)
        elif change.what == "transfer":
            self.lanes.change(change.ident, change, at, flow)
        else:
            name = f"{change.what} {change.ident}"
            self.groups[change.what].change(change.ident, name, change, at, flow)


class _Counters:
    """Pool use, and the share of prompt tokens found by prefix; told when they change."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        parent = packets.track("pools")
        names = ("GPU blocks used", "GPU blocks cached", "host pages used", "host pages evictable")
        self._tracks = {name: packets.counter(name, parent) for name in names}
        self._tracks["prefix hit rate"] = packets.counter("prefix hit rate", parent, "%")
        self._last: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()

    def take(self, state: State, event: ev.Event, at: int) -> None:
        b, p = state.blocks, state.pages
        values: dict[str, float] = {
            "GPU blocks used": len(b.state) - 1 - b.available,
            "GPU blocks cached": b.cached.count,
            "host pages used": len(p.state) - 1 - p.available,
            "host pages evictable": p.evictable.count,
        }
        if isinstance(event, ev.RequestAdmitted):
            self._tokens["hit"] += event.hit_tokens
            self._tokens["prompt"] += state.requests[event.request, event.epoch].prompt_tokens
            values["prefix hit rate"] = 100.0 * self._tokens["hit"] / max(self._tokens["prompt"], 1)
        for name, value in values.items():
            if self._last.get(name) != value:
                self._last[name] = value
                self._packets.count(self._tracks[name], at, value)
