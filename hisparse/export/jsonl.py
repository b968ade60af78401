"""JSON Lines: one object an event, with the keys seq, step, kind, cause and fields (by name).

{"seq":412,"step":9,"kind":"HotLeased","cause":400,"fields":{"row":3,"blocks":[5],"epochs":[1]}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TextIO

from hisparse.export.record import records
from hisparse.fsm.codec import LoggedEvent


def write(events: Iterable[tuple[int, LoggedEvent]], out: TextIO) -> int:
    """Write `events` to `out`, a line each; returns how many."""
    count = 0
    for r in records(events):
        line = {
            "seq": r.seq,
            "step": r.step,
            "kind": r.kind,
            "cause": r.cause,
            "fields": r.fields,
        }
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
        count += 1
    return count
