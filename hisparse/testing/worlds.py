"""Random worlds: the configuration and the workload of a simulation, drawn by seed.

Small on purpose, and under pressure: few blocks, few host pages, every policy, and a longest
request that cannot stay resident. In `tides` a few long requests stay while short ones squeeze them
and go, so that pages can come back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    SuffixConfig,
    check_capacity,
)
from hisparse.engine.trace import WorkloadRequest

EOS = 96  # never sampled: lengths are the workload's


HOST_SHARES = (1.3, 3.0, 10.0)
GPU_SHARES = (1.0, 1.5, 2.0, 4.0)
# Of the longest request: more than any world's window and hot region have. One of no more pages
# stays resident, and a world of such requests alone never spills.
PAGES_LEAST = 6


@dataclass(frozen=True, repr=False)
class World:
    """A small configuration in a few numbers. It shows only those that are not the smallest."""

    page_size: int = 2
    tokens_max: int = 24  # of the longest request
    requests_max: int = 4
    ranks: int = 1
    policy: str = "hybrid"
    write_back: Literal["eager", "on_pressure"] = "eager"
    on_copy_failure: Literal["rewind", "fail"] = "rewind"
    hot_rows: int = 4
    watermark_blocks: int = 0
    promote_pages: int = 0
    promote_after_steps: int = 1
    prefill_chunk: int = 4
    step_rows: int = 16
    lookahead_rows: int = 0
    gpu_share: float = 1.0  # GPU blocks, in the least that the longest request needs
    host_share: float = 1.3  # host pages, in pages of the longest request
    suffix_pages: int = 0  # of the CPU tier of indexer pages

    def __repr__(self) -> str:
        said = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return f"World({', '.join(f'{name}={v!r}' for name, v, least in said if v != least)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # in a failing example of Hypothesis too

    def config(self) -> HiSparseConfig:
        """Raises CapacityError for pools that do not hold one request."""
        least = self._sized(2).steady_blocks(self.tokens_max) + 1
        config = check_capacity(self._sized(int(least * self.gpu_share) + 1))
        return _with_suffix_pages(config, self.suffix_pages)

    def _sized(self, blocks: int) -> HiSparseConfig:
        stride = -(-self.page_size * 48 // 256) * 256
        host_pages = self.host_share * (-(-self.tokens_max // self.page_size) + 1)
        return HiSparseConfig(
            layout=ModelLayout(row_bytes=16, index_row_bytes=4, index_groups=((0, 1), (2,))),
            pools=PoolConfig(
                page_size=self.page_size,
                gpu_blocks=blocks,
                host_pool_gib=(int(host_pages) + 1) * stride / GIB,
            ),
            policy=PolicyConfig(
                name=self.policy,
                write_back=self.write_back,
                on_copy_failure=self.on_copy_failure,
                top_k=4,
                hot_rows=self.hot_rows,
                watermark_blocks=self.watermark_blocks,
                promote_pages=self.promote_pages,
                promote_after_steps=self.promote_after_steps,
            ),
            schedule=ScheduleConfig(
                max_requests=self.requests_max,
                max_model_len=self.tokens_max,
                prefill_chunk=self.prefill_chunk,
                step_rows=self.step_rows,
                lookahead_rows=self.lookahead_rows,
            ),
            ranks=self.ranks,
            checks="on",
        )


def random_config(rng: random.Random, tides: bool = False, spec: int = 0) -> HiSparseConfig:
    """A small world under pressure: few blocks, few host pages, every policy."""
    page_size, longest = rng.choice([2, 4, 8]), 64 if tides else rng.choice([24, 48])
    world = World(
        page_size=page_size,
        tokens_max=max(longest, PAGES_LEAST * page_size),
        write_back=rng.choice(["eager", "on_pressure"]),
        hot_rows=rng.choice([4, 8, 11]),
        watermark_blocks=rng.choice([0, 0, 3]),
        policy=rng.choice(["hybrid", "lru", "even"] + ["hybrid", "host_first"] * (not tides)),
        promote_pages=rng.choice([1, 4] if tides else [0, 1, 4]),
        promote_after_steps=rng.choice([1, 3, 8]),
        requests_max=8 if tides else rng.choice([4, 8]),
        prefill_chunk=rng.choice([4, 8, 16]),
        step_rows=rng.choice([16, 32]),
        lookahead_rows=spec,
    )
    if not tides:
        rng.choice(HOST_SHARES)  # not used: without it, every seed would be another world
    gpu_share = rng.choice([2, 3, 4] if tides else GPU_SHARES)
    host_share = 10.0 if tides else rng.choice(HOST_SHARES)
    return _no_larger_than_the_host(
        replace(world, gpu_share=gpu_share, host_share=host_share).config()
    )


def _no_larger_than_the_host(config: HiSparseConfig) -> HiSparseConfig:
    """The same world with no more GPU blocks than host pages, of which admission asks for a
    request's too: more would never be full."""
    least = config.steady_blocks(config.schedule.max_model_len) + 1
    blocks = min(config.pools.gpu_blocks, max(least, config.host_pages))
    pools = config.pools.model_copy(update={"gpu_blocks": blocks})
    return check_capacity(config.model_copy(update={"pools": pools}))


