"""Fault: one kind of thing that goes wrong, the rule that must hold all the same, and its proof.

A kind is a small class: how it is injected (a hook, or `strike` after a step), `rule`, what must
still hold, in words, and `marks`. Injecting makes an `Incident`, which says by a predicate when the
fault is *survived*; only then is its mark counted. An incident that is not survived when faults
have ceased and everything had time to settle is a violation, named `survives`.

What a kind draws comes from its own stream of chance, so that switching another kind off leaves it
as it was, as far as the world does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hisparse.errors import InvariantViolation
from hisparse.fsm.wire import Acknowledgements, AnyTransfer

if TYPE_CHECKING:
    from hisparse.testing.rank import SimRank
    from hisparse.testing.replica import SimReplica

Delivery = tuple[int, Acknowledgements]  # steps until it is there, the message


@dataclass(frozen=True)
class Incident:
    """A fault that happened: `mark` is counted once `survived` says so."""

    kind: str
    mark: str
    told: str
    step: int
    survived: Callable[[], bool]


class Fault:
    """One kind in one simulated world.

    Args:
        replica: the world; hooks are called by it.
        rate: chance of each opportunity.
        rng: this kind's own stream.
    """

    kind: ClassVar[str]
    family: ClassVar[str]
    rule: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    share: ClassVar[float] = 0.45  # of the worlds have it on, where the whole atlas may be
    needs_disk: ClassVar[bool] = False  # a log on disk
    rates: ClassVar[tuple[float, ...]] = (0.02, 0.1, 0.3)  # one of them is drawn where it is on

    def __init__(self, replica: SimReplica, rate: float, rng: random.Random) -> None:
        self.replica = replica
        self.rate = rate
        self.rng = rng
        self.armed = 0  # opportunities that are taken whatever the rate says

    @classmethod
    def all_marks(cls) -> tuple[str, ...]:
        return cls.marks or (cls.kind,)

    @classmethod
    def reachable_marks(cls, kinds: Collection[str], ranks: int) -> tuple[str, ...]:
        """Those that worlds of up to `ranks` ranks can hit in which only `kinds` strike."""
        return cls.all_marks()

    # -- for subclasses ---------------------------------------------------------------------------
    def strikes(self) -> bool:
        """Whether this opportunity is taken."""
        if self.replica.calm:
            return False
        if self.armed:
            self.armed -= 1
            return True
        return self.rng.random() < self.rate

    def fire(self, told: str, survived: Callable[[], bool], mark: str = "") -> None:
        """Count an injection; `survived` is asked after each step until it says yes."""
        replica = self.replica
        replica.fired[self.kind] += 1
        replica.incidents.append(
            Incident(self.kind, mark or self.all_marks()[0], told, replica.now, survived)
        )

    def require(self, held: bool, told: str) -> None:
        """The rule, where it can be seen at once. Raises InvariantViolation ``survives``."""
        if not held:
            text = f"{self.kind}: {told}; the rule: {self.rule}"
            raise InvariantViolation("survives", text, seq=self.replica.state.seq)

    # -- hooks: none does anything unless a kind says so ------------------------------------------
    def strike(self) -> None:
        """After a step."""

    def message(self, rank: SimRank, message: Acknowledgements) -> Sequence[Delivery] | None:
        """A rank sends `message`: what arrives instead, and when. None: nothing happens to it."""
        return None

    def copy_fails(self, rank: SimRank, transfer: AnyTransfer) -> bool:
        """Whether the rank's copy fails."""
        return False

    def command(self, rank: SimRank) -> None:
        """A step was laid into the rank's inbox; it runs next."""

    def tend(self) -> None:
        """Before a step, calm or not."""

    def cease(self) -> None:
        """Faults are over: let go of what is held."""


def with_hook(faults: Iterable[Fault], hook: str) -> list[Fault]:
    """Those whose kind says what `hook` does."""
    return [f for f in faults if getattr(type(f), hook) is not getattr(Fault, hook)]
