"""Whether the host pools of a node fit what may be pinned on it: the checks made at start.

Pure arithmetic on `HostLimits`; owns and reads nothing. `host_pool_gib` is capacity per replica:
the ranks of a replica share one pool or have one each, and a node may hold several replicas. A
refusal names each limit that does not hold, what it leaves, how to raise it, and a size that would
fit.

    check_node    all replicas and private ranks of the node, before the first pool is taken
    check_pool    one allocation, when it is made
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hisparse.config import GIB, HiSparseConfig
from hisparse.device.host_limits import HostLimits, gib
from hisparse.device.layout import Geometry
from hisparse.errors import CapacityError


@dataclass(frozen=True)
class Demand:
    """What the pools of a node come to.

    Args:
        host_pool_bytes: one host pool.
        suffix_pool_bytes: one CPU tier of indexer pages; every rank has its own.
        ranks: worker ranks of a replica on this node.
        replicas: data-parallel replicas on this node.
        replicas_here: those of them in this process's cgroup; None: all.
        shared: the ranks of a replica map one host pool; otherwise each has its own.
        standing_bytes: of all this, what is pinned already.
    """

    host_pool_bytes: int
    suffix_pool_bytes: int = 0
    ranks: int = 1
    replicas: int = 1
    replicas_here: int | None = None
    shared: bool = False
    standing_bytes: int = 0

    @property
    def pools(self) -> int:
        """Host pools of a replica."""
        return 1 if self.shared else self.ranks

    def total_bytes(self, replicas: int) -> int:
        suffix = self.ranks * self.suffix_pool_bytes
        return replicas * (self.pools * self.host_pool_bytes + suffix)

    def most_bytes(self, left_bytes: int, replicas: int) -> int:
        """The largest host pool with which `replicas` fit `left_bytes`; not above 0: none does."""
        suffix = replicas * self.ranks * self.suffix_pool_bytes
        return (left_bytes - suffix) // (replicas * self.pools)

    def told(self, replicas: int) -> str:
        """``2 replicas x 4 host pools of 24 GiB = 192 GiB``."""
        parts = f"{self.pools} host pool(s) of {gib(self.host_pool_bytes)}"
        if self.suffix_pool_bytes:
            parts = f"({parts} + {self.ranks} suffix pool(s) of {gib(self.suffix_pool_bytes)})"
        return f"{replicas} replica(s) x {parts} = {gib(self.total_bytes(replicas))}"


def check_node(
    config: HiSparseConfig,
    limits: HostLimits,
    *,
    ranks: int | None = None,
    replicas: int = 1,
    replicas_here: int | None = None,
    shared: bool = False,
    standing_bytes: int = 0,
) -> Demand:
    """The pools of all replicas and private ranks of the node, added up, against `limits`.

    For whoever starts them, before the first pool is taken. `ranks`: of a replica on this node,
    ``config.ranks`` if None; the others are those of `Demand`. Raises CapacityError with every
    limit that does not hold, and a ``pools.host_pool_gib`` with which all would.
    """
    geometry = Geometry.of(config)
    demand = Demand(
        host_pool_bytes=geometry.host_pool_bytes,
        suffix_pool_bytes=geometry.suffix_pool_bytes,
        ranks=config.ranks if ranks is None else ranks,
        replicas=replicas,
        replicas_here=replicas_here,
        shared=shared,
        standing_bytes=standing_bytes,
    )
    here = replicas if replicas_here is None else replicas_here
    reasons, fits = [], []
    for found, counted in ((limits.machine, replicas), (limits.cgroups, here)):
        for limit in found:
            left = limit.left_bytes + standing_bytes
            if demand.total_bytes(counted) > left:
                fits.append(demand.most_bytes(left, counted))
                reasons.append(f"{demand.told(counted)}, and {limit}: {limit.raise_it}")
    if reasons:
        raise refused("host pools of this node: ", reasons, min(fits))
    return demand


def check_pool(limits: HostLimits, size_bytes: int, what: str) -> None:
    """Raises CapacityError if machine or cgroups cannot hold `size_bytes` more, pinned."""
    over = [x for x in (*limits.machine, *limits.cgroups) if size_bytes > x.left_bytes]
    if over:
        reasons = [f"{limit}: {limit.raise_it}" for limit in over]
        start = f"{what}: {gib(size_bytes)} cannot be pinned: "
        raise refused(start, reasons, min(limit.left_bytes for limit in over))


def refused(start: str, reasons: list[str], most_bytes: int) -> CapacityError:
    """The error that gives `reasons`, and `most_bytes` as a size that would fit."""
    most = math.floor(max(most_bytes, 0) / GIB * 1000) / 1000
    fix = f"; or use pools.host_pool_gib={most:g}" if most else ""
    fixes = {"pools.host_pool_gib": most} if most else {}
    return CapacityError(start + "; ".join(reasons) + fix, fixes)


def suspects(limits: HostLimits, size_bytes: int) -> str:
    """Which limits leave less than `size_bytes`, memlock included, and how to raise each; for an
    error that the driver gave no reason for."""
    memlock = [limits.memlock] if limits.memlock is not None else []
    short = [
        f"{limit}: {limit.raise_it}"
        for limit in (*limits.machine, *limits.cgroups, *memlock)
        if limit.left_bytes < size_bytes
    ]
    return "; ".join(short) or f"no limit that is known explains it ({limits})"
