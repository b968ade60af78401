"""The machines as a page of Markdown, rendered from the very declarations that run. Pure.

Owns nothing: the text is a function of the machines and of their modules' docstrings, so that a
page which differs from `render()` is stale. Writing it to a file is the caller's business.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence

from hisparse.fsm.machine import ILLEGAL, Machine
from hisparse.fsm.machines import MACHINES

_HEAD = """\
# Machines

Generated from the declarations in `hisparse/fsm/machines/`; change those, not this page. The hot
path runs tables compiled from the same declarations. A trigger that a state does not list raises
`IllegalTransition`, which names the machine, the id and its epoch, the state, the trigger and the
seq.
"""


def render(machines: Sequence[Machine] = MACHINES) -> str:
    """The whole page, one section a machine."""
    return "\n".join([_HEAD, *(_section(machine) for machine in machines)])


def _section(machine: Machine) -> str:
    final = ", ".join(f"`{state.name}`" for state in machine.final)
    return "\n".join(
        [
            f"## {machine.name}",
            "",
            _introduction(machine),
            f"Begins in `{machine.states(0).name}`, may end in {final}.",
            "",
            "```mermaid",
            machine.mermaid(),
            "```",
            "",
            "| trigger | from | to |",
            "|---|---|---|",
            *_rows(machine),
            "",
        ]
    )


def _introduction(machine: Machine) -> str:
    """First paragraph of the docstring of the module that declares the machine, less its name."""
    module = sys.modules[machine.states.__module__]
    first = inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]
    text = first.partition(": ")[2] or first
    return text[:1].upper() + text[1:]


def _rows(machine: Machine) -> Iterator[str]:
    """One table row for each (trigger, destination), in the order of the triggers."""
    for trigger in machine.triggers:
        sources: dict[str, list[str]] = {}
        for state in machine.states:
            cell = int(machine.table[state, trigger])
            if cell != ILLEGAL:
                after = machine.states(cell).name
                sources.setdefault(after, []).append(f"`{state.name}`")
        for after, names in sources.items():
            yield f"| `{trigger.name}` | {', '.join(names)} | `{after}` |"
