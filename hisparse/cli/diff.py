"""`hisparse diff`: where two logs part, and what two states differ in. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from hisparse.cli.completion import places
from hisparse.cli.losses import dropped, lost, worst
from hisparse.cli.opening import History, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.fsm.describe import as_dict
from hisparse.fsm.diff import Difference, config_differences, differences, divergence
from hisparse.fsm.state import State, digest

SHOWN = 20  # differing ids printed; JSON has them all


class Point(NamedTuple):
    """A place of a log, as it was given, and the state there."""

    history: History
    where: str
    state: State


@click.command()
@click.argument("first", metavar="DIR[@PLACE]", shell_complete=places)
@click.argument("second", metavar="DIR[@PLACE]", shell_complete=places)
@click.option("--json", "as_json", is_flag=True, help="Print the difference as JSON.")
def diff(first: str, second: str, as_json: bool) -> int:
    """Print the first event at which two logs part, and the difference of their states. A PLACE is
    SEQ, step:N or last; with one directory twice, the states at its two places are compared.

    Exits 0 whether they differ or not; 1 where damage, 3 where a torn tail or lacking events hide
    a part of a log.

    Example: hisparse diff runs/one@step:9 runs/one@step:12
    """
    points = (_point(first), _point(second))
    report = compare(*points)
    if as_json:
        emit_json(report)
    else:
        emit(as_text(report))
    return worst(*(_told(p) for p in points))


def _point(text: str) -> Point:
    """A directory and a seq of its log; a name with an ``@`` may be one itself."""
    name, at, where = text.rpartition("@")
    if not at or Path(text).is_dir():
        name, where = text, "last"
    history = open_history(Path(name))
    return Point(history, where, history.state_at(where, read=True))


def _told(point: Point) -> int:
    of = str(point.history.directory)
    return point.history.told(point.where, crossed=point.state.seq, of=of)


def compare(first: Point, second: Point) -> dict[str, Any]:
    """The report: `equal`, `at`, `config`, `divergence`, `differences`, `lost`, `gaps`."""
    points = (first, second)
    states = [point.state for point in points]
    parted = divergence(*(p.history.known(1, p.state.seq) for p in points))
    found = list(differences(*states))
    digests = [digest(state) for state in states]
    return {
        "equal": parted is None and digests[0] == digests[1],
        "at": [state.seq for state in states],
        "state_digests": digests,
        "config": config_differences(first.history.config, second.history.config),
        "divergence": None
        if parted is None
        else {
            "seq": parted.seq,
            "first": None if parted.first is None else as_dict(parted.seq, parted.first),
            "second": None if parted.second is None else as_dict(parted.seq, parted.second),
        },
        "differences": [_as_json(difference) for difference in found],
        "lost": [lost(point.history.loss) for point in points],
        "gaps": [dropped(point.history.gaps) for point in points],
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
