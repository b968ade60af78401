"""Statistics: occupancy of the pools at one moment. Pure."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from hisparse.config_packing import Footprint
from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.state import State
from hisparse.kv.budget import spare
from hisparse.kv.host_pool import extents_held
from hisparse.kv.packing import held_footprint


def statistics(state: State) -> dict[str, int]:
    """Requests, blocks, pages, and over all live requests: GPU bytes needed, held and padded
    (`kv.packing`), and the extents of their host pages (``host_extents / requests_live`` is the
    mean, 1 is best)."""
    extents = extents_held(state)
    live = np.flatnonzero(state.rows.live).tolist()
    bytes_now = sum((held_footprint(state, row) for row in live), Footprint(0, 0))
    return {
        "seq": state.seq,
        "step": state.step,
        "requests_live": int(state.rows.live.sum()),
        "requests_waiting": len(state.waiting),
        "requests_draining": len(state.draining),
        "transfers_in_flight": len(state.transfers),
        "gpu_blocks_used": state.config.pools.gpu_blocks - 1 - state.blocks.available,
        "gpu_blocks_cached": state.blocks.cached.count,
        "gpu_blocks_spare": spare(state),
        "host_pages_used": len(state.pages.state) - 1 - state.pages.available,
        "host_pages_published": len(state.prefix),
        "gpu_bytes_needed": bytes_now.needed_bytes,
        "gpu_bytes_held": bytes_now.held_bytes,
        "gpu_bytes_padded": bytes_now.padded_bytes,
        "host_extents": sum(extents),
        "host_extents_worst": max(extents, default=0),
        "suffix_pages_stored": len(state.suffix_index),
    }


def pool_statistics(state: State) -> dict[str, dict[str, int]]:
    """Of each pool: its ids without the null one, how many of them are in each state of their
    machine, and how many a reservation could have at once."""
    suffix = state.suffix  # without a CPU tier it has no page, not even a null one
    return {
        "gpu_pool": _by_state(state.blocks.state[1:], BlockState, state.blocks.available),
        "host_pool": _by_state(state.pages.state[1:], PageState, state.pages.available),
        "suffix_pool": _by_state(
            suffix.state[1:], PageState, suffix.free.count + suffix.evictable.count
        ),
    }


def _by_state(
    states: npt.NDArray[np.uint8], kinds: type[enum.IntEnum], available: int
) -> dict[str, int]:
    counts = np.bincount(states, minlength=len(kinds)).tolist()
    by_name = {kind.name.lower(): counts[kind] for kind in kinds}
    return {"ids": len(states), "available": available} | by_name
