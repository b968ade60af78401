"""An index group on the GPU: its leader's resolver, its followers' fetches, its calls of a step.

`GroupResolver` is what the worker knows as a leader's `Resolver`. A call's plan stays on the
device, in a `ResolveCall`; what is done for it is queued by whoever copies rows out:

    leader      [wait fetches of an older plan] resolve, copy out        [compute]
                     resolve_after_fetch
    followers   [wait plan] fetch, in layer order                        [side]
                     fetch_after_plan
                [wait the own fetch] copy out                            [compute]
                     copy_out_after_fetch

That is so where the call is a single wave and nothing older waits for a follower; else followers
fetch in their turn, on compute. Every follower copies out what its leader resolved, so compute has
waited for all fetches before the step ends. Each wait has a name that a test can knock out.

Steps of fixed shape (`StepRows.span`) take calls that are kept, so that a captured graph finds its
addresses again, and epochs tell one step from the next. Calls of other steps are cut from an arena
(`calls.py`), wiped before each use; one that does not fit there has memory of its own, and gives it
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.device.backend import Tiers
from hisparse.device.cuda import entries
from hisparse.device.cuda.arrays import address
from hisparse.device.cuda.calls import CallArena
from hisparse.device.cuda.kernels import CALLS_MAX
from hisparse.device.cuda.plan import CudaPlan, Part
from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall
from hisparse.device.cuda.state import WIPED
from hisparse.device.cuda.waves import WaveLines, lay_out
from hisparse.device.rows import StepRows
from hisparse.errors import UsageError
from hisparse.fsm.wire import Table

if TYPE_CHECKING:
    from hisparse.device.cuda.state import WorkerState
    from hisparse.device.cuda.streams import CudaEvent, CudaStream

EPOCH_STEPS = (1 << 32) // CALLS_MAX
KEPT_CALLS_MAX = CALLS_MAX // 2  # of a group in a step of fixed shape; the rest is for other steps


class GroupResolver:
    """Implements `backend.Resolver` for the leader `layer` of a group of `state`'s worker."""

    def __init__(self, state: WorkerState, layer: int) -> None:
        self.worker, self.device = state, state.device
        members = next(g for g in state.geometry.groups if g[0] == layer)
        self.layers = len(members)
        self._owners = [f"layer {member}" for member in members]
        self._resolver: CudaResolver | None = None
        with self.device.compute.current():
            if state.offload:
                tables = CudaTables(
                    *(state.tables[t] for t in (Table.RESIDENT, Table.HOST, Table.HOT))
                )
                requests = state.geometry.max_requests
                self._resolver = CudaResolver(
                    state.sizes, tables, requests, self.layers, state.step
                )
            self._seen = self.device.cupy.zeros((2,), self.device.cupy.uint64)
            self._counters = self.device.cupy.zeros((4,), self.device.cupy.uint64)
            if self._resolver is not None:  # last: nothing that fails may keep them
                self._counters = self.device.faults.counters()
                self._resolver.counters, self._others = self._counters[:2], self._counters[2:]
        self._kept: dict[tuple[int, int, int], ResolveCall] = {}
        self._open: list[CudaPlan] = []  # some layer has not fetched
        self._arena: CallArena | None = None  # what calls of open plans are cut from
        self._kept_calls = self._other_calls = 0
        self._step = -1
        self._unjoined: Any = None  # the last fetch on the side stream
        state.groups.append(self)

    @property
    def state(self) -> tuple[Any, Any, Any, Any]:
        """The arrays that table changes forget in."""
        assert self._resolver is not None
        r = self._resolver
        return r.map, r.positions, r.order, r.group

    @property
    def state_bytes(self) -> int:
        """Bytes of replacement state; none without a host tier."""
        return self._resolver.state_bytes if self._resolver is not None else 0

    def close(self) -> None:
        """Nothing of it is queued, or will be."""
        if self._resolver is not None:
            self.device.faults.give_back(self._counters)

    def begin_step(self, step: int) -> None:
        """A step, or a dummy one under the number of the last. Where epochs come again, then and
        when their 32 bits are used up, what kept calls hold of them is wiped."""
        left = [plan for plan in self._open if plan.fetched and not plan.parts[0].kept]
        if left and self._unjoined is not None:  # of a step that failed: what it reads is cut anew
            self._wait(self.device.compute, self._unjoined, "resolve_after_fetch")
        self._open.clear()
        self._give_arena()
        if step == self._step or step // EPOCH_STEPS != self._step // EPOCH_STEPS:
            with self.device.compute.current():
                for call in self._kept.values():
                    self.device.wipe(call.count, WIPED)
                    self.device.wipe(call.misses, WIPED)
                self._wipe_tickets()
        self._step = step
        self._kept_calls = self._other_calls = 0

    # -- planning --------------------------------------------------------------------------------
    def plan(self, rows: StepRows, selection: Any, step: int) -> CudaPlan:
        """Lay the call out; what it asks of the device is queued by who copies out.

        Raises UsageError for a step of fixed shape that one resolve call cannot take, and as
        `CudaKernels.placed`.
        """
        if rows.span is not None:
            plan = self._plan_fixed(rows, selection, rows.span)
        else:
            if selection.dtype != np.int32 or not selection.flags.c_contiguous:
                selection = self.device.cupy.ascontiguousarray(
                    selection.astype(self.device.cupy.int32)
                )
            plan = CudaPlan(self, rows, selection)
            self._lay_out(plan)
        if self.worker.geometry.checks:
            entries.check_selection(self.worker, plan, self._owners[0])
        self._open.append(plan)
        return plan

    def _plan_fixed(self, rows: StepRows, selection: Any, span: int) -> CudaPlan:
        n, top_k = len(rows.rows), self.worker.geometry.top_k
        fits = selection.shape == (n, top_k) and selection.dtype == np.int32
        if not fits or not selection.flags.c_contiguous or selection.data.ptr % 16:
            raise UsageError(
                f"a step of fixed shape takes top_k int32[{n}, {top_k}], contiguous: it is "
                f"{selection.dtype}{list(selection.shape)}"
            )
        on_device, _ = self.worker.kernels.placed(rows)
        plan = CudaPlan(self, rows, selection)
        if self._resolver is None:
            plan.looked_up_count = n
            return plan
        ordinal = self._kept_calls
        if ordinal >= KEPT_CALLS_MAX:
            raise UsageError(f"more than {KEPT_CALLS_MAX} calls of an index group in a step")
        self._kept_calls += 1
        key = (n, span, ordinal)
        if key not in self._kept:
            self._kept[key] = ResolveCall(self.worker.sizes, n, span, ordinal)
        call = self._kept[key]
        call.rows, call.top_k = self.device.adopt(on_device), selection
        plan.parts.append(Part(call, None, kept=True))
        return plan

    def _lay_out(self, plan: CudaPlan) -> None:
        g = self.worker.geometry
        rows = plan.rows.rows
        looked_up, waves = np.arange(len(rows), dtype=np.int32), tuple[WaveLines, ...]()
        if self._resolver is not None:
            looked_up, waves = lay_out(rows, self.worker.backed, g.wave_rows)
        plan.looked_up_count = len(looked_up)
        packed = [looked_up, *(np.stack([w.rows, w.tokens]).ravel() for w in waves)]
        if not sum(len(part) for part in packed):
            return
        uploaded = self.device.upload(np.concatenate(packed))
        plan.looked_up, at = uploaded[: len(looked_up)], len(looked_up)
        for wave in waves:
            lines = len(wave.rows)
            rows_at, tokens_at = uploaded[at : at + lines], uploaded[at + lines : at + 2 * lines]
            plan.parts.append(self._part(plan, wave, rows_at, tokens_at))
            at += 2 * lines

    def _part(self, plan: CudaPlan, wave: WaveLines, rows: Any, tokens: Any) -> Part:
        count, lines = self._other_calls, len(wave.rows)
        self._other_calls += 1
        ordinal = KEPT_CALLS_MAX + count % (CALLS_MAX - KEPT_CALLS_MAX)
        if self._arena is None:
            self._arena = self.worker.take_arena()
        call = self.worker.cut_call(self._arena, lines, wave.span, ordinal)
        call.rows = rows
        return Part(call, tokens, kept=False)

    # -- fetching --------------------------------------------------------------------------------
    def copy_out(self, plan: CudaPlan, tiers: Sequence[Tiers], member: int) -> Any:
        """This layer's selected rows: torch uint8 ``[n, k, row_bytes]``."""
        n, k = plan.top_k.shape
        device, hot = self.device, tiers[member].hot
        owner, seen = self._owners[member], None if member else self._seen
        try:
            out = device.empty((n, k, hot.span.row_bytes), device.torch.uint8)
            if plan.looked_up_count:
                self._look_up(plan)
        except Exception:  # no memory
            self._fetch_all(plan, tiers, member)
            raise
        if plan.looked_up_count:
            entries.gather(self.worker, plan, None, hot, out, owner, seen)
        for part in plan.parts:
            self._fetch(plan, part, tiers, member, copied=True)
            entries.gather(self.worker, plan, part, hot, out, owner, seen)
        self._close(plan)
        return out

    def locate(self, plan: CudaPlan, tiers: Sequence[Tiers], member: int) -> Any:
        """Where they are: torch int32 ``[n, k]``, -1 for padding. Raises UsageError for waves."""
        try:
            if len(plan.parts) > 1:
                waves = len(plan.parts)
                raise UsageError(
                    f"resolve: the selections of a request's rows need {waves} waves: gather"
                )
            self._look_up(plan)
        except Exception:
            self._fetch_all(plan, tiers, member)
            raise
        for part in plan.parts:
            self._fetch(plan, part, tiers, member)
            if part.tokens is None:
                plan.places = part.call.out
            elif not plan.unpacked:  # by the first who asks: a leader may copy out
                entries.unpack(self.worker, plan, part)
                plan.unpacked = True
        if self.worker.geometry.checks:  # as copying out does for whoever copies
            entries.check_rows(self.worker, plan, tiers[member].hot, self._owners[member])
        self._close(plan)
        return self.device.torch.as_tensor(plan.places, device="cuda")

    def _fetch_all(self, plan: CudaPlan, tiers: Sequence[Tiers], member: int) -> None:
        """For a layer that gets no answer: followers and later calls still go by the plan."""
        for part in plan.parts:
            self._fetch(plan, part, tiers, member)
        self._close(plan)

    def _look_up(self, plan: CudaPlan) -> None:
        """Places of the tokens that need no resolve, once a plan."""
        if plan.places is not None or (plan.parts and plan.parts[0].tokens is None):
            return
        n, k = plan.top_k.shape
        device = self.device
        plan.places = device.adopt(device.empty((n, k), device.torch.int32))
        if plan.looked_up_count:
            entries.locate(self.worker, plan, self._owners[0])

    def _fetch(
        self, plan: CudaPlan, part: Part, tiers: Sequence[Tiers], member: int, copied: bool = False
    ) -> None:
        """Resolve a wave (leader), or have its missed rows fetched for a follower's layer.
        `copied`: its rows are copied out."""
        assert self._resolver is not None
        if member == 0:
            self._resolve(plan, part, tiers, copied)
        elif member in plan.fetched:
            self._wait(self.device.compute, plan.fetched.pop(member), "copy_out_after_fetch")
        else:
            self._resolver.reopen(part.call, member)
            self._replay(part, tiers, member)
            self.device.launches += 1

    def _resolve(self, plan: CudaPlan, part: Part, tiers: Sequence[Tiers], copied: bool) -> None:
        assert self._resolver is not None
        worker, device = self.worker, self.device
        if part.tokens is not None:
            entries.pack(worker, plan, part)
        if self._unjoined is not None and self._open[0] is not plan:
            self._wait(device.compute, self._unjoined, "resolve_after_fetch")
        if not part.kept and part.call.ordinal == KEPT_CALLS_MAX and self._other_calls > 1:
            self._wipe_tickets()  # ordinals come round: an epoch of this step is there again
        arguments = self._resolver.arguments(part.call, tiers[0].host.address, tiers[0].hot.address)
        if not copied:
            arguments["counters"] = address(self._others)
        self._resolver.resolve(part.call, arguments)
        device.launches += 1
        if plan.misses is not None:
            entries.add_misses(worker, plan, part.call)
        self._unjoined = None
        if self.layers > 1 and len(plan.parts) == 1 and self._open[0] is plan:
            self._fetch_ahead(plan, part, tiers)

    def _fetch_ahead(self, plan: CudaPlan, part: Part, tiers: Sequence[Tiers]) -> None:
        """All followers' fetches, in layer order, beside what compute does next."""
        device = self.device
        self._wait(device.side, device.compute.record(), "fetch_after_plan")
        with device.side.current():
            for member in range(1, self.layers):
                self._replay(part, tiers, member)
                self._unjoined = plan.fetched[member] = device.side.record()

    def _wait(self, stream: CudaStream, event: CudaEvent, why: str) -> None:
        """Every wait between compute and side goes through here."""
        stream.wait(event)

    def _replay(self, part: Part, tiers: Sequence[Tiers], member: int) -> None:
        assert self._resolver is not None
        host, hot = tiers[member].host.address, tiers[member].hot.address
        self._resolver.replay(part.call, member, host, hot)
        self.device.launches += 1

    def _close(self, plan: CudaPlan) -> None:
        """One more layer has what it needs of the plan."""
        plan.left -= 1
        if plan.left == 0 and plan in self._open:
            self._open.remove(plan)
            if not self._open:
                self._give_arena()

    def _give_arena(self) -> None:
        if self._arena is not None:
            self.worker.give_arena(self._arena)
            self._arena = None

    def _wipe_tickets(self) -> None:
        if self._resolver is not None:
            self.device.wipe(self._resolver.tickets, WIPED)

    # -- counters --------------------------------------------------------------------------------
    def statistics(self) -> dict[str, int]:
        """Misses of all calls; hits and resident entries of those whose rows were copied out, each
        entry counted (a position twice in a row counts twice). Synchronises."""
        with self.device.compute.current():
            resident, hosted = (int(x) for x in self._seen.get())
            copied, others = (int(x) for x in self._counters.get()[::2])
        counts = {"hits": hosted - copied, "misses": copied + others, "resident": resident}
        return counts | {"host_rows": copied + others}
