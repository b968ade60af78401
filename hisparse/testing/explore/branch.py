"""Branch: a scheduler at one moment, from which any input can be tried.

Owns what a `HiSparseCoordinator` holds: the folded state, and beside it the few things that are not
folded (`_KEPT`); the facts of the run invariants; and the connector's position, which says what the
ranks were told. An input is given to a production coordinator made of copies of these, with a log
of its own; the branch itself never changes. So a branch is what a replay of its path ends in.

    ("arrive", name)  ("plan",)  ("computed",)          an engine
    ("finish" | "abort" | "preempt", request)           its clients
    ("ack", rank, what it said)                         a rank
    ("lose" | "join", rank)                             who watches over ranks

An input names nothing that differs between renamed states: a request by its place in order of
arrival, a transfer in order of planning, a name by its number in the canonical form.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from hisparse.fsm.branch import branched
from hisparse.fsm.log import EventLog, MemoryLog
from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, TransferKind
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.explore.world import PAGE_ROWS, World

Input = tuple[Any, ...]
RETIRED = int(AckKind.RETIRED)
COMPUTING = (RequestState.ADMITTED, RequestState.PREFILL, RequestState.DECODE)

# Attributes of a coordinator, by what becomes of them in a branch.
_SHARED = {"config", "suffix", "metrics"}  # no tier is in these worlds; metrics decide nothing
_KEPT = {
    "_computed_seq",
    "_under_way",
    "accepted_seq",
    "recovered_seq",
}  # values that nobody writes to
_MADE = {"state", "log", "checker", "_broken", "_rewound", "_preempted"}


class Told:
    """What the ranks know by the last command, and whether a step is under way."""

    def __init__(self, ranks: int) -> None:
        self.position = 0  # seq up to which events were projected to the ranks
        self.commanded = 1  # transfers from here on are planned and in no command yet
        self.step_open = False
        self.waited: dict[int, int] = {}  # transfer -> step that waits for its copy
        self.lost_at = 0  # seq by which a rank was lost, with all that followed from it
        self.begun = [0] * ranks  # the step before the first that the rank's worker is told of

    def copy(self) -> Told:
        made = copy.copy(self)
        made.waited, made.begun = dict(self.waited), list(self.begun)
        return made

    def unretired(self, state: State, rank: int) -> int:
        """Steps that a rank was told of and whose end the scheduler does not know; 0 if lost."""
        lost = state.lost >> rank & 1
        return 0 if lost else state.step - max(state.retired[rank], self.begun[rank])


class Seat:
    """A production coordinator, and the inputs of a world as calls to it."""

    def __init__(self, world: World, coordinator: HiSparseCoordinator, told: Told) -> None:
        self.world = world
        self.coordinator = coordinator
        self.told = told

    @classmethod
    def fresh(cls, world: World, log: EventLog | None = None) -> Seat:
        """At the beginning of a log."""
        log = log if log is not None else MemoryLog(None)
        return cls(world, HiSparseCoordinator(world.config, log), Told(world.ranks))

    @property
    def state(self) -> State:
        return self.coordinator.state

    def give(self, given: Input, names: tuple[str, ...]) -> bool:
        """Do what the input says; False if the coordinator would not. Raises what it raises."""
        verb, *more = given
        return bool(getattr(self, f"_{verb}")(*more, names))

    # -- what an engine says ----------------------------------------------------------------------
    def _arrive(self, label: int, names: tuple[str, ...]) -> bool:
        world, name = self.world, names[label]
        number = world.names.index(name)
        whole = world.prompt_tokens // PAGE_ROWS
        hashes = [world.page_hash(number, page) for page in range(whole)]
        self.coordinator.arrive(name, world.prompt_tokens, world.max_tokens, hashes)
        return True

    def _plan(self, names: tuple[str, ...]) -> bool:
        """A step, as an engine plans it: admit, let decodes go first, then prompts by arrival."""
        coordinator, rows = self.coordinator, self.state.rows
        coordinator.admit_waiting()
        running = [q for q in self.state.by_row if q is not None and q.state in COMPUTING]
        running.sort(key=lambda q: (q.prompt_tokens > rows.computed[q.row], q.arrived_seq))
        room, wanted = PAGE_ROWS, []
        for q in running:
            computed = int(rows.computed[q.row])
            left = q.prompt_tokens - computed if computed < q.prompt_tokens else 1
            want = min(left, q.max_tokens - computed, room)
            if want > 0:
                wanted.append((q.row, want))
                room -= want
        granted = coordinator.grow([row for row, _ in wanted], [n for _, n in wanted])
        batch = [(row, n) for (row, _), n in zip(wanted, granted, strict=True) if n]
        step = coordinator.plan_step([row for row, _ in batch], [n for _, n in batch])
        self._command(step)
        self.told.step_open = bool(batch)
        return True

    def _command(self, step: int) -> None:
        """The step's command goes to the ranks: what was planned, and which copies it waits for."""
        state, told = self.state, self.told
        told.position, told.commanded = state.seq, state.next_transfer
        told.waited = {ident: at for ident, at in told.waited.items() if ident in state.transfers}
        for ident, t in state.transfers.items():
            if t.kind is TransferKind.RESTORE or not t.holds_block:
                told.waited.setdefault(ident, step)

    def _computed(self, names: tuple[str, ...]) -> bool:
        state, rows, hashes = self.state, self.state.rows, []
        under_way = self.coordinator._under_way.tolist()
        counts = []
        for row in under_way:
            live = bool(rows.live[row]) and int(rows.last_step[row]) == state.step
            counts.append(int(rows.planned[row] - rows.computed[row]) if live else 0)
            request = state.by_row[row]
            if live and request is not None and request.key not in state.rewinding:
                whole = (int(rows.computed[row]) + counts[-1]) // PAGE_ROWS
                number = self.world.names.index(request.request)
                made = range(len(request.hashes), whole)
                hashes += [(row, self.world.page_hash(number, page)) for page in made]
        self.told.step_open = False
        self.coordinator.rows_computed(state.step, under_way, counts, hashes)
        return True

    def _finish(self, at: int, names: tuple[str, ...]) -> bool:
        self.coordinator.finish(*self._key(at))
        return True

    def _abort(self, at: int, names: tuple[str, ...]) -> bool:
        self.coordinator.abort(*self._key(at))
        return True

    def _preempt(self, at: int, names: tuple[str, ...]) -> bool:
        self.coordinator.preempt(*self._key(at))
        return True

    def _key(self, at: int) -> Key:
        return list(self.state.requests)[at]

    # -- what the ranks say -----------------------------------------------------------------------
    def _ack(self, rank: int, said: tuple[tuple[int, int], ...], names: tuple[str, ...]) -> bool:
        """All that `rank` said since it was last heard, in one message, and the same once more."""
        state, transfers = self.state, list(self.state.transfers.values())
        acks, retired = [], max(state.retired[rank], self.told.begun[rank])
        for kind, label in said:
            if kind == RETIRED:
                retired += 1
                acks.append(Ack(AckKind.RETIRED, retired))
            else:
                acks.append(Ack(AckKind(kind), transfers[label].transfer, transfers[label].epoch))
        message = Acknowledgements(
            rank, state.worker_epoch[rank], state.acked[rank] + 1, tuple(acks)
        )
        taken = self.coordinator.update_acknowledgements(message)
        before = self.state.seq
        if self.coordinator.update_acknowledgements(message) or self.state.seq != before:
            raise AssertionError(f"rank {rank} said {acks} twice, and was heard twice")
        return taken

    def _lose(self, rank: int, names: tuple[str, ...]) -> bool:
        """Its worker is gone; what it had not said comes late, and is inert."""
        state, coordinator = self.state, self.coordinator
        epoch, first = state.worker_epoch[rank], state.acked[rank] + 1
        late = [
            Ack(kind, t.transfer, t.epoch)
            for kind in (AckKind.ENQUEUED, AckKind.COMPLETED)
            for t in state.transfers.values()
        ]
        coordinator.lose_rank(rank)
        self.told.lost_at = state.seq
        message = Acknowledgements(rank, epoch, first, (*late, Ack(AckKind.RETIRED, state.step)))
        if coordinator.update_acknowledgements(message) or state.seq != self.told.lost_at:
            raise AssertionError(f"rank {rank} was heard in epoch {epoch}, which is over")
        return True

    def _join(self, rank: int, names: tuple[str, ...]) -> bool:
        joined = self.coordinator.join_rank(rank, self.told.position)
        self.told.begun[rank] = self.state.step
        return joined


