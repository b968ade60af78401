"""`hisparse explore`: every interleaving of a small world, by the production code. No torch.

Exits 1 for a violation, 0 otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hisparse.cli.errors import VIOLATION, Verb, said_as, say
from hisparse.cli.output import Progress, emit, emit_json, table

if TYPE_CHECKING:
    from hisparse.testing.explore import Exploration, Search, Walk, World
    from hisparse.testing.explore.prepared import Prepared

COPIES = ("write_back", "spill", "restore")  # the names of `wire.TransferKind`
FIELDS = {"policy.name": "--policy", "policy.watermark_blocks": "--watermark"}
AT_LEAST_ONE, AT_LEAST_NONE = click.IntRange(1), click.IntRange(0)


@click.command(cls=Verb)
@click.option("--requests", type=AT_LEAST_ONE, default=2, show_default=True)
@click.option("--blocks", type=AT_LEAST_ONE, default=2, show_default=True, help="GPU blocks.")
@click.option("--host-pages", type=AT_LEAST_ONE, default=2, show_default=True)
@click.option("--transfers", type=AT_LEAST_ONE, default=2, show_default=True, help="At once.")
@click.option("--ranks", type=click.IntRange(1, 3), default=2, show_default=True)
@click.option("--crashes", type=AT_LEAST_NONE, default=1, show_default=True, help="Of ranks.")
@click.option("--failures", type=AT_LEAST_NONE, default=1, show_default=True, help="Of copies.")
@click.option("--faults", type=AT_LEAST_NONE, default=1, show_default=True, help="Of both.")
@click.option("--pages", type=AT_LEAST_ONE, default=1, show_default=True, help="A request.")
@click.option("--shared-pages", type=AT_LEAST_NONE, default=1, show_default=True)
@click.option("--unretired-steps", type=AT_LEAST_NONE, default=0, show_default=True)
@click.option("--policy", default="hybrid", show_default=True)
@click.option("--write-back", type=click.Choice(["eager", "on_pressure"]), default="eager")
@click.option("--watermark", type=AT_LEAST_NONE, default=0, show_default=True, help="In blocks.")
@click.option("--exact", is_flag=True, help="Tell host pages apart by their ids.")
@click.option("--max-states", type=AT_LEAST_ONE, metavar="N", help="Unique ones; then stop.")
@click.option("--keep-log", type=click.Path(path_type=Path), metavar="DIR", help="See above.")
@click.option("--projected", is_flag=True, help="The world of --to promela, and its count.")
@click.option("--copies", type=click.Choice(COPIES), default=COPIES[0], help="Of that world.")
@click.option("--to", type=click.Choice(["promela"]), help="Write that world as a model for Spin.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def explore(
    exact: bool,
    max_states: int | None,
    keep_log: Path | None,
    projected: bool,
    copies: str,
    to: str | None,
    out: Path | None,
    as_json: bool,
    **sizes: Any,
) -> int:
    """Try every interleaving of a small world, to its end, and check every state of it.

    Requests arrive, run, finish, are aborted, preempted, and come again; ranks acknowledge in any
    order and any batch, copies fail, a rank crashes. States that differ by a renaming of blocks,
    pages and requests count once. The shortest way to a violation is printed as moves and events;
    --keep-log writes it to DIR, for replay, check, why and diff. Exits 1 for a violation.

    With --projected the world is taken up when --transfers copies of a kind are in flight, and
    nothing is admitted or computed any more; no state is renamed, and those count that differ to a
    model of Spin. --to promela writes that model, from the tables as they are compiled.

    Example: hisparse explore --requests 1 --ranks 1
    """
    from hisparse.testing.explore import Search, World, walk

    world = World(**sizes)
    with said_as(FIELDS):
        world.config  # noqa: B018  it refuses here what would not do
    prepared = _prepared(world, copies) if projected or to else None
    if prepared is not None and to is not None:
        return _export(prepared, out)
    search = Search(world, exact=exact) if prepared is None else prepared.search()
    search.most = max_states
    result = _explored(search)
    result.world = world
    moves = [found.moves for found in result.violations]
    walks = [walk(search.world, way, plain=prepared is not None) for way in moves]
    report = as_report(result, walks)
    if prepared is not None:
        from hisparse.testing.explore.projection import Projection

        report["projected"] = Projection(prepared).count(search)
    emit_json(report) if as_json else emit(as_text(report))
    for found in result.violations:
        say(f"{found.invariant}: {found.message}")
    if walks and keep_log is not None:
        from hisparse.testing.logs import write_log

        write_log(walks[0], keep_log)
        say(f"replay: hisparse replay {keep_log}")
    return VIOLATION if result.violations else 0


def _explored(search: Search) -> Exploration:
    bar, most = Progress(), search.most
    try:
        search.progress = lambda r: bar("states", r.unique, most or r.unique)
        return search.run()
    finally:
        bar.close()


def _prepared(world: World, copies: str) -> Prepared:
    from hisparse.fsm.wire import TransferKind
    from hisparse.testing.explore.prepared import prepare

    return prepare(world, TransferKind[copies.upper()])


def _export(prepared: Prepared, out: Path | None) -> int:
    from hisparse.testing.explore.promela import COMMAND, declared, promela

    text = promela(prepared)
    if out is None:
        emit(text)
    else:
        out.write_text(text, encoding="utf-8")
    for line in declared(prepared):
        say(line)
    say(f"run: {COMMAND.format(model=out or 'FILE')}")
    return 0


def as_report(result: Exploration, walks: list[Walk]) -> dict[str, object]:
    """The first five keys are documented and stable."""
    return {
        "states": result.states,
        "unique": result.unique,
        "depth": result.depth,
        "seconds": round(result.seconds, 3),
        "violations": [
            {
                "invariant": found.invariant,
                "message": found.message,
                "moves": made.told,
                "events": made.events(),
            }
            for found, made in zip(result.violations, walks, strict=True)
        ],
        "cpu_seconds": round(result.cpu_seconds, 3),
        "scheduler_states": result.schedulers,
        "inputs": result.inputs,
        "bounded": result.bounded,
        "complete": result.complete,
        "world": world_of(result.world),
    }


def world_of(world: World) -> dict[str, object]:
    return {name: getattr(world, name) for name in world.__struct_fields__}


def as_text(report: dict[str, object]) -> list[str]:
    world, found = report["world"], report["violations"]
    assert isinstance(world, dict) and isinstance(found, list)
    counts = {name: value for name, value in report.items() if name != "world"}
    lines = [table({"explored": counts | {"violations": len(found)}, "world": world})]
    for number, one in enumerate(found, 1):
        lines += [f"violation {number}: {one['invariant']}", "  moves"]
        lines += [f"    {text}" for text in one["moves"]]
        lines += ["  events", *[f"    {text}" for text in one["events"]]]
    return lines
