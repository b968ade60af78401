"""`hisparse fuzz --mutants`: how soon seeded faults are found. No torch.

Exits 1 unless all are.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from hisparse.cli.errors import VIOLATION, say
from hisparse.cli.output import Progress, emit, emit_json

if TYPE_CHECKING:
    from hisparse.testing.mutation import Caught


def hunt_mutants(
    words: str,
    seeds: Iterable[int] | None,
    ranks: int | None,
    steps: int | None,
    as_json: bool,
    shrink: bool = True,
) -> int:
    """Hunt those of `words`, and report. Raises ConfigError where there are none, or no such."""
    from hisparse.testing.mutation import SEEDS, hunt, load, select
    from hisparse.testing.swarm import STEPS

    mutants = select(load(), "" if words == "all" else words)
    caught: list[Caught] = []
    bar = Progress()
    try:
        for name, broken in mutants.items():
            bar("mutants", len(caught), len(mutants))
            caught.append(
                hunt(name, broken, seeds or SEEDS, ranks=ranks, steps=steps or STEPS, shrink=shrink)
            )
    finally:
        bar.close()
    missed = [one.name for one in caught if one.result is None]
    if as_json:
        emit_json({"mutants": [one.report() for one in caught]})
    else:
        emit("\n".join(as_text(caught)))
    for one in caught:
        if one.result is None:
            say(f"mutant {one.name} was not found in {one.seeds} seeds: {one.told}")
    return VIOLATION if missed else 0


def as_text(caught: list[Caught]) -> list[str]:
    """A mutant a line, and what they come to."""
    width = max(len(one.name) for one in caught)
    lines = [f"{'mutant':<{width}}  seeds  events  witness       found by"]
    for one in caught:
        length, unit = one.witness
        found = one.invariant or "NOT FOUND"
        lines.append(
            f"{one.name:<{width}}  {one.seeds:>5} {one.events:>7}  {length:>3} {unit:<10} {found}"
        )
    found_all = [one for one in caught if one.result is not None]
    lines.append(f"found {len(found_all)} of {len(caught)}")
    if found_all:
        events = round(median(one.events for one in found_all))
        lines[-1] += f"; half of them within {events} events"
        if short := sum(one.shrunk and one.witness[0] <= 12 for one in found_all):
            lines[-1] += f"; {short} witnesses of 12 or less"
    return lines
