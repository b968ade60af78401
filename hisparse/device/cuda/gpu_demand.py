"""Whether a GPU has room for the pool and for what the worker takes beside it: checked at start.

Pure arithmetic on `GpuRoom`; owns and reads nothing. The pool is what `pools.gpu_blocks` says;
beside it are the replacement state and the calls of `kernels.resolve_memory`, and with checks on
the checksums of rows. Results of ops, graphs and an engine's own memory are not counted: what
passes here can still be too much. A refusal names the fields, their values, what is free, and the
most blocks that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.config import HiSparseConfig, ceil_div
from hisparse.device.checks import checksum_bytes
from hisparse.device.cuda.kernels import resolve_memory
from hisparse.device.host_limits import gib
from hisparse.device.layout import Geometry
from hisparse.errors import CapacityError

MAPPED_BYTES = 2 << 20  # the driver maps memory in whole multiples


@dataclass(frozen=True)
class GpuRoom:
    """Bytes of GPU `name` that are free, of how many, and of those in use what torch's allocator
    holds for nobody (cached)."""

    name: str
    free_bytes: int
    total_bytes: int
    cached_bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.name} has {gib(self.free_bytes)} free of {gib(self.total_bytes)}"
        if self.cached_bytes:
            text += f" (torch.cuda.empty_cache() may free {gib(self.cached_bytes)} more)"
        return text


def demand_bytes(config: HiSparseConfig) -> int:
    """The pool, as it is mapped, and what is beside it."""
    mapped = ceil_div(Geometry.of(config).gpu_pool_bytes, MAPPED_BYTES) * MAPPED_BYTES
    return mapped + _beside_bytes(config)


def _beside_bytes(config: HiSparseConfig) -> int:
    return sum(resolve_memory(config).values()) + checksum_bytes(Geometry.of(config)).taken


def check_gpu(config: HiSparseConfig, room: GpuRoom) -> None:
    """Raises CapacityError if `room` cannot hold what `config` asks for."""
    total = demand_bytes(config)
    if total <= room.free_bytes:
        return
    left = max(room.free_bytes - _beside_bytes(config), 0)
    most = left // MAPPED_BYTES * MAPPED_BYTES // config.block_bytes
    least = config.steady_blocks(config.schedule.max_model_len) + 1
    beside, schedule, policy = resolve_memory(config), config.schedule, config.policy
    checks = gib(checksum_bytes(Geometry.of(config)).taken)
    text = (
        f"pools.gpu_blocks={config.pools.gpu_blocks} of {config.block_bytes} B are "
        f"{gib(Geometry.of(config).gpu_pool_bytes)}; replacement state (schedule.max_requests="
        f"{schedule.max_requests}, schedule.max_model_len={schedule.max_model_len}, "
        f"policy.hot_rows={policy.hot_rows}) is {gib(beside['cuda_state_bytes'])}, resolve calls "
        f"(schedule.step_rows={schedule.step_rows}, policy.top_k={policy.top_k}) "
        f"{gib(beside['cuda_call_bytes'])}, row checksums (checks={config.checks!r}) {checks}: "
        f"{gib(total)}, and {room}: free memory there"
    )
    if most >= least:
        fix = f", or use pools.gpu_blocks={most}, less what the engine takes later"
        raise CapacityError(text + fix, {"pools.gpu_blocks": most})
    raise CapacityError(
        f"{text}, or lower schedule.max_requests or schedule.max_model_len: the {most} blocks that "
        f"are left cannot hold one request, which takes {least}"
    )
