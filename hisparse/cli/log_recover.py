"""`hisparse log recover | compact`: the verbs that change a log, or write what is left of one."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from hisparse.cli.errors import LOSS, VIOLATION, say
from hisparse.cli.opening import DIRECTORY
from hisparse.cli.output import emit, emit_json, table
from hisparse.errors import LogDamage, LogError
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_repair import compact_stream, recover_stream, streams
from hisparse.fsm.log_salvage import Salvage, rewrite

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@DIRECTORY
@click.option(
    "--salvage",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="OUT",
    help="Leave DIRECTORY as it is, and write every intact event to a new log in OUT.",
)
@_json
def recover(directory: Path, out: Path | None, as_json: bool) -> int:
    """Set the torn tail of a log aside; with --salvage, read on past damage into a new log.

    Exits 3 if something was lost, 1 for damage in the middle, which only --salvage gets past.

    Example: hisparse log recover runs/one --salvage runs/one-salvaged
    """
    report: dict[str, Any] = {}
    code = 0
    for name in streams(directory):
        done = _recovered(directory / name) if out is None else _salvaged(directory, out, name)
        report[name] = done
        for one in done["lost"]:
            say(f"{name}: lost: {one['text']}")
        if done["damage"]:
            say(f"{name}: loss found: {done['damage']}; --salvage OUT writes what is intact")
            code = VIOLATION
        elif done["lost"] and code == 0:
            code = LOSS
    shown = {
        name: {"last_seq": done["last_seq"], "events": done["events"], "lost": len(done["lost"])}
        for name, done in report.items()
    }
    if as_json:
        emit_json({"streams": report})
    else:
        emit(table(shown))
    return code


def _recovered(path: Path) -> dict[str, Any]:
    """The stream's part of the report, with the same keys whatever was done."""
    try:
        found = recover_stream(path)
    except LogError as error:
        if "is being written" in str(error):
            raise
        last_seq, events = _readable(path)
        return {"last_seq": last_seq, "events": events, "lost": [], "damage": str(error)}
    loss = [] if found.loss is None else [found.loss]
    lost = [
        {
            "segment": one.segment,
            "offset": one.offset,
            "lost_bytes": one.lost_bytes,
            "first_seq": 0,
            "last_seq": 0,
            "reason": one.reason,
            "text": str(one),
        }
        for one in loss
    ]
    return {"last_seq": found.last_seq, "events": found.events, "lost": lost, "damage": None}


def _readable(path: Path) -> tuple[int | None, int | None]:
    """The last seq before the damage, and how many events there are; None for a stream that cannot
    even be opened."""
    try:
        history = LogHistory.open(path.parent, stream=path.name)
    except LogError:
        return None, None
    last_seq, events = history.first_seq - 1, 0
    with suppress(LogDamage):
        for last_seq, _, _ in history.frames(history.first_seq):  # noqa: B007
            events += 1
    return last_seq, events


def _salvaged(directory: Path, out: Path, name: str) -> dict[str, Any]:
    salvage = Salvage(directory / name)
    events = rewrite(salvage, out / name)
    lost = [{**msgspec.structs.asdict(one), "text": str(one)} for one in salvage.lost]
    last = salvage.last_seq
    return {"last_seq": last, "events": events, "lost": lost, "damage": None}


@click.command()
@DIRECTORY
@_json
def compact(directory: Path, as_json: bool) -> int:
    """Compress every segment but the last of each stream below DIRECTORY.

    Example: hisparse log compact runs/one
    """
    done = {name: compact_stream(directory / name) for name in streams(directory)}
    for text in itertools.chain.from_iterable(one.failed for one in done.values()):
        say(f"loss found: {text}")
    report = {name: msgspec.structs.asdict(one) for name, one in done.items()}
    if as_json:
        emit_json({"streams": report})
    else:
        emit(table(report))
    return VIOLATION if any(one.failed for one in done.values()) else 0
