"""A resolve plan: what a leader decided for one call, so that followers can repeat it.

Owns nothing. Made by a `Resolver` inside a compute-stream op, read by the same op for the leader's
bytes and by its followers' ops for theirs. Rows are named physically: row ``b * page_size + o`` is
row o of block b (of host page b for a source); a plan names no request and no position, but for the
checks that ask whether a row is the one that was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.errors import DeviceError

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wave:
    """Rows consumed together: first copy the misses, then gather the rows out.

    Args:
        rows: int64 ``[r]`` rows of the call consumed here, or None for all of them.
        sources: int64 ``[m]`` physical host rows.
        destinations: int64 ``[m]`` physical hot rows, distinct within the wave.
    """

    rows: I64 | None
    sources: I64
    destinations: I64


@dataclass(frozen=True)
class Plan:
    """One call's answer: `physical` int64 ``[n, k]`` GPU rows; `padding` marks entries of zeros.

    `physical` at a padding entry is any readable row of the call (never the null block), so a
    gather needs no branch; `padding` is None when there is none, `all_padding` when nothing is
    readable at all. Waves partition the n rows and must be replayed in order. `chosen`, with
    checks: request rows int64 ``[n]`` and positions int64 ``[n, k]``, whose rows these are.
    """

    physical: I64
    padding: Bools | None
    all_padding: bool
    waves: tuple[Wave, ...]
    chosen: tuple[I64, I64] | None = None
    _packed: dict[int, I64] = field(default_factory=dict, repr=False)

    @property
    def missed(self) -> int:
        """Host rows that each layer reads for it."""
        return sum(wave.sources.size for wave in self.waves)

    def pack(self, page_size: int, block_rows: int) -> I64:
        """`physical` as row numbers of a view whose blocks are `block_rows` rows apart."""
        if block_rows not in self._packed:
            gap = (self.physical // page_size) * (block_rows - page_size)
            self._packed[block_rows] = self.physical + gap
        return self._packed[block_rows]


class Pending:
    """An array that a stream op will produce.

    `result()` blocks until the op has run and returns the array. `on_done(f)` runs ``f(array)``
    inside the op (at once if it already ran), for whoever must see it without waiting.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self.done = False

    def produce(self, op: Callable[[], Any]) -> None:
        """Run `op` for this value; called once, by the stream."""
        assert not self.done, "a stream op ran twice"
        self.done = True
        try:
            self._value = op()
        except BaseException as error:
            self._error = error
            raise
        for callback in self._callbacks:
            callback(self._value)
        self._callbacks.clear()

    def on_done(self, callback: Callable[[Any], None]) -> None:
        if self.done and self._error is None:
            callback(self._value)
        else:
            self._callbacks.append(callback)

    def result(self) -> Any:
        """The array. Raises what the op raised, to whoever asks after the first one."""
        if not self.done:
            self._synchronize()
        if self._error is not None:
            raise DeviceError(f"the op behind this value failed: {self._error}") from self._error
        assert self.done, "synchronised, and the op has not run"
        return self._value
