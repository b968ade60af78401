"""`hisparse run`: the main job. Every option is one field path of `RunConfig`; only those given are
passed on, so that defaults live there.

Needs torch, which is imported inside the verb, after the options were checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from hisparse.cli.errors import VIOLATION, Verb, options_of, said_as, say
from hisparse.cli.output import Progress, table
from hisparse.config_sources import given
from hisparse.engine.options import RunConfig
from hisparse.engine.options_check import PATHS, POLICIES, run_config
from hisparse.errors import ConfigError

LOG_OPTIONS = {
    "log.dir": "--log",
    "log.mode": "--log-mode",
    "log.snapshot_events": "--snapshot-events",
}


def _field(flag: str, text: str, **extra: Any) -> Callable[[Any], Any]:
    """An option that maps to the RunConfig field of the same name, default shown from there."""
    name = flag.split("/")[0].removeprefix("--").replace("-", "_")
    default = RunConfig.model_fields[name].default
    shown = "" if default is None or isinstance(default, bool) else f"  [default: {default}]"
    return click.option(flag, name, default=None, help=text + shown, **extra)


@click.command(cls=Verb)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML or JSON, sections as of `hisparse config` and `run`; HISPARSE_SECTION__FIELD in the "
    "environment stands above it, options above both.",
)
@_field("--trace", "Mooncake JSONL; without it, a generated one.", type=click.Path(path_type=Path))
@_field("--requests", "Serve the first N requests of the trace.", type=int, metavar="N")
@_field("--scale", "Multiply lengths and times by F.", type=float, metavar="F")
@_field("--step-ms", "Virtual time that a step takes, for arrivals.", type=float, metavar="F")
@_field("--device", "Backend.", metavar="NAME")
@_field(
    "--gpu-blocks",
    "Blocks of the packed GPU pool; by default what the longest request needs all-resident.",
    type=int,
    metavar="N",
)
@_field("--host-pool-gib", "Host tier.", type=float, metavar="G")
@_field("--page-size", "Tokens a page.", type=int, metavar="N")
@_field("--top-k", "Rows that attention reads.", type=int, metavar="N")
@_field("--hot-rows", "Rows of a request's hot region.", type=int, metavar="N")
@_field("--write-back", "When a sealed page is copied: eager or on_pressure.", metavar="WHEN")
@_field("--policy", f"Residency policy: {', '.join(POLICIES)}, or module:Class.", metavar="NAME")
@_field(
    "--suffix",
    "Who brings indexer pages back that the GPU has lost: none, or cpu, a tier in host memory.",
    type=click.Choice(get_args(RunConfig.model_fields["suffix"].annotation)),
)
@_field("--suffix-gib", "Capacity of --suffix cpu.", type=float, metavar="G")
@_field("--abort-rate", "Share of requests whose client goes away.", type=float, metavar="F")
@_field("--preempt-rate", "Share of requests preempted once, and resumed.", type=float, metavar="F")
@_field("--spec", "Drafts that a request proposes and verifies a step.", type=int, metavar="N")
@click.option(
    "--graph/--eager",
    "graph",
    default=None,
    help="With --device cuda: decode steps are captured in CUDA graphs and replayed, or not.  "
    "[default: eager]",
)
@_field(
    "--model",
    "builtin, or a tiny one of transformers with seeded weights (needs 'hisparse[transformers]'): "
    "deepseek_v32, glm_moe_dsa.",
    metavar="NAME",
)
@_field(
    "--record-selections",
    "Record what attention selects, beside the log: of all requests, or of one in N.",
    is_flag=False,
    flag_value=1,
    type=int,
    metavar="[N]",
)
@click.option(
    "--log",
    "log_dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the event log below DIR, which must not hold one yet.",
)
@click.option(
    "--snapshot-events",
    type=click.IntRange(1),
    metavar="N",
    help="With --log: a snapshot of the state each N events, near any place that is asked for.  "
    "[default: none]",
)
@click.option(
    "--log-mode",
    type=click.Choice(["off", "ring"]),
    help="Keep no history, or the last events in memory.  [default: ring]",
)
@_field(
    "--verify/--no-verify",
    "Compare tokens, logits and bytes with the oracle, and check invariants (on by default). The "
    "checks run on the simulated streams, so copies complete at other steps without them.",
)
@_field(
    "--seed", "Seed of weights, tokens, streams, aborts and preemptions.", type=int, metavar="S"
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(
    file: Path | None,
    log_dir: Path | None,
    snapshot_events: int | None,
    log_mode: str | None,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Serve a trace over a small GPU pool and a host pool, and verify every bit.

    Exits 0 only if tokens are identical to those of an unlimited resident pool and no invariant
    was violated.

    Example: hisparse run --trace trace.jsonl --requests 40 --log runs/one
    """
    if log_dir is not None and log_mode is not None:
        raise click.UsageError("--log and --log-mode exclude each other: a log in DIR keeps all")
    if snapshot_events is not None and log_dir is None:
        raise click.UsageError("--snapshot-events is of a log on disk: give --log DIR")
    options = {name: value for name, value in chosen.items() if value is not None}
    if log_dir is not None:
        options["log"] = {"mode": "disk", "dir": log_dir}
        if snapshot_events is not None:
            options["log"]["snapshot_events"] = snapshot_events
    elif log_mode is not None:
        options["log"] = {"mode": log_mode}
    data, origins = given(file)
    with said_as(names_of(origins, options)):
        return _run(run_config(data, origins, options), as_json)


