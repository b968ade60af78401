"""`CudaPlan`: a resolve call as far as the host knows it.

Owns nothing: what was decided is in its `ResolveCall`s, on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hisparse.device.cuda.resolver import ResolveCall
from hisparse.device.rows import StepRows

if TYPE_CHECKING:
    from hisparse.device.cuda.group import GroupResolver


class Part:
    """A wave of a plan: its call, and whose lines they are (None: line i is token i's)."""

    def __init__(self, call: ResolveCall, tokens: Any, kept: bool) -> None:
        self.call, self.tokens, self.kept = call, tokens, kept


class CudaPlan:
    """One resolve call of a group, as far as the host knows it."""

    missed = 0  # the device counts

    def __init__(self, group: GroupResolver, rows: StepRows, top_k: Any) -> None:
        self.group, self.rows, self.top_k = group, rows, top_k
        self.looked_up: Any = None  # tokens that need no resolve, int32 on the device
        self.looked_up_count = 0
        self.parts: list[Part] = []
        self.places: Any = None  # int32 [n, k], once somebody asks where rows are
        self.unpacked = False  # `places` has what the resolve answered, too
        self.misses: Any = None  # int32 [max_requests]: who sets it has misses added to it
        self.fetched: dict[int, Any] = {}  # member -> event of its fetch on the side stream
        self.left = group.layers

    @property
    def calls(self) -> list[ResolveCall]:
        """One a wave, in order."""
        return [part.call for part in self.parts]
