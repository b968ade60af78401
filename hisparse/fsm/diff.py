"""The difference of two logs: the first event that differs; and of two states, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.fsm.events import Event
from hisparse.fsm.state import BlockColumns, PageColumns, State
from hisparse.fsm.watch import WHATS, Facts, Target, facts

Logged = tuple[int, Event]


class Divergence(NamedTuple):
    """The first seq at which two logs say different things; None: that log has ended."""

    seq: int
    first: Event | None
    second: Event | None


class Difference(NamedTuple):
    """One id that two states tell different things of: the facts that differ, in either."""

    what: str
    ident: str
    first: Facts
    second: Facts

    def words(self) -> str:
        """``block 17: state CLEAN / FREE, role RESIDENT / -``."""
        keys = {**self.first, **self.second}
        parts = [f"{k} {self.first.get(k, '-')} / {self.second.get(k, '-')}" for k in keys]
        return f"{self.what} {self.ident}: {', '.join(parts)}"


def divergence(first: Iterable[Logged], second: Iterable[Logged]) -> Divergence | None:
    """Where the logs part, if they do."""
    for one, other in zip_longest(first, second):
        if one != other:
            seq = (one or other)[0]
            return Divergence(seq, one[1] if one else None, other[1] if other else None)
    return None


def config_differences(first: HiSparseConfig, second: HiSparseConfig) -> dict[str, list[Any]]:
    """Field path -> the two values, for the fields that differ. Where the log lies is no matter."""
    one, other = (dict(_flat("", c.model_dump(mode="json"))) for c in (first, second))
    keys = [key for key in {**one, **other} if not key.startswith("log.")]
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else key, item)
    else:
        yield path, value


def differences(first: State, second: State) -> Iterator[Difference]:
    """Every id that the states differ in: requests, transfers, blocks, host pages."""
    for what in ("request", "transfer", "block", "page"):
        assert what in WHATS
        for ident in _candidates(what, first, second):
            wanted = Target(what, ident)
            one, other = (_facts(state, wanted) for state in (first, second))
            keys = [k for k in {**one, **other} if one.get(k) != other.get(k)]
            if keys:
                yield Difference(
                    what,
                    ident,
                    {k: one[k] for k in keys if k in one},
                    {k: other[k] for k in keys if k in other},
                )


def _candidates(what: str, first: State, second: State) -> list[str]:
    if what == "request":
        keys = {**dict.fromkeys(first.requests), **dict.fromkeys(second.requests)}
        return [f"{name}/{epoch}" for name, epoch in sorted(keys, key=lambda key: key[1])]
    if what == "transfer":
        named = [*first.transfers, *second.transfers, *first.suffix_copies, *second.suffix_copies]
        return [str(ident) for ident in sorted(set(named))]
    if what == "block":
        return _changed(first.blocks, second.blocks)
    return _changed(first.pages, second.pages)


def _changed(one: BlockColumns | PageColumns, other: BlockColumns | PageColumns) -> list[str]:
    """Ids whose columns differ, and those that only one pool has."""
    n, most = sorted((len(one.state), len(other.state)))
    differ = np.zeros(most, dtype=np.bool_)
    differ[n:] = True
    for name in ("state", "epoch", "refs", "partner"):
        differ[:n] |= getattr(one, name)[:n] != getattr(other, name)[:n]
    return [str(ident) for ident in np.flatnonzero(differ).tolist()]


def _facts(state: State, wanted: Target) -> Facts:
    sizes = {"block": len(state.blocks.state), "page": len(state.pages.state)}
    if wanted.what in sizes and wanted.number >= sizes[wanted.what]:
        return {}
    return facts(state, wanted)
