"""What the two halves of a replica have to agree on, and how a worker finds that they do not.

Owns nothing. Each plan carries the scheduler's sizes as canonical JSON, some 400 bytes; a worker
compares them with its own before it looks at anything else of the plan. Not compared is what only
one half reads: the log, the checks, and what a policy decides by.
"""

from __future__ import annotations

import json
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, ProtocolError

SHARED: dict[str, Any] = {
    "layout": {"row_bytes", "index_row_bytes", "index_groups"},
    "pools": {"page_size", "gpu_blocks", "host_pool_gib"},
    "policy": {"top_k", "hot_rows"},
    "schedule": {"max_requests", "max_model_len", "step_rows"},
    "suffix": {"name", "gib"},
    "ranks": True,
}


def agreed(config: HiSparseConfig) -> str:
    """Canonical JSON of what both halves read, value by path (``pools.gpu_blocks``)."""
    found: dict[str, object] = {"pools.index_pages_per_block": config.index_pages_per_block}
    for section, held in config.model_dump(mode="json", include=SHARED).items():
        fields = held.items() if isinstance(held, dict) else ()
        found |= {f"{section}.{name}": value for name, value in fields} or {section: held}
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def check_agreed(scheduler: str, worker: str) -> None:
    """Raise ConfigError that names each field in which the two differ, with both values;
    ProtocolError where `scheduler` is nothing that `agreed` made."""
    if scheduler == worker:
        return
    ours = json.loads(worker)
    try:
        theirs = json.loads(scheduler)
        apart = [path for path in sorted(ours | theirs) if ours.get(path) != theirs.get(path)]
    except (ValueError, TypeError) as error:
        raise ProtocolError(
            f"begin_step: the plan does not say which sizes it is for ({error}): pass what "
            "plan_step made"
        ) from error
    told = "; ".join(f"{path} is {theirs.get(path)} there, {ours.get(path)} here" for path in apart)
    raise ConfigError(
        f"begin_step: the scheduler's configuration is not this worker's: {told}: make both halves "
        "from the same one"
    )
