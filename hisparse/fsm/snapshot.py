"""Snapshots: a whole State as bytes, and back, so that a seek need not fold from the first event.

Pure: bytes in, bytes out. A snapshot carries its digest; `restore` refuses bytes whose state does
not have it. Shapes and types come from the config, never from the bytes, so that a hostile snapshot
can neither allocate nor execute.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.errors import LogError
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Request, State, SuffixCopy, Transfer, digest

FORMAT = 1


class Records(msgspec.Struct, array_like=True):
    """Everything of a state that is not a column."""

    seq: int
    step: int
    now_us: int
    requests: list[Request]
    waiting: list[tuple[str, int]]
    draining: list[tuple[str, int]]
    transfers: list[Transfer]
    prefix: list[tuple[bytes, int]]
    page_hashes: list[tuple[int, bytes]]
    index_prefix: list[tuple[bytes, tuple[int, int]]]
    index_hashes: list[tuple[int, list[bytes]]]
    next_epoch: int
    next_transfer: int
    acked: list[int]
    worker_epoch: list[int]
    retired: list[int]
    promotion_held_until: int = 0
    suffix_hashes: list[tuple[int, bytes]] = []
    suffix_copies: list[SuffixCopy] = []
    suffix_answers: list[tuple[tuple[str, int], tuple[int, int]]] = []
    asleep: int = 0
    lost: int = 0


class Snapshot(msgspec.Struct, array_like=True):
    """The wire form: columns in the order of `_columns`, little-endian."""

    format: int
    digest: str
    columns: list[bytes]
    records: Records


_DECODER = msgspec.msgpack.Decoder(Snapshot)


def _columns(state: State) -> list[tuple[Any, str]]:
    """(owner, attribute) of every array and queue, in a fixed order."""
    found: list[tuple[Any, str]] = []
    suffix = (state.suffix,) if len(state.suffix.state) else ()
    for owner in (state.blocks, state.pages, state.rows, *suffix):
        for name, value in sorted(vars(owner).items()):
            if isinstance(value, np.ndarray | IdQueue):
                found.append((owner, name))
    return found


def _little(array: Any) -> bytes:
    data: bytes = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return data


def snapshot(state: State) -> bytes:
    """The state as bytes."""
    columns = []
    for owner, name in _columns(state):
        value = getattr(owner, name)
        if isinstance(value, IdQueue):
            value = value.ordered()
        columns.append(_little(value))
    columns += [_little(table) for table in state.rows.tables]
    records = Records(
        state.seq,
        state.step,
        state.now_us,
        list(state.requests.values()),
        list(state.waiting),
        list(state.draining),
        list(state.transfers.values()),
        list(state.prefix.items()),
        list(state.pages.hash_of.items()),
        list(state.index_prefix.items()),
        list(state.index_hashes.items()),
        state.next_epoch,
        state.next_transfer,
        state.acked,
        state.worker_epoch,
        state.retired,
        state.promotion_held_until,
        list(state.suffix.hash_of.items()),
        list(state.suffix_copies.values()),
        list(state.suffix_answers.items()),
        state.asleep,
        state.lost,
    )
    return msgspec.msgpack.encode(Snapshot(FORMAT, digest(state), columns, records))


def restore(config: HiSparseConfig, data: bytes) -> State:
    """The state that `snapshot` wrote. Raises LogError if the bytes are not such a state."""
    try:
        taken = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise LogError(f"not a snapshot: {error}") from None
    if taken.format != FORMAT:
        raise LogError(f"snapshot format {taken.format}: this version reads format {FORMAT}")
    state = State(config)
    try:
        _fill(state, taken)
    except (ValueError, IndexError, AssertionError) as error:
        raise LogError(f"the snapshot does not fit this configuration: {error}") from None
    if digest(state) != taken.digest:
        raise LogError(f"the snapshot's state has digest {digest(state)}, not {taken.digest}")
    return state


def _fill(state: State, taken: Snapshot) -> None:
    places = _columns(state)
    if len(taken.columns) != len(places) + len(state.rows.tables):
        raise ValueError(f"{len(taken.columns)} columns, {len(places)} expected")
    for (owner, name), data in zip(places, taken.columns, strict=False):
        value = getattr(owner, name)
        if isinstance(value, IdQueue):
            ids = np.frombuffer(data, dtype="<i8").astype(np.int64)
            setattr(owner, name, IdQueue(len(value.members()), ids))
        else:
            value[...] = _array(data, value)
    for table, data in zip(state.rows.tables, taken.columns[len(places) :], strict=True):
        table[...] = _array(data, table)
    r = taken.records
    state.seq, state.step, state.now_us = r.seq, r.step, r.now_us
    state.requests = {request.key: request for request in r.requests}
    for request in r.requests:
        if request.row >= 0:
            state.by_row[request.row] = request
    state.waiting = dict.fromkeys(r.waiting)
    state.draining = dict.fromkeys(r.draining)
    state.rewinding = {
        request.key: None for request in r.requests if request.state is RequestState.REWINDING
    }
    state.transfers = {t.transfer: t for t in r.transfers}
    state.prefix = dict(r.prefix)
    state.pages.hash_of = dict(r.page_hashes)
    state.index_prefix = dict(r.index_prefix)
    state.index_hashes = dict(r.index_hashes)
    state.suffix.hash_of = dict(r.suffix_hashes)
    state.suffix_index = {page_hash: page for page, page_hash in r.suffix_hashes}
    state.suffix_copies = {copy.transfer: copy for copy in r.suffix_copies}
    state.suffix_answers = dict(r.suffix_answers)
    state.asleep, state.lost = r.asleep, r.lost
    state.next_epoch, state.next_transfer = r.next_epoch, r.next_transfer
    state.acked, state.worker_epoch, state.retired = r.acked, r.worker_epoch, r.retired
    state.promotion_held_until = r.promotion_held_until


def _array(data: bytes, like: Any) -> Any:
    """`data` in the type and shape of `like`. Raises ValueError if it is another size."""
    return np.frombuffer(data, dtype=like.dtype.newbyteorder("<")).reshape(like.shape)
