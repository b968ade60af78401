"""What an engine is told by the verbs of the two roles: answers, changes, and the plan of a step.

Owns nothing. All are values; a `StepPlan` is also the one message of a step from the scheduler's
process to a worker's, and survives msgpack (`to_bytes`, `from_bytes`). The command in it names no
request; the plan does, since it is the engine's own: its worker side looks requests up by it.

    tokens of a step      0   1   2 | 3 | 4   5        laid end to end, request after request
    requests              "a"       |"c"| "b"          in the order in which they were asked for
    starts, counts        64, 3     |9,1| 0, 2         positions of each: [start, start + count)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from hisparse.connector.base import Rewound
from hisparse.errors import ProtocolError

if TYPE_CHECKING:
    from hisparse.device.rows import StepRows


@dataclass(frozen=True)
class Admitted:
    """The request holds all that it needs to finish. Names it, as its id does, but no later one."""

    request: str
    epoch: int
    row: int
    """its row in the device tables and in `StepPlan.rows`"""
    cached_rows: int
    """leading rows that were found by prefix and are not to be computed"""


@dataclass(frozen=True)
class Waiting:
    """The request is in the queue until there is enough of `resource`; then `Changes.admitted`."""

    request: str
    epoch: int
    resource: str
    """gpu_blocks, host_pages, rows; "queue": behind others; "memory": asleep; "rank": one lost"""


@dataclass(frozen=True)
class Refused:
    """The request could not fit even alone; it is gone."""

    request: str
    epoch: int
    resource: str
    need: int
    have: int


@dataclass(frozen=True)
class Changes:
    """What became of requests, not by the engine's own word, since it was last told."""

    admitted: tuple[Admitted, ...] = ()
    """those that waited"""
    rewound: tuple[Rewound, ...] = ()
    """a copy failed: compute on after `rows_computed`, from the first ``rows_certain + 1`` tokens:
    never fewer than those of the prompt"""
    preempted: tuple[str, ...] = ()
    """lost their place: `admit` them again, with the tokens that are certain: those of the prompt,
    and the others as far as `confirmed` said before"""
    failed: tuple[str, ...] = ()
    """ended, since rows were lost: too many of its copies failed, or one, where that is the policy
    (``policy.on_copy_failure = "fail"``)"""

    def __bool__(self) -> bool:
        return bool(self.admitted or self.rewound or self.preempted or self.failed)

    def __add__(self, later: Changes) -> Changes:
        return Changes(
            self.admitted + later.admitted,
            self.rewound + later.rewound,
            self.preempted + later.preempted,
            self.failed + later.failed,
        )


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A `StepPlan` on its way to a worker."""

    step: int
    requests: tuple[str, ...]
    request_rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    command: bytes
    sizes: str


def shown(data: object) -> str:
    """The subject of what an error says about a message: how many bytes, or what else it is."""
    return f"{len(data)} bytes are" if isinstance(data, bytes) else f"{data!r} is"


_MESSAGES = msgspec.msgpack.Decoder(_Message)


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step: what each request may compute now, and the command for the workers."""

    step: int
    requests: tuple[str, ...]
    request_rows: tuple[int, ...]
    first_positions: tuple[int, ...]
    counts: tuple[int, ...]
    command: bytes
    sizes: str = ""
    """what the worker has to agree on: `connector.agreement`"""
    changes: Changes = Changes()
    """what `acknowledge` would have told before this plan; empty in a worker's process"""

    @cached_property
    def granted(self) -> Mapping[str, int]:
        """Rows that each request computes in this step; requests that got none are not in it."""
        return dict(zip(self.requests, self.counts, strict=True))

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """Position of the first of these rows: how many the request had computed."""
        return dict(zip(self.requests, self.first_positions, strict=True))

    @cached_property
    def rows(self) -> StepRows:
        """Request row and position of each token: attention metadata (numpy)."""
        import numpy as np

        from hisparse.device.rows import StepRows

        spans = zip(self.first_positions, self.counts, strict=True)
        positions = [np.arange(start, start + n) for start, n in spans]
        return StepRows(
            np.repeat(np.array(self.request_rows, dtype=np.int32), self.counts),
            np.concatenate([np.zeros(0, dtype=np.int64), *positions]),
        )

    def __len__(self) -> int:
        """Tokens of the step."""
        return sum(self.counts)

    def to_bytes(self) -> bytes:
        """For a worker in another process."""
        message = _Message(
            self.step,
            self.requests,
            self.request_rows,
            self.first_positions,
            self.counts,
            self.command,
            self.sizes,
        )
        return msgspec.msgpack.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """Raises ProtocolError for bytes that `to_bytes` did not make."""
        try:
            m = _MESSAGES.decode(data)
        except (msgspec.DecodeError, TypeError) as error:
            raise ProtocolError(
                f"{shown(data)} no StepPlan ({error}): pass what to_bytes() gave, unchanged"
            ) from error
        return cls(m.step, m.requests, m.request_rows, m.starts, m.counts, m.command, m.sizes)
