"""Per cache: host view, hot view, and, for a leader, the hot-row map and the LRU.

`HiSparseRuntime` owns one layer's bindings to host and hot storage. A leader also owns a
`Resolver` (hot map, slot -> position, stamps); a follower owns none of that (`state_bytes` is 0)
and repeats its leader's plans for its own bytes. `IndexGroup` is what leader and followers share:
the plans of the current step, in the order in which they were asked for.

Makes no events, allocates no block. Holds at its edges: every follower repeats every plan of its
leader, in order, in the same step (else its hot rows would go stale); `check_replayed` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hisparse.device.backend import Array, Device, ResolvePlan, Resolver, Tiers
from hisparse.device.handle import PagedCacheView, check_step_rows
from hisparse.device.layout import Geometry
from hisparse.device.plan import Pending
from hisparse.device.rows import StepRows
from hisparse.errors import UsageError


@dataclass
class PlannedCall:
    """One resolve of this step; `plan` is there once the leader's op has run."""

    rows: StepRows
    width: int
    """positions that each row selects"""
    plan: ResolvePlan | None = None


class IndexGroup:
    """The layers of one index group and the calls of the step being queued."""

    def __init__(self, group: int, layers: Sequence[int]) -> None:
        self.group = group
        self.layers = tuple(layers)
        self.tiers: list[Tiers] = []  # of each layer, as it is bound
        self.leader: Resolver | None = None
        self.step = -1
        self.calls: list[PlannedCall] = []
        self.replayed = dict.fromkeys(self.layers[1:], 0)

    def begin_step(self, step: int) -> None:
        self.step = step
        self.calls = []
        self.replayed = dict.fromkeys(self.layers[1:], 0)
        if self.leader is not None:
            self.leader.begin_step(step)

    def check_replayed(self) -> None:
        """Raise UsageError if a follower left out a plan: its hot rows would go stale."""
        late = [layer for layer, done in self.replayed.items() if done != len(self.calls)]
        if late:
            raise UsageError(
                f"step {self.step}: layers {late} did not gather what their leader "
                f"(layer {self.layers[0]}) resolved: {len(self.calls)} calls"
            )


