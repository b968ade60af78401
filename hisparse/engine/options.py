"""Options of the main job, as one pydantic model: types, bounds and defaults, in this place only.

No torch here: the command line reads its defaults from `RunConfig` before anything heavy is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hisparse.config import LogConfig
from hisparse.errors import ConfigError


class RunConfig(BaseModel):
    """Options of `hisparse run`; each maps to one field of HiSparseConfig or of the workload."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    trace: Path | None = None
    requests: int = Field(default=24, gt=0)
    scale: float = Field(default=0.05, gt=0, le=1)
    step_ms: float = Field(
        default=25.0, gt=0, le=1e9, description="arrival clock: virtual ms a step takes"
    )
    device: str = "cpu"
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
    abort_rate: float = Field(default=0.0, ge=0, le=1)
    preempt_rate: float = Field(default=0.0, ge=0, le=1)
    spec: int = Field(default=0, ge=0, le=64, description="drafts a request and step")
    graph: bool = False
    model: Literal["builtin", "deepseek_v32", "glm_moe_dsa"] = "builtin"
    record_selections: int = Field(
        default=0, ge=0, description="0: none; 1: of all requests; n: of one in n"
    )
    log: LogConfig = LogConfig()
    verify: bool = True
    seed: int = Field(default=0, ge=0, lt=1 << 32)


def refuse_lost_selections(config: RunConfig) -> None:
    """Selections are written beside the log. Raises ConfigError where there is no such place."""
    if config.record_selections and config.log.mode != "disk":
        raise ConfigError(
            f"record_selections={config.record_selections} needs a log on disk: give --log DIR"
        )


def refuse_mismatched(config: RunConfig) -> None:
    """Options that do not go together. Raises ConfigError."""
    if config.model != "builtin":
        _refuse_for_transformers(config)
    if config.graph and config.device != "cuda":
        raise ConfigError(
            f"graph=True: device={config.device!r} has no graphs: use --device cuda, or --eager"
        )


def _refuse_for_transformers(config: RunConfig) -> None:
    alone = f"model={config.model!r}"
    if config.spec:
        raise ConfigError(
            f"spec={config.spec}: {alone} has no draft head: leave --spec at 0, or use --model "
            "builtin"
        )
    if config.graph:
        raise ConfigError(
            f"graph=True: {alone} has no decode step of fixed shape to capture: use --eager, or "
            "--model builtin"
        )
    if config.device != "cpu":
        raise ConfigError(
            f"device={config.device!r}: {alone} is batch-invariant on the CPU alone: use --device "
            "cpu, or --model builtin"
        )
