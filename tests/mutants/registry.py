"""The register of mutants, and how one of them changes the events of a decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def mutant(broken: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Register `broken`, a context manager, under its own name."""
    assert broken.__doc__, f"mutant {broken.__name__} does not say what it breaks"
    made = contextmanager(broken)
    MUTANTS[broken.__name__] = made
    return made


def relay(events):
    """A decision made of `events`: a list's own iterator could not be sent their seqs."""
    while events:
        yield events.pop(0)


def altered(decision, change):
    """The same decision, with what ``change(event)`` yields in place of each of its events."""
    seq = None
    try:
        while True:
            event = decision.send(seq)
            seq = event.cause
            for made in change(event):
                seq = yield made
    except StopIteration as stop:
        return stop.value


def nothing(*given):
    """A decision that decides nothing."""
    return
    yield
