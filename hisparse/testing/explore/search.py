"""search: every interleaving of a small world, breadth first, to its end.

A state of the world is a state of the scheduler and, of each rank, what it has said that the
scheduler has not taken in. A rank says one thing at a time, of any copy that it was told of, in any
order, and at any moment the scheduler takes in all that a rank has said: each batch that can reach
it does. A rank that is lost says nothing more, and what it had said comes late.

At the end `progress`: from each state, with no further arrival, abort, preemption or fault, there
is a way to where nothing is held.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hisparse.testing.explore.branch import RETIRED, Input
from hisparse.testing.explore.offers import FAILED, Said, sayings, with_saying
from hisparse.testing.explore.schedulers import Fault, Schedulers
from hisparse.testing.explore.world import World

Place = tuple[int, tuple[Said, ...], int, int]  # scheduler, said by rank, crashes, failures
Move = tuple[Any, ...]  # an Input, or ("say", rank, kind, transfer)
FORWARD = frozenset({"plan", "computed", "finish", "ack", "join", "say"})  # all but new trouble


class Found(msgspec.Struct, frozen=True):
    """A violation, and the moves that lead to it from the beginning."""

    invariant: str
    message: str
    moves: tuple[Move, ...]


@dataclass
class Exploration:
    """What was visited, and the shortest way to the first violation."""

    world: World
    states: int = 0  # reached, also where one was known
    unique: int = 0
    depth: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    schedulers: int = 0  # states of the scheduler among them
    inputs: int = 0  # given to production code
    bounded: int = 0  # of these, left out: more transfers than the world has
    complete: bool = False  # nothing is left to visit
    violations: list[Found] = field(default_factory=list)


class Search:
    """One exploration.

    Args:
        world: its sizes.
        exact: tell host pages apart (see `canonical`).
        plain: tell everything apart.
        most: unique states at which to stop; None: never.
        start: inputs that come first, one way.
        verbs: inputs that are tried, by their first word; None: all.
        progress: called after each level with the exploration so far.
    """

    def __init__(
        self,
        world: World,
        *,
        exact: bool = False,
        plain: bool = False,
        most: int | None = None,
        start: tuple[Input, ...] = (),
        verbs: frozenset[str] | None = None,
        progress: Callable[[Exploration], None] | None = None,
    ) -> None:
        self.world, self.most, self.start, self.verbs = world, most, start, verbs
        self.result = Exploration(world)
        self.schedulers = Schedulers(world, exact=exact, plain=plain, start=start)
        self.places: dict[Place, int] = {}
        self.parents: list[tuple[int, Move | None]] = []
        self._back: list[list[int]] = []  # by place, those that reach it by a move forward
        self.progress = progress

    def run(self) -> Exploration:
        """Explore; returns what was found. It stops at the first violation."""
        gc.disable()  # millions of tuples, and no cycle
        began, result = (time.perf_counter(), time.process_time()), self.result
        try:
            frontier = [self._place((0, ((),) * self.world.ranks, 0, 0), -1, None)]
            while frontier and not result.violations and not self._enough():
                frontier = self._level(frontier)
                result.depth += bool(frontier)
                self._tally(began)
                if self.progress is not None:
                    self.progress(result)
            result.complete = not frontier and not result.violations
            if result.complete and self.verbs is None:
                self._stuck()
        finally:
            gc.enable()
        self._tally(began)
        return result

    def _enough(self) -> bool:
        return self.most is not None and len(self.places) >= self.most

    def _tally(self, began: tuple[float, float]) -> None:
        result, schedulers = self.result, self.schedulers
        result.unique, result.schedulers = len(self.places), len(schedulers)
        result.inputs, result.bounded = schedulers.given, schedulers.bounded
        result.seconds = time.perf_counter() - began[0]
        result.cpu_seconds = time.process_time() - began[1]

    def _level(self, frontier: list[Place]) -> list[Place]:
        """All that one move reaches from `frontier` and was not known."""
        fresh: list[Place] = []
        for place in frontier:
            at = self.places[place]
            for move, there in self._moves(place):
                self.result.states += 1
                if isinstance(there, Fault):
                    moves = (*self.path(at), move)
                    self.result.violations.append(Found(there.invariant, there.message, moves))
                    return []
                if there not in self.places:
                    fresh.append(self._place(there, at, move))
                if move[0] in FORWARD and (move[0] != "say" or move[2] != FAILED):
                    self._back[self.places[there]].append(at)
            if self._enough():
                break
        return fresh

    def _place(self, place: Place, parent: int, move: Move | None) -> Place:
        self.places[place] = len(self.places)
        self.parents.append((parent, move))
        self._back.append([])
        return place

    def path(self, number: int) -> tuple[Move, ...]:
        """The moves from the beginning to a state of the world, as few as can be."""
        moves: list[Move] = []
        number, move = self.parents[number]
        while move is not None:
            moves.append(move)
            number, move = self.parents[number]
        return (*self.start, *reversed(moves))

    def _moves(self, place: Place) -> list[tuple[Move, Place | Fault]]:
        number, said, crashes, failures = place
        offer, world = self.schedulers.offers[number], self.world
        free = crashes + failures < world.faults
        may_crash, may_fail = free and crashes < world.crashes, free and failures < world.failures
        found: list[tuple[Move, Place | Fault]] = []
        for given in offer.inputs:
            if given[0] != "lose":
                self._give(place, given, found)
            elif may_crash:
                left = _without(said, given[1])
                self._give((number, left, crashes + 1, failures), given, found)
        for rank in range(world.ranks):
            if said[rank]:
                left = _without(said, rank)
                self._give((number, left, crashes, failures), ("ack", rank, said[rank]), found)
            for kind, transfer in sayings(offer, rank, said[rank]):
                if kind != FAILED or may_fail:
                    more = with_saying(said[rank], kind, transfer)
                    after = (*said[:rank], more, *said[rank + 1 :])
                    there = (number, after, crashes, failures + (kind == FAILED))
                    found.append((("say", rank, kind, transfer), there))
        return found

    def _give(self, place: Place, given: Input, found: list[tuple[Move, Place | Fault]]) -> None:
        """An input to the scheduler of `place`, in which all else is as it is afterwards."""
        if self.verbs is not None and given[0] not in self.verbs:
            return
        number, said, crashes, failures = place
        edge = self.schedulers.edge(number, given)
        if isinstance(edge, Fault):
            found.append((given, edge))
        elif edge is not None:
            renamed = tuple([_renamed(edge.transfers, one) for one in said])
            found.append((given, (edge.to, renamed, crashes, failures)))

    def _stuck(self) -> None:
        """`progress`: states from which nothing leads to where nothing is held. Where moves were
        left out it cannot be judged."""
        offers = self.schedulers.offers
        todo = [at for (number, *_), at in self.places.items() if offers[number].idle]
        good = bytearray(len(self.places))
        for at in todo:
            good[at] = 1
        while todo:
            for before in self._back[todo.pop()]:
                if not good[before]:
                    good[before] = 1
                    todo.append(before)
        stuck = good.find(0)
        if stuck >= 0 and not self.schedulers.bounded:
            text = f"{good.count(0)} states from which nothing leads to where nothing is held"
            self.result.violations.append(Found("progress", text, self.path(stuck)))


def _without(said: tuple[Said, ...], rank: int) -> tuple[Said, ...]:
    return (*said[:rank], (), *said[rank + 1 :])


def _renamed(numbers: tuple[int, ...], said: Said) -> Said:
    return tuple([(k, t) if k == RETIRED else (k, numbers[t]) for k, t in said])
