"""Options of the main job, as one pydantic model: types, bounds and defaults, in this place only.

No torch here: the command line reads its defaults from `RunConfig` before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hisparse.config import LogConfig, ModelLayout


class RunConfig(BaseModel):
    """Options of `hisparse run`; each maps to one field of HiSparseConfig or of the workload."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trace: Path | None = Field(default=None, description="Mooncake JSONL; none: a generated one")
    requests: int = Field(default=24, gt=0, description="the first so many of the trace")
    scale: float = Field(default=0.05, gt=0, le=1, description="multiplies lengths and times")
    step_ms: float = Field(
        default=25.0, gt=0, le=1e9, description="arrival clock: virtual ms a step takes"
    )
    device: str = Field(default="cpu", description="backend: cpu or cuda")
    # Table entries are int32, and a host pool above a pebibyte is a slip of the finger.
    gpu_blocks: int | None = Field(default=None, gt=1, lt=1 << 31)
    host_pool_gib: float = Field(default=0.25, gt=0, le=1 << 20)
    page_size: int = Field(default=16, gt=0)
    top_k: int = Field(default=16, gt=0)
    hot_rows: int = Field(default=32, gt=0)
    write_back: Literal["eager", "on_pressure"] = "eager"
    policy: str = "hybrid"
    suffix: Literal["none", "cpu"] = "none"
    suffix_gib: float = Field(default=0.01, gt=0, le=1 << 20)
    abort_rate: float = Field(default=0.0, ge=0, le=1, description="share whose client goes away")
    preempt_rate: float = Field(default=0.0, ge=0, le=1, description="share preempted once")
    spec: int = Field(default=0, ge=0, le=64, description="drafts a request and step")
    graph: bool = Field(default=False, description="decode steps in CUDA graphs")
    model: Literal["builtin", "deepseek_v32", "glm_moe_dsa"] = Field(
        default="builtin", description="whose layout and forward pass it is"
    )
    record_selections: int = Field(
        default=0, ge=0, description="0: none; 1: of all requests; n: of one in n"
    )
    log: LogConfig = LogConfig()
    verify: bool = Field(default=True, description="compare every bit with the oracle")
    seed: int = Field(default=0, ge=0, lt=1 << 32, description="of weights, tokens and streams")
    more: dict[str, dict[str, Any]] = Field(
        default={}, description="fields of HiSparseConfig that no option stands for, by section"
    )


# Fields of HiSparseConfig that an option stands for; those of the workload are the section `run`.
PLACES = {
    "pools.gpu_blocks": "gpu_blocks",
    "pools.host_pool_gib": "host_pool_gib",
    "pools.page_size": "page_size",
    "policy.name": "policy",
    "policy.top_k": "top_k",
    "policy.hot_rows": "hot_rows",
    "policy.write_back": "write_back",
    "suffix.name": "suffix",
    "suffix.gib": "suffix_gib",
}
WORKLOAD = tuple(n for n in RunConfig.model_fields if n not in (*PLACES.values(), "log", "more"))
DECIDED = {
    "layout": "the model has one",
    "ranks": "it has one rank",
    "checks": "--verify and --no-verify say it",
    "schedule.max_model_len": "the longest request of the trace says it",
    "schedule.lookahead_rows": "--spec says it",
}


def sections_of(
    config: RunConfig, layout: ModelLayout | Mapping[str, Any], gpu_blocks: int, longest: int
) -> dict[str, Any]:
    """The sections of HiSparseConfig for a model's layout and requests of at most `longest`
    tokens. Nothing is validated here, the fields of `config` included."""
    said: dict[str, Any] = {
        "layout": layout,
        "pools": {
            "page_size": config.page_size,
            "gpu_blocks": gpu_blocks,
            "host_pool_gib": config.host_pool_gib,
        },
        "policy": {
            "name": config.policy,
            "write_back": config.write_back,
            "top_k": config.top_k,
            "hot_rows": config.hot_rows,
        },
        "schedule": {"max_model_len": longest, "lookahead_rows": config.spec},
        "log": config.log,
        "suffix": {"name": config.suffix, "gib": config.suffix_gib},
        "checks": "on" if config.verify else "off",
    }
    for section, fields in config.more.items():
        said[section] = said[section] | fields
    return said
