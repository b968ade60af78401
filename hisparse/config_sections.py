"""Sections of the configuration: pydantic models that refuse bad input with the field, the value
and the fix. `hisparse.config` has the whole, and the sizes that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


def _violation(reason: str, fixes: dict[str, object]) -> PydanticCustomError:
    """Of a constraint between fields, with values that would do."""
    return PydanticCustomError("constraint", "{reason}", {"reason": reason, "fixes": fixes})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelLayout(Section):
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


class PoolConfig(Section):
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


class PolicyConfig(Section):
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


class ScheduleConfig(Section):
    """Limits of the serving loop that admission must know; lookahead rows are for speculation."""

    max_requests: int = Field(default=256, gt=0, description="requests that hold a row at once")
    max_model_len: int = Field(gt=0, description="tokens of the longest request")
    prefill_chunk: int = Field(default=64, gt=0, description="most prompt rows of a request a step")
    step_rows: int = Field(default=256, gt=0, description="most rows in a step, over all requests")
    lookahead_rows: int = Field(default=0, ge=0, description="rows beyond the next token")


class LogConfig(Section):
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
        name = str(folder or "")
        if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise _violation(
                f"a directory {name!r} that has no name in UTF-8 cannot be written down: give "
                "another name",
                {"log.dir": "hisparse-log"},
            )
        return folder


class SuffixConfig(Section):
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
