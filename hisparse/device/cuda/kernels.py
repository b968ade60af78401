"""The one seam through which CUDA C++ becomes something to launch.

Owns no memory. Sources are package data below ``kernels/``; sizes are compile-time constants, so a
module is compiled for each set of sizes and each architecture, by CuPy, which keeps what it made on
disk (``CUPY_CACHE_DIR``, ``~/.cupy/kernel_cache`` by default) under a key of source, options,
architecture, NVRTC's version and its own. `source` gives it the whole text, own headers included,
so the key sees all that is compiled but the headers of the toolkit. CuPy is imported where it is
used: a machine without a GPU can import this module, and its CI compiles the same sources with the
same options.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from hisparse.config import HiSparseConfig, ceil_div
from hisparse.device.cuda.waves import most_lines
from hisparse.errors import ConfigError, DeviceError

THREADS = 1024  # a block; fewer were slower (see docs)
CALLS_MAX = 64  # resolve calls of one index group in one step
CALL_ALIGNMENT = 256  # bytes, of calls that are cut from one memory
SLOTS_MAX = 16 * THREADS  # sixteen a thread, in registers
OPTIONS = ("-std=c++17",)  # of sources that know no sizes
SOURCES = files("hisparse.device.cuda") / "kernels"


@dataclass(frozen=True)
class ResolveSizes:
    """What the resolve kernels are compiled for.

    Args:
        page_size: tokens a page.
        top_k: positions that a row selects.
        hot_rows: slots of a request's hot region.
        pages: entries of the page tables that a request may use.
        row_bytes: bytes of a row in one layer, a multiple of 16.
        block_rows: rows from one block of the packed pool to the next.

    Raises ConfigError for sizes that the kernels cannot hold.
    """

    page_size: int
    top_k: int
    hot_rows: int
    pages: int
    row_bytes: int
    block_rows: int

    def __post_init__(self) -> None:
        if self.row_bytes % 16:
            whole = ceil_div(self.row_bytes, 16) * 16
            raise ConfigError(
                f"layout.row_bytes={self.row_bytes}: the cuda backend moves rows in pieces of 16 "
                f"bytes, use {whole}",
                {"layout.row_bytes": whole},
            )
        if self.top_k > SLOTS_MAX:
            raise ConfigError(
                f"policy.top_k={self.top_k}: the cuda backend takes at most {SLOTS_MAX}, use "
                "policy.top_k and policy.hot_rows of no more",
                {"policy.top_k": SLOTS_MAX, "policy.hot_rows": SLOTS_MAX},
            )
        if not self.top_k <= self.hot_rows <= SLOTS_MAX:
            near = max(self.top_k, min(self.hot_rows, SLOTS_MAX))
            raise ConfigError(
                f"policy.hot_rows={self.hot_rows}: the cuda backend takes {self.top_k} (top_k) "
                f"to {SLOTS_MAX}, use {near}",
                {"policy.hot_rows": near},
            )

    @classmethod
    def of(cls, config: HiSparseConfig) -> ResolveSizes:
        return cls(
            page_size=config.pools.page_size,
            top_k=config.policy.top_k,
            hot_rows=config.policy.hot_rows,
            pages=config.max_pages,
            row_bytes=config.layout.row_bytes,
            block_rows=config.block_bytes // config.layout.row_bytes,
        )

    @property
    def reach(self) -> int:
        """Positions of a request."""
        return self.pages * self.page_size

    @property
    def hot_blocks(self) -> int:
        return ceil_div(self.hot_rows, self.page_size)

    @property
    def stride(self) -> int:
        """Slots from one request's hot state to the next: whole words of four."""
        return ceil_div(self.hot_rows, 4) * 4

    @property
    def map_stride(self) -> int:
        return self.reach + 8

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: ``Shared`` of ``resolve.cu``."""
        slots = 4 * ceil_div(self.hot_rows, 4 * THREADS) * THREADS
        table = 4
        while table < 2 * self.top_k:
            table *= 2
        pages = self.pages + 1 if self.pages <= 4 * THREADS else 1  # of each staged table
        victims = ceil_div(self.top_k, 2) * 4
        warps = THREADS // 32
        words = 2 * table + 2 * pages + self.hot_blocks + 3 * warps + 1
        return 4 * words + 2 * table + 3 * slots + victims

    def check_block(self, limit_bytes: int) -> None:
        """Raise ConfigError for sizes that one block cannot plan for, on a GPU that gives it
        `limit_bytes` of shared memory."""
        if self.hot_blocks > THREADS:
            least = ceil_div(self.hot_rows, THREADS)
            raise ConfigError(
                f"policy.hot_rows={self.hot_rows} is {self.hot_blocks} blocks of pools.page_size="
                f"{self.page_size}, the cuda backend takes {THREADS}: use a pools.page_size of at "
                f"least {least}",
                {"pools.page_size": least},
            )
        if self.shared_bytes > limit_bytes:
            fixes = self._fitting(limit_bytes)
            use = " and ".join(f"{field}={most}" for field, most in fixes.items())
            raise ConfigError(
                f"policy.top_k={self.top_k} and policy.hot_rows={self.hot_rows} take "
                f"{self.shared_bytes} bytes of shared memory in a block, this GPU has "
                f"{limit_bytes}: use {use or 'another GPU'}",
                fixes,
            )

    def _fitting(self, limit_bytes: int) -> dict[str, int]:
        """What to change so that `limit_bytes` is enough: the most of top_k, then of hot_rows."""

        def most(least: int, limit: int, size: Callable[[int], ResolveSizes]) -> int:
            values = range(least, limit + 1)
            fit = bisect_right(values, limit_bytes, key=lambda n: size(n).shared_bytes)
            return values[fit - 1] if fit else 0

        top_k = most(1, self.top_k, lambda n: replace(self, top_k=n, hot_rows=n))
        if not top_k:
            return {}
        hot_rows = most(top_k, self.hot_rows, lambda n: replace(self, top_k=top_k, hot_rows=n))
        fixes = {} if top_k == self.top_k else {"policy.top_k": top_k}
        return fixes | ({} if hot_rows == self.hot_rows else {"policy.hot_rows": hot_rows})

    def state_bytes(self, requests: int, layers: int) -> int:
        """Replacement state of a leader: what a `CudaResolver` takes on the device, and keeps."""
        slot = 4 + 2 + 1  # its position, its place in the order, its group
        return requests * (2 * self.map_stride + slot * self.stride + 4) + 8 * layers

    def call_bytes(self, rows: int) -> int:
        """Buffers of one resolve call of `rows` rows: a new `ResolveCall`. In a step of fixed shape
        the engine's own arrays take the place of 4 bytes a row and 4 a selected entry."""
        selected = 4 + 4 + 16  # a position, where it is, the miss
        return rows * (selected * self.top_k + 4 + 8)

    def arena_bytes(self, rows: int, requests: int) -> int:
        """Room for all waves of any call of up to `rows` rows of up to `requests` requests, in a
        step without a fixed shape: what a `CallArena` is made of."""
        width = self.hot_rows // self.top_k
        lines, waves = most_lines(rows, requests, width), ceil_div(rows, width)
        return self.call_bytes(lines) + waves * CALL_ALIGNMENT

    def options(self) -> tuple[str, ...]:
        """Compiler options, the same for CuPy and for nvcc."""
        sizes = {
            "THREADS": THREADS,
            "PAGE": self.page_size,
            "TOPK": self.top_k,
            "HOT": self.hot_rows,
            "REACH": self.reach,
            "ROW_BYTES": self.row_bytes,
            "BLOCK_ROWS": self.block_rows,
            "CALLS": CALLS_MAX,
        }
        return (*OPTIONS, *(f"-D{name}={value}" for name, value in sizes.items()))


