"""Random worlds: the configuration and the workload of a simulation, drawn by seed.

Small on purpose, and under pressure: few blocks, few host pages, every policy. In `tides` a few
long requests stay while short ones squeeze them and go, so that pages can come back.
"""

from __future__ import annotations

import random

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


def random_config(rng: random.Random, tides: bool = False, spec: int = 0) -> HiSparseConfig:
    """A small world under pressure: few blocks, few host pages, every policy."""
    layout = ModelLayout(row_bytes=16, index_row_bytes=4, index_groups=((0, 1), (2,)))
    page_size, longest = rng.choice([2, 4, 8]), 64 if tides else rng.choice([24, 48])
    page_bytes = page_size * 48
    stride = -(-page_bytes // 256) * 256
    pages = -(-longest // page_size)
    policy = PolicyConfig(
        write_back=rng.choice(["eager", "on_pressure"]),
        top_k=4,
        hot_rows=rng.choice([4, 8, 11]),
        watermark_blocks=rng.choice([0, 0, 3]),
        name=rng.choice(["hybrid", "lru", "even"] + ["hybrid", "host_first"] * (not tides)),
        promote_pages=rng.choice([1, 4] if tides else [0, 1, 4]),
        promote_after_steps=rng.choice([1, 3, 8]),
    )
    schedule = ScheduleConfig(
        max_requests=8 if tides else rng.choice([4, 8]),
        max_model_len=longest,
        prefill_chunk=rng.choice([4, 8, 16]),
        step_rows=rng.choice([16, 32]),
        lookahead_rows=spec,
    )

    def sized(blocks: int) -> HiSparseConfig:
        host_pages = (10 if tides else rng.choice([1.3, 3, 10])) * (pages + 1)
        return HiSparseConfig(
            layout=layout,
            pools=PoolConfig(
                page_size=page_size,
                gpu_blocks=blocks,
                host_pool_gib=(int(host_pages) + 1) * stride / GIB,
            ),
            policy=policy,
            schedule=schedule,
            checks="on",
        )

    least = sized(2).steady_blocks(longest) + 1
    return check_capacity(
        sized(int(least * rng.choice([2, 3, 4] if tides else [1, 1.5, 2, 4])) + 1)
    )


def with_suffix(config: HiSparseConfig, rng: random.Random) -> HiSparseConfig:
    """The same world, in two cases of three with a CPU tier of indexer pages, small or large."""
    pages = rng.choice([0, rng.randrange(2, 30), 400])
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
    and stays, and short ones squeeze it and go."""

    def __init__(self, rng: random.Random, longest: int, tides: bool = False) -> None:
        self.rng = rng
        self.longest = longest
        self.tides = tides
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
        name = f"q{self.made}"
        return WorkloadRequest(name, now_ms, np.array(tokens, dtype=np.int64), total - prompt)
