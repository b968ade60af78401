"""Page copies on a real GPU: every byte of both pools, far offsets, long lists, a held stream."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest

from hisparse.device.cuda.copies import PAGES_MAX, PIECES_MAX, WAYS
from hisparse.device.layout import Geometry
from hisparse.errors import UsageError

pytestmark = pytest.mark.gpu

BY = {"copy engine": (), "kernel": WAYS, "as chosen": ("to gpu", "in gpu")}
HOLD = r"""
extern "C" __global__ void hold(const volatile int* flag, long long cycles) {
  const long long start = clock64();
  while (*flag == 0 && clock64() - start < cycles) {}
}
"""
HELD_MAX = 2_000_000_000  # cycles, about a second: a full queue would wait for ever


def geometry(
    row_bytes=656, layers=8, page_size=64, gpu_blocks=40, host_pages=50, index_row_bytes=132
):
    page = page_size * row_bytes
    groups = tuple((i,) for i in range(0, layers, 3))
    index = page_size * index_row_bytes * len(groups)
    return Geometry(
        page_size=page_size,
        layers=layers,
        groups=groups,
        row_bytes=row_bytes,
        index_row_bytes=index_row_bytes,
        gpu_blocks=gpu_blocks,
        block_bytes=layers * page,
        host_pages=host_pages,
        index_pages=layers * page // index,
        max_requests=1,
        max_pages=1,
        max_index_blocks=1,
        hot_blocks=1,
        hot_rows=1,
        top_k=1,
        suffix_pages=30,
    )


class Pools:
    """Both tiers and the suffix pool with random bytes, and the same in plain numpy."""

    def __init__(self, shape, by_kernel=(), seed=0, random=True):
        import cupy

        from hisparse.device.cuda.copies import PageCopies

        self.cupy, self.geometry = cupy, shape
        self.rng = np.random.default_rng(seed)
        self.host, self.suffix = (
            self.pinned(size) for size in (shape.host_pool_bytes, shape.suffix_pool_bytes)
        )
        self.gpu = cupy.zeros((shape.gpu_pool_bytes,), cupy.uint8)
        if random:
            self.host[:] = self.bytes(self.host.size)
            self.suffix[:] = self.bytes(self.suffix.size)
            self.gpu.set(self.bytes(self.gpu.size))
        self.copies = PageCopies(shape, self.gpu, self.host, self.suffix, by_kernel=by_kernel)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:  # a kernel's first launch waits for the device: not on a held stream
            self.copies.restore([1], [1])
        self.stream.synchronize()

    def bytes(self, size):
        return self.rng.integers(0, 256, size, dtype=np.uint8)

    def pinned(self, size):
        memory = self.cupy.cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size)

    def snapshot(self):
        """Copies of the pools as arrays by what a page is: [block, layer], [layer, page], ..."""
        self.cupy.cuda.runtime.deviceSynchronize()
        g = self.geometry
        gpu = self.gpu.get().reshape(g.gpu_blocks, g.block_bytes)
        used = g.index_pages * g.index_page_bytes
        return (
            gpu,
            gpu.reshape(g.gpu_blocks, g.layers, g.page_bytes),
            gpu[:, :used].reshape(g.gpu_blocks, len(g.groups), g.index_pages, -1)
            if used
            else gpu[:, :0],
            self.host.copy().reshape(g.layers, g.host_pages, g.page_bytes),
            self.suffix.copy().reshape(g.suffix_pages, len(g.groups), -1),
        )

    def check(self, wanted):
        for got, want in zip(self.snapshot(), wanted, strict=True):
            assert np.array_equal(got, want)

    def some(self, limit, n, first=1):
        return first + self.rng.permutation(limit - first)[:n]

    @contextmanager
    def held(self, stream):
        """A stream that does nothing until the block ends (or `HELD_MAX` is over)."""
        flag = self.pinned(4).view(np.int32)
        flag[0] = 0
        address = np.uint64(flag.ctypes.data)
        with stream:
            self.cupy.RawKernel(HOLD, "hold")((1,), (1,), (address, np.int64(HELD_MAX)))
        try:
            yield
        finally:
            flag[0] = 1


@pytest.mark.parametrize("by_kernel", BY.values(), ids=BY)
@pytest.mark.parametrize("shape", [(576, 8, 16), (656, 8, 64), (1152, 3, 64), (656, 78, 4)])
def test_every_byte_of_random_pages_goes_both_ways_and_no_other_byte_changes(shape, by_kernel):
    pools = Pools(geometry(*shape), by_kernel)
    g = pools.geometry
    for _ in range(4):
        _, gpu, _, host, _ = wanted = pools.snapshot()
        blocks, hosts = (pools.some(limit, 20) for limit in (g.gpu_blocks, g.host_pages))
        host[:, hosts[:10]] = gpu[blocks[:10]].swapaxes(0, 1)
        gpu[blocks[10:]] = host[:, hosts[10:]].swapaxes(0, 1)
        with pools.stream:
            pools.copies.spill(blocks[:10], hosts[:10].tolist())
            pools.copies.restore(hosts[10:], tuple(blocks[10:]))
        pools.check(wanted)


@pytest.mark.parametrize("by_kernel", BY.values(), ids=BY)
@pytest.mark.parametrize("index_row_bytes", [132, 130])
def test_indexer_pages_go_to_the_suffix_pool_and_back_and_to_other_slots(
    by_kernel, index_row_bytes
):
    """Pages of 130-byte rows are not whole 16-byte chunks: the copy engine moves them all."""
    pools = Pools(geometry(576, 9, 4, index_row_bytes=index_row_bytes), by_kernel)
    g = pools.geometry
    for _ in range(4):
        _, _, index, _, suffix = wanted = pools.snapshot()
        places = pools.some(g.gpu_blocks * g.index_pages, 40, g.index_pages)
        blocks, slots = places // g.index_pages, places % g.index_pages
        suffixes = pools.some(g.suffix_pages, 20)
        suffix[suffixes[:10]] = index[blocks[:10], :, slots[:10]]
        index[blocks[10:20], :, slots[10:20]] = suffix[suffixes[10:]]
        index[blocks[20:30], :, slots[20:30]] = index[blocks[30:], :, slots[30:]]
        with pools.stream:
            pools.copies.store_index(blocks[:10], slots[:10], suffixes[:10])
            pools.copies.load_index(suffixes[10:], blocks[10:20], slots[10:20])
            pools.copies.copy_index(blocks[30:], slots[30:], blocks[20:30], slots[20:30])
        pools.check(wanted)


@pytest.mark.parametrize("by_kernel", BY.values(), ids=BY)
def test_lists_longer_than_a_launch_or_a_batch_may_change_while_the_copies_wait(by_kernel):
    n = 2 * PAGES_MAX + 5
    shape = geometry(16, 17, 4, gpu_blocks=n + 9, host_pages=n + 20)
    assert n * shape.layers > PIECES_MAX
    pools = Pools(shape, by_kernel)
    _, gpu, _, host, _ = wanted = pools.snapshot()
    blocks, hosts = pools.some(shape.gpu_blocks, n), pools.some(shape.host_pages, n)
    host[:, hosts] = gpu[blocks].swapaxes(0, 1)
    with pools.held(pools.stream), pools.stream:
        pools.copies.spill(blocks, hosts)
        blocks[:], hosts[:] = 1, 1
        pools.copies.restore([2], [3])
    gpu[3] = host[:, 2]
    pools.check(wanted)


def test_offsets_beyond_32_bits_name_the_right_bytes():
    shape = geometry(gpu_blocks=13_000, host_pages=13_000)
    assert shape.host_pool_bytes > 1 << 32 < shape.gpu_pool_bytes
    pools = Pools(shape, random=False)
    gpu = pools.gpu.reshape(shape.gpu_blocks, shape.layers, shape.page_bytes)
    host = pools.host.reshape(shape.layers, shape.host_pages, shape.page_bytes)
    for by_kernel in BY.values():
        copies = type(pools.copies)(shape, pools.gpu, pools.host, by_kernel=by_kernel)
        page = pools.bytes(shape.block_bytes).reshape(shape.layers, shape.page_bytes)
        gpu[12_999] = pools.cupy.asarray(page)
        host[:, 12_998], host[:, 12_999] = page[::-1], 0
        pools.cupy.cuda.runtime.deviceSynchronize()
        with pools.stream:
            copies.spill([12_999], [12_999])
            copies.restore([12_998], [12_997])
        pools.stream.synchronize()
        assert np.array_equal(host[:, 12_999], page)
        assert np.array_equal(gpu[12_997].get(), page[::-1])


@pytest.mark.parametrize("by_kernel", BY.values(), ids=BY)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "edges cut"])
def test_a_spill_lies_between_the_last_writer_and_the_next_and_both_edges_are_needed(
    ordered, by_kernel
):
    """Both cut: the copy, whose stream is free, reads what was there before the last writer."""
    pools = Pools(geometry(), by_kernel)
    compute, d2h = pools.stream, pools.cupy.cuda.Stream(non_blocking=True)
    block = pools.gpu.reshape(40, 8, -1)[5]
    first = pools.host.reshape(8, 50, -1)[:, 3]
    block.fill(1)  # its kernel is loaded now, for the same reason
    pools.cupy.cuda.runtime.deviceSynchronize()
    with pools.held(compute):
        with compute:
            block.fill(0x11)  # the last writer, queued behind what holds the stream
            written = compute.record()
        if ordered:
            d2h.wait_event(written)
        with d2h:
            pools.copies.spill([5], [3])
            copied = d2h.record()
        if ordered:
            compute.wait_event(copied)
        with compute:
            block.fill(0x22)  # the next owner of the block
        if not ordered:
            d2h.synchronize()
    pools.cupy.cuda.runtime.deviceSynchronize()
    assert (block.get() == 0x22).all()
    assert (first == 0x11).all() == ordered


def test_the_first_version_of_the_drivers_call_copies_too(monkeypatch):
    from hisparse.device.cuda import copies

    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        pytest.skip("the driver has no batched copy")
    monkeypatch.setattr(copies, "_find_batch", lambda: (driver.cuMemcpyBatchAsync, True))
    pools = Pools(geometry())
    _, gpu, _, host, _ = wanted = pools.snapshot()
    host[:, [4, 2]] = gpu[[7, 9]].swapaxes(0, 1)
    with pools.stream:
        pools.copies.spill([7, 9], [4, 2])
    pools.check(wanted)


def test_what_cannot_be_copied_is_refused_and_nothing_is_queued():
    pools = Pools(geometry())
    wanted, copies = pools.snapshot(), pools.copies
    with pools.stream:
        for call, lists, message in (
            (copies.spill, ([1, 2], [3]), "lists of 2 and 1 pages"),
            (copies.spill, ([1, 0], [3, 4]), r"blocks \[1, 0\]: a list of ids in 1..39"),
            (copies.restore, ([50], [4]), r"hosts \[50\]: a list of ids in 1..49"),
            (copies.load_index, ([30], [4], [0]), r"suffixes \[30\]"),
            (copies.store_index, ([3], [-1], [3]), r"slots \[-1\]: a list of ids in 0.."),
            (copies.copy_index, ([3], [0, 1], [4], [0]), "lists of 1 and 2"),
        ):
            with pytest.raises(UsageError, match=message):
                call(*lists)
        copies.spill([], [])
    pools.check(wanted)
