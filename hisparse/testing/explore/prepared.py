"""prepared: the moment at which some copies are in flight, and what can come of it alone.

A production coordinator is driven the straight way, all requests running and every rank prompt,
until as many copies of a kind are in flight as the world says. From there on nothing is admitted,
planned or computed any more: ranks acknowledge in any order and any batch, copies fail, requests
end, a rank is lost. What is left is small enough to be modelled to the last decision
(`promela`), and is explored by production code like any world, with every id told apart.
"""

from __future__ import annotations

import msgspec

from hisparse.errors import UsageError
from hisparse.fsm.machines import RequestState
from hisparse.fsm.wire import TransferKind
from hisparse.testing.explore.branch import RETIRED, Branch, Input, Seat
from hisparse.testing.explore.offers import COMPLETED, offer_of, sayings
from hisparse.testing.explore.search import Search
from hisparse.testing.explore.world import World

VERBS = frozenset({"ack", "finish", "abort", "preempt", "lose"})
ROUNDS_MAX = 64  # steps until which the copies have to be in flight


class Prepared(msgspec.Struct, frozen=True):
    """A world at the moment where it is taken up.

    `start` leads there from an empty log; `branch` is the scheduler there.
    """

    world: World
    start: tuple[Input, ...]
    branch: Branch

    def search(self) -> Search:
        """The exploration from there on, with no renaming."""
        return Search(self.world, plain=True, start=self.start, verbs=VERBS)


def prepare(world: World, kind: TransferKind) -> Prepared:
    """Drive `world` to where `world.transfers` copies of `kind` are in flight, all ranks told.

    Raises UsageError where that never happens, and where a copy might fail that is read before it
    is complete: then a request would be rewound, and compute again.
    """
    seat, given = Seat.fresh(world), list[Input]()

    def give(one: Input) -> None:
        seat.give(one, world.names)
        given.append(one)

    for _ in range(ROUNDS_MAX):
        for at, name in enumerate(world.names):
            if all(request.request != name for request in seat.state.requests.values()):
                give(("arrive", at))
        give(("plan",))
        flying = list(seat.state.transfers.values())
        if sum(t.kind is kind for t in flying) >= world.transfers:
            break
        if seat.told.step_open:
            give(("computed",))
        else:
            for at, request in reversed(list(enumerate(seat.state.requests.values()))):
                if request.state is RequestState.DECODE:
                    give(("finish", at))
        _hear_all(seat, kind, give)
    else:
        raise UsageError(
            f"after {ROUNDS_MAX} steps of this world no {world.transfers} copies of kind "
            f"{kind.name} were in flight at once: give it other sizes (--transfers, --pages, "
            "--blocks, --write-back)"
        )
    if (
        world.failures
        and world.faults
        and any(t.kind is not TransferKind.WRITE_BACK for t in flying)
    ):
        raise UsageError(
            "a spill or restore that fails takes its request back to compute again, which a "
            "prepared world does not do: use --failures 0"
        )
    free = msgspec.structs.replace(world, transfers=64)  # what an end writes back is not left out
    branch = Branch(Seat(free, seat.coordinator, seat.told))
    return Prepared(free, tuple(given), branch)


def _hear_all(seat: Seat, kind: TransferKind, give: object) -> None:
    """Every rank says all that it can, but of copies of `kind`, until it has no more to say."""
    assert callable(give)
    for rank in range(seat.world.ranks):
        while True:
            kinds = [t.kind for t in seat.state.transfers.values()]
            words = [
                word
                for word in sayings(offer_of(Branch(seat)), rank, ())
                if word[0] == RETIRED or (word[0] == COMPLETED and kinds[word[1]] is not kind)
            ]
            if not words:
                break
            give(("ack", rank, (words[0],)))
