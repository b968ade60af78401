"""`hisparse replay`: fold a log on disk and show the state at its end. No torch, no GPU.

Reads the stream ``scheduler`` below the directory, and everything that the fold needs from the
header of its first segment. It never writes: a torn tail stays where it is and is reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from hisparse.cli.losses import dropped, lost
from hisparse.cli.opening import DIRECTORY, PLACE, History, open_history
from hisparse.cli.output import emit, emit_json, table
from hisparse.config_packing import Footprint
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import State, digest
from hisparse.kv.packing import held_footprint


@click.command()
@DIRECTORY
@PLACE
@click.option("--watch", "watched", help="block=N, page=N, request=ID or transfer=N.")
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def replay(directory: Path, where: str, watched: str | None, as_json: bool) -> int:
    """Fold the log in DIRECTORY and print the state that it amounts to, at its end or --at a place.
    With --watch, print instead each event that changed that id, and what it changed.

    Exits 3 if the log ends in a torn tail (what is printed is the state before it), or if its
    log lacks events and the state is taken up at a snapshot behind them; 1 if damage or
    lacking events hide the end: what is printed is the last state that can be known.

    Example: hisparse replay runs/one --at step:9 --json
    """
    from hisparse.cli.replay_watch import replay_watch

    if watched is not None:
        return replay_watch(directory, watched, where, as_json)
    history = open_history(directory)
    state = history.state_at(where)
    report = describe(state, history)
    if as_json:
        emit_json(report)
    else:
        emit(table(grouped(report)))
    return history.told(where, crossed=state.seq)


def describe(state: State, history: History) -> dict[str, Any]:
    """`replay --json`. `seq`, `state_digest`, `pools`, `requests`, `transfers`, `lost` and `gaps`
    are stable."""
    rows = state.rows
    requests: list[dict[str, Any]] = [
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
            **_gpu_bytes(state, request.row),
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
        "lost": lost(history.loss),
        "gaps": dropped(history.gaps),
        "pools": _pools(state),
        "requests": requests,
        "transfers": transfers,
    }


def _gpu_bytes(state: State, row: int) -> dict[str, int]:
    held = held_footprint(state, row) if row >= 0 else Footprint(0, 0)
    return {
        "gpu_bytes_needed": held.needed_bytes,
        "gpu_bytes_held": held.held_bytes,
        "gpu_bytes_padded": held.padded_bytes,
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
        groups["held now"][name] = (
            f"{r['state']} row {r['row']}, {r['computed']} rows computed, {r['gpu_bytes_held']} B "
            f"of GPU blocks, {r['gpu_bytes_padded']} B of them padding"
        )
    return groups
