"""Study: a log, its replay under the recorded configuration, and each variant beside them.

The replay of what was recorded comes first, and is compared event by event: where it is equal, what
a variant shows is due to its change alone. Where it is not (a log of an engine that schedules in
another order, or whose device could rewind it), `baseline` names the first event that differs, and
variants are to be read against `replayed`, not against `recorded`.

A log that ends with requests on the way is compared up to its last step: no variant goes further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.config import HiSparseConfig, check_capacity
from hisparse.engine.selections import Selections
from hisparse.engine.what_if.figures import Figures
from hisparse.engine.what_if.hot_rows import Counted, HotRows, RecordedSelections
from hisparse.engine.what_if.recording import Recording
from hisparse.engine.what_if.replay import ReplayedEngine
from hisparse.errors import (
    CapacityError,
    IllegalTransition,
    InvariantViolation,
    ProtocolError,
    StaleEpoch,
    UsageError,
)
from hisparse.fsm import events as ev
from hisparse.fsm.describe import as_dict
from hisparse.fsm.invariants.checker import Violation

Logged = tuple[int, ev.Event]
_BROKEN = (CapacityError, IllegalTransition, InvariantViolation, ProtocolError, StaleEpoch)


@dataclass(frozen=True)
class Variant:
    """What to try: a configuration and inputs, and the words for what was changed."""

    name: str
    config: HiSparseConfig
    recording: Recording
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came out of one replay, and where it left the log."""

    figures: Figures
    first_difference: dict[str, Any] | None = None
    hot_rows: HotRows | None = None

    def row(self) -> dict[str, Any]:
        """The figures, where the log was left, and what the hot regions hit."""
        seq = None if self.first_difference is None else self.first_difference["seq"]
        found = {"first_difference_seq": seq} | self.figures.report()
        hot = self.hot_rows
        if hot is not None:
            found |= _hits(hot.counted, hot.host_rows_read, self.figures.config)
            found["selections_unknown"] = hot.unknown_rows
        return found


