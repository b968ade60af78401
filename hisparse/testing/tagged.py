"""The model's place in a simulation: rows whose bytes the oracle knows, and random selections.

`TaggedModel.prepare` fixes, at the moment a step is planned, what every rank writes and must read
in it; a `ForwardPass` does so on one rank, at once or later. Every access is queued; a check runs
inside the stream, when the bytes are read (`hisparse.testing.content`). Nothing ever waits for the
device, so that the compute stream lags as far as the waits allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.loop import ReferenceEngine
from hisparse.errors import InvariantViolation
from hisparse.fsm.state import Key
from hisparse.fsm.wire import Table
from hisparse.testing.content import Chain
from hisparse.testing.worlds import EOS

INDEX_CACHE = 1000  # cache numbers of the index groups, beside those of the layers


@dataclass
class Seen:
    """What the checks inside the streams saw. With `tolerates_faults`, rows that read the page of
    a failed copy are noted: they may never be confirmed. Else they are a violation of `content`."""

    tolerates_faults: bool = False
    rows_checked: int = 0
    tables_checked: int = 0
    tainted: dict[Key, set[tuple[int, int]]] = field(default_factory=dict)  # (step, row)


@dataclass
class GroupPass:
    """One index group of a step: the rows of its indexer and of its layers, and what they read."""

    index_rows: np.ndarray
    index_want: dict[int, np.ndarray]  # by request row
    selection: np.ndarray
    layers: list[tuple[int, np.ndarray, np.ndarray]]  # layer, its new rows, what it gathers


Look = Callable[..., None]  # of a check and what it gets, as that is now: `RankDevice.look`


def at_once(check: Callable[..., None], *arrays: Any) -> None:
    check(*arrays)


@dataclass
class ForwardPass:
    """A step, as each rank computes it."""

    step: int
    seq: int
    seen: Seen
    rows: StepRows
    keys: dict[int, Key]
    tables: list[tuple[int, Table, np.ndarray]]  # of the step's requests, as the scheduler has them
    groups: list[GroupPass] = field(default_factory=list)

    def run(self, worker: HiSparseWorker, look: Look = at_once) -> None:
        """Queue it all, between the step's command and its end."""
        self.probe(worker, look)
        rows = self.rows
        for group, work in enumerate(self.groups):
            worker.index.write(group, rows, work.index_rows)
            for row, want in work.index_want.items():
                keys = worker.index.keys(group, row, len(want))
                self._expect(look, keys, want, f"index {group}", row)
            for place, (layer, own, want) in enumerate(work.layers):
                handle = worker.handles[layer]
                handle.write(rows, own)
                picked = handle.gather(rows, None if place else work.selection)
                self._expect(look, picked, want, f"layer {layer}")

    def probe(self, worker: HiSparseWorker, look: Look = at_once) -> None:
        """`table_truth`, on the compute stream, as the step sees the tables."""

        def compare(*tables: np.ndarray) -> None:
            self.seen.tables_checked += 1
            of = dict(zip(Table, tables, strict=True))
            for row, table, want in self.tables:
                have = of[table][row]
                width = min(len(want), len(have))
                if (want[:width] != have[:width]).any():
                    entry = int(np.argmax(want[:width] != have[:width]))
                    text = f"rank {worker.rank}, step {self.step}, table {table.name} row {row} "
                    text += f"entry {entry}: the scheduler has {want[entry]}, the worker "
                    text += str(have[entry])
                    raise InvariantViolation("table_truth", text, seq=self.seq)

        tables = [worker.tables[table] for table in Table]
        worker.device.compute.enqueue(lambda: look(compare, *tables))

    def _expect(
        self, look: Look, pending: Any, want: np.ndarray, what: str, of: int | None = None
    ) -> None:
        """Check `pending` when it is read: rows gathered for each of the step's rows, or the
        indexer rows of request row `of`, which all its rows of the step read."""

        seen = self.seen

        def check(data: np.ndarray) -> None:
            seen.rows_checked += want.size // want.shape[-1]
            if data.tobytes() == want.tobytes():
                return
            wrong = (data != want).any(axis=-1)
            if not seen.tolerates_faults:
                at = np.argwhere(wrong)[0].tolist()
                text = f"{what} in step {self.step} read other bytes at {at}"
                raise InvariantViolation("content", text, seq=self.seq)
            by_row = wrong.any(axis=-1) if of is None else self.rows.rows == of
            for i in np.flatnonzero(by_row).tolist():
                key = self.keys[int(self.rows.rows[i])]
                seen.tainted.setdefault(key, set()).add((self.step, int(self.rows.positions[i])))

        pending.on_done(lambda data: look(check, data))


