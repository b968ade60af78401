"""Options of the main job, as one pydantic model: types, bounds and defaults, in this place only.

No torch here: the command line reads its defaults from `RunConfig` before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hisparse.config import HiSparseConfig, LogConfig
from hisparse.config_check import known_paths, unknown_key
from hisparse.errors import ConfigError


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


def run_fields(data: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """Fields of RunConfig from what a file and the environment say (`config_sources.given`).

    Raises ConfigError for keys that nobody knows, and for those that a run decides itself.
    """
    known = [*known_paths(HiSparseConfig), "run", *(f"run.{name}" for name in WORKLOAD)]
    refused, said = [], set()
    for path, origin in origins.items():
        decided = next((p for p in DECIDED if path == p or path.startswith(f"{p}.")), None)
        if decided is not None:
            if (decided, origin) in said:
                continue  # of a whole section, one reason
            said.add((decided, origin))
            path = decided
            why = f"`hisparse run` takes no {decided}, {DECIDED[decided]}: leave it out"
        elif path not in known:
            why = unknown_key(path, known)
        elif path in HiSparseConfig.model_fields or path == "run":
            why = "is a section: give fields of it"
        else:
            continue
        refused.append(f"{path} (from {origin}): {why}")
    if refused:
        raise ConfigError("; ".join(refused))
    fields: dict[str, Any] = dict(data.get("run", {}))
    more: dict[str, dict[str, Any]] = {}
    for section, part in data.items():
        if section == "log":
            fields["log"] = part
        elif section != "run":
            for name, value in part.items():
                if (field := PLACES.get(f"{section}.{name}")) is not None:
                    fields[field] = value
                else:
                    more.setdefault(section, {})[name] = value
    return fields | ({"more": more} if more else {})


def run_origins(origins: Mapping[str, str]) -> dict[str, str]:
    """The same, by the names that RunConfig has."""
    return {PLACES.get(path, path.removeprefix("run.")): origin for path, origin in origins.items()}


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
