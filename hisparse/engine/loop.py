"""ReferenceEngine: continuous batching with chunked prefill over the tiers.

A serving loop as an engine author would write it: it owns queues, tokens and sampling, and knows
nothing of pages' places. What crosses between the connector's two roles passes through unread.

    arrivals ─► admit ─► grow ─► plan_step ─► connector meta ─► worker ─► forward ─► accept, finish
         ▲                                                                  │
         └─────────────────────── connector output ◄────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hisparse.connector.base import KVConnectorBase_V1, KVConnectorOutput
from hisparse.device.rows import StepRows
from hisparse.engine.batch import Batch, gather_tokens, wanted_rows
from hisparse.engine.progress import Progress
from hisparse.engine.served import Served
from hisparse.engine.speculate import Acceptance, standing
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm.machines import RequestState
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import PageHasher

NEVER = 1 << 62  # more tokens than anything generates


class Runner(Protocol):
    """The model side of a step."""

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        """Run one step.

        Args:
            meta: the connector's opaque metadata.
            tokens: int64 [n], the tokens whose rows are computed.
            rows: where they belong.
            sampled: indices into the n tokens whose next token is wanted.

        Returns:
            (int64 [len(sampled)] next tokens, float32 [len(sampled), vocab] their logits, the
            connector's output).
        """


class ReferenceEngine:
    """Serves a workload to its end.

    Args:
        coordinator: the scheduler side; its config bounds rows, chunk and batch.
        connector: the same coordinator's connector, in scheduler role.
        runner: the model side.
        eos: token id that ends a request.
        salt: separates prefix identities (model, layout, adapter).
        step_ms: arrival times advance by this much a step.
        drafts: what the last step proposed to follow, by request row; all or some of it is
            verified in the request's next step.
    """

    def __init__(
        self,
        coordinator: HiSparseCoordinator,
        connector: KVConnectorBase_V1,
        runner: Runner,
        *,
        eos: int,
        salt: bytes = b"",
        step_ms: float = 10.0,
        drafts: Callable[[], Mapping[int, list[int]]] = dict,
    ) -> None:
        self.coordinator = coordinator
        self.connector = connector
        self.runner = runner
        self.eos = eos
        self.step_ms = step_ms
        self.drafts = drafts
        self.acceptance = Acceptance()
        self.hasher = PageHasher(coordinator.config.pools.page_size, salt)
        self.live: dict[tuple[str, int], Served] = {}
        self.done: list[Served] = []
        self._ending: dict[tuple[str, int], Served] = {}  # at their end, not yet certain
        self.progress = Progress()
        self._output = KVConnectorOutput()

    # -- requests ---------------------------------------------------------------------------------
    def submit(self, work: WorkloadRequest) -> Served:
        """Hand a request to the coordinator."""
        prompt = work.prompt.tolist()
        served = Served(work.request, 0, len(prompt), work.max_new, prompt)
        self._arrive(served)
        if served.key in self.coordinator.state.waiting:
            self.live[served.key] = served
        else:
            self._close(served, "refused")
        return served

    def abort(self, served: Served) -> None:
        """The client went away."""
        self.coordinator.abort(served.request, served.epoch)
        served.withdraw_provisional()
        self._close(served, "aborted")

    def stop(self, served: Served) -> bool:
        """Its client has enough: it ends with the tokens that it has, once these are certain.
        False, with nothing changed, before its first token."""
        if not served.generated:
            return False
        served.max_new = len(served.generated)
        served.drafts.clear()
        if self.coordinator.state.requests[served.key].state is RequestState.DECODE:
            self._ending[served.key] = served
            return True
        self.coordinator.abort(*served.key, "stop")  # it waits, or computes what it had again
        served.withdraw_provisional()
        self._close(served, "finished")
        return True

    def preempt(self, served: Served) -> None:
        """Take a running request off the GPU; it comes back at the end of the queue, under a new
        epoch, and finds by prefix what it had computed and what was durable."""
        self.coordinator.preempt(*served.key)
        self._requeue(served)

    def is_ending(self, served: Served) -> bool:
        """Whether it has said all, and only waits for that to be certain."""
        return served.key in self._ending

    def _preempt_if_running(self, served: Served, preempt_at: dict[str, int]) -> None:
        if self.coordinator.state.requests[served.key].live and served.key not in self._ending:
            del preempt_at[served.request]
            self.preempt(served)

    def _requeue(self, served: Served) -> None:
        del self.live[served.key]
        self._ending.pop(served.key, None)
        served.withdraw_provisional()
        if len(served.generated) >= served.max_new:  # all that it was to say is certain
            self._close(served, "finished")
            return
        served.parent, served.hashed = b"", 0
        self._arrive(served)
        self.live[served.key] = served

    def _arrive(self, served: Served) -> None:
        hashes = self.page_hashes(served, len(served.tokens) // self.hasher.page_size)
        total = served.prompt_tokens + served.max_new
        served.epoch = self.coordinator.arrive(served.request, len(served.tokens), total, hashes)

    def page_hashes(self, served: Served, pages: int) -> list[bytes]:
        """Chain hashes of the whole pages below `pages` that were not asked for yet. (Where tokens
        are not known, a replay answers from a log.)"""
        size = self.hasher.page_size
        fresh = served.tokens[served.hashed * size : pages * size]
        made = self.hasher.extend(served.parent, fresh)
        if made:
            served.parent, served.hashed = made[-1], pages
        return made

    def _close(self, served: Served, outcome: str) -> None:
        served.outcome = outcome
        self.live.pop(served.key, None)
        self._ending.pop(served.key, None)
        self.done.append(served)

    # -- a step -----------------------------------------------------------------------------------
    def step(self) -> bool:
        """One scheduler step; False when there was nothing to compute."""
        self.connector.update_connector_output(self._output)
        self._take_rewound()
        self._drop_failed()
        self._finish_confirmed()
        self.coordinator.admit_waiting()
        batch = self._choose_rows()
        step = self.coordinator.plan_step([row for row, _, _ in batch], [n for _, _, n in batch])
        meta = self.connector.build_connector_meta()
        computed = self.coordinator.state.rows.computed
        tokens, rows, ends, sampled = gather_tokens(computed, batch)
        chosen, logits, self._output = self.runner.execute(meta, tokens, rows, sampled)
        self._accept(step, batch, ends, chosen.tolist(), logits)
        self.progress.watch(self.coordinator.state, bool(batch))
        return bool(batch)

    def _take_rewound(self) -> None:
        """Requests that went back: tokens that were never certain are sampled again."""
        for rewound in self.connector.take_rewound():
            served = self.live.get((rewound.request, rewound.epoch))
            if served is None or served.key not in self.coordinator.state.requests:
                continue
            served.confirmed_rows = max(served.confirmed_rows, rewound.rows_certain)
            served.withdraw_provisional()
            self._ending.pop(served.key, None)
            hashes = self.coordinator.state.requests[served.key].hashes
            served.hashed, served.parent = len(hashes), hashes[-1] if hashes else b""

    def _drop_failed(self) -> None:
        """Requests that the coordinator ended by itself: those that a copy lost rows of, and those
        that begin again because indexer pages could not be loaded."""
        state = self.coordinator.state
        for key in self.coordinator.take_preempted():
            if key in self.live:  # else its client went away since
                self._requeue(self.live[key])
        for served in list(self.live.values()):
            request = state.requests.get(served.key)
            if request is None or not (request.live or served.key in state.waiting):
                served.withdraw_provisional()
                self._close(served, "failed")

    def _finish_confirmed(self) -> None:
        """Requests at their end finish once none of their tokens is provisional."""
        confirmed = self.coordinator.state.rows.confirmed
        for request in self.coordinator.state.by_row:
            if request is not None and request.live:
                served = self.live[request.key]  # rows go back by a rewind, certain tokens do not
                served.confirmed_rows = max(served.confirmed_rows, int(confirmed[request.row]))
        for served in list(self._ending.values()):
            if served.certain:
                self.coordinator.finish(*served.key)
                self._close(served, "finished")

    def _choose_rows(self) -> Batch:
        """What this step computes, as far as the coordinator has places for it."""
        state, schedule = self.coordinator.state, self.coordinator.config.schedule
        rows, wanted = wanted_rows(state, schedule, self.live, self._ending)
        granted = self.coordinator.grow(rows, wanted)
        batch = [
            (row, self.live[state.request_of(row).key], count)
            for row, count in zip(rows, granted, strict=True)
            if count > 0
        ]
        return sorted(batch, key=lambda item: item[0])

    def _accept(
        self,
        step: int,
        batch: Batch,
        ends: list[range],
        chosen: list[int],
        logits: np.ndarray,
    ) -> None:
        """Sampled tokens that stand join their requests, their rows are accepted, certain ends
        finish."""
        computed, proposed = self.coordinator.state.rows.computed, self.drafts()
        hashes: list[tuple[int, bytes]] = []
        accepted: list[int] = []
        for (row, served, count), end in zip(batch, ends, strict=True):
            kept = self._keep(served, [chosen[i] for i in end])
            served.logits += [logits[i] for i in end[:kept]]
            served.drafts = list(proposed.get(row, ()))
            accepted.append(count - len(end) + kept)
            whole = (int(computed[row]) + accepted[-1]) // self.hasher.page_size
            hashes += [(row, page_hash) for page_hash in self.page_hashes(served, whole)]
        if batch:
            self.coordinator.rows_computed(step, [row for row, _, _ in batch], accepted, hashes)
        self._finish_confirmed()

    def _keep(self, served: Served, chosen: list[int]) -> int:
        """Take over what stands of the tokens chosen after the newest one and its drafts."""
        if not chosen:
            return 0
        drafts = served.drafts[: len(chosen) - 1]
        kept = standing(drafts, chosen, self.eos)
        self.acceptance.proposed += len(drafts)
        self.acceptance.accepted += kept - 1
        served.tokens += chosen[:kept]
        if chosen[kept - 1] == self.eos or len(served.generated) >= served.max_new:
            self._ending[served.key] = served
        return kept

    def run(
        self,
        workload: Sequence[WorkloadRequest],
        *,
        abort_at: dict[str, int] | None = None,
        preempt_at: dict[str, int] | None = None,
        after_step: Callable[[ReferenceEngine], None] | None = None,
    ) -> list[Served]:
        """Serve `workload` to its end and drain; returns every request, in order of ending.

        Args:
            abort_at: request id -> generated tokens after which its client goes away.
            preempt_at: request id -> generated tokens after which it is preempted, once.
            after_step: called after each step, for progress and live checks.
        """
        abort_at, preempt_at = abort_at or {}, dict(preempt_at or {})
        queue = sorted(workload, key=lambda work: work.arrival_ms)
        now_ms, at = 0.0, 0
        while at < len(queue) or self.live or self.coordinator.state.requests:
            if not self.live and at < len(queue):
                now_ms = max(now_ms, queue[at].arrival_ms)  # nothing to do: the clock jumps
            while at < len(queue) and queue[at].arrival_ms <= now_ms:
                self.submit(queue[at])
                at += 1
            self.coordinator.tick(int(now_ms * 1000))
            self.step()
            for served in list(self.live.values()):
                if len(served.generated) >= abort_at.get(served.request, NEVER):
                    self.abort(served)
                elif len(served.generated) >= preempt_at.get(served.request, NEVER):
                    self._preempt_if_running(served, preempt_at)
            if after_step is not None:
                after_step(self)
            now_ms += self.step_ms
        self.coordinator.log.commit()
        return self.done