class Study:
    """One log.

    Args:
        config: what it was recorded under.
        events: reads the log from its first event, each time that it is called.
        selections: what attention selected, where that was recorded.

    Raises UsageError for a log that plans no step, InvariantViolation for one that contradicts
    itself.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        events: Callable[[], Iterable[Logged]],
        selections: Selections | None = None,
    ) -> None:
        self.config = config
        self._events = events
        self.recording = Recording(config.pools.page_size)
        last = 0
        for seq, event in events():
            try:
                self.recording.take(seq, event)
            except (LookupError, ValueError) as error:  # ids of a foreign log may be anything
                text = f"{type(event).__name__} names what the log never spoke of ({error!r})"
                raise InvariantViolation("replay_equal", text, seq=seq) from error
            last = seq
        if not self.recording.steps:
            raise UsageError(f"the log's {last} events plan no step: there is nothing to decide")
        self.read_seq = last
        unended = self.recording.open_requests > 0
        self.until_step = self.recording.steps if unended else None
        self.last_seq = self.recording.last_step_seq - 1 if unended else last
        self.selections = selections and RecordedSelections(
            self.recording, selections.taken, config, self.until_step
        )

    def recorded(self) -> Iterator[Logged]:
        """The events that are compared."""
        for seq, event in self._events():
            if seq > self.last_seq:
                return
            yield seq, event

    def run(
        self, variants: Iterable[Variant], progress: Callable[[int], object] = lambda done: None
    ) -> dict[str, Any]:
        """The report. `variants` of it: `recorded`, `replayed`, then each one given."""
        replayed = self.decide(Variant("replayed", self.config, self.recording))
        recorded = replayed.figures
        if replayed.first_difference is not None:
            recorded = Figures(self.config)
            all(recorded.take(seq, event) for seq, event in self.recorded())
            recorded.finish(torn=self.until_step is not None)
        rows = [
            {"name": "recorded", "changes": {}} | recorded.report() | self._recorded_hits(),
            {"name": "replayed", "changes": {}} | replayed.row(),
        ]
        told = {name: value for name, value in rows[0].items() if name != "name"}
        for variant in variants:
            progress(len(rows) - 1)
            row = {"name": variant.name, "changes": dict(variant.changes)}
            rows.append(
                row | {"refused_at_start": _refusal(variant.config)} | self.decide(variant).row()
            )
        return {
            "events": self.last_seq,
            "steps": self.recording.steps,
            "until_step": self.until_step,
            "assumed": self._assumed(),
            "baseline": {
                "reproduced": replayed.first_difference is None,
                "first_difference": replayed.first_difference,
                "figures_differ": [n for n, v in rows[1].items() if n in told and told[n] != v],
            },
            "variants": rows,
        }

    def decide(self, variant: Variant) -> Outcome:
        """Replay a variant, beside the log. What it breaks is in the figures' `violations`."""
        outcome = Outcome(Figures(variant.config))
        beside = self.recorded()
        done = False

        def observe(seq: int, event: ev.Event) -> None:
            nonlocal done
            planned = isinstance(event, ev.StepPlanned)
            done = done or (planned and event.step == self.until_step)  # type: ignore[attr-defined]
            if done:
                return
            if outcome.first_difference is None:
                outcome.first_difference = _difference(next(beside, None), (seq, event))
            outcome.figures.take(seq, event)

        if self.selections is not None:
            outcome.hot_rows = HotRows(variant.config, self.selections)
        engine = ReplayedEngine(
            variant.config, variant.recording, self.until_step, outcome.hot_rows
        )
        try:
            engine.replay(observe)
        except _BROKEN as error:
            seq = engine.coordinator.state.seq
            name = getattr(error, "invariant", type(error).__name__)
            outcome.figures.faults.append(Violation(name, seq, str(error)))
        outcome.figures.finish(torn=self.until_step is not None)
        if outcome.first_difference is None:
            outcome.first_difference = _difference(next(beside, None), None)
        return outcome

    def _recorded_hits(self) -> dict[str, Any]:
        """What the run counted, beside what its replay finds."""
        if self.selections is None:
            return {}
        found = _hits(self.selections.counted, self.selections.host_rows_read, self.config)
        return found | {"selections_unknown": 0}

    def _assumed(self) -> list[str]:
        """What the log does not say, and was taken to be so."""
        found = []
        if self.selections is not None and self.selections.requests < len(self.recording.requests):
            found.append(
                f"selections of {self.selections.requests} of {len(self.recording.requests)} "
                "requests are recorded: hot rows are theirs alone"
            )
        ended = {d.number for d in self.recording.disturbances if not d.preempts}
        unknown = [
            r.request
            for r in self.recording.requests
            if r.total_tokens is None and r.number not in ended
        ]
        if unknown:
            shown = ", ".join(unknown[:5]) + (", …" if len(unknown) > 5 else "")
            found.append(
                f"{len(unknown)} requests ({shown}) have no end in the log: they generate to their "
                "max_tokens"
            )
        if self.until_step is not None:
            found.append(
                "the log ends with requests on the way: every variant ends at step "
                f"{self.until_step} too"
            )
        return found


def _hits(counted: Counted, host_rows: int, config: HiSparseConfig) -> dict[str, Any]:
    """Selected positions by where they were found, once a row and index group; `host_rows_read`
    and its bytes over all layers."""
    looked_up = counted.hits + counted.misses
    return {
        "selected_resident": counted.resident,
        "hot_hits": counted.hits,
        "hot_misses": counted.misses,
        "hot_hit_rate": counted.hits / looked_up if looked_up else 0.0,
        "host_rows_read": host_rows,
        "host_row_bytes_read": host_rows * config.layout.row_bytes,
    }


def _difference(recorded: Logged | None, decided: Logged | None) -> dict[str, Any] | None:
    if recorded == decided:
        return None
    seq = (recorded or decided or (0, None))[0]
    return {
        "seq": seq,
        "recorded": None if recorded is None else as_dict(*recorded),
        "decided": None if decided is None else as_dict(*decided),
    }


def _refusal(config: HiSparseConfig) -> str | None:
    """Why an engine would not start under `config`, if so."""
    try:
        check_capacity(config)
    except CapacityError as error:
        return str(error)
    return None
