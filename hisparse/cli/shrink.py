"""`hisparse shrink`: the smallest pytest scenario that still shows a log's violation. No torch.

The file goes to stdout. Exits 1 with a scenario, for a violation was found; 0 if nothing is
violated, and 3 or 1 if that holds only up to a torn tail, or to damage or lacking events.
"""

from __future__ import annotations

from pathlib import Path

import click

from hisparse.cli.errors import VIOLATION, say
from hisparse.cli.losses import dropped, lost, told
from hisparse.cli.opening import DIRECTORY, open_history
from hisparse.cli.output import emit, emit_json
from hisparse.fsm.describe import as_dict
from hisparse.fsm.scenario import source
from hisparse.fsm.shrink import first_violation
from hisparse.fsm.shrink import shrink as shrunk


@click.command()
@DIRECTORY
@click.option("--invariant", default="", help="Its first violation. [default: the log's first]")
@click.option("--json", "as_json", is_flag=True, help="Print the scenario and its file as JSON.")
def shrink(directory: Path, invariant: str, as_json: bool) -> int:
    """Print a test file with the fewest events of the log in DIRECTORY that still show a violation.

    The test passes while they do. Unordered accesses of rank streams are not shrunk. Exits 1 with
    a scenario, 0 if nothing is violated, 3 if the log has a torn tail and nothing is before it.

    Example: hisparse shrink runs/one > test_case.py
    """
    history = open_history(directory)
    violation, told_at = first_violation(
        history.config, history, invariant, torn=lambda: history.loss is not None
    )
    missing = {"lost": lost(history.loss), "gaps": dropped(history.gaps)}
    if violation is None:
        if as_json:
            emit_json({"invariant": invariant or None, "events": [], "source": None} | missing)
        say(f"{invariant} is not violated" if invariant else "nothing is violated")
        return told(history.loss, history.gaps, crossed=0)
    scenario = shrunk(history.config, violation, told_at, history)
    text = source(history.config, scenario, str(directory))
    count = len(scenario.events)
    if as_json:
        report = {
            "invariant": violation.invariant,
            "seq": violation.seq,
            "message": violation.message,
            "shown_by": scenario.shown_by,
            "minimal": scenario.minimal,
            "origin": scenario.origin,
            "events": [as_dict(seq, event) for seq, event in scenario.events],
            "source": text,
        }
        emit_json(report | missing)
    else:
        emit(text.rstrip("\n"))
    rest = "" if scenario.minimal else "; more could perhaps be left out"
    say(f"{violation.invariant} at seq {violation.seq}: {count} of {told_at} events show it{rest}")
    return VIOLATION