class HiSparseRuntime:
    """One layer's host and hot storage and its part of the fused resolve.

    Args:
        layer: the layer.
        group: the index group that the layer is in; a leader is the group's first layer.
        hot: hot blocks of this layer (the same shape as resident ones).
        host: this layer's pages of the pinned pool.
        resolver: the replacement state, or None for a follower.
    """

    def __init__(
        self,
        layer: int,
        group: IndexGroup,
        hot: PagedCacheView,
        host: PagedCacheView,
        resolver: Resolver | None,
        device: Device,
        geometry: Geometry,
    ) -> None:
        assert (resolver is not None) == (group.layers[0] == layer), "only a leader has a resolver"
        self.layer = layer
        self.group = group
        self.hot = hot
        self.host = host
        self.resolver = resolver
        group.tiers.append(Tiers(hot, host))
        group.leader = resolver if resolver is not None else group.leader
        self._member = len(group.tiers) - 1
        assert group.layers[self._member] == layer, "layers of a group are bound in its order"
        self._device = device
        self._geometry = geometry
        self._calls = 0
        self._host_rows = 0

    @property
    def is_leader(self) -> bool:
        return self.resolver is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of replacement state on the device; 0 for a follower."""
        return self.resolver.state_bytes if self.resolver is not None else 0

    def next_width(self, top_k: Array | None) -> int | None:
        """How many positions a row selects in the call that `gather` would make of `top_k`; None
        where it would raise."""
        if self.is_leader:
            return top_k.shape[1] if top_k is not None and top_k.ndim == 2 else None
        at = self.group.replayed[self.layer]
        return self.group.calls[at].width if at < len(self.group.calls) else None

    def gather(
        self,
        rows: StepRows,
        top_k: Array | None,
        copy: bool = True,
        out: Array | None = None,
    ) -> Pending:
        """Queue resolve (leader) or replay (follower) and the gather of this layer's bytes.

        Returns a `Pending` uint8 ``[n, k, row_bytes]``; padding entries are zeros. Without `copy`:
        int ``[n, k]``, where they are in ``hot.rows``, -1 for padding. With `out`, which only a
        backend takes whose `replay` does, the copy is there. The op raises
        InvariantViolation ``always_readable`` for a position with no copy. Raises UsageError: no
        step begun, top-k missing, of a wrong shape or wider than ``policy.top_k``, a request row
        of host arrays that there is none of; for a follower, top-k given, nothing left to replay,
        or other rows than its leader resolved.
        """
        if self.group.step < 0:
            raise UsageError(f"layer {self.layer}: gather before the first begin_step")
        chosen = None if top_k is None else self._device.adopt(top_k)
        call = self._lead(rows, chosen) if self.is_leader else self._follow(rows, chosen)
        chosen = None if chosen is None else self._device.keep(chosen)
        step, tiers, member = self.group.step, self.group.tiers, self._member
        kernels = self._device.kernels
        fetch = kernels.replay if copy else kernels.locate

        def run() -> Array:
            if chosen is not None:
                assert self.resolver is not None
                call.plan = self.resolver.plan(call.rows, chosen, step)
            if call.plan is None:
                raise UsageError(f"layer {self.layer}: the leader's resolve failed in this step")
            self._calls += 1
            self._host_rows += call.plan.missed
            if out is not None:
                return fetch(call.plan, tiers, member, out)
            return fetch(call.plan, tiers, member)

        return self._device.produce(run)

    def _lead(self, rows: StepRows, top_k: Array | None) -> PlannedCall:
        n = check_step_rows(rows, self._geometry.max_requests)
        if top_k is None:
            raise UsageError(f"layer {self.layer} leads index group {self.group.group}: pass top_k")
        if top_k.ndim != 2 or top_k.shape[0] != n or not np.issubdtype(top_k.dtype, np.integer):
            raise UsageError(f"top_k is {top_k.dtype}{list(top_k.shape)}, must be int[{n}, k]")
        if self._geometry.hot_rows and top_k.shape[1] > self._geometry.top_k:
            raise UsageError(
                f"top_k selects {top_k.shape[1]} rows, policy.top_k is {self._geometry.top_k}"
            )
        call = PlannedCall(rows, int(top_k.shape[1]))
        self.group.calls.append(call)
        return call

    def _follow(self, rows: StepRows, top_k: Array | None) -> PlannedCall:
        leader = self.group.layers[0]
        if top_k is not None:
            raise UsageError(f"layer {self.layer} follows layer {leader}: pass None for top_k")
        at = self.group.replayed[self.layer]
        if at >= len(self.group.calls):
            raise UsageError(
                f"layer {self.layer}: leader {leader} has not resolved in step {self.group.step}"
            )
        call = self.group.calls[at]
        if call.rows is not rows and not _same_rows(call.rows, rows):
            raise UsageError(f"layer {self.layer}: other rows than leader {leader} resolved")
        self.group.replayed[self.layer] = at + 1
        return call

    def take_over(self) -> None:
        """Of a follower, in a step that ends early: queue its part of the leader's calls that it
        has not repeated. Of a resolve that failed there is none."""
        for call in self.group.calls[self.group.replayed[self.layer] :]:
            self._device.compute.enqueue(partial(self._repeat, call))
        self.group.replayed[self.layer] = len(self.group.calls)

    # -- inside compute-stream ops ---------------------------------------------------------------
    def _repeat(self, call: PlannedCall) -> None:
        if call.plan is not None:
            self._calls += 1
            self._host_rows += call.plan.missed
            self._device.kernels.replay(call.plan, self.group.tiers, self._member)

    def counted(self) -> tuple[int, int]:
        """The counters of this layer's calls, for who has to put them back."""
        return self._calls, self._host_rows

    def set_counted(self, counts: tuple[int, int]) -> None:
        self._calls, self._host_rows = counts

    def statistics(self) -> dict[str, int]:
        """Counters of the ops that have run; a leader's hits, misses and resident entries too."""
        counts = {
            "calls": self._calls,
            "host_rows": self._host_rows,
            "host_bytes": self._host_rows * self.host.span.row_bytes,
            "state_bytes": self.state_bytes,
        }
        assert self.group.leader is not None
        made = self.group.leader.statistics()
        if "host_rows" in made:  # counted by the device
            rows = made.pop("host_rows")
            counts |= {"host_rows": rows, "host_bytes": rows * self.host.span.row_bytes}
        return counts | made if self.is_leader else counts


def _same_rows(a: StepRows, b: StepRows) -> bool:
    if a.span is not None or b.span is not None:
        return False  # nobody looks at what lies on a device
    return bool(np.array_equal(a.rows, b.rows) and np.array_equal(a.positions, b.positions))
