"""World: how small a world is that is explored to its end, and what it offers.

Requests are all alike, so that they can be renamed: as many pages each, the same prompt length, and
the first `shared_pages` pages with the same content. A request that has ended may come again, any
number of times, under its old name: what bounds a run is that states repeat, not a counter. Only
what no scheduler can do anything about is counted: crashes, and copies that fail.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from hisparse.config import (
    GIB,
    HOST_ALIGNMENT_BYTES,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.errors import CapacityError
from hisparse.kv import policies

PAGE_ROWS = 2  # rows a page: the least at which a page can be begun and not be whole
Content = tuple[int, int]  # request number (-1: shared by all), page


class World(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Sizes of a world; blocks and pages count without the null one."""

    requests: int = 2
    blocks: int = 2  # of the GPU pool
    host_pages: int = 2
    transfers: int = 2  # in flight at once; what would plan another does not happen meanwhile
    ranks: int = 2
    crashes: int = 1  # of ranks, in one run
    failures: int = 0  # copies that fail, in one run
    faults: int = 1  # of both together
    pages: int = 1  # of a request at its longest
    shared_pages: int = 1  # of its prompt
    unretired_steps: int = 0  # that the scheduler knows of no end of, when it plans another
    policy: str = "hybrid"
    write_back: Literal["eager", "on_pressure"] = "eager"
    watermark: int = 0

    @property
    def max_tokens(self) -> int:
        return self.pages * PAGE_ROWS

    @property
    def prompt_tokens(self) -> int:
        """All but the last row: a request decodes one token."""
        return self.max_tokens - 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f"q{number}" for number in range(self.requests))

    @cached_property
    def config(self) -> HiSparseConfig:
        """What scheduler and ranks agree on. Raises CapacityError and ConfigError, which name the
        sizes that are given here."""
        policies.resolve(self.policy)
        layout = ModelLayout(row_bytes=32, index_row_bytes=8, index_groups=((0,),))
        policy = PolicyConfig(
            name=self.policy,
            write_back=self.write_back,
            top_k=1,
            hot_rows=1,
            watermark_blocks=self.watermark,
            promote_pages=1,
            promote_after_steps=1,
        )
        schedule = ScheduleConfig(
            max_requests=self.requests,
            max_model_len=self.max_tokens,
            prefill_chunk=PAGE_ROWS,
            step_rows=PAGE_ROWS,
        )
        config = HiSparseConfig(
            layout=layout,
            pools=PoolConfig(
                page_size=PAGE_ROWS,
                gpu_blocks=self.blocks + 1,
                host_pool_gib=(self.host_pages + 1) * HOST_ALIGNMENT_BYTES / GIB,
            ),
            policy=policy,
            schedule=schedule,
            ranks=self.ranks,
            checks="on",
        )
        self._check_holds_one(config)
        return config

    def _check_holds_one(self, config: HiSparseConfig) -> None:
        """`config.check_capacity`, in the sizes of a world."""
        blocks, host_pages = config.steady_blocks(self.max_tokens), config.max_pages
        fixes: dict[str, object] = {}
        if self.blocks < blocks:
            fixes["blocks"] = blocks
        if config.offload and self.host_pages < host_pages:
            fixes["host_pages"] = host_pages
        if fixes:
            told = [
                f"{name}={getattr(self, name)} cannot hold one request of pages={self.pages}: "
                f"use at least {least}"
                for name, least in fixes.items()
            ]
            raise CapacityError("; ".join(told), fixes)

    def page_hash(self, number: int, page: int) -> bytes:
        """Hash of a page of request `number`; its content, and that of all before it."""
        owner = -1 if page < min(self.shared_pages, self.prompt_tokens // PAGE_ROWS) else number
        return f"{owner}/{page}".encode()

    @cached_property
    def contents(self) -> dict[bytes, Content]:
        """What each hash stands for."""
        found: dict[bytes, Content] = {}
        for number in range(self.requests):
            for page in range(self.pages):
                page_hash = self.page_hash(number, page)
                found[page_hash] = (int(page_hash.split(b"/")[0]), page)
        return found
