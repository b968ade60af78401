"""Replay: a recording through the production coordinator and serving loop, with no model. No torch.

    slot s:   aborts and preemptions whose request has come as far as it had when they happened,
              arrivals, ticks, resets, sleep and wake, in recorded order; then a step:
              `ReferenceEngine.step`, unchanged

The order in which requests are scheduled is the reference engine's. Under the recorded
configuration its own log comes out event by event; another engine's may not, and `study` says so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from hisparse.config import HiSparseConfig, LogConfig
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.rows import StepRows
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.engine.what_if.hot_rows import HotRows
from hisparse.engine.what_if.inputs import (
    CachesReset,
    CopyKey,
    Disturbance,
    IndexPages,
    MemoryTold,
    RecordedRequest,
    TimeTold,
)
from hisparse.engine.what_if.ranks import RecordedRanks
from hisparse.engine.what_if.recording import Recording
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import Event
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.state import Key
from hisparse.fsm.wire import AnyTransfer, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import HASH_BYTES

TOKEN, EOS, REJECTED = 0, 1, 2  # the only tokens there are
Told = RecordedRequest | Disturbance | TimeTold | CachesReset | MemoryTold
Observer = Callable[[int, Event], object]
_COMMANDS = msgspec.msgpack.Decoder(SparseKVOffloadCommand)


class ReplayedEngine(ReferenceEngine):
    """The serving loop over recorded inputs.

    Args:
        config: what to decide under; pages must have the recorded size.
        recording: the inputs.
        until_step: stop once this step was planned (None: when everything has drained).
        hot_rows: resolves what was selected, where that was recorded.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        recording: Recording,
        until_step: int | None = None,
        hot_rows: HotRows | None = None,
    ) -> None:
        update: dict[str, Any] = {"log": LogConfig(mode="off"), "checks": "off"}
        coordinator = HiSparseCoordinator(config.model_copy(update=update), MemoryLog(0))
        connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
        super().__init__(coordinator, connector, self, eos=EOS, drafts=lambda: _Proposals(self))
        self.recording = recording
        self.until_step = until_step
        self.hot_rows = hot_rows
        self._ranks = RecordedRanks(recording, config.ranks)
        self._events = LogCursor(coordinator.log, 0)
        self._by_number = {request.number: request for request in recording.requests}
        self._current: dict[str, RecordedRequest] = {}  # by request id: the last one of that name
        self._lives: dict[str, int] = {}
        self._life_of: dict[Key, tuple[int, int]] = {}  # a request's number, and which life of it
        self._hashed: dict[tuple[int, int, int], int] = {}  # how often each page of a life was
        self._begun = Counter[tuple[int, int, int]]()  # steps with the newest token, by `_place`
        self._since: dict[int, int] = {}  # slot in which a disturbance's rows were first seen

    # -- the model side ---------------------------------------------------------------------------
    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        """`Runner.execute`: the last recorded token of a request is EOS."""
        for row in np.unique(rows.rows).tolist():
            begun = self._place(row)
            self._begun[begun] += begun[2] in rows.positions[rows.rows == row]
        chosen = []
        for i in sampled:
            request = self._current[self.coordinator.state.request_of(int(rows.rows[i])).request]
            chosen.append(_token(request, int(rows.positions[i]) + 1))
        output = KVConnectorOutput()
        if meta is not None:
            command = _COMMANDS.decode(meta)
            copies: list[AnyTransfer] = [*command.transfers, *command.index_transfers]
            keys = [self._key(copy.transfer) for copy in copies]
            messages = self._ranks.answer(command, keys)
            output = KVConnectorOutput(msgspec.msgpack.encode(messages))
            if self.hot_rows is not None and command.step != self.until_step:
                self.hot_rows.apply(command)
                self.hot_rows.resolve(command.step, rows, self._numbers(rows))
        logits = np.zeros((len(chosen), 0), dtype=np.float32)
        return np.array(chosen, dtype=np.int64), logits, output

    def proposed(self, row: int) -> list[int]:
        """Drafts behind the newest token of request row `row`: as many as the log verified behind
        that token, of which as many stand; the most there may be where it had no place for more."""
        recorded = self._current[self.coordinator.state.request_of(row).request]
        _, at, start = self._place(row)
        life = recorded.lives[at] if at < len(recorded.lives) else recorded.lives[-1]
        known = life.verified.get(start)
        if known is None:
            return []
        told = known[min(self._begun[self._place(row)], len(known) - 1)]
        most = self.coordinator.config.schedule.lookahead_rows if told.cut else 0
        standing = [_token(recorded, start + 1 + i) for i in range(told.accepted - 1)]
        return standing + [REJECTED] * (max(told.planned - 1, most) - len(standing))

    def _place(self, row: int) -> tuple[int, int, int]:
        """Of the request in `row`: its number, its life, and the row of its newest token."""
        served = self.live[self.coordinator.state.request_of(row).key]
        return (*self._life_of[served.key], len(served.tokens) - 1)

    def _numbers(self, rows: StepRows) -> dict[int, int]:
        names = self.coordinator.state.request_of
        return {r: self._current[names(r).request].number for r in np.unique(rows.rows).tolist()}

    def _key(self, transfer: int) -> CopyKey:
        state = self.coordinator.state
        known = state.transfers.get(transfer)
        if known is not None:
            return (*self._life_of[state.request_of(known.row).key], known.kind, known.entry)
        page = state.suffix_copies[transfer]
        kind = IndexPages.LOAD if page.load else IndexPages.STORE
        return (*self._life_of[state.request_of(page.row).key], kind, page.entry)

    def page_hashes(self, served: Served, pages: int) -> list[bytes]:
        """The recorded hashes of this life, or of another one; else ones that nobody shares."""
        recorded, at = self._current[served.request], self._lives[served.request]
        lives = [*recorded.lives[at : at + 1], *recorded.lives[::-1]]
        made = []
        for page in range(served.hashed, pages):
            asked = (recorded.number, at, page)
            nth = self._hashed[asked] = self._hashed.get(asked, -1) + 1
            known = next((h for life in lives if (h := life.hash(page, nth)) is not None), None)
            made.append(known if known is not None else _unrecorded(recorded, page))
        served.hashed = max(served.hashed, pages)
        return made

    # -- the clients' side ------------------------------------------------------------------------
    def replay(self, observe: Observer) -> None:
        """Serve it all; `observe` gets every event, with its seq, in order: up to the event that
        broke a rule, where one does and that error is raised."""
        try:
            for _ in self._slots():
                self._show(observe)
            if any(message.slot == self.recording.steps for message in self.recording.messages):
                self.connector.update_connector_output(self._output)  # it was shut down
        finally:
            self._show(observe)

    def _show(self, observe: Observer) -> None:
        for seq, event in self._events.take():
            observe(seq, event)  # type: ignore[arg-type]

    def _slots(self) -> Iterator[int]:
        """Serve, and yield after each step."""
        state, recording = self.coordinator.state, self.recording
        arrivals = sorted(recording.requests, key=lambda request: (request.slot, request.seq))
        pending = sorted(recording.disturbances, key=lambda d: d.seq)
        ticks: dict[int, list[TimeTold]] = {}
        for tick in recording.ticks:
            ticks.setdefault(tick.slot, []).append(tick)
        told_until = max((m.slot for m in recording.memory if m.slot < recording.steps), default=-1)
        slot, at = 0, 0
        while True:
            due: list[tuple[int, Told]] = []
            while at < len(arrivals) and arrivals[at].slot <= slot:
                due.append((arrivals[at].seq, arrivals[at]))
                at += 1
            due += [(d.seq, d) for d in pending if self._is_due(d, slot)]
            due += [(tick.seq, tick) for tick in ticks.get(slot, [])]
            due += [(reset.seq, reset) for reset in recording.resets if reset.slot == slot]
            due += [(memory.seq, memory) for memory in recording.memory if memory.slot == slot]
            for _, told in sorted(due, key=lambda item: item[0]):
                self._tell(told)
            pending = [d for d in pending if (d.seq, d) not in due and not self._is_over(d)]
            pinned = any(d.slot is not None for d in pending)
            left = at < len(arrivals) or pinned or self.live or state.requests
            untold = slot <= told_until  # of memory: by the command of the step that follows
            if not (left or untold) or state.step == self.until_step:
                break
            if slot >= recording.steps and slot not in ticks:
                self._tick_on(recording.ticks)
            self.step()
            slot += 1
            yield slot

    def _tell(self, told: Told) -> None:
        if isinstance(told, TimeTold):
            self.coordinator.tick(told.now_us)
        elif isinstance(told, CachesReset):
            self.coordinator.reset_prefix_cache()  # not where it is held: as the engine was told
        elif isinstance(told, MemoryTold):
            if told.level:
                self.coordinator.sleep(told.level)  # nor this
            else:
                self.coordinator.wake_up()
        elif isinstance(told, RecordedRequest):
            self._current[told.request], self._lives[told.request] = told, 0
            prompt = np.zeros(told.prompt_tokens, dtype=np.int64)
            served = self.submit(WorkloadRequest(told.request, 0.0, prompt, told.max_new))
            self._life_of[served.key] = (told.number, 0)
        else:
            disturbed = self._served(told)
            if disturbed is not None:
                self._disturb(disturbed, told)

    def _disturb(self, served: Served, told: Disturbance) -> None:
        if not told.preempts:
            self.abort(served)
        elif self.coordinator.state.requests[served.key].live:
            self.preempt(served)

    def _requeue(self, served: Served) -> None:
        name = served.request
        self._lives[name] += 1
        super()._requeue(served)
        self._life_of[served.key] = (self._current[name].number, self._lives[name])

    def _tick_on(self, ticks: list[TimeTold]) -> None:
        """Beyond the recorded steps, time goes on as it did in the last of them."""
        if len(ticks) > 1:
            more_us = ticks[-1].now_us - ticks[-2].now_us
            self.coordinator.tick(self.coordinator.state.now_us + max(more_us, 0))

    # -- progress of the disturbed ----------------------------------------------------------------
    def _served(self, d: Disturbance) -> Served | None:
        """The request of `d`, if it is in the life that is disturbed."""
        name = self._by_number[d.number].request
        recorded = self._current.get(name)
        if recorded is None or recorded.number != d.number:
            return None
        if d.slot is None and self._lives[name] != d.life:
            return None
        return next((s for s in self.live.values() if s.request == name), None)

    def _is_due(self, d: Disturbance, slot: int) -> bool:
        if d.slot is not None:
            return slot == d.slot
        request = self._by_number[d.number]
        if d.rows < 0 and d.life == 0:
            return slot == request.slot + d.lag
        served = self._served(d)
        if served is None:
            return False
        known = self.coordinator.state.requests.get(served.key)
        if known is None:
            return False
        computed = int(self.coordinator.state.rows.computed[known.row]) if known.row >= 0 else -1
        if computed >= d.rows:
            self._since.setdefault(d.seq, slot)
        return d.seq in self._since and slot - self._since[d.seq] >= d.lag

    def _is_over(self, d: Disturbance) -> bool:
        """Whether the life that `d` is for can no longer come that far."""
        name = self._by_number[d.number].request
        recorded = self._current.get(name)
        if d.slot is not None or recorded is None or recorded.number < d.number:
            return False
        gone = not any(served.request == name for served in self.live.values())
        return gone or recorded.number > d.number or self._lives[name] > d.life


class _Proposals(dict[int, list[int]]):
    """Asked for a row once its tokens of this step have joined it."""

    def __init__(self, engine: ReplayedEngine) -> None:
        self._engine = engine

    def get(self, row: int, default: object = ()) -> list[int]:
        return self._engine.proposed(row)


def _token(request: RecordedRequest, position: int) -> int:
    return EOS if position + 1 == request.total_tokens else TOKEN


def _unrecorded(request: RecordedRequest, page: int) -> bytes:
    h = hashlib.blake2b(digest_size=HASH_BYTES, person=b"unrecorded")
    h.update(f"{request.number} {page}".encode())
    return h.digest()
