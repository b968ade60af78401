"""A scenario as the text of a pytest file: configuration and events as Python literals. Pure.

The file imports hisparse and nothing else; its one test passes for as long as the events show the
violation. Every value goes out as a literal of its own, so that a log cannot put code into it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from pprint import pformat
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.fsm.codec import LoggedEvent, UnknownEvent
from hisparse.fsm.shrink import Scenario

WIDTH = 100
_MODULES = {
    "BlockRole": "hisparse.fsm.machines",
    "BlockTrigger": "hisparse.fsm.machines",
    "PageTrigger": "hisparse.fsm.machines",
    "TransferKind": "hisparse.fsm.wire",
    "Checker": "hisparse.fsm.invariants",
    "RUN_CHECKS": "hisparse.fsm.invariants.run",
    "Audit": "hisparse.fsm.audit",
    "UnknownEvent": "hisparse.fsm.codec",
    "HiSparseConfig": "hisparse.config",
}
_BODIES = {
    "Checker": """\
    checker = Checker(CONFIG)
    for seq, event in EVENTS[:-1]:
        checker.event(seq, event)
    assert MESSAGE in RUN_CHECKS[INVARIANT](checker.run, EVENTS[-1][1])
""",
    "Audit": """\
    audit = Audit(CONFIG)
    for seq, event in EVENTS:
        if not audit.take(seq, event):
            break
    audit.finish()
    assert (INVARIANT, MESSAGE) in [(v.invariant, v.message) for v in audit.violations]
""",
}


def source(config: HiSparseConfig, scenario: Scenario, log: str) -> str:
    """The file, for a scenario of `log`."""
    violation = scenario.violation
    dumped = config.model_dump(mode="json", exclude_defaults=True, exclude={"log"})
    lines = pformat(dumped, width=WIDTH - 18, sort_dicts=False).splitlines()
    body = ["CONFIG = HiSparseConfig.model_validate_json(", f"    json.dumps({lines[0]}"]
    body += [f"               {line}" for line in lines[1:]]
    body[-1] += ")"
    body += [")", f"INVARIANT = {violation.invariant!r}", f"MESSAGE = {violation.message!r}"]
    body.append("EVENTS = [")
    for (seq, event), origin in zip(scenario.events, scenario.origin, strict=True):
        if origin != seq:
            body.append(f"    # seq {origin} of the log")
        body += _event(seq, event)
    body += ["]", "", "", f"def test_{re.sub(r'[^A-Za-z0-9_]', '_', violation.invariant)}():"]
    body.append(_BODIES[scenario.shown_by].rstrip())
    text = "\n".join(body)
    head = [
        '"""Passes for as long as these events show the violation: turn it round once it is fixed.',
        "",
        "Made by `hisparse shrink`.",
        '"""',
        "",
        f"# from {log!a}, seq {scenario.origin[-1]}",
        "# ruff: noqa: E501",
        "import json",
        "",
    ]
    return "\n".join([*head, *_imports(text), "", text, ""])


def _imports(text: str) -> list[str]:
    """Of what `text` names, a line a module."""
    named: dict[str, list[str]] = {}
    for name, module in sorted(_MODULES.items()):
        if re.search(rf"\b{name}\b", text):
            named.setdefault(module, []).append(name)
    found = {module: f"from {module} import {', '.join(names)}" for module, names in named.items()}
    if re.search(r"\bev\.", text):
        found["hisparse.fsm"] = "from hisparse.fsm import events as ev"
    return [line for _, line in sorted(found.items())]


def _event(seq: int, event: LoggedEvent) -> Iterable[str]:
    """The lines of one event."""
    kind = type(event).__name__
    made = kind if isinstance(event, UnknownEvent) else f"ev.{kind}"
    parts = [f"{name}={literal(getattr(event, name))}" for name in event.__struct_fields__]
    one = f"    ({seq}, {made}({', '.join(parts)})),"
    if len(one) <= WIDTH:
        return [one]
    return [f"    ({seq}, {made}(", *(f"        {part}," for part in parts), "    )),"]


def literal(value: Any) -> str:
    """Python for a field of an event."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, bytes):
        return f'bytes.fromhex("{value.hex()}")'
    return repr(value)
