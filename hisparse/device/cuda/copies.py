"""`PageCopies`: whole pages between the tiers, many of them and all their layers in one call.

Owns no memory that is copied; owns the lists of a call. Every copy is queued on the current CuPy
stream and is over when that stream has passed it; nothing here synchronises, and nothing is
allocated for a call. A list may be of any length, and may be changed as soon as the call returns.

    spill, store_index      GPU block -> host page, suffix page      [d2h]
    restore, load_index     host page, suffix page -> GPU block      [h2d]
    copy_index              GPU block -> GPU block                   [compute]

Pages go to the host by the copy engine, in the driver's batched copy (CUDA 12.8 or later): it costs
running kernels nothing, where a kernel that stores to host memory holds up all others. Pages come
back by a kernel of few blocks, since compute waits for them and a launch is queued in less time
than a batch; the same kernel copies between GPU blocks (docs/cuda.md has the figures). A way that
cannot go as it should, for want of a batched copy or of whole 16-byte chunks, goes the other way.

The CPU may read a host page once its copy was acknowledged as COMPLETED, until a command says to
write it; what is queued by now `HiSparseWorker.host_writes` tells apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.device.cuda.kernels import load, require_cupy
from hisparse.device.layout import NULL, Geometry
from hisparse.errors import ConfigError, DeviceError, UsageError

PAGES_MAX = 252  # of a launch: its parameters hold 4096 bytes
PIECES_MAX = 8192  # listed at a time; a page in one layer is a piece
PIECES_AT_ONCE = 256  # of a driver call: the first ones are moved while the others are queued
WAYS = ("to host", "to gpu", "in gpu")
_THREADS = 256
_BLOCKS = {"to host": 2, "to gpu": 8, "in gpu": 64}  # of the kernel
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_ATTRIBUTES = np.dtype(
    [(name, np.uint32) for name in ("order", "from", "from_id", "to", "to_id", "flags")]
)  # CUmemcpyAttributes
_PAGES = np.dtype(
    [(name, np.uint64) for name in ("source", "target", "source_stride", "target_stride")]
    + [(name, np.uint32) for name in ("chunks", "layers", "pages", "unused")]
    + [("offset", np.uint64, (PAGES_MAX, 2))]
)  # struct Pages of copy.cu
U64 = npt.NDArray[np.uint64]
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Side:
    """Where the pieces of a page lie: layer i's is `stride` * i bytes after layer 0's, which is as
    far from `address` as the page's offset says."""

    address: int
    stride: int


@cache
def _find_batch() -> tuple[Any, bool] | None:
    """The driver's batched copy, and whether it wants a place for the index of what failed (as the
    first version did). None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for name, wants_index in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True)):
        if hasattr(driver, name):
            return getattr(driver, name), wants_index
    return None


def has_batched_copy() -> bool:
    """Whether the driver has a batched copy."""
    return _find_batch() is not None


class BatchedCopy:
    """The driver's batched copy, with its lists. Raises DeviceError if the driver has none."""

    def __init__(self) -> None:
        found = _find_batch()
        if found is None:
            raise DeviceError("the driver has no batched copy: it needs CUDA 12.8 or later")
        self._call, self._wants_index = found
        self._sources, self._targets, self._sizes = np.zeros((3, PIECES_MAX), dtype=np.uint64)
        self._attributes = np.zeros(1, dtype=_ATTRIBUTES)
        self._attributes["order"], self._attributes["flags"] = _STREAM_ORDER, _BESIDE_COMPUTE
        self._first = np.zeros(1, dtype=np.uint64)  # all pieces have attributes 0

    def queue(
        self, source: Side, at: U64, target: Side, to: U64, layers: int, size: int, stream: int
    ) -> None:
        """Copy `size` bytes of each of `layers` of each page, in any order among themselves.

        Layer after layer: what is on its way at a time then lies in one layer's part of the host
        pool, and address translation keeps up (page after page it is a tenth slower).
        """
        self._sizes.fill(size)
        step = np.arange(layers, dtype=np.uint64)
        from_layers = np.uint64(source.address) + step * np.uint64(source.stride)
        to_layers = np.uint64(target.address) + step * np.uint64(target.stride)
        for first in range(0, len(at), PIECES_MAX):
            pages = slice(first, first + PIECES_MAX)
            most = PIECES_MAX // len(at[pages])
            for layer in range(0, layers, most):
                some = slice(layer, layer + most)
                shape = (len(step[some]), len(at[pages]))
                count = shape[0] * shape[1]
                sources, targets = (
                    x[:count].reshape(shape) for x in (self._sources, self._targets)
                )
                np.add.outer(from_layers[some], at[pages], out=sources)
                np.add.outer(to_layers[some], to[pages], out=targets)
                for begin in range(0, count, PIECES_AT_ONCE):
                    self._queue(begin, min(PIECES_AT_ONCE, count - begin), stream)

    def _queue(self, begin: int, count: int, stream: int) -> None:
        lists = (self._targets, self._sources, self._sizes)
        failed = ctypes.c_size_t(0)
        result = self._call(
            *(ctypes.c_void_p(array.ctypes.data + 8 * begin) for array in lists),
            ctypes.c_size_t(count),
            ctypes.c_void_p(self._attributes.ctypes.data),
            ctypes.c_void_p(self._first.ctypes.data),
            ctypes.c_size_t(1),
            *((ctypes.byref(failed),) if self._wants_index else ()),
            ctypes.c_void_p(stream),
        )
        if result:
            raise DeviceError(
                f"the driver refused a copy of {count} pieces of {self._sizes[0]} bytes: CUDA "
                f"error {result} (201: no context on this thread, 1: host memory that is not "
                "pinned, or a piece over the border of two registrations)"
            )


