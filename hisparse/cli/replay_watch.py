"""The part of `hisparse replay` that follows one id: `--watch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hisparse.cli.losses import dropped, lost
from hisparse.cli.opening import History, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.fsm.describe import as_dict, line
from hisparse.fsm.events import Event, LogGap
from hisparse.fsm.state import State
from hisparse.fsm.watch import changes, parse, words


def replay_watch(directory: Path, watched: str, where: str, as_json: bool) -> int:
    """Print each event that changed the watched id, with what it changed."""
    wanted = parse(watched)
    history = open_history(directory)
    at = history.read_to(where)
    events = _Followed(history, at)
    found = changes(State(history.config), events, wanted)
    if as_json:
        shown: list[dict[str, Any]] = [
            {"event": as_dict(change.seq, change.event)}
            | {"before": change.before, "after": change.after}
            for change in found
        ]
        missing = {"lost": lost(history.loss), "gaps": dropped(history.gaps)}
        emit_json({"watched": watched, "changes": shown} | missing)
    else:
        emit(f"{line(change.seq, change.event)}\n          {words(change)}" for change in found)
    return history.told(where, crossed=events.last)


class _Followed:
    """The events up to the first that are lacking: what was done there is not known."""

    def __init__(self, history: History, upto: int) -> None:
        self._history, self._upto, self.last = history, upto, 0

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        for seq, event in self._history.known(1, self._upto):
            if isinstance(event, LogGap):
                return
            self.last = seq
            yield seq, event
