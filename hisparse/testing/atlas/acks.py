"""Acknowledgements on their way: late, lost, cut short, doubled, overtaken; streams held open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hisparse.errors import ProtocolError
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements
from hisparse.testing.atlas.base import Delivery, Fault
from hisparse.testing.rank import Hold, SimRank


class AckFault(Fault):
    family = "acknowledgements"

    def taken(self, message: Acknowledgements) -> Callable[[], bool]:
        """Whether the scheduler has taken all of `message` in, or its rank has died since."""
        rank, epoch, last = message.rank, message.worker_epoch, message.last_seq

        def over() -> bool:
            state = self.replica.state
            return state.worker_epoch[rank] != epoch or state.acked[rank] >= last

        return over


class AckLost(AckFault):
    kind = "ack_lost"
    rule = "what was lost is said again with the next message, and taken in once"

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        if not self.strikes():
            return None
        self.fire(f"rank {rank.number}: up to {message.last_seq}", self.taken(message))
        return ()


class AckCut(AckFault):
    kind = "ack_cut"
    rule = "a part of a message counts as far as it goes, the rest when it comes"

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        if len(message.acks) < 2 or not self.strikes():
            return None
        kept = message.acks[: self.rng.randrange(1, len(message.acks))]
        self.fire(f"rank {rank.number}: up to {message.last_seq}", self.taken(message))
        return [(0, msgspec.structs.replace(message, acks=kept))]


class AckLate(AckFault):
    kind = "ack_late"
    rule = (
        "nothing is freed, published or reused before it is acknowledged, however long that takes"
    )

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        if rank.channel.held_until > self.replica.now or not self.strikes():
            return None
        rank.channel.held_until = self.replica.now + self.rng.choice([1, 3, 12])
        self.fire(f"rank {rank.number}: up to {message.last_seq}", self.taken(message))
        return [(0, message)]


class AckDuplicated(AckFault):
    kind = "ack_duplicated"
    rule = "a duplicate is inert, at once and later"

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        if not self.strikes():
            return None
        later = self.rng.choice([0, 1, 5])
        self.fire(f"rank {rank.number}: up to {message.last_seq}", self._inert(message))
        return [(0, message), (later, message)]

    def _inert(self, message: Acknowledgements) -> Callable[[], bool]:
        taken = self.taken(message)

        def survived() -> bool:
            if not taken():
                return False
            self.refused(message)
            return True

        return survived

    def refused(self, message: Acknowledgements) -> None:
        coordinator = self.replica.coordinator
        before = coordinator.digest()
        news = coordinator.update_acknowledgements(message)
        held = not news and coordinator.digest() == before
        self.require(held, f"{message} was taken in again")


class AckReordered(AckFault):
    kind = "ack_reordered"
    rule = "a message that others have overtaken brings nothing back"

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        if not self.strikes():
            return None
        self.fire(f"rank {rank.number}: up to {message.last_seq}", self.taken(message))
        return [(self.rng.choice([1, 2, 6]), message)]


class AckGap(AckFault):
    kind = "ack_gap"
    rule = "a gap in a rank's stream is reported, nothing of the message is taken in"

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        state, coordinator = self.replica.state, self.replica.coordinator
        expected = state.acked[rank.number] + 1
        ahead = expected + 1 - message.first_seq
        if not 0 < ahead < len(message.acks) or not self.strikes():
            return None
        if message.worker_epoch != state.worker_epoch[rank.number]:
            return None
        gapped = Acknowledgements(
            rank.number, message.worker_epoch, expected + 1, message.acks[ahead:]
        )
        before = coordinator.digest()
        try:
            coordinator.update_acknowledgements(gapped)
            refused = False
        except ProtocolError:
            refused = coordinator.digest() == before
        self.require(refused, f"rank {rank.number}: seq {expected} is missing, and it was taken in")
        self.fire(f"rank {rank.number}: {expected} skipped", self.taken(message))
        return None


class AckForeign(AckFault):
    kind = "ack_foreign_transfer"
    rule = "an acknowledgement of a transfer id under another epoch settles nothing"

    def strike(self) -> None:
        state = self.replica.state
        rank = self.rng.randrange(self.replica.config.ranks)
        if self.replica.ranks[rank].dead or not state.transfers or not self.strikes():
            return
        # A rank that says it of itself: its stream goes on behind what it never sent.
        ident = self.rng.choice(list(state.transfers))
        wrong = Ack(AckKind.COMPLETED, ident, state.transfers[ident].epoch + 1000)
        copy = state.transfers[ident]
        before = (copy.state, copy.enqueued, copy.completed)
        self.replica.ranks[rank].worker.acks.append(wrong)

        def survived() -> bool:
            now = self.replica.state.transfers.get(ident)
            self.require(now is None or now.completed >= before[2], f"transfer {ident} went back")
            return now is None

        self.fire(f"transfer {ident} under a foreign epoch", survived)


class StreamHeld(Fault):
    family = "acknowledgements"
    kind = "stream_held"
    rule = "copies of one stream are acknowledged while those of the other hang, in any order"

    def __init__(self, *rest: object) -> None:
        super().__init__(*rest)  # type: ignore[arg-type]
        self._held: list[tuple[SimRank, Hold, int]] = []

    def strike(self) -> None:
        replica = self.replica
        self._let_go(replica.now)
        if self._held or not self.strikes():
            return
        rank = self.rng.choice(replica.ranks)
        if rank.dead:
            return
        name = self.rng.choice(["d2h", "h2d"])
        event = rank.device.hold(getattr(rank.device, name))
        self._held.append((rank, event, replica.now + self.rng.choice([1, 4, 10])))
        state = replica.state
        mine = set(state.transfers) | set(state.suffix_copies)

        def survived() -> bool:
            state = replica.state
            return (event.done or rank.dead) and not mine & (
                set(state.transfers) | set(state.suffix_copies)
            )

        self.fire(f"{name} of rank {rank.number}", survived)

    def _let_go(self, now: int) -> None:
        for _, event, until in self._held:
            if now >= until:
                event.done = True
        self._held = [held for held in self._held if not held[1].done]

    def cease(self) -> None:
        self._let_go(1 << 60)
