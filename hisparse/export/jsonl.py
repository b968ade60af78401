"""JSON Lines: one object an event, with the keys seq, step, kind, cause and fields (by name).

{"seq":412,"step":9,"kind":"HotLeased","cause":400,"fields":{"row":3,"blocks":[5],"epochs":[1]}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TextIO

from hisparse.export.record import records
from hisparse.fsm.codec import LoggedEvent


def lines(events: Iterable[tuple[int, LoggedEvent]]) -> Iterator[str]:
    """`events`, a line each."""
    for r in records(events):
        line = {
            "seq": r.seq,
            "step": r.step,
            "kind": r.kind,
            "cause": r.cause,
            "fields": r.fields,
        }
        yield json.dumps(line, separators=(",", ":"))


def write(events: Iterable[tuple[int, LoggedEvent]], out: TextIO) -> int:
    """Write `events` to `out`, a line each; returns how many."""
    count = 0
    for line in lines(events):
        out.write(line + "\n")
        count += 1
    return count
