"""The lists that the driver's batched copy is given, carried out in host memory: no GPU needed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hisparse.device.cuda import copies
from hisparse.device.cuda.copies import PIECES_MAX, BatchedCopy, Side
from hisparse.errors import DeviceError


def carry_out(targets, sources, sizes, count, attributes, first, kinds, stream):
    lists = (targets, sources, sizes)
    words = ((ctypes.c_uint64 * count.value).from_address(x.value) for x in lists)
    for target, source, size in zip(*words, strict=True):
        ctypes.memmove(target, source, size)
    return 0


@pytest.mark.parametrize("pages, layers", [(64, 8), (1, 78), (509, 48), (PIECES_MAX + 3, 2)])
def test_each_layer_of_each_page_is_listed_once(pages, layers, monkeypatch):
    monkeypatch.setattr(copies, "_find_batch", lambda: (carry_out, False))
    rng = np.random.default_rng(pages)
    size, room = 16, pages + 5
    gpu = rng.integers(0, 256, (room, layers, size), dtype=np.uint8)
    host = rng.integers(0, 256, (layers, room, size), dtype=np.uint8)
    wanted = host.copy()
    blocks, hosts = (rng.permutation(room)[:pages] for _ in range(2))
    wanted[:, hosts] = gpu[blocks].swapaxes(0, 1)
    at, to = (ids.astype(np.uint64) * np.uint64(step) for ids, step in
              ((blocks, layers * size), (hosts, size)))  # fmt: skip
    sides = Side(gpu.ctypes.data, size), Side(host.ctypes.data, room * size)
    BatchedCopy().queue(sides[0], at, sides[1], to, layers, size, 0)
    assert np.array_equal(host, wanted)


def test_what_the_driver_refuses_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(copies, "_find_batch", lambda: (lambda *_: 1, False))
    one = np.zeros(1, dtype=np.uint64)
    with pytest.raises(DeviceError, match=r"1 pieces of 16 bytes: CUDA error 1 .*not pinned"):
        BatchedCopy().queue(Side(0, 0), one, Side(0, 0), one, 1, 16, 0)


def test_a_driver_without_it_is_an_error_that_says_which_has_it(monkeypatch):
    monkeypatch.setattr(copies, "_find_batch", lambda: None)
    with pytest.raises(DeviceError, match=r"needs CUDA 12\.8"):
        BatchedCopy()
