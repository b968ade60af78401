"""The fused resolve on the `cpu` backend: resident row, then hot row, then victim + host row.

Owns, for one index group's leader: the kept hot-row map (position -> slot), its inverse, and the
slot stamps. Reads the device tables, writes none of them, and moves no bytes: it returns a `Plan`.
Every method runs inside an op of the compute stream, so calls see the tables in stream order.

What it promises, and the reference in ``tests/device`` repeats in plain Python:

* Rows of a call are taken in order. A row's entry is resident (and touches nothing else), a hot
  hit, or a miss, which takes a victim slot.
* Replacement order is total: free slots first, then lowest (last-used step, hit above miss, slot
  index). The step is the engine's step, so all rows of one step share a stamp. The misses of a row,
  in order of first appearance, take the victims in that order, after all the row's hits are marked.
* Rows of one request in one call are consumed in waves of w = max(1, hot_rows // top_k): row j of
  the request (counting every row, also those that need no host page) is in wave j // w. A row takes
  no victim that it uses itself or that an earlier row of its wave uses. Since w * top_k <= hot_rows
  there always is one.
* Padding (-1, or a row index below 0) touches nothing. Duplicates in a row share a slot and count
  once. A fault is raised before any state is changed by the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.device.checks import BEYOND, NO_COPY, UNWRITTEN
from hisparse.device.layout import Geometry
from hisparse.device.plan import I64, Bools, Plan, Wave
from hisparse.device.rows import StepRows
from hisparse.device.rows import ordinals as ordinals_of
from hisparse.device.tables import DeviceTables
from hisparse.errors import InvariantViolation
from hisparse.fsm.wire import Table

NONE = -1
_PROTECTED = np.iinfo(np.int64).max
_NO_ROWS = np.empty(0, dtype=np.int64)


class CpuResolver:
    """Hot-row state of one leader and its vectorised resolve.

    State: `hot_map` int32 ``[max_requests, max_pages * page_size]``; `positions` int64, `stamps`
    int64 (``2 * step + hit``, -1 free) and `marks` int64 (wave that last used it), each
    ``[max_requests, hot_rows]``.
    """

    def __init__(self, geometry: Geometry, tables: DeviceTables, layer: int) -> None:
        self.geometry = geometry
        self.tables = tables
        self.layer = layer
        self.slots = geometry.hot_rows
        self.reach = geometry.max_pages * geometry.page_size if self.slots else 0
        shape = (geometry.max_requests, self.slots)
        self.hot_map = np.full((geometry.max_requests, self.reach), NONE, dtype=np.int32)
        self.positions = np.full(shape, NONE, dtype=np.int64)
        self.stamps = np.full(shape, NONE, dtype=np.int64)
        self.marks = np.zeros(shape, dtype=np.int64)
        self._mark = 0
        self.hits = self.misses = self.resident = 0

    @property
    def state_bytes(self) -> int:
        arrays = (self.hot_map, self.positions, self.stamps, self.marks)
        return sum(array.nbytes for array in arrays)

    def statistics(self) -> dict[str, int]:
        """Entries resolved so far, each position of a row once."""
        return {"hits": self.hits, "misses": self.misses, "resident": self.resident}

    def begin_step(self, step: int) -> None:
        """Each plan is told its step."""

    # -- forgetting ------------------------------------------------------------------------------
    def forget_rows(self, rows: Sequence[int]) -> None:
        """The request rows are handed on: found through slot -> position, not by a map scan."""
        for row in rows:
            self.forget_slots(row, 0, self.slots)

    def forget_slots(self, row: int, first: int, last: int) -> None:
        """Slots ``[first, last)`` of `row` lost their bytes (new hot block or request)."""
        held = self.positions[row, first:last]
        self.hot_map[row, held[held >= 0]] = NONE
        held[:] = NONE
        self.stamps[row, first:last] = NONE

    def forget_positions(self, row: int, first: int, last: int) -> None:
        """Positions ``[first, last)`` of `row` got another host page: their hot rows are stale."""
        here = self.hot_map[row, first:last]
        slots = here[here >= 0]
        self.positions[row, slots] = NONE
        self.stamps[row, slots] = NONE
        here[:] = NONE

    # -- resolve ---------------------------------------------------------------------------------
    def plan(self, rows: StepRows, selection: npt.NDArray[np.integer], step: int) -> Plan:
        """Resolve `selection`, int ``[n, k]`` positions of requests ``rows.rows``, -1 padding.

        Raises InvariantViolation ``always_readable`` for a position with neither a resident nor a
        host page, or that no table entry covers; with checks, or behind the row's own.
        """
        requests = rows.rows.astype(np.int64)
        top_k = selection.astype(np.int64, copy=False)
        size = self.geometry.page_size
        valid = top_k >= 0
        if requests.size and requests.min() < 0:
            valid &= (requests >= 0)[:, None]
        padded = not valid.all()
        spots = np.where(valid, top_k, 0) if padded else top_k
        pages = spots // size
        if pages.size and int(pages.max()) >= self.geometry.max_pages:
            self._refuse(requests, top_k, pages >= self.geometry.max_pages, BEYOND)
        if self.geometry.checks and (late := valid & (top_k > rows.positions[:, None])).any():
            self._refuse(requests, top_k, late, UNWRITTEN)
        blocks = self.tables[Table.RESIDENT][requests[:, None], pages].astype(np.int64)
        physical = blocks * size + (spots - pages * size)
        missing = blocks == 0
        need = (valid & missing) if padded else missing
        first = _first_mask(spots, valid if padded else None)
        once = valid if first is None else first & valid
        seen = int(np.count_nonzero(once))
        waves: tuple[Wave, ...] = (Wave(None, _NO_ROWS, _NO_ROWS),)
        needed = 0
        if need.any():
            self._check_readable(requests, top_k, pages, need)
            needed = int(np.count_nonzero(need & once))
            waves = self._resolve_needed(requests, spots, need, first, physical, step)
        self.resident += seen - needed
        chosen = (requests, spots) if self.geometry.checks else None
        return _pad(physical, valid if padded else None, waves, chosen)

    def _check_readable(self, requests: I64, top_k: I64, pages: I64, need: Bools) -> None:
        lost = need & (self.tables[Table.HOST][requests[:, None], pages] == 0)
        if lost.any():
            self._refuse(requests, top_k, lost, NO_COPY)
        hot = self.tables[Table.HOT]
        homeless = ~(hot > 0).all(axis=1) if self.slots else np.ones(len(hot), dtype=np.bool_)
        lost = need & homeless[requests][:, None]
        if lost.any():
            self._refuse(
                requests, top_k, lost, "the position is on the host, and the row has no hot region"
            )

    def _refuse(self, requests: I64, top_k: I64, where: Bools, why: str) -> None:
        i, j = (int(x[0]) for x in np.nonzero(where))
        raise InvariantViolation(
            "always_readable",
            f"row {requests[i]}, position {top_k[i, j]}, layer {self.layer}: {why}",
        )

    def _resolve_needed(
        self, requests: I64, spots: I64, need: Bools, first: Bools | None, physical: I64, step: int
    ) -> tuple[Wave, ...]:
        """Fill `physical` where `need`; returns the waves. Changes hot state."""
        ordinals = ordinals_of(requests)
        base, width = self._mark + 1, self.geometry.wave_rows
        self._mark += 1 + int(ordinals.max()) // width
        slots = self.hot_map[requests[:, None], spots]
        missed = (need & (slots < 0)).any(axis=1)
        hard = np.zeros(self.geometry.max_requests, dtype=np.bool_)
        hard[requests[missed]] = True  # a request with no miss in the call changes no slot's owner
        hard_rows = hard[requests]
        i, j = np.nonzero(need & ~hard_rows[:, None])
        if i.size:
            self.stamps.reshape(-1)[requests[i] * self.slots + slots[i, j]] = 2 * step + 1
            once = i.size if first is None else int(np.count_nonzero(first[i, j]))
            self.hits += once
            physical[i, j] = self._locate(requests[i], slots[i, j])
        touched = hard_rows & need.any(axis=1)
        copies: dict[int, list[tuple[I64, I64]]] = {}
        for ordinal in np.unique(ordinals[touched]):
            chosen = np.flatnonzero(touched & (ordinals == ordinal))
            wave = int(ordinal) // width
            made = self._resolve_round(
                chosen, requests, spots, need, first, physical, step, base + wave
            )
            if made is not None:
                copies.setdefault(wave, []).append(made)
        return _group_waves(ordinals // width, touched, copies)

    def _resolve_round(
        self,
        chosen: I64,
        requests: I64,
        spots: I64,
        need: Bools,
        first: Bools | None,
        physical: I64,
        step: int,
        mark: int,
    ) -> tuple[I64, I64] | None:
        """Resolve rows `chosen`, at most one a request; returns miss sources and destinations."""
        request, spot, wanted = requests[chosen], spots[chosen], need[chosen]
        at = request[:, None] * self.reach + spot
        flat_map = self.hot_map.reshape(-1)
        slot = flat_map[at]
        cold = wanted & (slot < 0)
        once = wanted if first is None else wanted & first[chosen]
        i, j = np.nonzero(wanted & ~cold)
        place = request[i] * self.slots + slot[i, j]
        self.stamps.reshape(-1)[place] = 2 * step + 1
        self.marks.reshape(-1)[place] = mark
        mi, mj = np.nonzero(cold & once)
        self.hits += int(np.count_nonzero(once)) - mi.size
        made = None
        if mi.size:
            victims = self._take_victims(request, mi, step, mark)
            owner, wanted_at = request[mi], spot[mi, mj]
            place = owner * self.slots + victims
            flat_positions = self.positions.reshape(-1)
            old = flat_positions[place]
            live = old >= 0
            flat_map[owner[live] * self.reach + old[live]] = NONE
            flat_positions[place] = wanted_at
            flat_map[owner * self.reach + wanted_at] = victims
            size = self.geometry.page_size
            page = wanted_at // size
            host = self.tables[Table.HOST][owner, page].astype(np.int64)
            self.misses += mi.size
            made = (host * size + (wanted_at - page * size), self._locate(owner, victims))
            slot = flat_map[at]
        wi, wj = np.nonzero(wanted)
        physical[chosen[wi], wj] = self._locate(request[wi], slot[wi, wj])
        return made

    def _take_victims(self, request: I64, owners: I64, step: int, mark: int) -> I64:
        """One victim slot for each miss; `owners` is ascending, an index into `request`."""
        fresh = np.ones(owners.size, dtype=np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=fresh[1:])
        line, start = np.cumsum(fresh) - 1, np.flatnonzero(fresh)
        rows = request[owners[start]]
        keys = self.stamps[rows]
        keys[self.marks[rows] == mark] = _PROTECTED
        order: I64 = np.argsort(keys, axis=1, kind="stable")
        victims: I64 = order[line, np.arange(owners.size) - start[line]]
        assert (keys[line, victims] != _PROTECTED).all(), "a wave uses more slots than there are"
        place = request[owners] * self.slots + victims
        self.stamps.reshape(-1)[place] = 2 * step
        self.marks.reshape(-1)[place] = mark
        return victims

    def _locate(self, requests: I64, slots: Any) -> I64:
        """Physical rows of hot slots, by the HOT table."""
        size = self.geometry.page_size
        entry = slots // size
        blocks = self.tables[Table.HOT][requests, entry].astype(np.int64)
        assert blocks.all(), "a hot slot in the null block"
        where: I64 = blocks * size + (slots - entry * size)
        return where


def _first_mask(spots: I64, valid: Bools | None) -> Bools | None:
    """Which entries are the first of their position in their row; None when all valid ones are."""
    if spots.shape[1] < 2:
        return None
    keys = spots if valid is None else np.where(valid, spots, -1 - np.arange(spots.shape[1]))
    ordered = np.sort(keys, axis=1)
    if not (ordered[:, 1:] == ordered[:, :-1]).any():
        return None
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    fresh = np.ones_like(keys, dtype=np.bool_)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.empty_like(fresh)
    np.put_along_axis(first, order, fresh, axis=1)
    return first


def _group_waves(
    wave_of: I64, touched: Bools, copies: dict[int, list[tuple[I64, I64]]]
) -> tuple[Wave, ...]:
    """Waves to replay. A wave without a copy is gathered with the one before it, and rows whose
    slots nobody takes in this call with the first."""
    begins = sorted(copies)
    if not begins or (len(begins) == 1 and begins[0] <= wave_of[touched].min()):
        return (Wave(None, *_join(copies[begins[0]] if begins else [])),)
    if begins[0] > 0:
        begins.insert(0, 0)
    group = np.where(touched, np.searchsorted(begins, wave_of, side="right") - 1, 0)
    return tuple(
        Wave(np.flatnonzero(group == index), *_join(copies.get(wave, [])))
        for index, wave in enumerate(begins)
    )


def _join(made: list[tuple[I64, I64]]) -> tuple[I64, I64]:
    if not made:
        return _NO_ROWS, _NO_ROWS
    if len(made) == 1:
        return made[0]
    return np.concatenate([m[0] for m in made]), np.concatenate([m[1] for m in made])


def _pad(
    physical: I64, valid: Bools | None, waves: tuple[Wave, ...], chosen: tuple[I64, I64] | None
) -> Plan:
    """Point padding at a readable row, so that the null block is never read."""
    if valid is None:
        return Plan(physical, None, False, waves, chosen)
    some = physical[valid]
    if some.size == 0:
        return Plan(np.zeros_like(physical), ~valid, True, waves, chosen)
    return Plan(np.where(valid, physical, some[0]), ~valid, False, waves, chosen)
