"""`hisparse diff`: where two logs part, and what two states differ in. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hisparse.cli.opening import History, open_history
from hisparse.fsm.describe import as_dict
from hisparse.fsm.diff import Difference, config_differences, differences, divergence
from hisparse.fsm.events import Event
from hisparse.fsm.state import digest

SHOWN = 20  # differing ids printed; JSON has them all
Point = tuple[History, int]


@click.command()
@click.argument("first", metavar="DIR[@PLACE]")
@click.argument("second", metavar="DIR[@PLACE]")
@click.option("--json", "as_json", is_flag=True, help="Print the difference as JSON.")
def diff(first: str, second: str, as_json: bool) -> int:
    """Print the first event at which two logs part, and the difference of their states. A PLACE is
    SEQ, step:N or last; with one directory twice, the states at its two places are compared.

    Example: hisparse diff runs/one@step:40 runs/two@step:40
    """
    points = (_point(first), _point(second))
    report = compare(*points)
    click.echo(json.dumps(report, indent=2) if as_json else as_text(report))
    return 0


def _point(text: str) -> Point:
    """A directory and a seq of its log; a name with an ``@`` may be one itself."""
    name, at, where = text.rpartition("@")
    if not at or Path(text).is_dir():
        name, where = text, "last"
    history = open_history(Path(name))
    return history, history.seq_at(where)


def _upto(point: Point) -> Iterator[tuple[int, Event]]:
    history, last = point
    for seq, event in history.known():
        if seq > last:
            return
        yield seq, event


def compare(first: Point, second: Point) -> dict[str, Any]:
    """The report: `equal`, `at`, `config`, `divergence`, `differences`."""
    states = [history.state_at(seq) for history, seq in (first, second)]
    parted = divergence(_upto(first), _upto(second))
    found = list(differences(*states))
    digests = [digest(state) for state in states]
    return {
        "equal": parted is None and digests[0] == digests[1],
        "at": [first[1], second[1]],
        "state_digests": digests,
        "config": config_differences(first[0].config, second[0].config),
        "divergence": None
        if parted is None
        else {
            "seq": parted.seq,
            "first": None if parted.first is None else as_dict(parted.seq, parted.first),
            "second": None if parted.second is None else as_dict(parted.seq, parted.second),
        },
        "differences": [_as_json(difference) for difference in found],
    }


def _as_json(found: Difference) -> dict[str, Any]:
    return found._asdict() | {"text": found.words()}


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    if report["equal"]:
        return f"equal up to seq {report['at'][0]}: the same events, the same state"
    lines = [f"config {key}: {a} / {b}" for key, (a, b) in report["config"].items()]
    parted = report["divergence"]
    if parted is None:
        lines.append("the same events")
    else:
        lines.append(f"the logs part at seq {parted['seq']}")
        for name in ("first", "second"):
            event = parted[name]
            lines.append(f"  {name:<6}  {'(ends before it)' if event is None else event['line']}")
    found = report["differences"]
    lines.append(f"states at seq {report['at'][0]} / {report['at'][1]}: {len(found)} ids differ")
    lines += [f"  {one['text']}" for one in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more")
    return "\n".join(lines)
