"""What verbs print: aligned tables for people, and a progress bar that only a terminal sees."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

BAR_CELLS = 30
Groups = Mapping[str, Mapping[str, object]]


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
