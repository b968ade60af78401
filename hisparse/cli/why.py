"""`hisparse why`: how a block, host page, request or transfer came to be as it is. No torch."""

from __future__ import annotations

from pathlib import Path

import click

from hisparse.cli.completion import ids
from hisparse.cli.losses import dropped, lost
from hisparse.cli.opening import DIRECTORY, PLACE, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.fsm.describe import as_dict
from hisparse.fsm.watch import target
from hisparse.fsm.why import explain

KINDS = {"block": "block", "host-page": "page", "request": "request", "transfer": "transfer"}


@click.command()
@DIRECTORY
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("ident", metavar="ID", shell_complete=ids)
@PLACE
@click.option("--json", "as_json", is_flag=True, help="Print the chain as JSON.")
def why(directory: Path, kind: str, ident: str, where: str, as_json: bool) -> int:
    """Print the chain of events that led to the state of ID, newest first, each above its cause.

    Exits 1 where damage, 3 where a torn tail or lacking events hide a part of it.

    Example: hisparse why runs/one host-page 7 --at step:20
    """
    wanted = target(KINDS[kind], ident)
    history = open_history(directory)
    at, config = history.read_to(where), history.config
    links = explain(
        wanted,
        lambda seq: history.known(seq, at),
        at,
        page_size=config.pools.page_size,
        index_pages=config.index_pages_per_block,
    )
    if as_json:
        chain = [
            {"depth": link.depth, "text": link.text, "event": as_dict(link.seq, link.event)}
            for link in links
        ]
        missing = {"lost": lost(history.loss), "gaps": dropped(history.gaps)}
        emit_json({"kind": kind, "id": ident, "at": at, "chain": chain} | missing)
    else:
        leads = ("  " * link.depth + ("because " if link.depth else "") for link in links)
        emit(f"{link.seq:>8}  {lead}{link.text}" for link, lead in zip(links, leads, strict=True))
    return history.told(where)