def with_suffix(config: HiSparseConfig, rng: random.Random) -> HiSparseConfig:
    """The same world, in two cases of three with a CPU tier of indexer pages, small or large."""
    return _with_suffix_pages(config, rng.choice([0, rng.randrange(2, 30), 400]))


def _with_suffix_pages(config: HiSparseConfig, pages: int) -> HiSparseConfig:
    if not pages:
        return config
    suffix = SuffixConfig(name="cpu", gib=(pages + 0.5) * config.index_page_bytes / GIB)
    return check_capacity(config.model_copy(update={"suffix": suffix}))


def random_workload(
    rng: random.Random, longest: int, n: int, tides: bool = False
) -> list[WorkloadRequest]:
    """Requests over a few shared prefixes, arriving in bursts; or in `tides`: a few long ones stay
    while short ones squeeze them and go, so that pages can come back."""
    stems = [[rng.randrange(EOS) for _ in range(longest)] for _ in range(2)]
    work, now_ms = [], 0.0
    for i in range(n):
        total = rng.randrange(2, longest + 1)
        prompt = rng.randrange(1, total)
        if tides:
            total, prompt = (longest, 4) if i % 5 == 0 else (total // 2 + 2, total // 2 + 1)
        shared = rng.randrange(prompt + 1) if rng.random() < 0.8 else 0
        tokens = rng.choice(stems)[:shared] + [rng.randrange(EOS) for _ in range(prompt - shared)]
        now_ms += (200 if i % 5 == 4 else 0) if tides else rng.choice([0, 0, 10, 60])
        work.append(
            WorkloadRequest(f"q{i}", now_ms, np.array(tokens, dtype=np.int64), total - prompt)
        )
    return work


class Workload:
    """Requests without end over a few shared prefixes; in `tides`, one in five is as long as may be
    and stays, and short ones squeeze it and go. Ids are `name` and a number."""

    def __init__(
        self, rng: random.Random, longest: int, tides: bool = False, name: str = "q"
    ) -> None:
        self.rng = rng
        self.longest = longest
        self.tides = tides
        self.name = name
        self.stems = [[rng.randrange(EOS) for _ in range(longest)] for _ in range(2)]
        self.made = 0

    def next(self, now_ms: float, *, greedy: bool = False) -> WorkloadRequest:
        """The next one, which arrives now; a `greedy` one is as long as may be."""
        rng, longest = self.rng, self.longest
        total = longest if greedy else rng.randrange(2, longest + 1)
        prompt = rng.randrange(1, total)
        if self.tides and not greedy:
            stays = self.made % 5 == 0
            total, prompt = (longest, 4) if stays else (total // 2 + 2, total // 2 + 1)
        shared = rng.randrange(prompt + 1) if rng.random() < 0.8 else 0
        tokens = rng.choice(self.stems)[:shared]
        tokens = tokens + [rng.randrange(EOS) for _ in range(prompt - shared)]
        self.made += 1
        name = f"{self.name}{self.made}"
        return WorkloadRequest(name, now_ms, np.array(tokens, dtype=np.int64), total - prompt)
