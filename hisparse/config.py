"""Configuration: pydantic models that refuse bad input with the field, the value and the fix.

Nothing here does I/O (`HiSparseConfig.load` asks a module that does) or imports torch. Derived
sizes (block bytes, pages per block, pool counts) are computed once, here, so that scheduler and
worker cannot disagree about them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hisparse.errors import CapacityError

GIB = 1 << 30
HOST_ALIGNMENT_BYTES = 256
RESIDENT = "resident"  # the policy that has no host tier


def _violation(reason: str, fixes: dict[str, object]) -> PydanticCustomError:
    """Of a constraint between fields, with values that would do."""
    return PydanticCustomError("constraint", "{reason}", {"reason": reason, "fixes": fixes})


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below a / b."""
    return -(-a // b)


class ModelLayout(_Model):
    """What one token costs in each cache.

    `index_groups` lists, per index group, its layers: the leader (which owns the indexer) first,
    then the followers that reuse its top-k. Every layer is in exactly one group.
    """

    row_bytes: int = Field(gt=0, description="bytes of one token's KV row in one layer")
    index_row_bytes: int = Field(gt=0, description="bytes of one token's indexer row in one group")
    index_groups: tuple[tuple[int, ...], ...] = Field(
        min_length=1, description="layers of each index group, its leader first"
    )

    @field_validator("index_groups")
    @classmethod
    def _layers_once_and_index_fits(
        cls, groups: tuple[tuple[int, ...], ...], info: ValidationInfo
    ) -> tuple[tuple[int, ...], ...]:
        layers = sorted(layer for group in groups for layer in group)
        if layers != list(range(len(layers))) or not all(groups):
            raise ValueError(
                f"index_groups={groups} must hold every layer 0..n-1 exactly once, "
                "the leader of each group first"
            )
        row, index = info.data.get("row_bytes"), info.data.get("index_row_bytes")
        if row and index and len(groups) * index > len(layers) * row:
            most = len(layers) * row // len(groups)
            raise _violation(
                f"{len(groups)} indexer rows of {index} B do not fit {len(layers)} KV rows of "
                f"{row} B: index_row_bytes must be at most {most}",
                {"layout.index_row_bytes": most},
            )
        return groups

    @property
    def layers(self) -> int:
        return sum(len(group) for group in self.index_groups)

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.index_groups)


class PoolConfig(_Model):
    """Sizes of the two tiers. Both counts include the null id 0, which holds nothing."""

    page_size: int = Field(default=64, gt=0, description="tokens a page")
    gpu_blocks: int = Field(gt=1, description="fixed-size blocks of the packed GPU pool")
    host_pool_gib: float = Field(
        gt=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="host-cache capacity per data-parallel replica, GiB",
    )
    index_pages_per_block: int = Field(
        default=0,
        ge=0,
        description="whole indexer pages a block, which is made as large as they need; 0: as many "
        "as fit the bytes of a resident page (`config_packing` chooses)",
    )


class PolicyConfig(_Model):
    """Residency policy: what is kept where, and when it moves."""

    name: str = Field(
        default="hybrid",
        max_length=200,
        pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$",
        description="a registered policy, or module:Class of one's own",
    )
    write_back: Literal["eager", "on_pressure"] = Field(
        default="eager", description="a page is copied to the host when it is full, or at need"
    )
    top_k: int = Field(default=2048, gt=0, description="rows that attention reads of a request")
    hot_rows: int = Field(
        default=4096, gt=0, validate_default=True, description="rows of a request's hot region"
    )
    on_copy_failure: Literal["rewind", "fail"] = Field(
        default="rewind",
        description="a copy fails whose page steps could read: recompute its rows, or end the "
        "request (preempt it, where indexer pages could not be loaded)",
    )
    watermark_blocks: int = Field(default=0, ge=0, description="blocks kept free beyond promises")
    promote_pages: int = Field(
        default=8, ge=0, description="most host pages brought back in a step; 0: none ever"
    )
    promote_after_steps: int = Field(
        default=64, gt=0, description="steps without pressure before pages come back"
    )

    @field_validator("hot_rows")
    @classmethod
    def _hot_holds_top_k(cls, hot_rows: int, info: ValidationInfo) -> int:
        top_k = info.data.get("top_k", 0)
        if hot_rows < top_k:
            raise _violation(
                f"hot_rows={hot_rows} must be at least top_k={top_k}: "
                "a row's whole selection has to fit in the hot region",
                {"policy.hot_rows": top_k},
            )
        return hot_rows


class ScheduleConfig(_Model):
    """Limits of the serving loop that admission must know; lookahead rows are for speculation."""

    max_requests: int = Field(default=256, gt=0, description="requests that hold a row at once")
    max_model_len: int = Field(gt=0, description="tokens of the longest request")
    prefill_chunk: int = Field(default=64, gt=0, description="most prompt rows of a request a step")
    step_rows: int = Field(default=256, gt=0, description="most rows in a step, over all requests")
    lookahead_rows: int = Field(default=0, ge=0, description="rows beyond the next token")


class LogConfig(_Model):
    """Where events go: `off` keeps no history, `ring` the last N in memory, `disk` all of them."""

    mode: Literal["off", "ring", "disk"] = Field(default="ring", description="what is kept")
    dir: Path | None = Field(
        default=None, validate_default=True, description="of mode 'disk': where the log is written"
    )
    fsync: Literal["never", "interval", "commit"] = Field(
        default="never", description="when what was written is made to last a loss of power"
    )
    fsync_interval_s: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="of fsync 'interval': between syncs"
    )
    ring_events: int = Field(default=100_000, gt=0, description="of mode 'ring': events kept")
    segment_bytes: int = Field(
        default=64 << 20, gt=0, le=1 << 30, description="size at which a segment is sealed"
    )
    snapshot_events: int = Field(
        default=0, ge=0, description="events from one snapshot to the next; 0: never"
    )
    compress: bool = Field(default=False, description="compress sealed segments with zstd")
    on_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="a disk that refuses: raise, or drop the events, counted, behind a LogGap",
    )

    @field_validator("dir")
    @classmethod
    def _disk_has_dir(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if folder is None and info.data.get("mode") == "disk":
            raise _violation(
                "mode='disk' needs dir: the directory that the log is written to",
                {"log.dir": "hisparse-log"},
            )
        return folder


class SuffixConfig(_Model):
    """Who is asked for the indexer pages of a prefix that the GPU has lost; `none`: nobody."""

    name: Literal["none", "cpu"] = Field(
        default="none", description="nobody, or a tier in host memory"
    )
    gib: float = Field(
        default=1.0,
        gt=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="capacity of the 'cpu' tier of indexer pages, GiB",
    )


class HiSparseConfig(_Model):
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


def check_capacity(config: HiSparseConfig) -> HiSparseConfig:
    """Refuse pools that cannot hold one request of `max_model_len`. Raises CapacityError, which
    names every pool that is too small, with the size that would do."""
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
