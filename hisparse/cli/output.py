"""What verbs print: data, through a pager where it is long; tables for people; a progress bar.

A terminal alone sees pager and bar. `emit` pages what does not fit the screen, with $PAGER, unless
`hisparse --no-pager`, NO_PAGER, or a PAGER that is empty or `cat` says not to.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TextIO

import click

BAR_CELLS = 30
Groups = Mapping[str, Mapping[str, object]]


def emit(texts: str | Iterable[str]) -> None:
    """Print data on stdout, a line or more a text, as they come."""
    lines = (line for text in ([texts] if isinstance(texts, str) else texts) for line in _of(text))
    if not paging():
        for line in lines:
            click.echo(line)
        return
    first: list[str] = []
    for line in lines:
        first.append(line)
        if len(first) >= shutil.get_terminal_size().lines:
            os.environ.setdefault("LESS", "FRX")  # as git has it: long lines wrap, the text stays
            click.echo_via_pager(f"{line}\n" for line in chain(first, lines))
            return
    for line in first:
        click.echo(line)


def _of(text: str) -> Iterator[str]:
    return iter(text.split("\n"))


def emit_json(report: Mapping[str, Any]) -> None:
    """Print a report as JSON."""
    emit(json.dumps(report, indent=2))


def paging() -> bool:
    """Whether what is long goes through a pager."""
    context = click.get_current_context(silent=True)
    refused = context is not None and context.find_root().params.get("no_pager", False)
    named = os.environ.get("PAGER", "less")
    return (
        sys.stdout.isatty()
        and not refused
        and "NO_PAGER" not in os.environ
        and (named.strip() not in ("", "cat"))
    )


def table(groups: Groups) -> str:
    """Two aligned columns under a heading a group. The first word of a line is the JSON key."""
    width = max(len(key) for rows in groups.values() for key in rows)
    blocks = []
    for title, rows in groups.items():
        lines = [f"  {key:<{width}}  {_shown(value)}" for key, value in rows.items()]
        blocks.append("\n".join([title, *lines]))
    return "\n".join(blocks)


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "-"
        case _:
            return str(value)


class Progress:
    """A bar a stage, redrawn in place on a terminal; nothing at all in a pipe."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stderr if out is None else out
        self.on = self.out.isatty()
        self._drawn = ""
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.on:
            return
        full = BAR_CELLS * done // max(total, 1)
        bar = f"{stage:<9} [{'#' * full}{'.' * (BAR_CELLS - full)}] {done}/{total}"
        if bar == self._drawn:
            return
        if self._stage not in ("", stage):
            self.out.write("\n")
        self.out.write(f"\r{bar}")
        self.out.flush()
        self._drawn, self._stage = bar, stage

    def close(self) -> None:
        """End the line of the last bar, so that what follows begins on its own."""
        if self._drawn:
            self.out.write("\n")
            self._drawn = ""
