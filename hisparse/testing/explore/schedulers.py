"""Schedulers: each state that the scheduler of a world can be in, once, and where inputs lead.

Decisions and folds depend on the state and the input alone, so each pair of them is given to the
production code once, however many states of the world it is a part of. After an input the state
invariants are run over the new state; the run invariants saw each event as it came.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hisparse.errors import HiSparseError, InvariantViolation
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.testing.explore.branch import Branch, Input, Seat
from hisparse.testing.explore.canonical import canonical
from hisparse.testing.explore.offers import Offer, offer_of
from hisparse.testing.explore.world import World

# What production code may raise at a fault of its own; anything else is a fault of this one.
FAULTS = (HiSparseError, AssertionError, LookupError, ValueError)


class Fault(msgspec.Struct, frozen=True):
    """What an input ran into: a named invariant, or the kind of an error."""

    invariant: str
    message: str


class Edge(msgspec.Struct, frozen=True):
    """Where an input leads: the scheduler there, and its transfers' numbers by their old ones."""

    to: int
    transfers: tuple[int, ...]  # -1: settled


class Schedulers:
    """All that were met, numbered from 0, the one at the beginning.

    Args:
        world: its sizes.
        exact: tell host pages apart (see `canonical`).
        plain: tell everything apart.
        start: inputs that lead to the beginning, from an empty log.
    """

    def __init__(
        self,
        world: World,
        *,
        exact: bool = False,
        plain: bool = False,
        start: tuple[Input, ...] = (),
    ) -> None:
        self.world, self.exact, self.plain = world, exact, plain
        self.branches: list[Branch] = []
        self.came: list[tuple[int, Input | None]] = []  # from which, by what
        self.offers: list[Offer] = []
        self.given = 0  # inputs that production code was given
        self.bounded = 0  # of these, how many planned more transfers than the world has
        self._known: dict[Any, int] = {}
        self._edges: list[dict[Input, Edge | Fault | None]] = []
        first = Seat.fresh(world)
        self._template = first.coordinator
        for given in start:
            first.give(given, world.names)
        self._enter(first, -1, None)

    def __len__(self) -> int:
        return len(self.branches)

    @property
    def keys(self) -> set[Any]:
        """The canonical form of each."""
        return set(self._known)

    def edge(self, number: int, given: Input) -> Edge | Fault | None:
        """Where `given` leads from scheduler `number`; None where it does nothing, or plans more
        transfers than the world has."""
        edges = self._edges[number]
        if given not in edges:
            self.given += 1
            edges[given] = self._take(number, given)
        return edges[given]

    def path(self, number: int) -> list[Input]:
        """The inputs, from the first on, that a branch is made of: a replay of them is equal to it,
        not only by a renaming."""
        inputs: list[Input] = []
        number, given = self.came[number]
        while given is not None:
            inputs.append(given)
            number, given = self.came[number]
        return inputs[::-1]

    def _take(self, number: int, given: Input) -> Edge | Fault | None:
        branch = self.branches[number]
        seat = branch.seat(self._template)
        before = list(branch.state.transfers)
        try:
            if not seat.give(given, branch.names):
                return None
        except FAULTS as error:
            return fault_of(error)
        checker = seat.coordinator.checker
        assert checker is not None
        if checker.violations:
            return Fault(checker.violations[0].invariant, checker.violations[0].message)
        if len(seat.state.transfers) > self.world.transfers:
            self.bounded += 1
            return None
        to = self._enter(seat, number, given)
        if isinstance(to, Fault):
            return to
        now = {ident: at for at, ident in enumerate(seat.state.transfers)}
        return Edge(to, tuple([now.get(ident, -1) for ident in before]))

    def _enter(self, seat: Seat, came_from: int, given: Input | None) -> int | Fault:
        """The number of the scheduler that `seat` is; it is looked at when it is new."""
        branch = Branch(seat)
        key, branch.names = canonical(
            self.world, branch.state, branch.extra, self.exact, self.plain
        )
        known = self._known.get(key)
        if known is not None:
            return known
        for name, check in STATE_CHECKS.items():
            for text in check(branch.state):
                return Fault(name, text)
        branch.settle()
        number = self._known[key] = len(self.branches)
        self.branches.append(branch)
        self.came.append((came_from, given))
        self.offers.append(offer_of(branch))
        self._edges.append({})
        return number


def fault_of(error: Exception) -> Fault:
    """A violation by the invariant's name, or by the kind of error that production code raised."""
    name = error.invariant if isinstance(error, InvariantViolation) else type(error).__name__
    return Fault(name, str(error) or repr(error))
