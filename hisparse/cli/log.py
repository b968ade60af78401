"""`hisparse log`: look into a log, follow it, repair it, compress it. No torch, no GPU.

Exit codes: `hisparse.cli.losses`; 2 where there is no log. `info` reads every event of a stream,
`cat` those in its range, `tail` the last ones: each says what is lacking there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from hisparse.cli import log_cat
from hisparse.cli.completion import KINDS, kind_names
from hisparse.cli.errors import say
from hisparse.cli.log_recover import compact, recover
from hisparse.cli.losses import dropped, lost, told
from hisparse.cli.opening import DIRECTORY
from hisparse.cli.output import emit, emit_json, table
from hisparse.errors import LogDamage
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import EVENT_TYPES, RequestArrived, StepPlanned
from hisparse.fsm.log_history import STREAM, LogHistory
from hisparse.fsm.log_reader import DiskReader

POLL_S = 0.1
NAMES = {cls.__struct_config__.tag: cls.__name__ for cls in EVENT_TYPES}

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_stream = click.option(
    "--stream", default=STREAM, show_default=True, help="Which log below DIRECTORY: rank-0, …"
)


@click.group()
def log() -> None:
    """Look into an event log, follow it, repair it, compress it.

    Example: hisparse log info runs/one
    """


def _undamaged(texts: Iterable[str]) -> Iterator[str]:
    """`texts` up to damage, which the history then knows, and `told` says."""
    with suppress(LogDamage):
        yield from texts


# -- info -----------------------------------------------------------------------------------------


@log.command()
@DIRECTORY
@_stream
@_json
def info(directory: Path, stream: str, as_json: bool) -> int:
    """What the log in DIRECTORY holds: segments, events by kind, steps, requests, configuration.

    Reads every event, so that damage anywhere is found.

    Example: hisparse log info runs/one --json
    """
    history = LogHistory.open(directory, stream=stream)
    report = describe(history)
    if as_json:
        emit_json(report)
    else:
        emit(table(_grouped(report)))
    return told(history.loss, history.gaps)


def describe(history: LogHistory) -> dict[str, Any]:
    """`log info --json`."""
    kinds: Counter[str] = Counter()
    first_step, last_step, seq = None, None, history.first_seq - 1
    codec = Codec(EVENT_TYPES)
    with suppress(LogDamage):
        for seq, kind, body in history.frames(history.first_seq):  # noqa: B007
            kinds[NAMES.get(kind, f"kind-{kind}")] += 1
            if kind == StepPlanned.__struct_config__.tag:
                event = codec.decode(kind, body)
                assert isinstance(event, StepPlanned)
                last_step = event.step
                first_step = event.step if first_step is None else first_step
    config = history.config
    return {
        "events": sum(kinds.values()),
        "first_seq": history.first_seq,
        "last_seq": seq,
        "segments": [msgspec.structs.asdict(segment) for segment in history.segments],
        "bytes": sum(segment.bytes for segment in history.segments),
        "snapshots": history.snapshots.seqs(),
        "steps": {"first": first_step, "last": last_step},
        "requests": kinds[RequestArrived.__name__],
        "kinds": dict(kinds.most_common()),
        "gaps": dropped(history.gaps),
        "lost": lost(history.loss),
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
@DIRECTORY
@_stream
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="NAME",
    shell_complete=kind_names,
    help="Events of this name.",
)
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
    unknown = [kind for kind in kinds if kind not in KINDS and not kind.startswith("kind-")]
    if unknown:
        raise click.UsageError(f"--kind {unknown[0]}: known are {', '.join(KINDS)}")
    history = LogHistory.open(directory, stream=stream)
    first, last = log_cat.bounds(history, seqs, steps)
    if wide:
        if kinds or pages or transfers or requests:
            raise click.UsageError("--wide takes --block, --seq and --step only")
        say(", ".join(f"{letter} {state.name}" for state, letter in log_cat.LETTERS.items()))
        texts = log_cat.wide(history, list(blocks), first, last, as_json=as_json)
    else:
        chosen = log_cat.Filter(kinds, blocks, pages, transfers, requests)
        found = log_cat.events(history, chosen, first, last)
        texts = (log_cat.line(seq, event, as_json=as_json) for seq, event in found)
    emit(_undamaged(texts))
    to_end = seqs[1] is None and steps[1] is None
    crossed = [gap for gap in history.gaps if gap.last_seq >= first]
    return told(history.loss, crossed, at=None if to_end else last)


# -- tail -----------------------------------------------------------------------------------------


@log.command()
@DIRECTORY
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
    lines = (log_cat.line(seq, e, as_json=as_json) for seq, e in history.read(start))
    if not follow:
        emit(_undamaged(lines))
        return told(history.loss, [gap for gap in history.gaps if gap.last_seq >= start])
    for line in lines:
        click.echo(line)
    reader = DiskReader(directory / stream, Codec(EVENT_TYPES))
    with LogCursor(reader, history.last_seq) as cursor:
        while True:
            for seq, event in cursor.take():
                click.echo(log_cat.line(seq, event, as_json=as_json))
            time.sleep(POLL_S)


for command in (recover, compact):
    log.add_command(command)