def resolve_memory(config: HiSparseConfig) -> dict[str, int]:
    """GPU memory beside the pools, known before any is taken: to be left out of what pools get.

    `cuda_state_bytes`: replacement state of all leaders, what the worker's ``state_bytes`` will
    say. `cuda_call_bytes`: what the resolve calls of steps without a fixed shape are cut from, an
    arena for each group that is `open_at_once`; each fixed shape keeps its own, which is not
    counted. Zeros without a host tier; CuPy rounds each array up to 512.

    Raises ConfigError for sizes that the kernels cannot hold.
    """
    groups = config.layout.index_groups
    if not config.offload:
        return {"cuda_state_bytes": 0, "cuda_call_bytes": 0}
    sizes, requests = ResolveSizes.of(config), config.schedule.max_requests
    return {
        "cuda_state_bytes": sum(sizes.state_bytes(requests, len(layers)) for layers in groups),
        "cuda_call_bytes": open_at_once(groups)
        * sizes.arena_bytes(config.schedule.step_rows, requests),
    }


def open_at_once(groups: Sequence[Sequence[int]]) -> int:
    """Of index groups, layers of each, how many have a call open at once, where a model's layers
    come in order: a leader's call is open until the last layer of its group has copied out."""
    spans = [(min(layers), max(layers)) for layers in groups]
    return max(sum(first <= at <= last for first, last in spans) for at, _ in spans)


def source(name: str) -> str:
    """A kernel source as one text, its own headers put in their places."""
    text = (SOURCES / name).read_text(encoding="utf-8")
    lines = []
    for line in text.splitlines():
        own = line.startswith('#include "')
        lines.append(source(line.split('"')[1]) if own else line)
    return "\n".join(line for line in lines if line != "#pragma once") + "\n"


def require_cupy() -> Any:
    """CuPy with a usable device. Raises DeviceError that says what is missing."""
    try:
        import cupy
    except ImportError:
        raise DeviceError(
            "the cuda backend needs CuPy: install 'hisparse[cuda12]' or 'hisparse[cuda13]'"
        ) from None
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"the cuda backend found no usable GPU: {error}") from error
    if not found:
        raise DeviceError("the cuda backend found no GPU: CUDA_VISIBLE_DEVICES may hide it")
    return cupy


@cache
def load(name: str, sizes: ResolveSizes | None = None) -> Any:
    """The compiled module of source `name` for `sizes`, if it knows any, for the current device.

    Raises DeviceError with what the compiler said.
    """
    cupy = require_cupy()
    options = OPTIONS if sizes is None else sizes.options()
    try:
        module = cupy.RawModule(code=source(name), options=options, backend="nvrtc")
        module.compile()
    except cupy.cuda.compiler.CompileException as error:
        raise DeviceError(f"{name} did not compile for {sizes}: {error}") from error
    return module
