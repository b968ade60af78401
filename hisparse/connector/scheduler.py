"""`SchedulerConnector`: `HiSparseConnector` in scheduler role, with the verbs of an engine.

Owns the coordinator, and the `Sessions` of the requests that it admitted. A request is named by its
id, or by what `admit` answered, which names no later one. Steps are planned one at a time::

    admit ─► plan_step ─► plan.to_bytes() ═══════► worker        end_step ─► acknowledge ─► …
                                                     ╚═════ acknowledgements() ══════╝

Every call is checked before anything of it is logged: what raises UsageError or StaleEpoch changed
nothing, and the engine may go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.config_check import usable_config
from hisparse.connector.agreement import agreed
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole, Rewound
from hisparse.connector.checks import Asked, StepChecks, Wanted
from hisparse.connector.plan import Admitted, Changes, Refused, StepPlan, Waiting
from hisparse.connector.sessions import RequestRef, Session, Sessions
from hisparse.errors import UsageError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_open import open_log
from hisparse.fsm.state_size import check_state
from hisparse.kv.admission import never_fits
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import PageHasher


class SchedulerConnector(StepChecks):
    """The scheduler's half of a replica.

    Args:
        config: sizes and policy, the same as the workers'.
        log: where events go (default: what ``config.log`` asks for).

    Raises:
        ConfigError: the configuration cannot be used.
        LogError, UsageError: the log is another's.
    """

    def __init__(
        self, config: HiSparseConfig | Mapping[str, Any], *, log: EventLog | None = None
    ) -> None:
        self.config = usable_config(config)
        if log is None and self.config.log.mode == "disk":
            check_state(self.config)
        opened = self._opened(log)
        try:
            coordinator = HiSparseCoordinator(self.config, opened)
        except BaseException:
            if log is None:
                opened.close()
            raise
        super().__init__(KVConnectorRole.SCHEDULER, coordinator=coordinator)
        self._sizes = agreed(self.config)
        self._sessions = Sessions()
        self._planned: StepPlan | None = None
        self._admitted: list[Admitted] = []  # not told yet

    def _opened(self, log: EventLog | None) -> EventLog:
        """`log`, or a fresh one as the configuration asks for it."""
        if log is not None:
            if not hasattr(log, "committed_seq"):
                raise UsageError(
                    f"log={log!r} is no EventLog: a directory is named by log.dir, with log.mode "
                    "'disk', in the configuration"
                )
            return log
        opened = open_log(
            self.config.log,
            Codec(EVENT_TYPES),
            stream="scheduler",
            config_json=self.config.model_dump_json(),
        )
        if opened.next_seq != 1:
            opened.close()
            raise UsageError(
                f"log.dir={str(self.config.log.dir)!r} already holds a log of {opened.last_seq} "
                "events: give an empty directory, or remove it (HiSparseCoordinator.recover goes "
                "on from it)"
            )
        return opened

    # -- requests ---------------------------------------------------------------------------------
    def admit(
        self, request: str, prompt: Sequence[int] | Any, max_new: int, *, salt: bytes = b""
    ) -> Admitted | Waiting | Refused:
        """A request arrives, and gets its place if every budget holds it now.

        Args:
            request: id, not in use by one that waits or lives.
            prompt: its tokens, integers [n] with n at least 1. Where it was preempted, all of its
                tokens that are certain.
            max_new: most tokens that follow, at least 1.
            salt: separates prefixes that must not be shared (model, adapter, tenant), at most 64 B.

        Raises UsageError for an id in use, or arguments that make no sense.
        """
        request, tokens, max_new = self._sessions.check_arrival(request, prompt, max_new, salt)
        coordinator, state = self.coordinator, self.coordinator.state
        hasher = PageHasher(self.config.pools.page_size, salt)
        hashes, total = hasher.extend(b"", tokens), len(tokens) + max_new
        binding = never_fits(state, len(tokens), total)
        epoch = coordinator.arrive(request, len(tokens), total, hashes)
        if binding is not None:
            return Refused(request, epoch, *binding)
        self._sessions[request] = Session(request, epoch, len(tokens), hasher, tokens.tolist())
        self._admit_waiting()
        for i, admitted in enumerate(self._admitted):
            if (admitted.request, admitted.epoch) == (request, epoch):
                return self._admitted.pop(i)
        return Waiting(request, epoch, self._waits_for((request, epoch)))

    def finish(self, request: RequestRef, reason: str = "stop") -> None:
        """It generated its last token; its durable pages outlive it. Raises UsageError unless its
        whole prompt is computed."""
        session = self._sessions.find(request, "finish")
        self.coordinator.finish(*session.key, reason)
        self._forget(session)

    def abort(self, request: RequestRef, reason: str = "abort") -> None:
        """End it, whatever it does."""
        session = self._sessions.find(request, "abort")
        self.coordinator.abort(*session.key, reason)
        self._forget(session)

    def preempt(self, request: RequestRef, reason: str = "preempt") -> None:
        """Take it off the GPU. It comes back by `admit`, with the tokens that are certain (ask
        `confirmed` before: nobody tells of a copy that fails behind it), and finds by prefix what
        was durable. Raises UsageError for one that waits."""
        session = self._sessions.find(request, "preempt")
        self.coordinator.preempt(*session.key, reason)
        self._forget(session)

    def confirmed(self, request: RequestRef) -> int:
        """Leading rows that are certain; tokens sampled from later ones are provisional: a copy
        that fails may take them back (`Changes.rewound`)."""
        return self.coordinator.confirmed(*self._sessions.find(request, "confirmed").key)

    def _forget(self, session: Session) -> None:
        """Nobody asks for it any more. Admitted and not told yet, it is not told."""
        del self._sessions[session.request]
        self._admitted = [a for a in self._admitted if (a.request, a.epoch) != session.key]

    def _admit_waiting(self) -> None:
        state = self.coordinator.state
        for key in self.coordinator.admit_waiting():
            row = state.requests[key].row
            self._admitted.append(Admitted(*key, row, int(state.rows.computed[row])))

    # -- a step -----------------------------------------------------------------------------------
    def plan_step(self, wanted: Mapping[Any, Wanted]) -> StepPlan:
        """Fix the rows of the next step, and make its command.

        Args:
            wanted: by request (id, or what `admit` answered), the rows that it would compute next:
                how many, or their tokens. Tokens beyond the prompt that are told here are what
                others can find by prefix later; those of rows that are only counted are not.
                Order is the order of service, and that of the tokens in the step. May be empty: a
                step without rows lets copies and ends of requests go on.

        Returns:
            The plan; under pressure it grants fewer rows than wanted, or none.

        Raises UsageError, StaleEpoch: a request that is not here or waits, a step that has not
        ended, rows beyond ``max_new`` or ``schedule.step_rows``, tokens that are not the prompt's.
        """
        return self.plan_checked(self.check_wanted(wanted), Changes())

    def plan_checked(self, asked: Iterable[Asked], changes: Changes) -> StepPlan:
        """The second half; a request that `changes`, told since, names gets no row."""
        moved = {r.request for r in changes.rewound} | {*changes.preempted, *changes.failed}
        asked = [one for one in asked if one[0].request not in moved]
        coordinator, state = self.coordinator, self.coordinator.state
        rows = [state.requests[session.key].row for session, _, _ in asked]
        granted = coordinator.grow(rows, [n for _, n, _ in asked])
        given = [one for one in zip(asked, rows, granted, strict=True) if one[2]]
        counts = [n for _, _, n in given]
        rows = [row for _, row, _ in given]
        starts = [int(state.rows.computed[row]) for row in rows]
        step = coordinator.plan_step(rows, counts)
        for (session, _, told), _, n in given:
            session.step_tokens = told[:n]
        command = self.build_connector_meta()
        assert command is not None, "usable_config refuses what makes no command"
        self._planned = StepPlan(
            step,
            tuple(session.request for (session, _, _), _, _ in given),
            tuple(rows),
            tuple(starts),
            tuple(counts),
            command,
            self._sizes,
            changes,
        )
        return self._planned

    def end_step(self, accepted: Mapping[Any, int] | None = None) -> None:
        """The planned step's rows are computed: all of them, or of those requests that `accepted`
        names its first ones (drafts that were rejected: the rest). 0 gives up all rows of a
        request; those of its prompt are no drafts, so any other number has all of these.

        Raises UsageError: no step is planned, more than was granted, a part of the prompt's rows,
        or a request not in it.
        """
        plan, counts = self.check_accepted(accepted)
        self._accept(plan, counts)

    def _accept(self, plan: StepPlan, counts: list[int]) -> None:
        self._planned = None
        hashes: list[tuple[int, bytes]] = []
        for name, row, start, n in zip(
            plan.requests, plan.request_rows, plan.first_positions, counts, strict=True
        ):
            session = self._sessions.get(name)
            request = None if session is None else self.coordinator.state.by_row[row]
            if session is None or request is None or request.key != session.key:
                continue  # it ended since, and its row may be another's
            hashes += [(row, h) for h in session.learn(start, n, request.hashes)]
        if plan.requests:
            self.coordinator.rows_computed(plan.step, plan.request_rows, counts, hashes)

    # -- what the workers say ---------------------------------------------------------------------
    def acknowledge(self, acknowledgements: bytes = b"") -> Changes:
        """Take in what a worker says (`WorkerConnector.acknowledgements`), admit who waits as far
        as there is room now, and tell what changed. Between steps: what comes sooner has to wait.

        Raises ProtocolError, with nothing changed, for bytes that no worker made, or a gap;
        UsageError while a step is planned.
        """
        self.check_between("acknowledge")
        if acknowledgements:
            self.update_connector_output(KVConnectorOutput(acknowledgements))
        rewound = [self._rewind(told) for told in self.take_rewound()]
        preempted = [
            s for key in self.coordinator.take_preempted() if (s := self._sessions.held(key))
        ]
        for session in preempted:
            self._forget(session)
        requests, waiting = self.coordinator.state.requests, self.coordinator.state.waiting
        failed = [
            session
            for session in self._sessions.values()
            if (held := requests.get(session.key)) is None
            or not (held.live or session.key in waiting)
        ]
        for session in failed:
            self._forget(session)
        self._admit_waiting()
        admitted, self._admitted = self._admitted, []
        return Changes(
            tuple(admitted),
            tuple(told for told in rewound if told is not None),
            tuple(session.request for session in preempted),
            tuple(session.request for session in failed),
        )

    def _rewind(self, told: Rewound) -> Rewound | None:
        session = self._sessions.held((told.request, told.epoch))
        if session is None or session.key not in self.coordinator.state.requests:
            return None
        return replace(told, rows_certain=session.rewind(told.rows_certain))

    @property
    def draining(self) -> bool:
        """Whether requests that ended still hold something: go on stepping, if only without rows,
        until they do not."""
        return bool(self.coordinator.state.requests)

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids of those that wait or live, in order of arrival."""
        return tuple(self._sessions)
