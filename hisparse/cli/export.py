"""`hisparse export`: a log in another tool's format. No torch; the log is only read.

Data goes to OUT, or (jsonl) to stdout. A file appears whole or not at all, for its owner only.
Exits 0; 1 for damage, or for lacking events that a trace cannot cross; 3 for a torn tail or dropped
events: what was readable is exported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import click

from hisparse.cli.errors import VIOLATION, say
from hisparse.cli.losses import dropped, lost, told, worst
from hisparse.cli.opening import DIRECTORY, History, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.errors import HiSparseError, LogError, UsageError
from hisparse.export import html, jsonl, parquet, perfetto
from hisparse.fsm.log_history import STREAM
from hisparse.fsm.snapshot import restore
from hisparse.fsm.state import State

CAP = click.IntRange(min=0)
FORMATS = ("jsonl", "parquet", "perfetto", "html")
WHOLE = ("perfetto", "html")  # take all streams, or the scheduler's alone: there is no choice


@click.command()
@DIRECTORY
@click.option("--to", "form", type=click.Choice(FORMATS), required=True, help="The format.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--with",
    "other",
    type=click.Path(path_type=Path),
    metavar="DIR2",
    help="html: a second log, over the first.",
)
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
    directory: Path,
    form: str,
    out: Path | None,
    other: Path | None,
    stream: str,
    as_json: bool,
    **options: Any,
) -> int:
    """Write the log in DIRECTORY in another format.

    jsonl: one JSON object an event. parquet: a row an event, for DuckDB, Polars or Spark.
    perfetto: a trace for ui.perfetto.dev: states of requests, transfers, blocks and pages over
    steps, with arrows from causes; of all rank streams too. html: one page that needs no network:
    lanes of state, a cursor, a search, and why each change happened; of two logs, where they part.

    Example: hisparse export runs/one --to html -o one.html --with runs/two
    """
    if out is None and (form != "jsonl" or as_json):
        raise UsageError(
            "--json prints on stdout, and formats other than jsonl need a file: give -o OUT"
        )
    if other is not None and form != "html":
        raise UsageError("--with lays a second log over the first: it needs --to html")
    history = open_history(directory)
    if stream not in (STREAM, *history.rank_streams()):
        raise UsageError(f"{directory} holds no stream {stream!r}")
    if form in WHOLE and stream != STREAM:
        what = {"perfetto": "all streams", "html": "the scheduler's stream"}[form]
        raise UsageError(f"{form} shows {what}: leave --stream out")
    if form == "html":
        assert out is not None
        return _page([history, *([open_history(other)] if other else [])], out, as_json)
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


def page_of(directories: Sequence[Path], out: Path) -> html.Report:
    """Write the HTML page of one log or two to `out`."""
    return _write_page([open_history(directory) for directory in directories], out)


def _write_page(histories: list[History], out: Path) -> html.Report:
    with writing(out, text=True) as file:
        return html.write([(_source(h), _end_of(h)) for h in histories], cast(TextIO, file))


def _page(histories: list[History], out: Path, as_json: bool) -> int:
    """The HTML page, and a word on it; returns the exit code."""
    made = _write_page(histories, out)
    report = {
        "format": "html",
        "out": str(out),
        "divergence": made.divergence,
        "logs": [
            {"directory": str(history.directory), "events": record.events}
            | {"changes": record.changes, "error": str(record.error) if record.error else None}
            | {"lost": lost(history.loss), "gaps": dropped(history.gaps)}
            for history, record in zip(histories, made.records, strict=True)
        ],
    }
    if as_json:
        emit_json(report)
    else:
        say(f"{out}: {', '.join(f'{record.events} events' for record in made.records)}")
    codes = [_ended(history, STREAM) for history in histories]
    for record in made.records:
        if record.error is not None:
            say(f"states end early: {record.error}")
            codes.append(VIOLATION)
    return VIOLATION if VIOLATION in codes else max(codes)


def _source(history: History) -> html.Source:
    log = history.log
    known = frozenset(log.snapshots.seqs())

    def resume(seq: int) -> State | None:
        data = log.snapshots.read(seq) if seq in known else None
        try:
            return None if data is None else restore(log.config, data)
        except LogError:  # a snapshot is a short cut: what cannot be used is passed over
            return None

    return html.Source(history.directory.name, log.config, history, log.apply, resume)


def _end_of(history: History) -> Callable[[], dict[str, Any]]:
    """What a page says of the end of the log, once it has been read."""

    def ended() -> dict[str, Any]:
        loss = history.loss
        return {"lost": None if loss is None else str(loss)}

    return ended


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