class TaggedModel:
    """Prepares forward passes, samples at random, proposes drafts of which some will stand."""

    def __init__(self, config: HiSparseConfig, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.random = np.random.RandomState(rng.randrange(1 << 31))
        self.chains: dict[str, Chain] = {}
        self.spec = config.schedule.lookahead_rows
        self.guesses = random.Random(rng.random() if self.spec else 0)

    def prepare(self, engine: ReferenceEngine, rows: StepRows, seen: Seen) -> ForwardPass:
        state = engine.coordinator.state
        layout = self.config.layout
        named = dict.fromkeys(rows.rows.tolist())
        keys = {row: state.request_of(row).key for row in named}
        tables = [(row, t, state.table(t)[row].copy()) for row in named for t in Table]
        work = ForwardPass(state.step, state.seq, seen, rows, keys, tables)
        if not named:
            return work
        chains = {row: self._chain(engine, key) for row, key in keys.items()}
        ends = {row: int(rows.positions[rows.rows == row].max()) + 1 for row in named}
        for group, layers in enumerate(layout.index_groups):
            cache, width = INDEX_CACHE + group, layout.index_row_bytes
            whole = {row: chain.rows(cache, width) for row, chain in chains.items()}
            selection = self._select(rows)
            work.groups.append(
                GroupPass(
                    _pick(whole, rows.rows, rows.positions),
                    {row: whole[row][: ends[row]] for row in named},
                    selection,
                    [self._layer(layer, chains, rows, selection) for layer in layers],
                )
            )
        return work

    def _layer(
        self, layer: int, chains: dict[int, Chain], rows: StepRows, selection: np.ndarray
    ) -> tuple[int, np.ndarray, np.ndarray]:
        width = self.config.layout.row_bytes
        whole = {row: chain.rows(layer, width) for row, chain in chains.items()}
        want = np.zeros((*selection.shape, width), dtype=np.uint8)
        for row, known in whole.items():
            mine = rows.rows == row
            chosen = selection[mine]
            found = known[np.maximum(chosen, 0)]
            found[chosen < 0] = 0
            want[mine] = found
        return layer, _pick(whole, rows.rows, rows.positions), want

    def _chain(self, engine: ReferenceEngine, key: Key) -> Chain:
        """The chain of a request, with the tags of all its tokens and drafts."""
        served = engine.live[key]
        chain = self.chains.setdefault(served.request, Chain())
        chain.tags(served.tokens + served.drafts)
        return chain

    def choose(self, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]) -> np.ndarray:
        """int64 [len(sampled)]: the token after each; where a draft follows it, that one, more
        often than not."""
        return np.array([self._choose(tokens, rows, i) for i in sampled], dtype=np.int64)

    def _choose(self, tokens: np.ndarray, rows: StepRows, i: int) -> int:
        follows = i + 1 < len(tokens) and rows.rows[i + 1] == rows.rows[i]
        if follows and self.guesses.random() < 0.6:
            return int(tokens[i + 1])
        return self.rng.randrange(EOS)

    def drafts(self) -> dict[int, list[int]]:
        """Drafts of everybody, some of which will stand."""
        rows = range(self.config.schedule.max_requests if self.spec else 0)
        return {row: [self.guesses.randrange(EOS) for _ in range(self.spec)] for row in rows}

    def _select(self, rows: StepRows) -> np.ndarray:
        """int32 [n, k]: random causal positions, some padding, some duplicates, some locality."""
        k = self.config.policy.top_k
        width = np.where(self.random.rand(len(rows.positions), 1) < 0.3, 6, 1 << 30)
        reach = np.minimum(rows.positions[:, None] + 1, width)
        back = (self.random.rand(len(rows.positions), k) * reach).astype(np.int64)
        chosen = rows.positions[:, None] - back
        if self.random.rand() < 0.5:
            chosen = chosen // 2
        chosen[self.random.rand(*chosen.shape) < 0.1] = -1
        return np.asarray(chosen, dtype=np.int32)


def _pick(whole: dict[int, np.ndarray], rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The row of each (request row, position)."""
    return np.stack([whole[r][p] for r, p in zip(rows.tolist(), positions.tolist(), strict=True)])
