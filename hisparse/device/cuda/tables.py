"""A command's resets and table updates as one launch (``kernels/tables.cu``).

`pack_changes` is numpy and makes no device call. Where a command gives one entry several ids, the
device has to know the first (to compare with what is there), the last (to write it), and whether
the ids between, which were never there, named something: that is what one after the other would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hisparse.device.cuda.kernels import SLOTS_MAX, ResolveSizes, load
from hisparse.fsm.wire import SparseKVOffloadCommand, Table

if TYPE_CHECKING:
    from hisparse.device.cuda.device import CudaDevice

THREADS = 1024
_IN_BETWEEN = 256  # flag beside a change's table
_TABLES = (Table.RESIDENT, Table.HOST, Table.INDEX, Table.HOT)  # enum Table of tables.cu
_BEGIN = np.dtype(
    [(name, np.uint64) for name in ("rows", "starts", "resets", "changes")]
    + [("tables", np.uint64, 4), ("strides", np.int32, 4), ("entries", np.int32, 4)]
    + [(name, np.uint64) for name in ("leaders", "arrived", "step")]
    + [(name, np.int32) for name in ("rows_count", "leaders_count", "number")]
    + [(name, np.int32) for name in ("page_size", "hot_rows", "stride", "map_stride", "reach")]
    + [("sums", np.uint64), ("sums_stride", np.uint64)],
    align=True,
)  # struct Begin


@dataclass(frozen=True)
class Changes:
    """A command's changes by request row: int32 `rows` ``[r]``, `starts` ``[r + 1]``, `resets`
    ``[r]``, and `changes` ``[m, 4]`` of (table and flag, entry, first id, last id)."""

    rows: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    resets: npt.NDArray[np.int32]
    changes: npt.NDArray[np.int32]

    def packed(self) -> npt.NDArray[np.int32]:
        """All of it, `changes` first, where their 16 bytes are aligned."""
        return np.concatenate([self.changes.ravel(), self.rows, self.starts, self.resets])


def pack_changes(command: SparseKVOffloadCommand) -> Changes:
    """What `command` does to the tables."""
    updates = [update for update in command.tables if update.ids]
    sizes = [len(update.ids) for update in updates]
    count = sum(sizes)
    owners = np.repeat(np.array([u.row for u in updates], dtype=np.int64), sizes)
    changes = np.empty((count, 4), dtype=np.int32)
    if count:
        tables = [_TABLES.index(Table(update.table)) for update in updates]
        changes[:, 0] = np.repeat(np.array(tables), sizes)
        changes[:, 1] = np.concatenate([np.arange(u.entry, u.entry + len(u.ids)) for u in updates])
        changes[:, 2] = changes[:, 3] = np.concatenate([u.ids for u in updates])
        owners, changes = _merge(owners, changes)
    resets = np.array(sorted(set(command.resets)), dtype=np.int64)
    rows = np.union1d(owners, resets)
    return Changes(
        rows.astype(np.int32),
        np.append(np.searchsorted(owners, rows), len(owners)).astype(np.int32),
        np.isin(rows, resets).astype(np.int32),
        changes,
    )


def _merge(
    owners: npt.NDArray[np.int64], changes: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """By row, table and entry; several changes of one entry become one."""
    order = np.lexsort((changes[:, 1], changes[:, 0], owners))  # stable: as the command has them
    owners, changes = owners[order], changes[order]
    same = (owners[1:] == owners[:-1]) & (changes[1:, :2] == changes[:-1, :2]).all(axis=1)
    if not same.any():
        return owners, changes
    begins = np.flatnonzero(np.r_[True, ~same])
    ends = np.r_[begins[1:], len(owners)] - 1
    left = np.zeros(len(owners), dtype=np.int64)
    left[1:] = same & (changes[1:, 3] != changes[:-1, 3]) & (changes[:-1, 3] != 0)
    merged = changes[begins]
    merged[:, 3] = changes[ends, 3]
    merged[:, 0] += _IN_BETWEEN * (np.add.reduceat(left, begins) > 0)
    return owners[begins], merged


class TableWriter:
    """Launches `hisparse_begin` for one set of tables and its leaders' hot state.

    Args:
        tables: int32 ``[requests, entries]`` of each `wire.Table`; from row to row may be more.
        states: (map, positions, order, group) of each leader, none without a host tier.
        step: int32 ``[1]``, the step under way.
        sums: row checksums uint32 ``[requests, ...]``, or None.
    """

    def __init__(
        self,
        device: CudaDevice,
        sizes: ResolveSizes,
        tables: Mapping[Table, Any],
        states: Sequence[tuple[Any, Any, Any, Any]],
        step: Any,
        sums: Any = None,
    ) -> None:
        cupy, self._device = device.cupy, device
        self._kernel = load("tables.cu").get_function("hisparse_begin")
        self._shared_bytes = 2 * sizes.hot_rows
        self._kernel.max_dynamic_shared_size_bytes = 2 * SLOTS_MAX
        self._arrived = cupy.zeros((len(tables[Table.HOT]),), cupy.int32)
        addresses = [[array.data.ptr for array in state] for state in states]
        self._leaders = cupy.asarray(np.array(addresses, dtype=np.uint64).reshape(-1, 4))
        self._held = (tables, states, step, sums)  # their addresses are in what follows
        made = self._begin = np.zeros(1, _BEGIN)
        for i, table in enumerate(_TABLES):
            made["tables"][0, i] = tables[table].data.ptr
            made["strides"][0, i] = tables[table].strides[0] // 4
            made["entries"][0, i] = tables[table].shape[1]
        made["leaders"], made["leaders_count"] = self._leaders.data.ptr, len(states)
        made["arrived"], made["step"] = self._arrived.data.ptr, step.data.ptr
        made["page_size"], made["hot_rows"] = sizes.page_size, sizes.hot_rows
        made["stride"], made["map_stride"] = sizes.stride, sizes.map_stride
        made["reach"] = sizes.reach
        if sums is not None:
            made["sums"], made["sums_stride"] = sums.data.ptr, sums[0].size

    def begin(self, command: SparseKVOffloadCommand) -> None:
        """Queue the command's changes and its step number on compute: one launch."""
        self.queue(pack_changes(command), command.step)

    def queue(self, changes: Changes, step: int) -> None:
        """Queue `changes` and the step's number on compute: one launch."""
        made, rows = self._begin, len(changes.rows)
        at = self._device.compute.staging.put(changes.packed())
        for name, size in (
            ("changes", changes.changes.size),
            ("rows", rows),
            ("starts", rows + 1),
            ("resets", rows),
        ):
            made[name] = at
            at += 4 * size
        made["rows_count"], made["number"] = rows, step
        grid = (max(rows, 1), max(int(made["leaders_count"][0]), 1) if rows else 1)
        self._device.launch(self._kernel, grid, THREADS, (made[0].copy(),), self._shared_bytes)
