"""Statistics: occupancy of both pools at one moment. Pure."""

from __future__ import annotations

import numpy as np

from hisparse.config_packing import Footprint
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
