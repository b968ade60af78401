"""`hisparse export`: a log in another tool's format. No torch; the log is only read.

Data goes to OUT, or (jsonl) to stdout. A file appears whole or not at all, for its owner only.
Exits 0; 1 for damage, or for dropped events that a trace cannot cross; 3 for a torn tail or dropped
events: what was readable is exported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import click

from hisparse.cli.errors import VIOLATION, say
from hisparse.cli.losses import dropped, lost, told, worst
from hisparse.cli.opening import DIRECTORY, History, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.errors import HiSparseError, UsageError
from hisparse.export import jsonl, parquet, perfetto
from hisparse.fsm.log_history import STREAM

CAP = click.IntRange(min=0)
FORMATS = ("jsonl", "parquet", "perfetto")


@click.command()
@DIRECTORY
@click.option("--to", "form", type=click.Choice(FORMATS), required=True, help="The format.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--stream", default=STREAM, show_default=True, help="scheduler, or rank-N.")
@click.option(
    "--clock",
    type=click.Choice(["seq", "step"]),
    default="step",
    show_default=True,
    help="perfetto: 1 us a seq, or 1 ms a step.",
)
@click.option("--blocks", type=CAP, default=256, show_default=True, help="perfetto: block tracks.")
@click.option("--pages", type=CAP, default=256, show_default=True, help="perfetto: page tracks.")
@click.option(
    "--requests", type=CAP, default=1000, show_default=True, help="perfetto: request tracks."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(
    directory: Path, form: str, out: Path | None, stream: str, as_json: bool, **options: Any
) -> int:
    """Write the log in DIRECTORY in another format.

    jsonl: one JSON object an event. parquet: a row an event, for DuckDB, Polars or Spark.
    perfetto: a trace for ui.perfetto.dev: states of requests, transfers, blocks and pages over
    steps, with arrows from causes; of all rank streams too.

    Example: hisparse export runs/one --to parquet -o one.parquet
    """
    if out is None and (form != "jsonl" or as_json):
        raise UsageError("--json prints on stdout, and binary formats need a file: give -o OUT")
    history = open_history(directory)
    if stream not in (STREAM, *history.rank_streams()):
        raise UsageError(f"{directory} holds no stream {stream!r}")
    if form == "perfetto" and stream != STREAM:
        raise UsageError("a perfetto trace holds all streams: leave --stream out")
    if out is None:
        emit(jsonl.lines(history.read(1, stream)))
        return _ended(history, stream)
    error = None
    with writing(out, text=form == "jsonl") as file:
        if form == "perfetto":
            report, error = _trace(history, cast(BinaryIO, file), **options)
        else:
            report = {"events": _rows(history, form, stream, file)}
    loss = history.loss if stream == STREAM else history.rank_losses.get(stream)
    report = {"format": form, "out": str(out), "stream": stream} | report
    if as_json:
        emit_json(report | {"lost": lost(loss), "gaps": dropped(history.gaps)})
    else:
        say(f"{out}: {report['events']} events")
    if error is not None:
        say(f"the trace ends early: {error}")
        return VIOLATION
    return _ended(history, stream)


def _rows(history: History, form: str, stream: str, file: BinaryIO | TextIO) -> int:
    events = history.read(1, stream)
    if form == "jsonl":
        return jsonl.write(events, cast(TextIO, file))
    return parquet.write(events, cast(BinaryIO, file))


def _trace(
    history: History, file: BinaryIO, clock: Any, blocks: int, pages: int, requests: int
) -> tuple[dict[str, Any], HiSparseError | None]:
    made = perfetto.write(
        history.config,
        history,
        {name: history.read(1, name) for name in history.rank_streams()},
        file,
        apply=history.log.apply,
        caps=perfetto.Caps(blocks, pages, requests),
        clock=clock,
    )
    if any(made.left_out.values()):
        counts = ", ".join(f"{n} {what}s" for what, n in made.left_out.items() if n)
        say(f"tracks left out: {counts} (--blocks, --pages and --requests raise the caps)")
    report = made._asdict()
    error = report.pop("error")
    return report | {"error": str(error) if error else None}, error


def _ended(history: History, stream: str) -> int:
    """The exit code, after a word on what the log lacks."""
    losses = {STREAM: history.loss} if stream == STREAM else {}
    losses |= history.rank_losses
    gaps = history.gaps if stream == STREAM else []
    return worst(told(None, gaps), *(told(loss, of=name) for name, loss in losses.items()))


@contextmanager
def writing(path: Path, *, text: bool = False) -> Iterator[BinaryIO | TextIO]:
    """A file that takes the place of `path` when the block ends well. Raises UsageError."""
    mode: dict[str, Any] = {"mode": "w", "encoding": "utf-8"} if text else {"mode": "wb"}
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            with path.open(**mode) as stream:
                yield stream
            return
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(fd, **mode) as file:
                yield file
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
