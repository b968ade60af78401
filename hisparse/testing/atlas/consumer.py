"""Commands on their way to a rank: behind by whole steps, given twice, one left out."""

from __future__ import annotations

from hisparse.testing.atlas.base import Fault
from hisparse.testing.rank import SimRank


class ConsumerFault(Fault):
    family = "consumer"

    def applied(self, rank: SimRank, to_seq: int, mark: str = "") -> None:
        """Survived once the rank has gone on past `to_seq`, or is no more."""

        def survived() -> bool:
            return rank not in self.replica.ranks or rank.worker.to_seq > to_seq

        self.fire(f"rank {rank.number} at {to_seq}", survived, mark)


class CommandLate(ConsumerFault):
    kind = "command_late"
    rule = "a rank that is steps behind the others reads and writes what its step was planned with"

    def command(self, rank: SimRank) -> None:
        now = self.replica.now
        if rank.inbox and rank.behind_until <= now and self.strikes():
            rank.behind_until = now + self.rng.choice([1, 2, 5])
            self.applied(rank, rank.inbox[-1].to_seq)


class CommandDuplicated(ConsumerFault):
    kind = "command_duplicated"
    rule = "a command that was applied is refused, nothing of it is applied again"

    def command(self, rank: SimRank) -> None:
        ready = rank.inbox and rank.behind_until <= self.replica.now
        if ready and self.strikes():
            task = rank.inbox[0]
            rank.run_one()
            seq = rank.worker.to_seq
            self.require(rank.refuses(task.meta), f"rank {rank.number} applied {seq} twice")
            self.applied(rank, seq)


class CommandGap(ConsumerFault):
    kind = "command_gap"
    rule = "a gap in the commands is reported by the rank, and never skipped"

    def command(self, rank: SimRank) -> None:
        if len(rank.inbox) > 1 and self.strikes():
            seq = rank.worker.to_seq
            skipped = rank.inbox[-1].meta
            self.require(rank.refuses(skipped), f"rank {rank.number} skipped from {seq}")
            self.applied(rank, rank.inbox[-1].to_seq)
