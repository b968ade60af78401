"""A log on a time line: what each event changed, and when that was. Pure.

`Timeline` stands beside a fold: after each event, `changes` says which blocks, host pages,
transfers and requests are in another state than before it. `Clock` turns a seq into nanoseconds: a
log has no clock of its own, so a seq lasts 1 us or a step 1 ms, its events evenly spread. `Causes`
knows what each event led to; it and the clock are made in one pass over the log, 8 bytes an event.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.fsm.events import Event, StepPlanned
from hisparse.fsm.machines import BlockRole, BlockState, PageState, RequestState
from hisparse.fsm.state import Key, State

What = Literal["block", "page", "transfer", "request"]
Facts = dict[str, int | str]
SEQ_NS = 1_000
STEP_NS = 1_000_000
STEPS_MAX = 1 << 40  # later steps, which only a foreign log has, fall together
_TRANSFERS = ("transfers", "enqueued", "completed", "failed")


class Change(NamedTuple):
    """One id is in another state: ``""`` for FREE, settled or gone. `facts` say more of it."""

    what: What
    ident: int | Key
    state: str
    facts: Facts


class Timeline:
    """Holds the last states seen; `state` is the fold's own, evolved between two calls."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._blocks = state.blocks.state.copy()
        self._pages = state.pages.state.copy()
        self._transfers: dict[int, str] = {}
        self._requests: dict[Key, str] = {}
        self._rows: dict[int, Key] = {}

    def changes(self, event: Event) -> Iterator[Change]:
        """What `event`, which the fold has just taken, changed."""
        yield from self._changed_requests(event)
        yield from self._changed_transfers(event)
        b, p = self.state.blocks, self.state.pages
        for block in _differ(self._blocks, b.state):
            state = BlockState(int(b.state[block]))
            facts: Facts = {
                "epoch": int(b.epoch[block]),
                "role": BlockRole(int(b.role[block])).name,
            }
            yield Change("block", block, state.name if state else "", facts)
        for page in _differ(self._pages, p.state):
            found = PageState(int(p.state[page]))
            yield Change("page", page, found.name if found else "", {"epoch": int(p.epoch[page])})

    def _changed_transfers(self, event: Event) -> Iterator[Change]:
        named = [ident for field in _TRANSFERS for ident in getattr(event, field, ())]
        for ident in dict.fromkeys(named):
            t = self.state.transfers.get(ident)
            now = "" if t is None else t.state.name
            if now == self._transfers.get(ident, ""):
                continue
            if t is None:
                del self._transfers[ident]
                yield Change("transfer", ident, "", {})
                continue
            self._transfers[ident] = now
            facts: Facts = {
                "kind": t.kind.name,
                "row": t.row,
                "page_of_request": t.entry,
                "block": f"{t.block}@{t.block_epoch}",
                "host_page": f"{t.page}@{t.page_epoch}",
            }
            yield Change("transfer", ident, now, facts)

    def _changed_requests(self, event: Event) -> Iterator[Change]:
        named = dict.fromkeys(self._rows.values())
        request = getattr(event, "request", None)
        if request is not None:
            named[request, getattr(event, "epoch", 0)] = None
        for key in named:
            found = self.state.requests.get(key)
            gone = found is None or found.state is RequestState.GONE
            now = "" if found is None or gone else found.state.name
            if now == self._requests.get(key, ""):
                continue
            facts: Facts = {}
            if found is None or gone:
                del self._requests[key]
                self._rows = {row: held for row, held in self._rows.items() if held != key}
            else:
                self._requests[key] = now
                if found.row >= 0:
                    self._rows[found.row] = key
                facts = {"epoch": found.epoch, "row": found.row, "hit_tokens": found.hit_tokens}
            yield Change("request", key, now, facts)


def _differ(before: npt.NDArray[np.uint8], now: npt.NDArray[np.uint8]) -> list[int]:
    """Ids whose state is another one; `before` is brought up to date."""
    found = np.flatnonzero(before != now)
    before[found] = now[found]
    return [int(ident) for ident in found]


class Clock:
    """Nanoseconds of a seq: `steps` are the seqs that planned one, and the steps they planned."""

    def __init__(self, steps: list[tuple[int, int]], end: int, by: Literal["seq", "step"]) -> None:
        self._firsts = [1, *(seq for seq, _ in steps), end + 1]
        self._steps = [0, *(min(max(step, 0), STEPS_MAX) for _, step in steps)]
        self._by = by

    def at(self, seq: int) -> int:
        if self._by == "seq":
            return seq * SEQ_NS
        at = min(max(bisect_right(self._firsts, seq) - 1, 0), len(self._steps) - 1)
        length = max(self._firsts[at + 1] - self._firsts[at], 1)
        within = min(max(seq - self._firsts[at], 0), length)
        return self._steps[at] * STEP_NS + within * STEP_NS // length


class Causes:
    """Which events name a seq as their cause."""

    def __init__(self, causes: npt.NDArray[np.int64]) -> None:
        self._order = np.argsort(causes, kind="stable")
        self._sorted = causes[self._order]

    def led_to(self, seq: int) -> list[int]:
        """Seqs of the events that `seq` led to, in order."""
        first, last = np.searchsorted(self._sorted, [seq, seq + 1])
        return [int(at) + 1 for at in self._order[first:last]]


def indexed(
    events: Iterable[tuple[int, object]], by: Literal["seq", "step"]
) -> tuple[Clock, Causes]:
    """The clock and the causes of a log that begins at seq 1; a cause that is none becomes 0."""
    causes = array("q")
    steps: list[tuple[int, int]] = []
    for seq, event in events:
        cause = getattr(event, "cause", 0)
        causes.append(cause if 0 < cause < seq else 0)
        if isinstance(event, StepPlanned):
            steps.append((seq, event.step))
    return Clock(steps, len(causes), by), Causes(np.array(causes, dtype=np.int64))
