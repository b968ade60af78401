"""The event that could not be folded, told of the state of now. Pure.

Its numbers keep their distance to those of the state, and what it names keeps its name of now:
where they were wrong, they stay as wrong. What it names and had been told of must still be: a block
that is given back twice is another fault than one that was never given out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.rerun.inputs import ACKED
from hisparse.fsm.rerun.names import RESIDENT, Names
from hisparse.fsm.state import State

_EPOCHS = (
    ("blocks", ("block_epochs", "epochs")),
    ("sources", ("source_epochs",)),
    ("pages", ("page_epochs", "epochs")),
    ("suffixes", ("suffix_epochs",)),
)
_POOLS = {"pages": "pages", "suffixes": "suffix"}


def told(names: Names, e: Any, then: State) -> Any:
    """`e` as it is now; `then` is the state that it could not follow. Raises LookupError where it
    names what was left out."""
    now, changed = names.state, dict[str, Any]()

    def epoch(old: int) -> int:
        if old >= then.next_epoch:
            return old - then.next_epoch + now.next_epoch
        return names.keys[old][1]

    def row(old: int) -> int:
        found = names.row(old)
        if found < 0 and then.by_row[old] is not None:
            raise LookupError(f"the tenant of row {old} was left out")
        return old if found < 0 else found

    def transfer(old: int) -> int:
        if old >= then.next_transfer:
            return old - then.next_transfer + now.next_transfer
        return old and names.transfers[old]

    for field, of in (("epoch", epoch), ("row", row)):
        if hasattr(e, field) and getattr(e, field) >= 0:
            changed[field] = of(getattr(e, field))
    for field, of in (("rows", row), ("hash_rows", row), ("request_epochs", epoch)):
        if isinstance(getattr(e, field, None), tuple):
            changed[field] = tuple(map(of, getattr(e, field)))
    for field in ("transfers", *ACKED):
        if hasattr(e, field):
            changed[field] = tuple(map(transfer, getattr(e, field)))
    for field, fields in _EPOCHS:
        name = next((name for name in fields if hasattr(e, name)), None)
        if hasattr(e, field) and name is not None:
            had, has = (getattr(s, _POOLS.get(field, "blocks")) for s in (then, now))
            pairs = list(zip(getattr(e, field), getattr(e, name), strict=True))
            if any(had.epoch[ident] and not has.epoch[ident] for ident, _ in pairs):
                raise LookupError(f"what {field} were was left out")
            changed[name] = tuple(
                old - had.epoch.item(ident) + has.epoch.item(ident) for ident, old in pairs
            )
    return msgspec.structs.replace(e, **(changed | _entries(names, e) | _counts(names, e, then)))


def _entries(names: Names, e: Any) -> dict[str, Any]:
    """Table entries by the names that they have now; the next ones where they have none."""
    role = RESIDENT if not hasattr(e, "role") else e.role

    def entry(row: int, old: int) -> int:
        return names.new_entry(row, role, old) if row in names.held else old

    if isinstance(e, ev.BlocksReserved | ev.PagesPublished) and not e.rows:
        return {"entry": entry(e.row, e.entry)}
    entries = getattr(e, "entries", ())
    rows = getattr(e, "rows", ()) or (getattr(e, "row", -1),) * len(entries)
    return {"entries": tuple(map(entry, rows, entries))} if entries else {}


def _counts(names: Names, e: Any, then: State) -> dict[str, Any]:
    """What counts up, as far from where it should be as it was."""
    now = names.state
    match e:
        case ev.StepPlanned():
            starts = [
                start - then.rows.computed.item(row) + now.rows.computed.item(names.row(row))
                for row, start in zip(e.rows, e.starts, strict=True)
            ]
            return {"step": _step(names, e.step, then), "starts": tuple(starts)}
        case ev.RowsComputed():
            return {"step": _step(names, e.step, then)}
        case ev.AcknowledgementsTaken():
            moved = now.acked[e.rank] - then.acked[e.rank]
            retired = e.retired_step - then.retired[e.rank] + now.retired[e.rank]
            epochs = {
                f"{name}_epochs": tuple(
                    names.keys[old][1] if old in names.keys else old
                    for old in getattr(e, f"{name}_epochs")
                )
                for name in ACKED
            }
            counted = {"first_seq": e.first_seq + moved, "last_seq": e.last_seq + moved}
            return {"retired_step": retired, **counted, **epochs}
        case ev.PromotionHeld():
            return {"until_step": e.until_step - then.step + now.step}
        case ev.Tick():
            return {"now_us": e.now_us - then.now_us + now.now_us}
        case ev.RequestRewound():
            confirmed = now.rows.confirmed.item(names.row(e.row))
            moved = confirmed - then.rows.confirmed.item(e.row)
            return {"rows": max(e.rows + moved, 0), "certain": e.certain + moved}
    return {}


def _step(names: Names, step: int, then: State) -> int:
    if then.step and not names.state.step:
        raise LookupError("every step before was left out")
    return names.steps.get(step, step - then.step + names.state.step)