class PageCopies:
    """Copies of one rank's pages.

    Args:
        geometry: where pages lie in the pools.
        gpu_pool: uint8 ``[gpu_pool_bytes]`` on the device.
        host_pool: uint8 ``[host_pool_bytes]``, numpy over pinned memory that the device reaches at
            its host address. No piece (a page in one layer) may lie over two registrations.
        suffix_pool: uint8 ``[suffix_pool_bytes]`` likewise, where there is a CPU tier of indexer
            pages; there a piece is a page in one group.
        by_kernel: the ways, of `WAYS`, that go by the kernel where both can.

    Raises DeviceError without CuPy or a GPU, ConfigError for pieces that the kernel cannot move
    where there is no batched copy. Methods raise UsageError for lists of different lengths and for
    ids that are null or not in the geometry, with nothing queued; DeviceError if the driver refuses
    a copy.
    """

    def __init__(
        self,
        geometry: Geometry,
        gpu_pool: Any,
        host_pool: npt.NDArray[np.uint8],
        suffix_pool: npt.NDArray[np.uint8] | None = None,
        *,
        by_kernel: Collection[str] = ("to gpu", "in gpu"),
    ) -> None:
        self._cupy = require_cupy()
        self.geometry = g = geometry
        self._batch = BatchedCopy() if has_batched_copy() else None
        self._kernel = load("copy.cu").get_function("hisparse_copy")
        self._arguments = np.zeros(1, dtype=_PAGES)
        self._index_bytes = g.page_size * g.index_row_bytes  # of a page in one group
        gpu = int(gpu_pool.__cuda_array_interface__["data"][0])
        host = int(host_pool.ctypes.data)
        self._gpu, self._host = Side(gpu, g.page_bytes), Side(host, g.host_pages * g.page_bytes)
        self._index = Side(gpu, g.index_pages * self._index_bytes)
        suffix = 0 if suffix_pool is None else int(suffix_pool.ctypes.data)
        self._suffix = Side(suffix, self._index_bytes)
        odd = [n for n in (g.page_bytes, self._index_bytes, g.block_bytes) if n % 16]
        if odd and self._batch is None:
            raise ConfigError(
                f"layout.row_bytes, layout.index_row_bytes: pieces of {odd} bytes; without the "
                "driver's batched copy (CUDA 12.8) they must be multiples of 16"
            )
        self._by_kernel = frozenset(() if odd else by_kernel if self._batch else WAYS)

    # -- the tiers ---------------------------------------------------------------------------------
    def spill(self, blocks: Ids, hosts: Ids) -> None:
        """All layers of each GPU block to its host page."""
        at, to = self._blocks(blocks), self._hosts(hosts)
        self._copy_rows("to host", self._gpu, at, self._host, to)

    def restore(self, hosts: Ids, blocks: Ids) -> None:
        """All layers of each host page to its GPU block."""
        at, to = self._hosts(hosts), self._blocks(blocks)
        self._copy_rows("to gpu", self._host, at, self._gpu, to)

    def store_index(self, blocks: Ids, slots: Ids, suffixes: Ids) -> None:
        """All groups of the indexer page in each slot of a GPU block to its suffix page."""
        at, to = self._slots(blocks, slots), self._suffixes(suffixes)
        self._copy_index("to host", self._index, at, self._suffix, to)

    def load_index(self, suffixes: Ids, blocks: Ids, slots: Ids) -> None:
        """All groups of each suffix page to its slot of a GPU block."""
        at, to = self._suffixes(suffixes), self._slots(blocks, slots)
        self._copy_index("to gpu", self._suffix, at, self._index, to)

    def copy_index(self, sources: Ids, source_slots: Ids, blocks: Ids, slots: Ids) -> None:
        """All groups of an indexer page to another slot, an entry a page. No page that is written
        may be another entry's source."""
        at, to = self._slots(sources, source_slots), self._slots(blocks, slots)
        self._copy_index("in gpu", self._index, at, self._index, to)

    # -- offsets of pages, in bytes ----------------------------------------------------------------
    def _blocks(self, blocks: Ids) -> U64:
        g = self.geometry
        return _offsets("blocks", blocks, NULL + 1, g.gpu_blocks, g.block_bytes)

    def _hosts(self, hosts: Ids) -> U64:
        return _offsets(
            "hosts", hosts, NULL + 1, self.geometry.host_pages, self.geometry.page_bytes
        )

    def _suffixes(self, suffixes: Ids) -> U64:
        g = self.geometry
        return _offsets("suffixes", suffixes, NULL + 1, g.suffix_pages, g.index_page_bytes)

    def _slots(self, blocks: Ids, slots: Ids) -> U64:
        at = self._blocks(blocks)
        within = _offsets("slots", slots, 0, self.geometry.index_pages, self._index_bytes)
        _check_lengths(at, within)
        return at + within

    # -- queueing ----------------------------------------------------------------------------------
    def _copy_rows(self, way: str, source: Side, at: U64, target: Side, to: U64) -> None:
        self._copy(way, source, at, target, to, self.geometry.layers, self.geometry.page_bytes)

    def _copy_index(self, way: str, source: Side, at: U64, target: Side, to: U64) -> None:
        self._copy(way, source, at, target, to, len(self.geometry.groups), self._index_bytes)

    def _copy(
        self, way: str, source: Side, at: U64, target: Side, to: U64, layers: int, size: int
    ) -> None:
        _check_lengths(at, to)
        if not len(at):
            return
        if way in self._by_kernel:
            self._launch(_BLOCKS[way], source, at, target, to, layers, size)
        else:
            assert self._batch is not None, way
            stream = self._cupy.cuda.get_current_stream().ptr
            self._batch.queue(source, at, target, to, layers, size, stream)

    def _launch(
        self, blocks: int, source: Side, at: U64, target: Side, to: U64, layers: int, size: int
    ) -> None:
        made = self._arguments
        made["source"], made["source_stride"] = source.address, source.stride
        made["target"], made["target_stride"] = target.address, target.stride
        made["chunks"], made["layers"] = size // 16, layers
        for first in range(0, len(at), PAGES_MAX):
            pages = at[first : first + PAGES_MAX]
            made["pages"] = len(pages)
            made["offset"][0, : len(pages), 0] = pages
            made["offset"][0, : len(pages), 1] = to[first : first + PAGES_MAX]
            self._kernel((blocks,), (_THREADS,), (made[0],))


def _offsets(what: str, ids: Ids, first: int, limit: int, size: int) -> U64:
    """Bytes of each id's place. Raises UsageError for an id outside ``[first, limit)``."""
    array = np.asarray(ids, dtype=np.int64)
    if array.ndim != 1 or (array.size and not first <= array.min() <= array.max() < limit):
        raise UsageError(f"{what} {list(ids)[:8]}: a list of ids in {first}..{limit - 1}")
    return array.astype(np.uint64) * np.uint64(size)


def _check_lengths(at: U64, to: U64) -> None:
    if len(at) != len(to):
        raise UsageError(f"lists of {len(at)} and {len(to)} pages: each page has one target")
