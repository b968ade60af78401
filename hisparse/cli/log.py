"""`hisparse log`: look into a log, follow it, repair it, compress it. No torch, no GPU.

exit    what was found
0       nothing amiss
1       damage: an intact event lies behind bytes that are not
2       no log there, or a call that cannot be used
3       a torn tail, or events that the writer dropped: what is there was recovered with that loss
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from hisparse.cli import log_cat
from hisparse.cli.errors import LOSS, VIOLATION, say
from hisparse.cli.log_recover import compact, recover
from hisparse.cli.output import table
from hisparse.errors import LogError
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import EVENT_TYPES, RequestArrived, StepPlanned
from hisparse.fsm.log_history import STREAM, LogHistory
from hisparse.fsm.log_reader import DiskReader

POLL_S = 0.1
NAMES = {cls.__struct_config__.tag: cls.__name__ for cls in EVENT_TYPES}

_directory = click.argument("directory", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_stream = click.option(
    "--stream", default=STREAM, show_default=True, help="Which log below DIRECTORY: rank-0, …"
)


@click.group()
def log() -> None:
    """Look into an event log, follow it, repair it, compress it.

    Example: hisparse log info runs/one
    """


def _told(history: LogHistory) -> int:
    """Say on stderr what is missing; returns the exit code for it."""
    for gap in history.gaps:
        say(f"recovered with loss: {gap}")
    loss = history.loss
    if loss is not None:
        say(f"{'recovered with loss' if loss.torn else 'loss found'}: {loss}")
        if not loss.torn:
            return VIOLATION
    return LOSS if history.gaps or loss is not None else 0


# -- info -----------------------------------------------------------------------------------------


@log.command()
@_directory
@_stream
@_json
def info(directory: Path, stream: str, as_json: bool) -> int:
    """What the log in DIRECTORY holds: segments, events by kind, steps, requests, configuration.

    Reads every event, so that damage anywhere is found.

    Example: hisparse log info runs/one --json
    """
    history = LogHistory.open(directory, stream=stream)
    report, damage = describe(history)
    click.echo(json.dumps(report, indent=2) if as_json else table(_grouped(report)))
    code = _told(history)
    if damage and code != VIOLATION:
        say(f"loss found: {damage}")
        return VIOLATION
    return code


def describe(history: LogHistory) -> tuple[dict[str, Any], str]:
    """`log info --json`, and what damage was met on the way ("": none)."""
    kinds: Counter[str] = Counter()
    damage, first_step, last_step, seq = "", None, None, history.first_seq - 1
    codec = Codec(EVENT_TYPES)
    try:
        for seq, kind, body in history.frames(history.first_seq):  # noqa: B007
            kinds[NAMES.get(kind, f"kind-{kind}")] += 1
            if kind == StepPlanned.__struct_config__.tag:
                event = codec.decode(kind, body)
                assert isinstance(event, StepPlanned)
                last_step = event.step
                first_step = event.step if first_step is None else first_step
    except LogError as error:
        damage = str(error)
    config = history.config
    report = {
        "events": sum(kinds.values()),
        "first_seq": history.first_seq,
        "last_seq": seq,
        "segments": [msgspec.structs.asdict(segment) for segment in history.segments],
        "bytes": sum(segment.bytes for segment in history.segments),
        "snapshots": history.snapshots.seqs(),
        "steps": {"first": first_step, "last": last_step},
        "requests": kinds[RequestArrived.__name__],
        "kinds": dict(kinds.most_common()),
        "gaps": [msgspec.structs.asdict(gap) for gap in history.gaps],
        "lost": None if history.loss is None else msgspec.structs.asdict(history.loss),
        "damage": damage or None,
        "schema_digest": history.header.schema_digest,
        "config": {
            "gpu_blocks": config.pools.gpu_blocks,
            "host_pages": config.host_pages,
            "page_size": config.pools.page_size,
            "block_bytes": config.block_bytes,
            "policy": config.policy.name,
            "write_back": config.policy.write_back,
            "hot_rows": config.policy.hot_rows,
            "max_model_len": config.schedule.max_model_len,
            "ranks": config.ranks,
        },
    }
    return report, damage


def _grouped(report: dict[str, Any]) -> dict[str, dict[str, object]]:
    segments = {s["name"]: f"from seq {s['first_seq']}, {s['bytes']} B" for s in report["segments"]}
    names = ("events", "first_seq", "last_seq", "bytes", "requests", "schema_digest")
    return {
        "log": {
            **{name: report[name] for name in names},
            "steps": "{first} to {last}".format(**report["steps"]),
            "snapshots": len(report["snapshots"]),
        },
        "segments": segments,
        "kinds": report["kinds"] or {"-": None},
        "config": report["config"],
    }


# -- cat ------------------------------------------------------------------------------------------


@log.command()
@_directory
@_stream
@click.option("--kind", "kinds", multiple=True, metavar="NAME", help="Events of this name.")
@click.option("--block", "blocks", multiple=True, type=int, help="Events on this GPU block.")
@click.option("--host-page", "pages", multiple=True, type=int, help="Events on this host page.")
@click.option("--transfer", "transfers", multiple=True, type=int, help="Events on this transfer.")
@click.option("--request", "requests", multiple=True, help="Events on this request or its row.")
@click.option("--seq", "seqs", type=log_cat.RANGE, default=(None, None), help="Seqs A to B.")
@click.option("--step", "steps", type=log_cat.RANGE, default=(None, None), help="Steps A to B.")
@click.option("--wide", is_flag=True, help="A line a step, a column a block, a letter a state.")
@_json
def cat(
    directory: Path,
    stream: str,
    kinds: tuple[str, ...],
    blocks: tuple[int, ...],
    pages: tuple[int, ...],
    transfers: tuple[int, ...],
    requests: tuple[str, ...],
    seqs: log_cat.Range,
    steps: log_cat.Range,
    wide: bool,
    as_json: bool,
) -> int:
    """Print the events of the log in DIRECTORY, one a line (with --json: a JSON object a line).

    Options may be repeated. Ids are alternatives; kinds and ranges narrow further.

    Example: hisparse log cat runs/one --block 17 --step 3..9
    """
    unknown = [kind for kind in kinds if kind not in log_cat.KINDS and not kind.startswith("kind-")]
    if unknown:
        raise click.UsageError(f"--kind {unknown[0]}: known are {', '.join(log_cat.KINDS)}")
    history = LogHistory.open(directory, stream=stream)
    first, last = log_cat.bounds(history, seqs, steps)
    if wide:
        if kinds or pages or transfers or requests:
            raise click.UsageError("--wide takes --block, --seq and --step only")
        say(", ".join(f"{letter} {state.name}" for state, letter in log_cat.LETTERS.items()))
        for text in log_cat.wide(history, list(blocks), first, last, as_json=as_json):
            click.echo(text)
        return _told(history)
    chosen = log_cat.Filter(kinds, blocks, pages, transfers, requests)
    for seq, event in log_cat.events(history, chosen, first, last):
        click.echo(log_cat.line(seq, event, as_json=as_json))
    return _told(history)


# -- tail -----------------------------------------------------------------------------------------


@log.command()
@_directory
@_stream
@click.option("-n", "count", type=click.IntRange(0), default=10, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows, until interrupted.")
@_json
def tail(directory: Path, stream: str, count: int, follow: bool, as_json: bool) -> int:
    """Print the last events of the log in DIRECTORY; with -f, those that follow too.

    Example: hisparse log tail -f runs/one
    """
    history = LogHistory.open(directory, stream=stream)
    start = max(history.first_seq, history.last_seq + 1 - count)
    for seq, event in history.read(start):
        click.echo(log_cat.line(seq, event, as_json=as_json))
    if not follow:
        return _told(history)
    reader = DiskReader(directory / stream, Codec(EVENT_TYPES))
    with LogCursor(reader, history.last_seq) as cursor:
        while True:
            for seq, event in cursor.take():
                click.echo(log_cat.line(seq, event, as_json=as_json))
            time.sleep(POLL_S)


for command in (recover, compact):
    log.add_command(command)
