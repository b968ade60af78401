"""HiSparseCoordinator: host allocation, source prefixes, resident leases, the spill machine.

The shell around the pure core. Every public method is one input: it appends the input event, runs
the decisions that follow from it, and appends and folds each of their events (`kv.recorder`). What
comes over it as a whole is in `kv.interruptions`.

Work reaches the worker only as a projection of the log (`fsm.project`), never from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.config_packing import Footprint
from hisparse.fsm import events as ev
from hisparse.fsm.log import EventLog
from hisparse.fsm.machines import LIVE, RequestState
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Acknowledgements
from hisparse.kv import validate
from hisparse.kv.acknowledgements import acknowledge, as_input
from hisparse.kv.admission import admit, local_hit, make_room, never_fits
from hisparse.kv.budget import spare
from hisparse.kv.decision import ints
from hisparse.kv.growth import grow
from hisparse.kv.interruptions import Interruptions
from hisparse.kv.lifecycle import drain, end_request, seal_pages
from hisparse.kv.managers import HiSparseIndexManager
from hisparse.kv.packing import held_footprint
from hisparse.kv.promotion import promote
from hisparse.kv.residency import reclaim
from hisparse.kv.rewind import resume
from hisparse.kv.statistics import pool_statistics, statistics
from hisparse.kv.suffix import SuffixSource, ask, store_sealed
from hisparse.kv.validate import Rows


class HiSparseCoordinator(Interruptions):
    """The scheduler side of one replica.

    Args:
        config: sizes and policy, shared with the worker.
        log: where events go; its next seq must be 1 (a fresh log), and nobody else's.
        suffix: asked for indexer pages that the GPU has lost (default: what the config names).

    With ``checks="on"`` every event goes through the run invariants before it is folded; what they
    find is kept in `checker.violations`.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        log: EventLog,
        *,
        suffix: SuffixSource | None = None,
        _recovered: State | None = None,
    ) -> None:
        super().__init__(config, log, suffix=suffix, _recovered=_recovered)
        self._computed_seq = 0  # of the last rows computed: what makes decoding requests grow
        self._under_way = np.zeros(0, dtype=np.int64)  # request rows of the last step planned

    # -- inputs -----------------------------------------------------------------------------------
    def arrive(
        self, request: str, prompt_tokens: int, max_tokens: int, page_hashes: Sequence[bytes]
    ) -> int:
        """A request arrives; returns its epoch.

        Args:
            request: id, not in use by a live or waiting request.
            prompt_tokens: length of the prompt, at least 1.
            max_tokens: most tokens it can have, prompt included.
            page_hashes: chained salted hash of each whole page of the prompt.

        Raises:
            UsageError: the id is in use, or the lengths make no sense.
        """
        request, prompt_tokens, max_tokens = validate.arrival(
            self.state, request, prompt_tokens, max_tokens, page_hashes
        )
        epoch = self.state.next_epoch
        seq = self._record(
            ev.RequestArrived(0, request, epoch, prompt_tokens, max_tokens, tuple(page_hashes))
        )
        binding = never_fits(self.state, prompt_tokens, max_tokens)
        if binding is not None:
            self._record(ev.RequestRefused(seq, request, epoch, *binding))
            self._run(end_request(self.state, (request, epoch), False, seq))
        return epoch

    def admit_waiting(self) -> list[Key]:
        """Admit from the head of the queue while every budget holds; returns who was admitted."""
        admitted: list[Key] = []
        while self.state.waiting and not self.state.asleep and not self.state.lost:
            key = next(iter(self.state.waiting))
            request = self.state.requests[key]
            cause = request.arrived_seq
            if not self._run(make_room(self.state, request, cause)):
                break
            if self.suffix is not None:
                local = local_hit(self.state, request)
                self._run(ask(self.state, self.suffix, request, local))
            self._run(admit(self.state, request, cause, self.suffix))
            admitted.append(key)
        return admitted

    def grow(self, rows: Rows, rows_wanted: Rows) -> list[int]:
        """Make places for the next rows of live requests, in this order.

        Args:
            rows: request rows.
            rows_wanted: how many more rows each would compute.

        Returns:
            How many each may compute now: what it wants, or less under pressure; 0 for a request
            that is being rewound.

        Raises:
            UsageError: a row is not live, or would compute more than its `max_tokens`.
        """
        at, wanted = validate.growth(self.state, rows, rows_wanted)
        if self.state.rewinding:
            wanted = np.where(validate.rewinding(self.state, at), 0, wanted)
        return self._run(grow(self.state, at, wanted, self._computed_seq))

    def plan_step(self, rows: Rows, counts: Rows) -> int:
        """Fix the rows of the next step; returns its number.

        Raises UsageError for rows that are named twice, are not live, have a step under way, or
        have no place for that many (`grow` says how many have one).
        """
        at, planned = validate.plan(self.state, rows, counts)
        step = self.state.step + 1
        starts = self.state.rows.computed[at]
        seq = self._record(ev.StepPlanned(0, step, ints(at), ints(starts), ints(planned)))
        self._under_way = at
        if self._rewound:  # the engine had the whole step before to ask
            held = self.state.requests
            self._rewound = {key: told for key, told in self._rewound.items() if key in held}
        watermark = self.config.policy.watermark_blocks
        if watermark and (short := watermark - spare(self.state)) > 0:
            self._run(reclaim(self.state, short, seq, "watermark"))
        elif self.config.offload:
            self._run(promote(self.state, seq))
        return step

    def rows_computed(
        self,
        step: int,
        rows: Rows,
        counts: Rows,
        page_hashes: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Rows of `step` are computed and accepted.

        Args:
            step: the step's number.
            rows: request rows, as planned; those whose request ended since are passed over, and
                nothing is accepted of those that were rewound since.
            counts: accepted rows of each, at most what was planned.
            page_hashes: (request row, chain hash) of each page beyond the prompt's whole pages
                that these rows complete, in order.

        Raises:
            UsageError: another step, rows that it did not plan, or more hashes than whole pages.
        """
        under_way = self._under_way
        at, accepted = validate.computed(self.state, step, rows, counts, page_hashes, under_way)
        if not len(at):
            return
        known = page_hashes
        if self.state.rewinding or len(at) < len(rows):
            kept = set(at[~validate.rewinding(self.state, at)].tolist())
            known = [(row, page_hash) for row, page_hash in page_hashes if row in kept]
        hash_rows = tuple([row for row, _ in known])
        hashes = tuple([page_hash for _, page_hash in known])
        page_size = self.state.page_size
        before = self.state.rows.computed[at] // page_size
        seq = self._record(ev.RowsComputed(0, step, ints(at), ints(accepted), hash_rows, hashes))
        self._computed_seq = seq
        sealed = before < self.state.rows.computed[at] // page_size
        if np.count_nonzero(sealed):
            self._run(seal_pages(self.state, at[sealed], before[sealed], seq))
            if self.suffix is not None:
                self._run(store_sealed(self.state, self.suffix, at[sealed], before[sealed], seq))
        self._resume(seq)

    def _resume(self, cause: int) -> None:
        """Requests that were rewound, and that nothing holds back any more, go on."""
        for key in list(self.state.rewinding):
            self._run(resume(self.state, key, cause))

    def confirmed(self, request: str, epoch: int) -> int:
        """Leading rows of a request that are certain: no step that computed them could read a page
        whose copy may still fail. Tokens sampled from later rows are provisional."""
        row = validate.known(self.state, request, epoch).row
        return int(self.state.rows.confirmed[row]) if row >= 0 else 0

    def finish(self, request: str, epoch: int, reason: str = "stop") -> None:
        """The request generated its last token; its durable pages outlive it.

        Raises UsageError unless its whole prompt is computed and it has not ended.
        """
        key = validate.ends(self.state, request, epoch, "finish", (RequestState.DECODE,)).key
        seq = self._record(ev.RequestFinished(0, *key, validate.text(reason, "finish: reason")))
        self._end(key, True, seq)

    def abort(self, request: str, epoch: int, reason: str = "abort") -> None:
        """End the request, whatever its state; after an end this changes nothing."""
        key = validate.text(request, "abort: request"), validate.count(epoch, "abort: epoch")
        before = self.state.requests.get(key)
        ended = before is None or before.state is RequestState.DRAINING
        seq = self._record(ev.RequestAborted(0, *key, validate.text(reason, "abort: reason")))
        if not ended:
            self._end(key, False, seq)

    def preempt(self, request: str, epoch: int, reason: str = "preempt") -> None:
        """Take the request off the GPU. It comes back by `arrive`, under a new epoch.

        Raises UsageError unless it is admitted and has not ended.
        """
        key = validate.ends(self.state, request, epoch, "preempt", LIVE).key
        seq = self._record(ev.RequestPreempted(0, *key, validate.text(reason, "preempt: reason")))
        self._end(key, True, seq)

    def _end(self, key: Key, keep: bool, seq: int) -> None:
        row = self.state.requests[key].row
        if self.suffix is not None and row >= 0:
            self._run(HiSparseIndexManager(self.state).seal_final(row, seq))
            self._run(self.suffix.store(row, 0, int(self.state.rows.index[row]), seq))
        self._run(end_request(self.state, key, keep, seq))

    def take_preempted(self) -> list[Key]:
        """Requests that were taken off the GPU since the last call, and not by `preempt`: indexer
        pages that they read could not be loaded, and they could not be rewound, or a rank was lost.
        Like any preempted request they come back by `arrive`, with the tokens that are certain
        (`confirmed` rows before the end; of a failed load: none)."""
        taken, self._preempted = self._preempted, []
        return taken

    def tick(self, now_us: int) -> None:
        """Tell the state what time it is, in microseconds; UsageError if it would go back."""
        self._record(ev.Tick(0, validate.count(now_us, "now_us", least=self.state.now_us)))

    def update_acknowledgements(self, acks: Acknowledgements) -> bool:
        """Take a rank's acknowledgements in; False if all were old or another epoch's.

        Raises ProtocolError on a gap in the rank's stream.
        """
        event = as_input(self.state, acks)
        if event is None:
            return False
        seq = self._record(event)
        self._run(acknowledge(self.state, event, seq))
        if self.suffix is not None:
            self._preempted += self._run(self.suffix.result(event, seq))
        self._resume(seq)
        for key in list(self.state.draining):
            self._run(drain(self.state, key, seq))
        return True

    def take_rewound(self) -> list[ev.RequestRewound]:
        """Requests that went back since the last call, once each: how many of their rows are
        computed now, and from how many of them sampled tokens stand."""
        taken, self._rewound = list(self._rewound.values()), {}
        return taken

    def abort_all(self, reason: str) -> list[Key]:
        """Abort every request that has not ended; returns which. They drain as any other."""
        open_ = [k for k, r in self.state.requests.items() if r.live or k in self.state.waiting]
        for key in open_:
            self.abort(*key, reason)
        return open_

    # -- queries ----------------------------------------------------------------------------------
    def footprint(self, request: str, epoch: int) -> Footprint:
        """GPU bytes that a request needs, holds and pads, now; all 0 while it waits.

        Raises UsageError for one that is not there.
        """
        row = validate.known(self.state, request, epoch).row
        return held_footprint(self.state, row) if row >= 0 else Footprint(0, 0)

    def statistics(self) -> dict[str, int]:
        """Occupancy now, in blocks, pages, bytes and requests (`kv.statistics`)."""
        return statistics(self.state)

    def pool_statistics(self) -> dict[str, dict[str, int]]:
        """Of ``gpu_pool``, ``host_pool`` and ``suffix_pool``: ids by the state that they are in."""
        return pool_statistics(self.state)
