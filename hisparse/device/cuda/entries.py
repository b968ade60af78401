"""Launches over a call's selected entries (``kernels/rows.cu``), on the current stream.

Each takes the worker that it is for, and what the kernel reads and writes; none keeps anything.
`owner` names the layer in a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.device.cuda.arrays import address
from hisparse.device.handle import PagedCacheView
from hisparse.fsm.wire import Table

if TYPE_CHECKING:
    from hisparse.device.cuda.plan import CudaPlan, Part
    from hisparse.device.cuda.resolver import ResolveCall
    from hisparse.device.cuda.state import WorkerState


def check_selection(worker: WorkerState, plan: CudaPlan, owner: str) -> None:
    """A token selects itself and what lies before it; anything else is a fault."""
    kernels, faults = worker.kernels, worker.device.faults
    rows, positions = kernels.placed(plan.rows)
    n, k = plan.top_k.shape
    kernels.launch(
        "check_selection",
        n * k,
        *(address(rows), address(positions), address(plan.top_k), np.int32(n)),
        *(np.int32(k), np.int32(worker.sizes.reach), faults.code(owner), faults.address),
        threads_a_unit=1,
    )


def check_rows(worker: WorkerState, plan: CudaPlan, hot: PagedCacheView, owner: str) -> None:
    """The rows at ``plan.places`` are what was written, and there is one for each position."""
    kernels, faults = worker.kernels, worker.device.faults
    rows, _ = kernels.placed(plan.rows)
    n, k = plan.top_k.shape
    kernels.launch(
        "check_rows",
        n * k,
        *(kernels.view(hot), address(rows), address(plan.top_k), address(plan.places)),
        *(np.int32(n), np.int32(k), faults.code(owner), faults.address),
        kernels.checks(worker, hot),
    )


def locate(worker: WorkerState, plan: CudaPlan, owner: str) -> None:
    """``plan.places`` of the tokens that need no resolve."""
    kernels, faults = worker.kernels, worker.device.faults
    rows, _ = kernels.placed(plan.rows)
    k = plan.top_k.shape[1]
    kernels.launch(
        "locate",
        plan.looked_up_count * k,
        *(kernels.table(worker.tables[Table.RESIDENT]), address(rows)),
        *(address(plan.top_k), address(plan.looked_up), np.int32(plan.looked_up_count)),
        *(np.int32(k), np.int32(worker.geometry.page_size), np.int32(worker.sizes.block_rows)),
        *(address(plan.places), faults.code(owner), faults.address),
        threads_a_unit=1,
    )


def pack(worker: WorkerState, plan: CudaPlan, part: Part) -> None:
    """A wave's selections, as its resolve reads them."""
    call, width = part.call, worker.sizes.top_k
    worker.kernels.launch(
        "pack",
        call.lines * width,
        *(address(plan.top_k), address(part.tokens), np.int32(call.lines)),
        *(np.int32(plan.top_k.shape[1]), np.int32(width), address(call.top_k)),
        threads_a_unit=1,
    )


def unpack(worker: WorkerState, plan: CudaPlan, part: Part) -> None:
    """A wave's answers into ``plan.places``, where its tokens have them."""
    call, k = part.call, plan.top_k.shape[1]
    worker.kernels.launch(
        "unpack",
        call.lines * k,
        *(address(call.out), address(part.tokens), np.int32(call.lines)),
        *(np.int32(k), np.int32(worker.sizes.top_k), address(plan.places)),
        threads_a_unit=1,
    )


def add_misses(worker: WorkerState, plan: CudaPlan, call: ResolveCall) -> None:
    """Misses of a call to ``plan.misses``, by request row."""
    worker.kernels.launch(
        "add_misses",
        call.lines,
        *(address(call.rows), address(call.count), np.int32(call.lines)),
        *(np.int32(call.span), address(plan.misses)),
        threads_a_unit=1,
    )


def gather(
    worker: WorkerState,
    plan: CudaPlan,
    part: Part | None,
    hot: PagedCacheView,
    out: Any,
    owner: str,
    seen: Any,
) -> None:
    """Rows of a wave, or of the tokens that need no resolve (None), to `out`, uint8 ``[n, k,
    row_bytes]``; `seen` (None: not counted) gets resident and host-backed entries."""
    kernels, faults = worker.kernels, worker.device.faults
    rows, _ = kernels.placed(plan.rows)
    k = plan.top_k.shape[1]
    if part is None:
        places, width, tokens, lines = plan.places, k, plan.looked_up, plan.looked_up_count
    else:
        places, width, tokens = part.call.out, worker.sizes.top_k, part.tokens
        lines = part.call.lines
    kernels.launch(
        "gather",
        lines * k,
        *(kernels.view(hot), kernels.table(worker.tables[Table.RESIDENT])),
        *(address(rows), address(plan.top_k), address(places), address(tokens)),
        *(np.int32(lines), np.int32(k), np.int32(width), np.int32(part is None)),
        *(np.int32(worker.geometry.page_size), address(out)),
        *(faults.code(owner), faults.address),
        *(kernels.checks(worker, hot), address(seen)),
    )
