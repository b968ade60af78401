"""What a log lacks: said on stderr in the same words by every verb, put in its JSON under the same
keys, and turned into the same exit code.

code    what was lacking
0       nothing before the place that was asked about; what lies behind it is noted
1       damage, or lacking events that a fold cannot cross: what lies behind was not read
3       a torn tail, or lacking events that were read past: all that is there was read
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hisparse.cli.errors import LOSS, VIOLATION, say
from hisparse.fsm.log_reader import Gap, Loss

SALVAGE = "`hisparse log recover --salvage OUT` reads on behind it"


def lost(loss: Loss | None) -> dict[str, Any] | None:
    """What a reader could not read, for JSON."""
    if loss is None:
        return None
    return msgspec.structs.asdict(loss)


def dropped(gaps: Iterable[Gap]) -> list[dict[str, Any]]:
    """What a log says it lacks, for JSON."""
    return [msgspec.structs.asdict(gap) for gap in gaps]


def worst(*codes: int) -> int:
    """The exit code of several: a loss that hides something counts above one that was crossed."""
    return max(codes, key=(0, LOSS, VIOLATION).index, default=0)


def told(
    loss: Loss | None,
    gaps: Iterable[Gap] = (),
    *,
    at: int | None = None,
    crossed: int | None = None,
    of: str = "",
) -> int:
    """Say what is lacking; returns the exit code for it.

    Args:
        at: the last seq that was asked about; None: the log's last, wherever that is.
        crossed: the last seq that was reached; a gap at or behind it was not crossed. None: all.
        of: whose loss it is, where several logs or streams are read.
    """
    code, lead = 0, f"{of}: " if of else ""
    for gap in gaps:
        if at is not None and gap.first_seq > at:
            say(f"{lead}note: {gap}, behind seq {at}")
        elif crossed is not None and gap.last_seq > crossed:
            say(f"{lead}loss found: {gap}; what follows was not read")
            return VIOLATION
        else:
            say(f"{lead}recovered with loss: {gap}")
            code = LOSS
    if loss is None:
        return code
    if at is not None and at < loss.expected_seq:
        say(f"{lead}note: {loss}, behind seq {at}")
        return code
    if loss.torn:
        say(f"{lead}recovered with loss: {loss}")
        return LOSS
    say(f"{lead}loss found: {loss}; {SALVAGE}")
    return VIOLATION