class Branch:
    """See the module. `names` are the requests' names by their numbers in its canonical form."""

    def __init__(self, seat: Seat) -> None:
        coordinator = seat.coordinator
        unknown = set(vars(coordinator)) ^ (_SHARED | _KEPT | _MADE)
        if unknown:
            raise TypeError(
                f"a coordinator holds {sorted(unknown)}: what becomes of it in a branch?"
            )
        self.world = seat.world
        self.state = coordinator.state
        self.told = seat.told
        self.kept = {name: getattr(coordinator, name) for name in _KEPT}
        self._checker = coordinator.checker
        self._facts = b""
        self.names: tuple[str, ...] = seat.world.names

    @property
    def extra(self) -> tuple[Any, ...]:
        """What beside the folded state the future depends on, for the key."""
        state, told = self.state, self.told
        transfers = state.transfers
        return (
            tuple(self.kept["_under_way"].tolist()) if told.step_open else None,
            tuple([ident < told.commanded for ident in transfers]),
            tuple([state.step - told.waited.get(ident, state.step + 1) for ident in transfers]),
            tuple([told.unretired(state, rank) for rank in range(len(state.retired))]),
            bool(state.lost) and told.position < told.lost_at,
        )

    def settle(self) -> None:
        """Keep the facts of its run as bytes: many runs begin here."""
        assert self._checker is not None
        self._facts, self._checker = pickle.dumps(self._checker.run, -1), None

    def seat(self, template: HiSparseCoordinator) -> Seat:
        """A coordinator that goes on from here, as if it had come all the way."""
        coordinator = copy.copy(template)
        coordinator.state = branched(self.state)
        coordinator.log = MemoryLog(None, start=self.state.seq)
        for name, value in self.kept.items():
            setattr(coordinator, name, value)
        coordinator._broken, coordinator._rewound, coordinator._preempted = None, {}, []
        coordinator.checker = checker = copy.copy(template.checker)
        assert checker is not None
        checker.run, checker.violations = pickle.loads(self._facts), []
        return Seat(self.world, coordinator, self.told.copy())
