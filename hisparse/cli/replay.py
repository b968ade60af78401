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
from pydantic import ValidationError

from hisparse.cli.errors import LOSS, say
from hisparse.cli.output import table
from hisparse.config import HiSparseConfig, config_error
from hisparse.errors import HiSparseError, InvariantViolation, LogError
from hisparse.fsm.codec import Codec, SegmentHeader, UnknownEvent
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.fold import evolve
from hisparse.fsm.log_files import OsDisk
from hisparse.fsm.log_reader import DiskReader, Loss, Segment, segment_numbers
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import State, digest

STREAM = "scheduler"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the state as JSON.")
def replay(directory: Path, as_json: bool) -> int:
    """Fold the log in DIRECTORY and print the state that it amounts to.

    Exits 3 if the log ends in a torn tail: what is printed is the state before it.

    Example: hisparse replay runs/one --json
    """
    state, loss = fold_directory(directory)
    report = describe(state, loss)
    click.echo(json.dumps(report, indent=2) if as_json else table(grouped(report)))
    if loss is not None:
        say(f"recovered with loss: {loss}")
        return LOSS
    return 0


def fold_directory(directory: Path) -> tuple[State, Loss | None]:
    """The state after every event of the log in `directory`, and the torn tail, if there is one.

    Raises LogError for no log, for damage, and for an event that this version does not know;
    InvariantViolation ``replay_equal`` for events that contradict the state.
    """
    stream = directory / STREAM
    reader = DiskReader(stream, Codec(EVENT_TYPES))
    state = State(read_config(directory))
    for seq, event in reader:
        if isinstance(event, UnknownEvent):
            raise LogError(f"event {seq} has kind {event.kind}, which this version does not know")
        try:
            evolve(state, event, seq)
        except HiSparseError:
            raise
        except Exception as error:  # ids and lengths of a foreign log may be anything
            text = (
                f"{type(event).__name__} cannot follow the state: {error or type(error).__name__}"
            )
            raise InvariantViolation("replay_equal", text, seq=seq) from error
    return state, reader.loss


def read_config(directory: Path) -> HiSparseConfig:
    """The configuration in the header of the log's first segment. Raises LogError."""
    stream, disk = directory / STREAM, OsDisk()
    if not directory.is_dir():
        raise LogError(f"{directory}: no such directory; give the one that --log wrote to")
    numbers = segment_numbers(disk, stream) if stream.is_dir() else []
    if not numbers:
        raise LogError(f"{directory} holds no log: {STREAM}/00000001.seg is missing")
    try:
        first = Segment(disk, stream, numbers[0])
    except OSError as error:
        raise LogError(f"cannot read {directory}: {error.strerror or error}") from error
    header = first.header
    first.close()
    if not isinstance(header, SegmentHeader):
        raise LogError(f"{directory}: {first.name} is damaged: {header}")
    try:
        return HiSparseConfig.model_validate_json(header.config)
    except ValidationError as error:
        raise LogError(
            f"{directory}: its configuration is unusable: {config_error(error)}"
        ) from None


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
