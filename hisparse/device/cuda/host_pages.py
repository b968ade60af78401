"""Pages of host memory: near the GPU where the kernel lets us, and there before they are pinned.

Owns no memory. System calls through ctypes (no libnuma), which also lets go of the interpreter's
lock, so that several threads fault pages in at once. Two ways to a NUMA node, both tried: ``mbind``
with MPOL_PREFERRED (a container's seccomp profile may refuse it), and first touch by threads that
run on the node's CPUs. Both prefer and neither insists: a full node lets pages go elsewhere, and
`share_on` tells where they lie.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hisparse.device.host_limits import HostLimits, gib, gpu_node, node_cpus
from hisparse.errors import DeviceError

_CALLS = {"x86_64": {"mbind": 237, "move_pages": 279}, "aarch64": {"mbind": 235, "move_pages": 239}}
_MPOL_PREFERRED = 1
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_CHUNK_BYTES = 8 << 20  # faulting in holds the process's mmap lock, 1 ms for 3 MiB of small pages
_SAMPLE_PAGES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Placement:
    """Where pages should lie: `node` and the CPUs that touch them first; None: anywhere."""

    node: int | None = None
    cpus: frozenset[int] = frozenset()
    why: str = "anywhere"


def near_gpu(
    pci_bus_id: str, limits: HostLimits, size_bytes: int, root: Path = Path("/")
) -> Placement:
    """The placement of `size_bytes` next to the GPU at `pci_bus_id`, or why there is none."""
    if len(limits.nodes) < 2:
        return Placement(why="one NUMA node is all that this process may use")
    node = gpu_node(pci_bus_id, root)
    if node is None:
        return Placement(why=f"the kernel names no NUMA node of GPU {pci_bus_id}")
    if node not in limits.nodes:
        return Placement(why=f"the cpuset of this process excludes node {node} of the GPU")
    cpus = node_cpus(node, root) & os.sched_getaffinity(0)
    why, free = f"node {node}, next to GPU {pci_bus_id}", limits.nodes[node]
    if free < size_bytes:
        why += f", as far as its {gib(free)} reach"
    return Placement(node, cpus, why)


def advise(memory: mmap.mmap) -> None:
    """Huge pages where the kernel has them (half the time to fault in and to pin), no copy for
    children (theirs would be copy on write, and move our pages from under the GPU), no core dump.
    """
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        memory.madvise(advice)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel built without them
            raise


def bind(address: int, size: int, node: int) -> str | None:
    """Prefer `node` for pages of the interval that are not there yet; None, or what refused it."""
    number = _CALLS.get(platform.machine(), {}).get("mbind")
    if number is None:
        return f"mbind is not known on {platform.machine()}"
    bits = 64 * (node // 64 + 1)
    mask = (ctypes.c_uint64 * (bits // 64))()
    mask[node // 64] = 1 << node % 64
    arguments = (number, address, size, _MPOL_PREFERRED, ctypes.addressof(mask), bits + 1, 0)
    if _libc.syscall(*(ctypes.c_long(argument) for argument in arguments)):
        return f"mbind: {errno.errorcode.get(ctypes.get_errno(), 'error')}"
    return None


def run_on(cpus: frozenset[int]) -> None:
    """Keep the calling thread on `cpus`, so that what it touches first lies there."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def populate(address: int, size: int, array: np.ndarray) -> None:
    """Fault in the whole pages ``[address, address + size)``, writable; `array` is that memory.

    Raises DeviceError with the kernel's name for what it refused.
    """
    for offset in range(0, size, _CHUNK_BYTES):
        part = min(_CHUNK_BYTES, size - offset)
        if not _libc.madvise(address + offset, part, _POPULATE_WRITE):
            continue
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # a kernel that knows the advice and cannot follow it
            raise DeviceError(f"madvise(MADV_POPULATE_WRITE): {os.strerror(code)}")
        array[offset : offset + part : mmap.PAGESIZE] = 0


def share_on(address: int, size: int, node: int) -> float | None:
    """Share of a sample of the interval's pages that lies on `node`; None if nobody tells."""
    number = _CALLS.get(platform.machine(), {}).get("move_pages")
    if number is None:
        return None
    pages = size // mmap.PAGESIZE
    sampled: Sequence[int] = range(0, pages, max(1, pages // _SAMPLE_PAGES))
    places = (ctypes.c_void_p * len(sampled))(*(address + i * mmap.PAGESIZE for i in sampled))
    status = (ctypes.c_int * len(sampled))()
    where, found = ctypes.addressof(places), ctypes.addressof(status)
    arguments = (number, 0, len(sampled), where, 0, found, 0)  # no nodes given: only asks
    if _libc.syscall(*(ctypes.c_long(argument) for argument in arguments)):
        return None
    return sum(held == node for held in status) / len(sampled)
