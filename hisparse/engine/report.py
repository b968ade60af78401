"""The report of the main job: figures of one served run, and what was verified of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.config_packing import candidates, packing_of, planned_footprint
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.options import RunConfig
from hisparse.engine.reference import ReferenceResult
from hisparse.engine.served import Served
from hisparse.engine.verify import ContentOracle, LiveChecks, differing_requests
from hisparse.kv.coordinator import HiSparseCoordinator


def served_figures(
    run: RunConfig,
    config: HiSparseConfig,
    engine: ReferenceEngine,
    served: Sequence[Served],
    device: dict[str, int],
) -> dict[str, Any]:
    """What was served, moved and written; `device` are the worker's statistics at the end.

    Taken after the shutdown: the leases left are leaks.
    """
    coordinator = engine.coordinator
    counts, held = coordinator.metrics.counts, coordinator.statistics()
    looked_up = device["hits"] + device["misses"]
    log = coordinator.log.statistics()
    suffix = run.suffix != "none"
    longest = config.schedule.max_model_len
    largest = planned_footprint(config, longest, host_backed=True)
    packing = packing_of(config)
    return {
        "requests": len(served),
        "requests_finished": sum(r.outcome == "finished" for r in served),
        "requests_aborted": sum(r.outcome == "aborted" for r in served),
        "requests_refused": sum(r.outcome == "refused" for r in served),
        "requests_failed": sum(r.outcome == "failed" for r in served),
        "tokens_generated": sum(len(r.generated) for r in served),
        "steps": counts["steps"],
        "rows_computed": counts["rows_computed"],
        "drafts_proposed": engine.acceptance.proposed,
        "drafts_accepted": engine.acceptance.accepted,
        "acceptance_rate": engine.acceptance.rate,
        "gpu_blocks": config.pools.gpu_blocks,
        "block_bytes": packing.block_bytes,
        "index_pages_per_block": packing.index_pages_per_block,
        "padded_share_mean": packing.mean,
        "padded_share_worst": packing.worst,
        "padded_share_mean_else": max(shape.mean for shape in candidates(config)),
        "request_bytes_needed": largest.needed_bytes,
        "request_bytes_held": largest.held_bytes,
        "request_bytes_padded": largest.padded_bytes,
        "gpu_blocks_leased_at_end": held["gpu_blocks_used"],
        "host_pages_leased_at_end": held["host_pages_used"],
        "peak_gpu_blocks_hisparse": engine.progress.gpu_blocks,
        "concurrent_requests_hisparse": engine.progress.concurrent_requests,
        **{f"waited_for_{name}": len(who) for name, who in sorted(engine.progress.waits.items())},
        "spills": counts["spills"],
        "write_backs": counts["write_backs"],
        "restores": counts["restores"],
        "pages_published": counts["pages_published"],
        "prefix_hit_tokens": counts["prefix_hit_pages"] * config.pools.page_size,
        **{name: n for name, n in counts.items() if suffix and name.startswith("suffix_")},
        "hot_hits": device["hits"],
        "hot_misses": device["misses"],
        "hot_hit_rate": device["hits"] / looked_up if looked_up else 0.0,
        "host_rows_read": device["host_rows"],
        "preemptions": counts["preemptions"],
        "rewinds": counts["rewinds"],
        "copies_failed": counts["transfers_failed"],
        "events": coordinator.state.seq,
        "log_bytes": log.written_bytes,
        "state_digest": coordinator.digest(),
    }


def fewer_than_resident(report: dict[str, Any]) -> str | None:
    """Why the run held fewer requests at once than its GPU blocks hold all-resident, and what to
    change; None if it did not."""
    held, resident = (report[f"concurrent_requests_{name}"] for name in ("hisparse", "resident"))
    if held >= resident:
        return None
    said = f"held {held} requests at once, and {resident} would be all-resident: "
    if refused := report["requests_refused_resident"]:
        return said + (
            f"there {refused} were refused that do not fit, of which each has others wait here: "
            "raise gpu_blocks, or lower hot_rows or prefill_chunk"
        )
    if waited := report.get("waited_for_host_pages"):
        return said + f"{waited} requests waited for host pages: raise host_pool_gib"
    return said + (
        "those that wait are admitted once pages have left, and others ended before: raise "
        "gpu_blocks, or use policy host_first"
    )


def verified_figures(
    expected: dict[str, ReferenceResult],
    served: Sequence[Served],
    coordinator: HiSparseCoordinator,
    oracle: ContentOracle,
    live: LiveChecks,
) -> dict[str, Any]:
    """`tokens_identical` is None, and nothing counts as checked, with --no-verify."""
    checker = coordinator.checker
    if checker is None:
        return {"tokens_identical": None, "invariants": {"checked": [], "violations": []}}
    wrong = differing_requests(served, expected)
    checked = checker.checked | live.checked | {"content": oracle.rows_checked, "disjoint_views": 1}
    found = [*checker.violations, *live.violations, *oracle.violations]
    return {
        "tokens_identical": not wrong,
        "requests_differing": wrong,
        "invariants": {
            "checked": sorted(name for name, times in checked.items() if times),
            "violations": [
                {"invariant": v.invariant, "seq": v.seq, "message": v.message} for v in found
            ],
        },
    }
