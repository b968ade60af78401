"""`StepChecks`: what an engine asks of a step is looked at before anything of it is decided.

Changes nothing, logs nothing. What raises here has left scheduler and log as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.connector.plan import StepPlan
from hisparse.connector.sessions import RequestRef, Session, Sessions, token_ids
from hisparse.errors import UsageError
from hisparse.fsm.state import Key
from hisparse.kv.validate import is_count

Wanted = int | Sequence[int]
Asked = tuple[Session, int, list[int]]  # rows that it would compute, and their tokens if told


class StepChecks(HiSparseConnector):
    """Of a `SchedulerConnector`, which owns what is looked at."""

    config: HiSparseConfig
    _sessions: Sessions
    _planned: StepPlan | None

    def check_between(self, verb: str) -> None:
        """Raise UsageError while a step is planned."""
        if self._planned is not None:
            raise UsageError(
                f"{verb}: step {self._planned.step} has not ended: begin_step and end_step it, or "
                "abandon_step, after which none of its rows count (of a SchedulerConnector, "
                "end_step with 0 of each request)"
            )

    def check_wanted(self, wanted: Mapping[Any, Wanted]) -> list[Asked]:
        """The first half of `plan_step`, which changes nothing and raises its errors."""
        self.check_between("plan_step")
        if not isinstance(wanted, Mapping):
            raise UsageError(
                f"plan_step: wanted={wanted!r} must be a mapping, {{request: rows}}; {{}} for a "
                "step without rows"
            )
        asked = [self._check_one(ref, want) for ref, want in wanted.items()]
        if len({session.request for session, _, _ in asked}) < len(asked):
            names = [session.request for session, _, _ in asked]
            raise UsageError(f"plan_step: {names} names a request twice: name each once")
        total, most = sum(n for _, n, _ in asked), self.config.schedule.step_rows
        if total > most:
            raise UsageError(
                f"plan_step: {total} rows are wanted, schedule.step_rows is {most}: want fewer, or "
                "raise it"
            )
        return asked

    def _check_one(self, ref: RequestRef, want: Wanted) -> Asked:
        session = self._sessions.find(ref, "plan_step")
        name, state = session.request, self.coordinator.state
        row = state.requests[session.key].row
        if row < 0:
            raise UsageError(
                f"plan_step: request {name!r} waits for {self._waits_for(session.key)}: leave it "
                "out until Changes.admitted names it"
            )
        told: list[int] = []
        if isinstance(want, bool):
            raise UsageError(
                f"plan_step: request {name!r} wants {want}: pass a number of rows, or their tokens"
            )
        if not isinstance(want, int | np.integer):
            told = token_ids(want, f"plan_step: tokens of {name!r}").tolist()
            want = len(told)
        computed, limit = int(state.rows.computed[row]), int(state.rows.limit[row])
        if computed == limit:
            raise UsageError(
                f"plan_step: request {name!r} wants {want} rows: it has computed all {limit} that "
                "it was admitted for: finish it, or admit it with a larger max_new"
            )
        if not 1 <= want <= limit - computed:
            raise UsageError(
                f"plan_step: request {name!r} wants {want} rows: it has computed {computed} and "
                f"was admitted for {limit}, so 1..{limit - computed} would do"
            )
        known = session.tokens[computed : computed + len(told)]
        if told[: len(known)] != known:
            raise UsageError(
                f"plan_step: request {name!r}: tokens {told[:8]} from position {computed} on are "
                f"not those that it has there, {known[:8]}: pass the next ones, or their number"
            )
        return session, int(want), told

    def check_accepted(self, accepted: Mapping[Any, int] | None) -> tuple[StepPlan, list[int]]:
        """What `end_step` does first, which changes nothing and raises its errors."""
        plan = self._planned
        if plan is None:
            raise UsageError("end_step: no step is planned: plan_step comes first")
        if not isinstance(accepted, Mapping | None):
            raise UsageError(
                f"end_step: accepted={accepted!r} must be a mapping, {{request: rows}}, or None "
                "for all"
            )
        counts = dict(zip(plan.requests, plan.counts, strict=True))
        for ref, n in (accepted or {}).items():
            name = ref if isinstance(ref, str) else self._sessions.find(ref, "end_step").request
            if name not in counts:
                raise UsageError(
                    f"end_step: request {name!r} has no row in step {plan.step}: it has those of "
                    f"{list(plan.requests)}"
                )
            if not is_count(n) or not 0 <= n <= plan.granted[name]:
                raise UsageError(
                    f"end_step: request {name!r} accepts {n!r} rows of the {plan.granted[name]} "
                    f"granted: use 0..{plan.granted[name]}"
                )
            self._check_prompt(plan, name, int(n))
            counts[name] = int(n)
        return plan, list(counts.values())

    def _check_prompt(self, plan: StepPlan, name: str, accepted: int) -> None:
        session = self._sessions.get(name)
        if session is None or not accepted:
            return
        sure = min(plan.granted[name], session.prompt - plan.starts[name])
        if accepted < sure:
            raise UsageError(
                f"end_step: request {name!r} accepts {accepted} rows, and the first {sure} of its "
                f"{plan.granted[name]} are of its prompt, which holds no drafts: use "
                f"{sure}..{plan.granted[name]}, or 0 to compute them all again"
            )

    def _waits_for(self, key: Key) -> str:
        state = self.coordinator.state
        if state.asleep or state.lost:
            return "memory" if state.asleep else "rank"
        return state.requests[key].deferred or "queue"
