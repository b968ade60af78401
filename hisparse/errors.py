"""Every error that hisparse raises: one flat tree, a sentence each.

HiSparseError
├── ConfigError          an option, file or trace line that cannot be used
├── PolicyError          a residency policy that raised, or whose answer cannot be carried out
├── CapacityError        a pool too small for what must fit in it
├── IllegalTransition    a trigger that its machine does not allow in the state it is in
├── StaleEpoch           an id whose epoch is not the one that the state holds
├── InvariantViolation   a named invariant that does not hold
├── ProtocolError        a command or acknowledgement out of order between scheduler and worker
├── LogError             a log that cannot be written, read or trusted
├── LogDamage            a place of a log that damage, or events that it says it lacks, lie before
├── DeviceError          a backend that is missing, refused or failed
└── UsageError           a call that the library's contract forbids at that point
"""

from __future__ import annotations

from collections.abc import Mapping


class HiSparseError(Exception):
    """Base of every error here; ``except HiSparseError`` catches all of them."""


class ConfigError(HiSparseError):
    """An option, file or trace line cannot be used; the message names field, value and fix.

    `fixes` holds, of configurations, a value that would do by the path of its field
    (``pools.gpu_blocks``); None: leave the field out.
    """

    def __init__(self, message: str, fixes: Mapping[str, object] | None = None) -> None:
        self.fixes = dict(fixes or {})
        super().__init__(message)


class CapacityError(ConfigError):
    """A pool is too small for what must fit in it; the message gives the size that would do."""


class PolicyError(HiSparseError):
    """A residency policy raised, or answered what its view forbids; the message names it, and the
    line or the bound."""


class IllegalTransition(HiSparseError):
    """A trigger was applied in a state that does not allow it.

    Carries what an engineer asks first: which machine, which id and epoch, in which state, which
    trigger, at which seq of the log.
    """

    def __init__(
        self,
        machine: str,
        ident: object,
        state: str,
        trigger: str,
        *,
        epoch: int | None = None,
        seq: int | None = None,
        history: list[str] | None = None,
    ) -> None:
        self.machine = machine
        self.ident = ident
        self.state = state
        self.trigger = trigger
        self.epoch = epoch
        self.seq = seq
        self.history = history or []
        text = f"{machine} {ident} (epoch {epoch}) is {state}: {trigger!r} is illegal at seq {seq}"
        if self.history:
            text += "; last events of it: " + " <- ".join(reversed(self.history))
        super().__init__(text)


class StaleEpoch(HiSparseError):
    """An id came with an epoch that is not current; an id without its epoch names nothing."""


class InvariantViolation(HiSparseError):
    """A named invariant of DESIGN section 9 does not hold."""

    def __init__(self, invariant: str, message: str, *, seq: int | None = None) -> None:
        self.invariant = invariant
        self.message = message
        self.seq = seq
        super().__init__(f"{invariant}: {message}" + ("" if seq is None else f" (seq {seq})"))


class ProtocolError(HiSparseError):
    """A command or acknowledgement is out of order: a gap is reported, never skipped."""


class LogError(HiSparseError):
    """A log cannot be written, read or trusted; the message names segment, offset and seq."""


class LogDamage(LogError):
    """Damage, or events that a log says it lacks, lie before what was asked for: it is lost."""


class DeviceError(HiSparseError):
    """A backend is missing, refused by name, or failed."""


class UsageError(HiSparseError):
    """A call that the library's contract forbids at that point; nothing was changed."""
