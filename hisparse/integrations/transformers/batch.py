"""`Batch`: the lines of a cache as requests of its backend, from admission to their end.

Owns which request each line is (`lines.Line`) and the columns that the rectangle has. Before a pass
it says which tokens have to be computed and has a plan with a place for each of their rows; where
there is none yet it lets copies and ended requests go on, by steps without rows, until there is.
What a pass does with its plan is `HiSparseCache`'s. Errors leave the rows as they were.
"""

from __future__ import annotations

from typing import Any

from hisparse.backend import HiSparseBackend
from hisparse.connector.plan import Admitted, Changes, Refused, StepPlan, Waiting
from hisparse.errors import CapacityError, DeviceError, UsageError
from hisparse.integrations.transformers.lines import Line, paddings


class Batch:
    """Of one `HiSparseCache`.

    Args:
        backend, name, max_tokens, salt: see there.
        eos, pads: ids of tokens that end a line, and of those that follow its end.
    """

    def __init__(
        self,
        backend: HiSparseBackend,
        name: str,
        *,
        max_tokens: int,
        salt: bytes,
        eos: frozenset[int],
        pads: frozenset[int],
    ) -> None:
        self.backend = backend
        self.columns = 0
        self.lines: list[Line] = []
        self._name, self._salt = name, salt
        self._max_tokens = max_tokens
        self._eos, self._pads = eos, pads

    # -- a pass -----------------------------------------------------------------------------------
    def tokens_of(self, ids: list[list[int]], mask: Any) -> dict[int, list[int]]:
        """By line that goes on, its tokens of this pass; padding is left out. Ends lines that are
        seen to have ended. Raises UsageError, and nothing was changed."""
        if self.lines and len(ids) != len(self.lines):
            raise UsageError(f"a batch of {len(ids)} on a cache of {len(self.lines)}: make another")
        if not ids or not ids[0]:
            raise UsageError(
                f"input_ids of {len(ids)} lines without a token: pass at least one of each"
            )
        lines = self.lines or [Line(f"{self._name}-{i}") for i in range(len(ids))]
        width = len(ids[0])
        before = paddings(mask, len(ids), self.columns + width)
        tokens: dict[int, list[int]] = {}
        ended: list[int] = []
        for i, (line, held) in enumerate(zip(lines, before, strict=True)):
            if line.ended and width > 1:
                raise UsageError(f"line {i} has ended: begin a batch without it, with a new cache")
            if line.admitted and held != line.padding:
                raise UsageError(
                    f"attention_mask says {held} columns of padding in line {i}, it has "
                    f"{line.padding}: pass the mask of all columns, also of those in the cache"
                )
            came = ids[i][max(held - self.columns, 0) :]
            if width == 1 and line.last in self._eos and came and came[0] in self._pads:
                ended.append(i)
            elif came and not line.ended:
                tokens[i] = came
        for i in ended if len(lines) > 1 else ():
            if not lines[i].ended:
                self.finish(i)
        for line, held in zip(lines, before, strict=True):
            line.padding = held
        self.lines = lines
        return tokens

    def plan(self, tokens: dict[int, list[int]]) -> StepPlan | None:
        """A place for every row that has to be computed for `tokens`; None where all are cached.
        Lines that begin are admitted. Raises UsageError, CapacityError or DeviceError, after which
        they were never there."""
        try:
            wanted = self._admit(tokens)
            return self._planned(wanted) if wanted else None
        except Exception:
            self.forget_new()
            raise

    def computed(self, width: int, plan: StepPlan | None) -> None:
        """A pass of `width` columns is queued: the rows of its plan count."""
        for request, n in plan.granted.items() if plan is not None else ():
            line = next(line for line in self.lines if line.request == request)
            line.rows += n
            line.fresh = False
        self.columns += width

    def forget_new(self) -> None:
        """Lines that the pass that failed began were never there."""
        here = set(self.backend.requests)
        for line in self.lines:
            if line.fresh:
                if line.request in here:
                    self.backend.abort(line.request, "failed")
                line.admitted = line.fresh = False

    # -- room for it ------------------------------------------------------------------------------
    def _admit(self, tokens: dict[int, list[int]]) -> dict[str, list[int]]:
        """Tokens that have to be computed, by request; lines that begin are admitted."""
        wanted: dict[str, list[int]] = {}
        for i, came in tokens.items():
            line = self.lines[i]
            first = max(self.columns - line.padding, 0)  # position of the first that came
            if not line.admitted:
                most = max(self._max_tokens - len(came), 1)
                answer = self.backend.admit(line.request, came, most, salt=self._salt)
                admitted = answer if isinstance(answer, Admitted) else self._await(answer)
                line.admitted = line.fresh = True
                line.rows = admitted.cached_rows
            wanted[line.request] = came[line.rows - first :]
            line.last = came[-1]
        return wanted

    def _await(self, answer: Waiting | Refused) -> Admitted:
        """Let ended requests and copies go on until `answer` is admitted."""
        while isinstance(answer, Waiting):
            moving = self._moving
            for admitted in self._empty_step().admitted:
                if (admitted.request, admitted.epoch) == (answer.request, answer.epoch):
                    return admitted
            if not moving:
                self.backend.abort(answer.request, "no room")
                break
        raise CapacityError(
            f"no place for {answer.request}: {answer} with {self._max_tokens} tokens promised to "
            "each line; make the pool that is named larger, max_tokens or the batch smaller"
        )

    @property
    def _moving(self) -> bool:
        """Whether steps without rows may still make room."""
        now = self.backend.coordinator.statistics()
        return bool(now["transfers_in_flight"] or now["requests_draining"])

    def _empty_step(self) -> Changes:
        plan = self.backend.plan_step({})
        self.backend.begin_step(plan)
        self.backend.end_step()
        self._check(plan.changes)
        return plan.changes

    def _planned(self, wanted: dict[str, list[int]]) -> StepPlan:
        """A plan that has a place for every row: a pass cannot compute a part of them."""
        total, most = sum(map(len, wanted.values())), self.backend.config.schedule.step_rows
        if total > most:
            raise UsageError(
                f"a pass of {total} tokens, schedule.step_rows is {most}: pass generate("
                f"prefill_chunk_size={max(1, most // len(wanted))}), or raise step_rows"
            )
        over = [
            line.request
            for line in self.lines
            if line.rows + len(wanted.get(line.request, ())) > self._max_tokens
        ]
        if over:
            raise UsageError(
                f"{', '.join(over)} would have more rows than max_tokens={self._max_tokens}: pass "
                "generate() a smaller max_new_tokens, or the cache a larger max_tokens (it is "
                "schedule.max_model_len if none is given)"
            )
        while True:
            plan = self.backend.plan_step(wanted)
            if not plan.changes and dict(plan.granted) == {r: len(t) for r, t in wanted.items()}:
                return plan
            moving = bool(plan.changes) or self._moving
            self.backend.begin_step(plan)
            self.backend.abandon_step()  # copies go on meanwhile
            self._check(plan.changes)
            if not moving:
                raise CapacityError(
                    f"no places for the {total} rows of a pass: enlarge pools.gpu_blocks, or pass "
                    "a smaller prefill_chunk_size"
                )

    def _check(self, changes: Changes) -> None:
        """Raise DeviceError if rows of this batch were lost: tokens may have come of them."""
        ours = {line.request for line in self.lines}
        lost = [r.request for r in changes.rewound] + [*changes.preempted, *changes.failed]
        if hit := sorted(ours.intersection(lost)):
            here = set(self.backend.requests)
            for line in self.lines:
                if line.request in hit:
                    line.ended = True
                    if line.request in here:
                        self.backend.abort(line.request, "copy failed")
            raise DeviceError(
                f"a copy failed under {', '.join(hit)}: the newest tokens may be wrong, and it "
                "ends here; close this cache and generate again"
            )

    # -- requests ---------------------------------------------------------------------------------
    def finish(self, line: int) -> None:
        """See `HiSparseCache.finish`, and so with what is below."""
        held = self.lines[line]
        if held.admitted and not held.ended:
            self.backend.finish(held.request)
        held.ended = True

    def settle(self) -> None:
        while any(
            self.backend.confirmed(line.request) < line.rows
            for line in self.lines
            if line.admitted and not line.ended
        ):
            self._empty_step()

    def close(self) -> None:
        here = set(self.backend.requests)
        for i, line in enumerate(self.lines):
            if line.request in here and not line.ended:
                self.finish(i)
        self.lines, self.columns = [], 0

    def statistics(self) -> dict[str, int]:
        return {
            "lines": len(self.lines),
            "ended": sum(line.ended for line in self.lines),
            "columns": self.columns,
            "padding": sum(line.padding for line in self.lines),
            "rows": sum(line.rows for line in self.lines),
        }
