"""branched: a state to go on with in another direction, that shares nothing with the first.

Pure, and by type: arrays, queues, dicts, lists and records are copied, what cannot change is
shared. An attribute of a type that is not known here raises TypeError: none is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.state import (
    BlockColumns,
    PageColumns,
    Request,
    RowColumns,
    State,
    SuffixColumns,
    SuffixCopy,
    Transfer,
)

Copy = Callable[[Any], Any]


def branched(state: State) -> State:
    """A copy with the same digest. Raises TypeError for what it does not know how to copy."""
    made: State = _of_attributes(state)
    made.by_row = [None if q is None else made.requests[q.key] for q in state.by_row]
    return made


def _of_attributes(owner: Any) -> Any:
    made = object.__new__(type(owner))
    made.__dict__.update({name: _copied(value) for name, value in owner.__dict__.items()})
    return made


def _copied(value: Any) -> Any:
    try:
        return _COPIES[type(value)](value)
    except KeyError:
        kind = type(value).__name__
        raise TypeError(f"a state holds a {kind}: say in fsm.branch how it is copied") from None


def _same(value: Any) -> Any:
    return value


def _of_record(value: Any) -> Any:
    lists = {n: v[:] for n in value.__struct_fields__ if type(v := getattr(value, n)) is list}
    return msgspec.structs.replace(value, **lists)


_COPIES: dict[type, Copy] = {
    np.ndarray: np.ndarray.copy,
    IdQueue: IdQueue.copy,
    list: lambda value: [_copied(item) for item in value],
    tuple: lambda value: tuple([_copied(item) for item in value]),
    dict: lambda value: {key: _copied(item) for key, item in value.items()},
    **dict.fromkeys((int, float, str, bytes, type(None), HiSparseConfig), _same),
    **dict.fromkeys((Request, Transfer, SuffixCopy), _of_record),
    **dict.fromkeys((BlockColumns, PageColumns, RowColumns, SuffixColumns), _of_attributes),
}
