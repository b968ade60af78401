"""What a `State` takes, and who refuses it: before a log is begun that nobody would read again, and
where the machine has no memory for it. Owns nothing, makes no events."""

from __future__ import annotations

from hisparse.config import HiSparseConfig
from hisparse.errors import CapacityError
from hisparse.fsm.state import BLOCK_BYTES_MAX, State, state_bytes

MAX_STATE_BYTES = 1 << 30  # that a log's own configuration may ask for


def check_state(config: HiSparseConfig) -> None:
    """Raise CapacityError for a state that no reader of its log would make."""
    need, pools, schedule = state_bytes(config), config.pools, config.schedule
    if need > MAX_STATE_BYTES:
        raise CapacityError(
            f"log.mode='disk': the scheduler's state takes {need} B, and a log whose state takes "
            f"more than {MAX_STATE_BYTES} is not read again; {BLOCK_BYTES_MAX} of them each of "
            f"pools.gpu_blocks={pools.gpu_blocks}, of {config.host_pages} host pages and "
            f"{config.suffix_pages} pages of suffix.gib, the rest schedule.max_requests="
            f"{schedule.max_requests} times the pages of max_model_len={schedule.max_model_len}: "
            "lower what takes most, raise pools.page_size, or keep no log on disk"
        )


def fresh_state(config: HiSparseConfig) -> State:
    """``State(config)``. Raises CapacityError where this machine has no memory for it."""
    try:
        return State(config)
    except (MemoryError, ValueError) as error:  # of numpy: beyond all memory
        raise CapacityError(
            f"the scheduler's state of {state_bytes(config)} B does not fit this machine "
            f"({error}): lower pools.gpu_blocks={config.pools.gpu_blocks}, "
            f"pools.host_pool_gib={config.pools.host_pool_gib:g}, suffix.gib, "
            f"schedule.max_requests={config.schedule.max_requests} or policy.hot_rows="
            f"{config.policy.hot_rows}, or raise pools.page_size={config.pools.page_size}"
        ) from error