def names_of(origins: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """How a field of RunConfig, or its path, is called: as file or environment said it, else by the
    option that says it."""
    over = {*options, *(f"log.{name}" for name in options.get("log", {}))}
    flags = options_of(run) | LOG_OPTIONS
    names = {}
    for field, path in (PATHS | {field: field for field in LOG_OPTIONS}).items():
        said = path in origins and field not in over
        names[field] = names[path] = path if said else flags[field]
    if options.get("log", {}).get("mode") == "disk":
        names["log.mode"] = LOG_OPTIONS["log.dir"]
    return names | {"schedule.lookahead_rows": names["spec"]}


def _run(config: RunConfig, as_json: bool) -> int:
    limit_threads()
    progress = Progress()
    from hisparse.cli.models import build_model
    from hisparse.engine.report import fewer_than_resident
    from hisparse.engine.run import Job, succeeded
    from hisparse.engine.run import as_json as report_json

    try:
        report = Job(config, progress, build=build_model).run()
    finally:
        progress.close()
    click.echo(report_json(report) if as_json else table(grouped(report)))
    if fewer := fewer_than_resident(report):
        say(fewer)
    violations = report["invariants"]["violations"]
    for violation in violations[:5]:
        say(f"violated: {violation['invariant']} at seq {violation['seq']}: {violation['message']}")
    if len(violations) > 5:
        say(f"and {len(violations) - 5} more violations")
    if report["tokens_identical"] is False:
        say(f"tokens differ from the oracle's: {', '.join(report['requests_differing'][:20])}")
    return 0 if succeeded(report) else VIOLATION


def limit_threads() -> None:
    """One thread: a second one saves a sixth of the time on idle cores, and where cores are shared
    its spinning waits take ten times the whole run. OMP_NUM_THREADS overrides. Raises ConfigError
    where there is no torch."""
    try:
        import torch
    except ImportError:
        raise ConfigError("hisparse run needs torch: install 'hisparse[torch]'") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


GROUPS = {
    "requests": "requests requests_finished requests_aborted requests_refused requests_failed "
    "tokens_generated steps rows_computed drafts_proposed drafts_accepted acceptance_rate "
    "preemptions rewinds",
    "same GPU budget, peak": "gpu_blocks block_bytes "
    "index_pages_per_block padded_share_mean padded_share_worst padded_share_mean_else "
    "request_bytes_needed request_bytes_held request_bytes_padded concurrent_requests_hisparse "
    "concurrent_requests_resident requests_refused_resident waited_for_rows waited_for_gpu_blocks "
    "waited_for_host_pages peak_gpu_blocks_hisparse "
    "peak_gpu_blocks_resident",
    "leased at the end": "gpu_blocks_leased_at_end host_pages_leased_at_end",
    "tiers": "spills write_backs restores pages_published prefix_hit_tokens "
    "suffix_pages_asked suffix_pages_loaded suffix_pages_stored suffix_pages_evicted "
    "suffix_copies_failed hot_hits hot_misses "
    "hot_hit_rate host_rows_read copies_failed",
    "log": "events log_bytes state_digest",
    "device": "steps_eager steps_replayed graphs_captured graph_nodes_max kernel_launches",
}


def grouped(report: dict[str, Any]) -> dict[str, dict[str, object]]:
    """The report as the table's groups; a key that no group names goes into the last one."""
    rest = dict(report)
    groups: dict[str, dict[str, object]] = {
        title: {name: rest.pop(name) for name in names.split() if name in rest}
        for title, names in GROUPS.items()
    }
    invariants = rest.pop("invariants")
    rest.pop("requests_differing", None)
    groups["verified"] = {
        "tokens_identical": rest.pop("tokens_identical"),
        "invariants_checked": len(invariants["checked"]),
        "violations": len(invariants["violations"]),
        **rest,
    }
    return {title: rows for title, rows in groups.items() if rows}
