"""walk: the moves of one path, done again from an empty log by the production code.

A path is of canonical names; here they get the ids and epochs of one run, so that what went wrong
can be read as events, and as a log by `hisparse check`, `replay`, `why` and `diff`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hisparse.config import HiSparseConfig
from hisparse.fsm.describe import line
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.wire import AckKind
from hisparse.testing.explore.branch import RETIRED, Input, Seat
from hisparse.testing.explore.canonical import canonical
from hisparse.testing.explore.schedulers import FAULTS, Fault, fault_of
from hisparse.testing.explore.search import Move
from hisparse.testing.explore.world import World


@dataclass
class Walk:
    """What came of it: the log, each move in words, and the fault at its end, if any."""

    config: HiSparseConfig
    log: MemoryLog
    seat: Seat
    told: list[str] = field(default_factory=list)
    fault: Fault | None = None

    def events(self) -> list[str]:
        """The log, a line an event."""
        return [line(seq, event).strip() for seq, event in self.log.read(1)]


def walk(world: World, moves: Iterable[Move], *, plain: bool = False) -> Walk:
    """Do `moves`; stops at a fault. `plain`: they are of a search in which nothing is renamed."""
    log = MemoryLog(None)
    seat = Seat.fresh(world, log)
    made = Walk(world.config, log, seat)
    for move in moves:
        names = canonical(world, seat.state, None, plain, plain)[1]
        made.told.append(in_words(seat, move, names))
        if move[0] != "say":
            made.fault = _done(seat, move, names)
        if made.fault is not None:
            break
    return made


def _done(seat: Seat, given: Input, names: tuple[str, ...]) -> Fault | None:
    checker = seat.coordinator.checker
    assert checker is not None
    try:
        seat.give(given, names)
    except FAULTS as error:
        return fault_of(error)
    if checker.violations:
        return Fault(checker.violations[0].invariant, checker.violations[0].message)
    for name, check in STATE_CHECKS.items():
        for text in check(seat.state):
            return Fault(name, text)
    return None


def in_words(seat: Seat, move: Move, names: tuple[str, ...]) -> str:
    """A move, with the ids that it has in this run."""
    verb, *rest = move
    match verb:
        case "arrive":
            return f"{names[rest[0]]} arrives"
        case "plan":
            return f"step {seat.state.step + 1} is planned"
        case "computed":
            return f"the rows of step {seat.state.step} are computed"
        case "finish" | "abort" | "preempt":
            name, epoch = list(seat.state.requests)[rest[0]]
            return f"{name}/{epoch}: {verb}"
        case "ack":
            said = [_saying(seat, kind, transfer) for kind, transfer in rest[1]]
            return f"rank {rest[0]} is heard: {', '.join(said)}"
        case "say":
            return f"rank {rest[0]}: {_saying(seat, rest[1], rest[2])}"
        case _:
            return f"rank {rest[0]} is lost" if verb == "lose" else f"rank {rest[0]} joins"


def _saying(seat: Seat, kind: int, transfer: int) -> str:
    if kind == RETIRED:
        return "RETIRED"
    return f"{AckKind(kind).name} {list(seat.state.transfers)[transfer]}"
