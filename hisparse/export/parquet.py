"""Parquet: a row an event, written in row groups, so that a log larger than a machine can go out.

    seq, step, cause   int64            row      int32, of the event itself (null: it names none)
    kind               string           request  string, of the event or of the request in its row
    blocks, pages, transfers            list<int64>, null where the event has no such list
    fields             string           JSON of all other fields, by name

`transfers` of AcknowledgementsTaken are all that it settles or moves; of MemoryAccessed, the copy
that accesses. What does not fit a column's type (a foreign log may say anything) stays in `fields`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO

from hisparse.export import missing
from hisparse.export.record import Record, records
from hisparse.fsm.codec import LoggedEvent

ROWS_A_GROUP = 64 * 1024
LISTS = ("blocks", "pages", "transfers")
_ACKED = ("enqueued", "completed", "failed")
_POOLS = {"gpu": "blocks", "host": "pages"}


def write(
    events: Iterable[tuple[int, LoggedEvent]], out: BinaryIO, *, rows_a_group: int = ROWS_A_GROUP
) -> int:
    """Write `events` to `out`; returns how many. Raises UsageError without pyarrow."""
    pa, pq = _pyarrow()
    ids = pa.list_(pa.int64())
    schema = pa.schema(
        [
            pa.field("seq", pa.int64(), nullable=False),
            pa.field("step", pa.int64()),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("cause", pa.int64()),
            pa.field("row", pa.int32()),
            pa.field("request", pa.string()),
            *(pa.field(name, ids) for name in LISTS),
            pa.field("fields", pa.string(), nullable=False),
        ]
    )
    count = 0
    rows = map(as_row, records(events))
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for group in _grouped(rows, rows_a_group):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def as_row(record: Record) -> dict[str, Any]:
    """The columns of one event."""
    rest = dict(record.fields)
    found: dict[str, Any] = {
        "seq": record.seq,
        "step": _fits(record.step, 63),
        "kind": record.kind,
        "cause": _fits(record.cause, 63),
        "row": _fits(rest.get("row"), 31),
        "request": record.request,
    }
    for name in ("step", "cause"):
        if found[name] is None:
            rest[name] = getattr(record, name)
    for name in LISTS:
        found[name] = _ids(rest.get(name))
    for name in ("row", "request", *LISTS):
        if name in rest and found[name] is not None:
            del rest[name]
    if record.kind == "AcknowledgementsTaken":
        found["transfers"] = _ids([ident for name in _ACKED for ident in rest[name]])
    elif record.kind == "MemoryAccessed":
        pool = _POOLS.get(rest["pool"])
        if pool is not None and (ids := _ids(rest["ids"])) is not None:
            found[pool] = ids
            del rest["ids"]
        found["transfers"] = _ids([rest["transfer"]]) if rest["transfer"] else None
    found["fields"] = json.dumps(rest, separators=(",", ":"))
    return found


def _fits(value: Any, bits: int) -> int | None:
    fits = isinstance(value, int) and -(1 << bits) <= value < 1 << bits
    return value if fits else None


def _ids(values: Any) -> list[int] | None:
    if not isinstance(values, list) or any(_fits(value, 63) is None for value in values):
        return None
    return values


def _grouped(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    while group := list(islice(rows, size)):
        yield group


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing("pyarrow", "parquet") from None
    return pa, pq
