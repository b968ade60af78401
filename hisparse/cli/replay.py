"""`hisparse replay`: fold a log on disk and show the state at its end. No torch, no GPU.

Reads the stream ``scheduler`` below the directory, and everything that the fold needs from the
header of its first segment. It never writes: a torn tail stays where it is and is reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from hisparse.cli.errors import LOSS, say
from hisparse.cli.output import table
from hisparse.config import HiSparseConfig
from hisparse.errors import LogError
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.log_reader import Loss
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import State, digest


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--at", "where", default="last", help="SEQ, step:N or last.", show_default=True)
@click.option("--watch", "watched", help="block=N, page=N, request=ID or transfer=N.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def replay(directory: Path, where: str, watched: str | None, as_json: bool) -> int:
    """Fold the log in DIRECTORY and print the state that it amounts to, at its end or --at a place.
    With --watch, print instead each event that changed that id, and what it changed.

    Exits 3 if the log ends in a torn tail: what is printed is the state before it. Exits 3 too
    if its writer had to drop events: the state is then taken up at the snapshot behind them.

    Example: hisparse replay runs/one --json
    """
    from hisparse.cli.replay_at import replay_at, replay_watch

    if watched is not None:
        return replay_watch(directory, watched, where, as_json)
    state, loss = fold_directory(directory) if where == "last" else replay_at(directory, where)
    report = describe(state, loss)
    click.echo(json.dumps(report, indent=2) if as_json else table(grouped(report)))
    missing = [*LogHistory.open(directory).gaps, *([] if loss is None else [loss])]
    for one in missing:
        say(f"recovered with loss: {one}")
    return LOSS if missing else 0


def fold_directory(directory: Path) -> tuple[State, Loss | None]:
    """The state at the end of the log in `directory`, and the torn tail, if there is one.

    Raises LogError for damage, and as `LogHistory.open` and `LogHistory.state_at` do.
    """
    history = LogHistory.open(directory)
    if history.loss is not None and not history.loss.torn:
        raise LogError(str(history.loss))
    return history.state_at(history.last_seq), history.loss


def read_config(directory: Path) -> HiSparseConfig:
    """The configuration in the header of the log's first segment. Raises LogError."""
    return LogHistory.open(directory).config


def describe(state: State, loss: Loss | None) -> dict[str, Any]:
    """`replay --json`. `seq`, `state_digest`, `pools`, `requests` and `transfers` are stable."""
    rows = state.rows
    requests = [
        {
            "request": request.request,
            "epoch": request.epoch,
            "state": request.state.name,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "row": request.row,
            "computed": int(rows.computed[request.row]) if request.row >= 0 else 0,
            "published_pages": int(rows.published[request.row]) if request.row >= 0 else 0,
            "hot": request.hot.name,
            "deferred": request.deferred,
        }
        for request in state.requests.values()
    ]
    transfers = [
        {
            "transfer": t.transfer,
            "epoch": t.epoch,
            "kind": t.kind.name,
            "state": t.state.name,
            "row": t.row,
            "entry": t.entry,
            "block": t.block,
            "block_epoch": t.block_epoch,
            "page": t.page,
            "page_epoch": t.page_epoch,
            "pinned_seq": t.pinned_seq,
        }
        for t in state.transfers.values()
    ]
    return {
        "seq": state.seq,
        "events": state.seq,
        "step": state.step,
        "state_digest": digest(state),
        "lost": None if loss is None else _lost(loss),
        "pools": _pools(state),
        "requests": requests,
        "transfers": transfers,
    }


def _lost(loss: Loss) -> dict[str, Any]:
    return {
        "segment": loss.segment,
        "offset": loss.offset,
        "expected_seq": loss.expected_seq,
        "lost_bytes": loss.lost_bytes,
        "reason": loss.reason,
    }


def _pools(state: State) -> dict[str, Any]:
    """Occupancy without the null ids."""
    blocks, pages = state.blocks, state.pages
    leased = ~np.isin(blocks.state, (BlockState.FREE, BlockState.CACHED))
    return {
        "gpu": {
            "blocks": len(blocks.state) - 1,
            "available": blocks.available,
            "by_state": {s.name: int((blocks.state[1:] == s).sum()) for s in BlockState},
            "leased_by_role": {
                r.name: int((leased & (blocks.role == r))[1:].sum()) for r in BlockRole
            },
        },
        "host": {
            "pages": len(pages.state) - 1,
            "available": pages.available,
            "findable": len(state.prefix),
            "by_state": {s.name: int((pages.state[1:] == s).sum()) for s in PageState},
        },
    }


def grouped(report: dict[str, Any]) -> dict[str, dict[str, object]]:
    """The description as the table's groups: states that hold something, requests, transfers."""
    groups: dict[str, dict[str, object]] = {
        "log": {name: report[name] for name in ("seq", "events", "step", "state_digest")}
    }
    for name, pool in report["pools"].items():
        groups[f"{name} pool"] = {
            key: {k: v for k, v in value.items() if v} if isinstance(value, dict) else value
            for key, value in pool.items()
        }
    held = report["requests"]
    groups["held now"] = {"requests": len(held), "transfers": len(report["transfers"])}
    for r in held:
        name = f"{r['request']}/{r['epoch']}"
        groups["held now"][name] = f"{r['state']} row {r['row']}, {r['computed']} rows computed"
    return groups
