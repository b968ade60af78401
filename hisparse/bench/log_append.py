"""Events appended: to this project's logs, to the `eventsourcing` library, to a plain file.

The events are those of one page's life, from its reservation to its spill: once with 64 pages an
event, once with one. All writers get the same events, made beforehand, and commit every 64 of them:

    log off, ring, disk     `EventLog.append`, `commit`; on disk with checksums, seqs and segments
    disk, fsync             the same, synced to the disk at each commit
    eventsourcing           its `EventStore.put` of 64 frozen dataclasses with the same fields, by
                            its JSON mapper, into its recorder in memory (`popo`), or into that of
                            an SQLite file (`sqlite`: synced at each commit by default)
    msgspec file            length and msgpack body of each event, one unbuffered write: no
                            checksum, no seq, no memory of what was written

A sample is one batch: 64 appends and the commit, over what they moved. Writers take turns.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import make_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hisparse.bench.measure import Case, summarise
from hisparse.config import LogConfig
from hisparse.fsm import events as ev
from hisparse.fsm.codec import Codec
from hisparse.fsm.log_open import open_log
from hisparse.fsm.machines import BlockRole, BlockTrigger
from hisparse.fsm.wire import TransferKind

COMMIT_EVERY = 64
BATCHES = 16  # of a writer, before the next has its turn
LIBRARY, EXTRA = "eventsourcing", "hisparse[bench]"
Put = Callable[[list[ev.Event]], None]  # append a batch and commit it


class Writer(NamedTuple):
    """`put` takes batches of what `ready` made of events; `close` ends it."""

    name: str
    put: Callable[[list[Any]], None]
    close: Callable[[], None]
    ready: Callable[[list[ev.Event]], list[Any]] = list


def life(pages: int, at: int) -> list[ev.Event]:
    """What becomes of `pages` pages of one request, in the events that every page goes through."""
    ids = tuple(range(at, at + pages))
    entries, epochs = tuple(range(pages)), (1,) * pages
    hashes = tuple(ident.to_bytes(16, "big") for ident in ids)
    return [
        ev.BlocksReserved(at, BlockRole.RESIDENT, 3, 0, ids, epochs),
        ev.HostPagesReserved(at, 3, ids, epochs),
        ev.TransferPinned(
            at, TransferKind.SPILL, 3, 1, 1, 1, ids, entries, ids, epochs, ids, epochs
        ),
        ev.TransferEnqueued(at, 0, True, ids),
        ev.TransferCompleted(at, 0, True, ids),
        ev.PagesPublished(at, 3, 0, ids, epochs, hashes),
        ev.PagesSpilled(at, 3, BlockTrigger.spilled, entries, ids, epochs, ids),
        ev.BlocksEvicted(at, ids, epochs),
    ]


def batches(pages: int, count: int) -> list[list[ev.Event]]:
    """`count` batches of `COMMIT_EVERY` events."""
    events: list[ev.Event] = []
    while len(events) < count * COMMIT_EVERY:
        events += life(pages, 1 + len(events) * pages)
    return [events[i : i + COMMIT_EVERY] for i in range(0, count * COMMIT_EVERY, COMMIT_EVERY)]


# -- writers --------------------------------------------------------------------------------------


def _own(name: str, config: dict[str, Any]) -> Writer:
    log = open_log(
        LogConfig.model_validate({"ring_events": 10_000, **config}),
        Codec(ev.EVENT_TYPES),
        stream="scheduler",
    )
    append, commit = log.append, log.commit

    def put(batch: list[Any]) -> None:
        for event in batch:
            append(event)
        commit()

    return Writer(name, put, log.close)


def _msgspec_file(path: Path) -> Writer:
    file, encode, size = path.open("wb", buffering=0), msgspec.msgpack.encode, struct.Struct("<I")

    def put(batch: list[Any]) -> None:
        bodies = [encode(event) for event in batch]
        file.write(b"".join([part for body in bodies for part in (size.pack(len(body)), body)]))

    return Writer("msgspec file", put, file.close)


def _plain(value: Any) -> Any:
    """What JSON can hold of a field: names of enum members and hashes as text."""
    if isinstance(value, tuple) and value and isinstance(value[0], bytes):
        return [item.hex() for item in value]
    return list(value) if isinstance(value, tuple) else int(value)


@cache
def _dataclasses() -> dict[type, Any]:
    """Each kind of event as the frozen dataclass that the library expects, its fields unchanged."""
    return {
        kind: make_dataclass(
            kind.__name__,
            ["originator_id", "originator_version", *kind.__struct_fields__],
            frozen=True,
            namespace={"__module__": __name__},
        )
        for kind in ev.EVENT_TYPES
    }


def _eventsourcing(path: Path | None) -> Writer:
    from uuid import uuid4

    from eventsourcing.persistence import EventStore, JSONTranscoder, Mapper
    from eventsourcing.popo import POPOApplicationRecorder
    from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteDatastore

    recorder: Any = POPOApplicationRecorder()
    datastore = None if path is None else SQLiteDatastore(str(path))
    if datastore is not None:
        recorder = SQLiteApplicationRecorder(datastore)
        recorder.create_table()
    store: Any = EventStore(Mapper(JSONTranscoder()), recorder)
    originator, version = uuid4(), iter(range(1, 1 << 62))
    kinds = _dataclasses()

    def ready(batch: list[ev.Event]) -> list[Any]:
        return [
            kinds[type(event)](
                originator, next(version), *map(_plain, msgspec.structs.astuple(event))
            )
            for event in batch
        ]

    def close() -> None:
        if datastore is not None:
            datastore.close()

    name = f"{LIBRARY} {'popo' if path is None else 'sqlite'}"
    return Writer(name, store.put, close, ready)


def has_library() -> bool:
    """Whether the library to compare with is installed."""
    return find_spec(LIBRARY) is not None


def baselines(directory: Path) -> Iterator[Writer]:
    yield _msgspec_file(directory / "plain")
    if has_library():
        yield _eventsourcing(None)
        yield _eventsourcing(directory / "events.sqlite")


def own(directory: Path) -> Iterator[Writer]:
    yield _own("log off", {"mode": "off"})
    yield _own("log ring", {"mode": "ring"})
    yield _own("log disk", {"mode": "disk", "dir": directory / "disk"})
    yield _own("log disk, fsync", {"mode": "disk", "dir": directory / "sync", "fsync": "commit"})


# -- cases ----------------------------------------------------------------------------------------


def bench_append(directory: Path, *, runs: int, batches_a_run: int = 64) -> list[Case]:
    """Microseconds a page transition, of events of 64 pages and of one."""
    cases = []
    for pages, what in ((64, "events of 64 pages"), (1, "single events")):
        where = directory / f"pages{pages}"
        where.mkdir()
        samples = _samples(where, batches(pages, batches_a_run), pages, runs)
        medians = {name: summarise(name, s, "").median for name, s in samples.items()}
        against = [name for name in medians if not name.startswith("log ")]
        for name, found in samples.items():
            ratios = {base: medians[name] / medians[base] for base in against if base != name}
            cases.append(summarise(f"append, {what}, {name}", found, "us/transition", ratios))
    return cases


def _samples(
    directory: Path, events: list[list[ev.Event]], pages: int, runs: int
) -> dict[str, list[list[float]]]:
    samples: dict[str, list[list[float]]] = {}
    for run in range(runs):
        where = directory / str(run)
        where.mkdir()
        with ExitStack() as stack:
            writers = [*own(where), *baselines(where)]
            for writer in writers:
                stack.callback(writer.close)
                samples.setdefault(writer.name, []).append([])
            for at in range(0, len(events), BATCHES):
                for writer in writers:
                    turn = [writer.ready(batch) for batch in events[at : at + BATCHES]]
                    samples[writer.name][-1] += [_timed(writer, batch, pages) for batch in turn]
    return samples


def _timed(writer: Writer, batch: list[Any], pages: int) -> float:
    start = time.perf_counter()
    writer.put(batch)
    return 1e6 * (time.perf_counter() - start) / (len(batch) * pages)
