"""The page itself: its parts put together, the logs in it, and a policy that lets nothing else in.

`page.html` is the markup, `STYLES` are the look; the scripts are joined in the order of `SCRIPTS`.
Written in one go: the texts of a log while it is read, its columns when it has ended.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple, TextIO

from hisparse.export.html.lanes import Record, Recorder, Source
from hisparse.export.html.payload import Texts
from hisparse.fsm import events as ev
from hisparse.fsm.describe import as_dict, fields
from hisparse.fsm.diff import divergence
from hisparse.fsm.why import words

STYLES = ("page.css", "side.css")
SCRIPTS = (
    *("data.js", "index.js", "log.js", "why.js", "raster.js", "panel.js"),
    *("draw.js", "side.js", "view.js", "app.js", "input.js"),
)
NAMES = ("a", "b")
Ended = Callable[[], dict[str, Any]]


class Report(NamedTuple):
    """What was written: a record a log, and where two of them part."""

    records: list[Record]
    divergence: int | None


def write(sources: Sequence[tuple[Source, Ended]], out: TextIO) -> Report:
    """Write the page of one log or of two to `out`. `Ended` is asked once its log has been read:
    what the page is to say of its end (`lost`, in words)."""
    style, script = ("\n".join(map(_part, names)) for names in (STYLES, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head, _, tail = _part("page.html").partition("<!-- data -->")
    out.write(head.replace("{{policy}}", policy).replace("{{style}}", style))
    parted = _parted([source for source, _ in sources])
    records = [
        _log(name, source, ended, parted, out)
        for name, (source, ended) in zip(NAMES, sources, strict=False)
    ]
    out.write(tail.replace("{{script}}", script))
    return Report(records, None if parted is None else parted["seq"])


def _log(
    name: str, source: Source, ended: Ended, parted: dict[str, Any] | None, out: TextIO
) -> Record:
    recorder, texts, tenants = Recorder(source), Texts(), _Tenants()
    lengths: list[int] = []

    def put(line: str | None) -> None:
        if line is not None:
            lengths.append(len(line))
            out.write(line + "\n")

    out.write(f'<script type="text/plain" id="{name}-texts">')
    for seq, event in source.events:
        tenants.take(event)
        recorder.take(seq, event)
        put(texts.take(fields(event), _words(event, seq, tenants)))
    put(texts.rest())
    columns = recorder.columns()
    columns.u32("texts", lengths)
    meta = recorder.meta() | {"name": source.name, "divergence": parted} | ended()
    out.write(f'</script>\n<script type="text/plain" id="{name}-columns">')
    out.write(columns.encoded(meta) + "</script>\n")
    return recorder.record


class _Tenants:
    """Who holds each row now, for `why.words`."""

    def __init__(self) -> None:
        self._held: dict[int, str] = {}

    def take(self, event: Any) -> None:
        if isinstance(event, ev.RequestAdmitted):
            self._held[event.row] = f"{event.request}/{event.epoch}"

    def who(self, row: int, seq: int) -> str:
        held = self._held.get(row)
        return f"request {held} (row {row})" if held else f"row {row}"


def _words(event: Any, seq: int, tenants: _Tenants) -> str:
    if not isinstance(event, ev.Event):
        return "an event of a kind that this version lacks"
    try:
        return words(event, seq, tenants.who)
    except ValueError as error:  # lengths of a foreign log may be anything
        return f"{type(event).__name__} contradicts itself: {error}"


def _parted(sources: Sequence[Source]) -> dict[str, Any] | None:
    if len(sources) < 2:
        return None
    found = divergence(*(source.events for source in sources))
    if found is None:
        return None
    sides = {"first": found.first, "second": found.second}
    lines = {name: as_dict(found.seq, e)["line"] if e else None for name, e in sides.items()}
    return {"seq": found.seq} | lines


def _part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
