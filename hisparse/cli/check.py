"""`hisparse check`: every invariant that a log can show, after every event. No torch, no GPU.

Reads the scheduler's stream, and each rank's stream for the order of its device accesses. Prints
the witness of each violation. Exits 0 if all holds; 1 for a violation, damage, or lacking events,
behind which nothing is checked; 3 for a torn tail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from hisparse.cli.errors import VIOLATION
from hisparse.cli.losses import dropped, lost, told, worst
from hisparse.cli.opening import DIRECTORY, History, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.fsm.audit import CHECKED, NOT_CHECKED, Audit
from hisparse.fsm.describe import as_dict
from hisparse.fsm.events import Event, LogGap
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.invariants.inherited import NEEDS_HISTORY
from hisparse.fsm.rank_order import RankOrder
from hisparse.fsm.witness import witness

WITNESSES = 10  # violations whose witness is searched for


@click.command()
@DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check(directory: Path, as_json: bool) -> int:
    """Check the log in DIRECTORY and print what does not hold, with the events that show it.

    Behind events that the log lacks it goes on at the next snapshot. Exits 1 for a violation,
    for damage, or for such events with no snapshot behind them; 3 for what it could read past.

    Example: hisparse check runs/one --json
    """
    history = open_history(directory)
    report = audit(history)
    if as_json:
        emit_json(report)
    else:
        emit(as_text(report))
    read_to = report["resumed"][-1]["seq"] if report["resumed"] else 0
    code = told(history.loss, history.gaps, crossed=read_to)
    of_ranks = (told(loss, of=name) for name, loss in history.rank_losses.items())
    violated = report["violations"] or report["unordered"]
    return worst(code, *of_ranks, VIOLATION if violated else 0)


class Resumed(NamedTuple):
    """A gap that a snapshot took up: events of seqs in (after_seq, seq] were not judged."""

    after_seq: int
    seq: int


def audit(history: History) -> dict[str, Any]:
    """The report: keys `events`, `segments`, `lost`, `gaps`, `resumed`, `checked`, `not_checked`,
    `violations`, `unordered` and `unordered_total` are stable."""
    made = Audit(history.config)
    start = made.state
    sizes = [len(columns.state) for columns in (start.blocks, start.pages, start.suffix)]
    ranks = [RankOrder(name, history.read(1, name), *sizes) for name in history.rank_streams()]
    resumed: list[Resumed] = []
    cut = False
    for seq, event in history:
        if seq <= made.state.seq:
            continue  # the snapshot has it
        if isinstance(event, LogGap):
            state = history.log.snapshot_behind(seq)
            cut = state is None
            if state is None:
                break
            resumed.append(Resumed(event.after_seq, state.seq))
            made.resume(state)
            continue
        if not made.take(seq, event):
            break
        for rank in ranks:
            rank.folded(seq, event, made.state)
    for rank in ranks:
        rank.finish()
    made.finish(torn=cut or history.loss is not None)
    return {
        "events": made.events,
        "segments": history.segments,
        "lost": lost(history.loss),
        "gaps": dropped(history.gaps),
        "resumed": [one._asdict() for one in resumed],
        "recounts": made.recounts,
        "checked": list(CHECKED),
        "not_checked": [{"invariant": i.name, "where": i.where} for i in NOT_CHECKED]
        + [
            {"invariant": name, "where": "log", "from_seq": resumed[0].after_seq + 1}
            for name in NEEDS_HISTORY
            if resumed
        ],
        "violations": _witnessed(history, made.violations),
        "more_violations": made.more,
        "ranks": [
            {
                "stream": rank.name,
                "steps": rank.steps,
                "lost": lost(history.rank_losses.get(rank.name)),
            }
            for rank in ranks
        ],
        "unordered": [pair for rank in ranks for pair in _unordered(history, rank)],
        "unordered_total": sum(rank.clocks.total for rank in ranks),
    }


def _unordered(history: History, rank: RankOrder) -> list[dict[str, Any]]:
    """Pairs of accesses that nothing orders, each with its event of the rank's stream."""

    def told(seq: int, access: str) -> dict[str, Any]:
        event = next((event for _, event in history.read(seq, rank.name)), None)
        return {"access": access, "stream": rank.name} | as_dict(seq, event)

    return [
        {
            "pool": pair.pool,
            "id": pair.ident,
            "first": told(pair.first_seq, pair.first),
            "second": told(pair.second_seq, pair.second),
            "missing_edge": pair.missing_edge,
        }
        for pair in rank.clocks.found
    ]


def _witnessed(history: History, violations: list[Violation]) -> list[dict[str, Any]]:
    found = []
    for number, violation in enumerate(violations):
        chain: list[dict[str, Any]] = []
        if number < WITNESSES:
            event = next((event for _, event in history.read(violation.seq)), None)
            if isinstance(event, Event):
                shown = witness(history.config, violation, event, history)
                chain = [as_dict(seq, e) for seq, e in shown]
        found.append(
            {
                "invariant": violation.invariant,
                "seq": violation.seq,
                "message": violation.message,
                "witness": chain,
            }
        )
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['events']} events in {report['segments']} segments"]
    lines.append(f"checked      {', '.join(report['checked'])}")
    rest = ", ".join(_unchecked(one) for one in report["not_checked"])
    lines.append(f"not checked  {rest}")
    for gap in report["resumed"]:
        lines.append(
            f"not judged   events {gap['after_seq'] + 1} to {gap['seq']}: lacking, and what"
        )
        lines[-1] += " follows up to the next snapshot"
    for violation in report["violations"]:
        lines += ["", f"violated: {violation['invariant']} at seq {violation['seq']}"]
        lines += [f"  {violation['message']}"]
        lines += [f"  {event['seq']:>8}  {_tail(event)}" for event in violation["witness"]]
    for pair in report["unordered"]:
        lines += ["", f"unordered: {pair['missing_edge']}"]
        for name in ("first", "second"):
            lines.append(f"  {name:<6}  {pair[name]['access']}: {pair[name]['line']}")
    more = report["unordered_total"] - len(report["unordered"])
    if more:
        lines += ["", f"and {more} more unordered pairs"]
    if not report["violations"] and not report["unordered"]:
        lines.append("nothing violated")
    elif report["more_violations"]:
        lines.append(f"and {report['more_violations']} more violations")
    return "\n".join(lines)


def _unchecked(one: dict[str, Any]) -> str:
    behind = f", from seq {one['from_seq']} on" if "from_seq" in one else ""
    return f"{one['invariant']} ({one['where']}{behind})"


def _tail(event: dict[str, Any]) -> str:
    return str(event["line"]).partition("  ")[2]
