"""Configuration: the whole, of sections that refuse bad input (`hisparse.config_sections`).

Nothing here does I/O (`HiSparseConfig.load` asks a module that does) or imports torch. Derived
sizes (block bytes, pages per block, pool counts) are computed once, here, so that scheduler and
worker cannot disagree about them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hisparse.config_sections import (
    LogConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    Section,
    SuffixConfig,
)
from hisparse.errors import CapacityError

__all__ = [
    "GIB",
    "HOST_ALIGNMENT_BYTES",
    "RESIDENT",
    "HiSparseConfig",
    "LogConfig",
    "ModelLayout",
    "PolicyConfig",
    "PoolConfig",
    "ScheduleConfig",
    "SuffixConfig",
    "ceil_div",
    "check_capacity",
    "check_sizes",
    "host_page_bounds",
    "recorded_config",
]

GIB = 1 << 30
HOST_ALIGNMENT_BYTES = 256
SIZE_MAX = (1 << 31) - 1  # of ids and counts: tables hold them in 32 bits
PAGE_BYTES_MAX = 1 << 40
REQUEST_PAGES_MAX = 1 << 24
RESIDENT = "resident"  # the policy that has no host tier


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


class HiSparseConfig(Section):
    """Everything that scheduler and worker must agree on."""

    layout: ModelLayout
    pools: PoolConfig
    policy: PolicyConfig = PolicyConfig()
    schedule: ScheduleConfig
    log: LogConfig = LogConfig()
    suffix: SuffixConfig = SuffixConfig()
    ranks: int = Field(default=1, gt=0, le=64, description="worker ranks of this replica")
    checks: Literal["on", "off"] = Field(
        default="off", description="whether invariants are checked as it runs"
    )

    @classmethod
    def load(cls, file: str | Path | None = None, **sections: Any) -> HiSparseConfig:
        """From a TOML or JSON file, then ``HISPARSE_SECTION__FIELD`` of the environment, then
        `sections` (mappings), each over the one before it (`hisparse.config_sources`).

        Raises ConfigError that names every fault at once, each with where its value is from.
        """
        from hisparse.config_sources import load

        return load(file, **sections)[0]

    @property
    def offload(self) -> bool:
        return self.policy.name != RESIDENT

    # -- derived sizes; a block holds a resident page of all layers, or whole indexer pages ------
    @property
    def page_bytes(self) -> int:
        """Bytes of a resident page, all layers: what a copy between the tiers moves."""
        return self.pools.page_size * self.layout.layers * self.layout.row_bytes

    @property
    def block_bytes(self) -> int:
        """Whole KV rows, so that a layer's rows lie in one grid over all blocks."""
        index = self.pools.index_pages_per_block * self.index_page_bytes
        return max(self.page_bytes, ceil_div(index, self.layout.row_bytes) * self.layout.row_bytes)

    @property
    def index_page_bytes(self) -> int:
        groups = len(self.layout.index_groups)
        return self.pools.page_size * groups * self.layout.index_row_bytes

    @property
    def index_pages_per_block(self) -> int:
        return self.pools.index_pages_per_block or self.page_bytes // self.index_page_bytes

    @property
    def host_page_bytes(self) -> int:
        """Stride of a host page: its bytes rounded up to the alignment."""
        return ceil_div(self.page_bytes, HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES

    @property
    def host_pages(self) -> int:
        """Whole host pages in `host_pool_gib`, the null page included."""
        return int(self.pools.host_pool_gib * GIB) // self.host_page_bytes

    @property
    def suffix_pages(self) -> int:
        """Indexer pages in the CPU tier, the null page included; 0 without one."""
        if self.suffix.name == "none" or not self.offload:
            return 0
        return int(self.suffix.gib * GIB) // self.index_page_bytes

    @property
    def hot_blocks(self) -> int:
        return ceil_div(self.policy.hot_rows, self.pools.page_size) if self.offload else 0

    @property
    def max_pages(self) -> int:
        return ceil_div(self.schedule.max_model_len, self.pools.page_size)

    @property
    def max_index_blocks(self) -> int:
        return ceil_div(self.max_pages, self.index_pages_per_block)

    @property
    def window_pages(self) -> int:
        """Resident pages that let a request advance: the open tail, and the page after it."""
        return ceil_div(1 + self.schedule.lookahead_rows, self.pools.page_size) + 1

    @property
    def step_pages(self) -> int:
        """Pages that the rows of one step fill: what admission leaves for prompts to pass through.

        Shared by all requests, since they share the rows of a step.
        """
        return ceil_div(self.schedule.step_rows, self.pools.page_size)

    @property
    def backed_pages(self) -> int:
        """Blocks with which a request of any length can go on: its window, and a hot region to read
        all other pages through. One of no more pages needs no host tier, and stays resident."""
        return self.window_pages + self.hot_blocks if self.offload else self.max_pages

    def steady_blocks(self, tokens: int) -> int:
        """GPU blocks that a request of `tokens` tokens needs to be sure to finish."""
        pages = ceil_div(tokens, self.pools.page_size)
        return min(pages, self.backed_pages) + ceil_div(pages, self.index_pages_per_block)


def check_sizes(config: HiSparseConfig) -> HiSparseConfig:
    """Refuse sizes that no machine has: what follows from the others can be computed with. Raises
    CapacityError, which names every one."""
    sections = {name: getattr(config, name) for name in type(config).model_fields}
    sizes = {
        f"{name}.{field}": value
        for name, section in sections.items()
        if isinstance(section, Section)
        for field, value in section
        if isinstance(value, int)
    }
    reasons = [
        f"{path}={value} must be at most {SIZE_MAX}"
        for path, value in sizes.items()
        if value > SIZE_MAX
    ]
    if not reasons and config.page_bytes > PAGE_BYTES_MAX:
        reasons.append(
            f"pools.page_size={config.pools.page_size} rows of layout.row_bytes="
            f"{config.layout.row_bytes} in {config.layout.layers} layers are {config.page_bytes} B "
            f"a page, which must be at most {PAGE_BYTES_MAX}: lower either"
        )
    if not reasons and config.max_pages > REQUEST_PAGES_MAX:
        reasons.append(
            f"schedule.max_model_len={config.schedule.max_model_len} are {config.max_pages} pages "
            f"of pools.page_size={config.pools.page_size}, must be at most {REQUEST_PAGES_MAX}: "
            "lower the former, or raise the latter"
        )
    if reasons:
        raise CapacityError("; ".join(reasons))
    return config


def host_page_bounds(config: HiSparseConfig) -> dict[str, int]:
    """By the field that bounds it: most host pages that requests of `max_model_len` have at once,
    of those that GPU blocks leave room for, that there are, and that `max_requests` have. The least
    binds; what the host pool has beyond it keeps prefixes of requests that ended. Empty without a
    host tier."""
    if not config.offload:
        return {}
    held = (config.pools.gpu_blocks - 1) // config.steady_blocks(config.schedule.max_model_len)
    return {
        "pools.gpu_blocks": held * config.max_pages,
        "pools.host_pool_gib": config.host_pages - 1,
        "schedule.max_requests": config.schedule.max_requests * config.max_pages,
    }


def check_capacity(config: HiSparseConfig) -> HiSparseConfig:
    """Refuse pools that cannot hold one request of `max_model_len`, and sizes that no machine has
    (`check_sizes`). Raises CapacityError, which names every pool that is too small, with the size
    that would do."""
    check_sizes(config)
    tokens = config.schedule.max_model_len
    reasons: list[str] = []
    fixes: dict[str, object] = {}
    need = config.steady_blocks(tokens) + 1
    if config.pools.gpu_blocks < need:
        fixes["pools.gpu_blocks"] = need
        reasons.append(
            f"pools.gpu_blocks={config.pools.gpu_blocks} cannot hold one request of {tokens} "
            f"tokens in {config.policy.name!r} mode: use at least {need}"
        )
    if config.offload and config.suffix.name != "none" and config.suffix_pages < 2:
        least = math.ceil(2 * config.index_page_bytes / GIB * 1e9) / 1e9
        fixes["suffix.gib"] = least
        reasons.append(
            f"suffix.gib={config.suffix.gib:g} holds no indexer page of {config.index_page_bytes} "
            f"B beside the null page: use at least {least:.9f}"
        )
    pages = config.max_pages + 1
    if config.offload and config.host_pages < pages:
        gib = math.ceil(pages * config.host_page_bytes / GIB * 1e6) / 1e6  # as it is printed
        fixes["pools.host_pool_gib"] = gib
        reasons.append(
            f"pools.host_pool_gib={config.pools.host_pool_gib:g} holds {config.host_pages} host "
            f"pages, and one request of {tokens} tokens needs {pages}: use at least {gib:.6f}"
        )
    if reasons:
        raise CapacityError("; ".join(reasons), fixes)
    return config


def recorded_config(text: str) -> HiSparseConfig:
    """The configuration in a log's header, JSON. A field that is younger than the log says what the
    code did then, whatever its default is now. Raises ValidationError."""
    config = HiSparseConfig.model_validate_json(text)
    if "on_copy_failure" in config.policy.model_fields_set:
        return config
    policy = config.policy.model_copy(update={"on_copy_failure": "fail"})
    return config.model_copy(update={"policy": policy})
