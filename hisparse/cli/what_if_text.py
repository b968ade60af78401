"""The figures of `hisparse what-if` for people: few variants side by side, many in lines."""

from __future__ import annotations

from typing import Any

SIDE_BY_SIDE = 5  # variants, `recorded` and `replayed` included
MIB = 1 << 20
_BYTES = ("host_bytes_written", "host_bytes_read", "host_row_bytes_read")
_HIDDEN = {"name", "changes", "refused_at_start", "first_difference_seq", "invariants_checked"}
_SHORT = {  # columns of the long form
    "finished": "done",
    "refused": "refused",
    "deferred": "deferred",
    "preemptions": "preempt",
    "prefix_hit_tokens": "hit tokens",
    "spills": "spills",
    "restores": "restores",
    "host_bytes_written": "written",
    "host_bytes_read": "read",
    "host_pages_evicted": "evicted",
    "peak_concurrent_requests": "peak reqs",
    "peak_gpu_blocks": "gpu",
    "peak_host_pages": "host",
    "hot_hit_rate": "hit rate",
    "host_row_bytes_read": "rows read",
    "steps": "steps",
    "waited_steps_mean": "waited",
    "violations": "violated",
}


def as_text(report: dict[str, Any]) -> str:
    """The report as an aligned table."""
    variants = report["variants"]
    if len(variants) <= SIDE_BY_SIDE:
        names = [name for name in variants[-1] if name not in _HIDDEN]
        rows = [["", *(variant["name"] for variant in variants)]]
        rows += [[name, *(_shown(name, v[name]) for v in variants)] for name in names]
    else:
        names = [name for name in _SHORT if name in variants[-1]]
        rows = [["variant", *(_SHORT[name] for name in names)]]
        rows += [[v["name"], *(_shown(name, v[name]) for name in names)] for v in variants]
    reproduced = report["baseline"]["reproduced"]
    said = "equals the log" if reproduced else "differs from the log"
    head = f"{report['events']} events, {report['steps']} steps; their replay {said}"
    return "\n".join([head, *_aligned(rows)])


def _shown(name: str, value: Any) -> str:
    if name in _BYTES:
        return f"{value / MIB:.1f} MiB"
    if name == "hot_hit_rate":
        return f"{value:.3f}"
    match value:
        case list():
            return str(len(value))
        case dict():
            return ", ".join(f"{count} {what}" for what, count in value.items()) or "-"
        case float():
            return f"{value:.1f}"
        case _:
            return str(value)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
