"""`hisparse why`: how a block, host page, request or transfer came to be as it is. No torch."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hisparse.cli.opening import open_history
from hisparse.fsm.describe import as_dict
from hisparse.fsm.watch import target
from hisparse.fsm.why import explain

KINDS = {"block": "block", "host-page": "page", "request": "request", "transfer": "transfer"}


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("ident", metavar="ID")
@click.option("--at", "where", default="last", help="SEQ, step:N or last.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the chain as JSON.")
def why(directory: Path, kind: str, ident: str, where: str, as_json: bool) -> int:
    """Print the chain of events that led to the state of ID, newest first, each above its cause.

    Example: hisparse why runs/one host-page 17 --at step:9201
    """
    wanted = target(KINDS[kind], ident)
    history = open_history(directory)
    at, config = history.seq_at(where), history.config
    links = explain(
        wanted,
        history.known,
        at,
        page_size=config.pools.page_size,
        index_pages=config.index_pages_per_block,
    )
    if as_json:
        chain = [
            {"depth": link.depth, "text": link.text, "event": as_dict(link.seq, link.event)}
            for link in links
        ]
        click.echo(json.dumps({"kind": kind, "id": ident, "at": at, "chain": chain}, indent=2))
        return 0
    for link in links:
        lead = "  " * link.depth + ("because " if link.depth else "")
        click.echo(f"{link.seq:>8}  {lead}{link.text}")
    return 0
