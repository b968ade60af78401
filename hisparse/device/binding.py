"""Set-up: bind the packed allocations to views, and build what attention will hold.

Owns nothing afterwards. Binding attaches storage; which layers form an index group comes from the
config, never from the order of the packed bytes. Followers get no resolver here, so their
replacement state does not exist by the time GPU memory is profiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.device.backend import Array, Device
from hisparse.device.handle import HiSparseCacheHandle, IndexCache, PagedCacheView
from hisparse.device.layout import Geometry, check_disjoint_views
from hisparse.device.runtime import HiSparseRuntime, IndexGroup
from hisparse.device.tables import DeviceTables


@dataclass(frozen=True)
class BoundCache:
    """One rank's cache: handles by layer, the index cache, and the pools as single views."""

    handles: tuple[HiSparseCacheHandle, ...]
    groups: tuple[IndexGroup, ...]
    index: IndexCache
    blocks: PagedCacheView
    host: tuple[PagedCacheView, ...]
    suffix: tuple[PagedCacheView, ...]  # one a group; none without a CPU tier of indexer pages


def bind_cache(
    geometry: Geometry,
    device: Device,
    tables: DeviceTables,
    gpu_pool: Array,
    host_pool: Array,
    suffix_pool: Array | None = None,
) -> BoundCache:
    """Views of the pools and a handle a layer. Raises InvariantViolation ``disjoint_views``."""
    assert gpu_pool.size == geometry.gpu_pool_bytes, (gpu_pool.size, geometry)
    assert host_pool.size == geometry.host_pool_bytes, (host_pool.size, geometry)
    layers = range(geometry.layers)
    resident = [
        PagedCacheView(gpu_pool, geometry.resident_span(i), f"resident, layer {i}") for i in layers
    ]
    host = [PagedCacheView(host_pool, geometry.host_span(i), f"host, layer {i}") for i in layers]
    index = [
        PagedCacheView(gpu_pool, geometry.index_span(g), f"index group {g}")
        for g in range(len(geometry.groups))
    ]
    suffix = [
        PagedCacheView(suffix_pool, geometry.suffix_span(g), f"suffix, index group {g}")
        for g in range(len(geometry.groups))
        if suffix_pool is not None
    ]
    for views in (resident, host, index, suffix):
        check_disjoint_views(views)
    groups = tuple(IndexGroup(g, members) for g, members in enumerate(geometry.groups))
    handles: dict[int, HiSparseCacheHandle] = {}
    for group in groups:
        for layer in group.layers:
            leads = layer == group.layers[0]
            resolver = device.kernels.make_resolver(geometry, tables, layer) if leads else None
            runtime = HiSparseRuntime(
                layer, group, resident[layer], host[layer], resolver, device, geometry
            )
            handles[layer] = HiSparseCacheHandle(layer, resident[layer], runtime, device, tables)
    whole = geometry.resident_span(0)
    blocks = PagedCacheView(
        gpu_pool,
        type(whole)(0, geometry.block_bytes, geometry.gpu_blocks, 1, geometry.block_bytes),
        "whole blocks",
    )
    return BoundCache(
        tuple(handles[i] for i in layers),
        groups,
        IndexCache(index, device, tables),
        blocks,
        tuple(host),
        tuple(suffix),
    )
