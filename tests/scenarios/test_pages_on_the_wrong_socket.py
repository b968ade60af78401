"""G07: the pool is touched first by a thread on the other socket; pinned pages cannot move, and one
socket's GPUs are a third slower.

Here a pool has a placement, decided before the first touch: the GPU's node, bound, and touched by
threads on its CPUs; how much of it lies there is told.
"""

from __future__ import annotations

import mmap

import pytest

from hisparse.device.cuda import host_pages
from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.host_pages import near_gpu
from hisparse.device.host_limits import HostLimits

GPU, MIB, PAGE = "0000:CA:00.0", 1 << 20, mmap.PAGESIZE


class Driver:
    def register(self, address, size):
        pass

    def unregister(self, address):
        pass


@pytest.fixture
def host(tmp_path):
    """A host of two nodes whose GPU is on node 1; its files, and its limits."""
    for number, cpus in ((0, "0-3"), (1, "0-7")):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
    gpu = tmp_path / f"sys/bus/pci/devices/{GPU.lower()}"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    return tmp_path, HostLimits(None, (), (), None, {0: 64 * MIB, 1: 64 * MIB})


def test_the_node_of_the_gpu_is_chosen_and_said(host):
    root, limits = host
    placement = near_gpu(GPU, limits, MIB, root)
    assert placement.node == 1 and placement.cpus
    assert placement.why == f"node 1, next to GPU {GPU}"


def test_every_piece_is_bound_before_it_is_touched(host, monkeypatch):
    root, limits = host
    done = []
    monkeypatch.setattr(host_pages, "bind", lambda at, size, node: done.append(("bind", node)))
    touch = host_pages.populate
    monkeypatch.setattr(
        host_pages, "populate", lambda *a: (done.append(("touch", None)), touch(*a))
    )
    monkeypatch.setattr(host_pages, "run_on", lambda cpus: done.append(("run on", cpus)))
    placement = near_gpu(GPU, limits, MIB, root)
    memory = HostMemory(6 * PAGE, Driver(), piece_bytes=2 * PAGE, threads=1, placement=placement)
    memory.wait()
    memory.release()
    names = [name for name, _ in done]
    first_touch = names.index("touch")
    assert "bind" not in names[first_touch:] and names.count("touch") == 3
    assert ("run on", placement.cpus) in done[:first_touch]
    assert all(node == 1 for name, node in done if name == "bind")


def test_a_pool_that_reaches_beyond_its_node_says_so(host):
    root, limits = host
    assert "as far as its" in near_gpu(GPU, limits, 128 * MIB, root).why
