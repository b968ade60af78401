"""The fault atlas: every kind of fault that a simulation knows, by name.

A family a file. `select` reads what `--faults` says: names of kinds or families; with a minus they
are left out, and where nothing is named without one, all others are on.
"""

from __future__ import annotations

from collections.abc import Iterable

from hisparse.errors import ConfigError
from hisparse.testing.atlas import acks, consumer, copies, disk, memory, ranks, requests, scheduler
from hisparse.testing.atlas.base import Fault, Incident

__all__ = ["ATLAS", "Fault", "Incident", "marks_of", "select"]

_KINDS: tuple[type[Fault], ...] = (
    acks.AckLost,
    acks.AckCut,
    acks.AckLate,
    acks.AckDuplicated,
    acks.AckReordered,
    acks.AckGap,
    acks.AckForeign,
    acks.StreamHeld,
    copies.CopyFailed,
    copies.CopyPartial,
    memory.EvictionInLoad,
    memory.MemoryRefused,
    requests.AbortInTransfer,
    requests.PreemptInTransfer,
    requests.FinishInTransfer,
    requests.IdReused,
    requests.StaleEpoch,
    requests.LateAbort,
    consumer.CommandLate,
    consumer.CommandDuplicated,
    consumer.CommandGap,
    ranks.RankCrash,
    ranks.RankStaleCursor,
    ranks.DummyStep,
    ranks.OldWorkerSpeaks,
    scheduler.SchedulerCrash,
    disk.LogTorn,
    disk.LogFlipped,
    disk.FsyncLost,
    disk.PowerLoss,
    disk.DiskFull,
    disk.GapRestart,
)
ATLAS: dict[str, type[Fault]] = {kind.kind: kind for kind in _KINDS}


def select(words: str) -> tuple[str, ...]:
    """Kinds of a list like ``ack_lost,copies,-copy_partial``. Raises ConfigError for a word that
    names neither a kind nor a family."""
    families: dict[str, list[str]] = {}
    for kind in _KINDS:
        families.setdefault(kind.family, []).append(kind.kind)
    wanted: set[str] = set()
    left_out: set[str] = set()
    for word in filter(None, (part.strip() for part in words.split(","))):
        name = word.removeprefix("-")
        named = families.get(name, [name] if name in ATLAS else [])
        if not named:
            raise ConfigError(
                f"faults={word!r} is no kind of fault: use one of {', '.join(ATLAS)}, or a "
                f"family: {', '.join(families)}"
            )
        (left_out if word.startswith("-") else wanted).update(named)
    return tuple(kind for kind in ATLAS if kind in (wanted or set(ATLAS)) - left_out)


def marks_of(kinds: Iterable[str], ranks: int) -> tuple[str, ...]:
    """Marks that a campaign over these kinds, in worlds of up to `ranks` ranks, has to hit."""
    kinds = tuple(kinds)
    return tuple(mark for kind in kinds for mark in ATLAS[kind].reachable_marks(kinds, ranks))
