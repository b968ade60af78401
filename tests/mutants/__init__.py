"""Faults in the production code, by name, each there for the length of a `with`.

`hisparse fuzz --mutants` puts one in after the other and says how soon it was found. This package
is the only place that knows them: what looks for faults knows none, and no wheel holds this. A
mutant is a function under `@mutant`; its docstring says what it breaks, and of a fault that people
met in the field, in brackets, which one (most have a scenario in `tests/scenarios`).

A mutant takes a promise out of the code, and mostly also out of the assertion that guards it, so
that an invariant has to find it and not the code's own checks.

    acknowledgements   what ranks say, and who has to      pools      epochs, queues, leases
    admission          look-ups, budgets, the queue        streams    waits, copies, rows, ranks
    ends               finish, abort, preempt              suffix     indexer pages, CPU tier
    logs               fold, log, cursors, restarts        tiers      spill, restore, rewind, sleep
    publication        what a prefix finds
"""

from __future__ import annotations

from . import (
    acknowledgements,
    admission,
    ends,
    logs,
    pools,
    publication,
    streams,
    suffix,
    tiers,
)
from .registry import MUTANTS

__all__ = [
    "MUTANTS",
    "acknowledgements",
    "admission",
    "ends",
    "logs",
    "pools",
    "publication",
    "streams",
    "suffix",
    "tiers",
]
