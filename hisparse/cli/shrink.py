"""`hisparse shrink`: the smallest pytest scenario that still shows a log's violation. No torch.

The file goes to stdout. Exits 1 with a scenario, for a violation was found; 0 if nothing is
violated, and 3 or 1 if that holds only up to a torn tail, or to damage.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from hisparse.cli.errors import LOSS, VIOLATION, say
from hisparse.cli.opening import History, open_history
from hisparse.fsm.describe import as_dict
from hisparse.fsm.scenario import source
from hisparse.fsm.shrink import first_violation
from hisparse.fsm.shrink import shrink as shrunk


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
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
    if violation is None:
        return _none_found(history, invariant)
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
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(text, nl=False)
    rest = "" if scenario.minimal else "; more could perhaps be left out"
    say(f"{violation.invariant} at seq {violation.seq}: {count} of {told_at} events show it{rest}")
    return VIOLATION


def _none_found(history: History, invariant: str) -> int:
    say(f"{invariant} is not violated" if invariant else "nothing is violated")
    if history.log.gaps:
        say(f"lost: {history.log.gaps[0]}; what follows was not checked")
        return VIOLATION
    if history.loss is None:
        return 0
    say(f"{'recovered with loss' if history.loss.torn else 'lost'}: {history.loss}")
    return LOSS if history.loss.torn else VIOLATION
