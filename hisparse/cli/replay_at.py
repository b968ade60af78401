"""The parts of `hisparse replay` that stop at a seq (`--at`) or follow one id (`--watch`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hisparse.cli.errors import LOSS, say
from hisparse.cli.opening import open_history
from hisparse.fsm.describe import as_dict, line
from hisparse.fsm.log_reader import Loss
from hisparse.fsm.state import State
from hisparse.fsm.watch import changes, parse, words


def replay_at(directory: Path, where: str) -> tuple[State, Loss | None]:
    """The state at ``SEQ``, ``step:N`` or ``last``, and the torn tail if that is the end."""
    history = open_history(directory)
    seq = history.seq_at(where)
    return history.state_at(seq), history.loss if seq == history.log.last_seq else None


def replay_watch(directory: Path, watched: str, where: str, as_json: bool) -> int:
    """Print each event that changed the watched id, with what it changed."""
    wanted = parse(watched)
    history = open_history(directory)
    at = history.seq_at(where)
    found: list[dict[str, Any]] = []
    for change in changes(State(history.config), history.known(), wanted, at):
        if as_json:
            found.append(
                {"event": as_dict(change.seq, change.event)}
                | {"before": change.before, "after": change.after}
            )
        else:
            click.echo(f"{line(change.seq, change.event)}\n          {words(change)}")
    if as_json:
        click.echo(json.dumps({"watched": watched, "changes": found}, indent=2))
    if history.loss is not None and where == "last":
        say(f"recovered with loss: {history.loss}")
        return LOSS
    return 0
