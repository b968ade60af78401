"""What-if: recorded inputs, decided again. Unchanged, every event comes out as it was."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_rig import events_of, served, small_config

from hisparse.engine.what_if.changes import changed_config, drop, swap
from hisparse.engine.what_if.recording import ASKED_ANEW
from hisparse.engine.what_if.study import Study, Variant
from hisparse.errors import ConfigError, InvariantViolation, UsageError
from hisparse.fsm import events as ev
from hisparse.testing.calm import CalmSimulation


def study_of(config, events):
    return Study(config, lambda: iter(events))


def kind_of(cls):
    return cls.__struct_config__.tag


def replay(study, recording=None, config=None):
    """(outcome, events) of a variant."""
    variant = Variant("x", config or study.config, recording or study.recording)
    return study.decide(variant)


@pytest.fixture(scope="module")
def clean():
    config = small_config()
    return config, events_of(served(config))


def all_of(events, kind):
    return [(seq, event) for seq, event in events if isinstance(event, kind)]


# -- unchanged ------------------------------------------------------------------------------------


SEEDS = (22, 28, 30, 40, 42, 99, 128, 201)


@pytest.fixture(scope="module")
def simulated():
    """Aborts, preemptions, failing copies, rewinds, drafts with no place, lagging streams, sleep,
    pages of the CPU tier that come back and that do not: (config, events) by seed."""
    found = {}
    for seed in SEEDS:
        simulation = CalmSimulation(seed)
        simulation.run()
        found[seed] = simulation.config, list(simulation.log.read(1))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_simulated_run_is_decided_again_event_by_event(simulated, seed):
    outcome = replay(study_of(*simulated[seed]))
    assert outcome.first_difference is None, f"first event that differs: {outcome.first_difference}"
    assert outcome.figures.violations == []


RESTARTS = {ev.RankLost, ev.RankJoined, ev.SchedulerRecovered}  # refused by name
INPUTS = {cls for cls in ev.EVENT_TYPES if cls.is_input and kind_of(cls) < 20} - RESTARTS
REFUSED_ALONE = {*ASKED_ANEW, ev.LogGap, ev.MemoryRestored}
MAY_CHANGE_NOTHING = {ev.RequestFinished}  # at its last token: it has a test of its own
TOLD = INPUTS - REFUSED_ALONE - MAY_CHANGE_NOTHING


def test_the_simulated_runs_have_every_input(simulated):
    """What nobody replays here may be replayed wrong: a new input needs a seed that has it."""
    seen = {type(event) for _, events in simulated.values() for _, event in events}
    assert INPUTS - seen == {ev.LogGap}
    pinned = [e for _, events in simulated.values() for _, e in events]
    assert {e.load for e in pinned if isinstance(e, ev.SuffixPinned)} == {False, True}
    assert {ev.RequestRewound, ev.TransferFailed, ev.SuffixFailed} <= seen
    assert any(isinstance(e, ev.RequestPreempted) and e.cause for e in pinned)


@pytest.mark.parametrize("kind", sorted(TOLD, key=kind_of))
def test_every_input_that_a_replay_is_told_counts(simulated, kind):
    """Without it, that very event is missing: a recording that overlooks one differs there."""
    config, events, (seq, event) = next(
        (config, events, found[0])
        for config, events in simulated.values()
        if (found := [item for item in all_of(events, kind) if not item[1].cause])
    )
    study = study_of(config, events)
    outcome = replay(study, drop(study.recording, seq, event))
    assert outcome.first_difference["seq"] == seq
    assert outcome.first_difference["recorded"]["kind"] == kind.__name__


@pytest.mark.parametrize(
    "event",
    [
        ev.WorkerOpened(0, 0, 1, 0),
        ev.LogGap(0, 1, "full"),
        ev.RankLost(0, 0, 2, "died"),
        ev.RankJoined(0, 0, 2, 0),
        ev.SchedulerRecovered(0, "restarted"),
    ],
)
def test_an_input_that_no_replay_can_be_told_of_is_refused_by_name(clean, event):
    config, events = clean
    with pytest.raises(UsageError, match=f"seq 1 .*does not know: {type(event).__name__}"):
        study_of(config, [(1, event), *events])


@pytest.mark.parametrize("changes", [{"ranks": 2}, {"write_back": "on_pressure"}], ids=str)
def test_every_configuration_is_decided_again(changes):
    config = small_config(**changes)
    study = study_of(config, events_of(served(config, seed=3)))
    assert replay(study).first_difference is None


@pytest.mark.parametrize("cut", range(40, 600, 70))
def test_a_cut_log_is_decided_again_up_to_its_last_step(clean, cut):
    config, events = clean
    study = study_of(config, events[:cut])
    outcome = replay(study)
    assert outcome.first_difference is None
    assert outcome.figures.report()["events"] == study.last_seq
    ends_before_a_step = isinstance(events[study.last_seq : cut][0][1], ev.StepPlanned)
    assert ends_before_a_step and study.until_step == study.recording.steps


def test_figures_are_those_of_the_coordinator(clean):
    config, events = clean
    coordinator = served(config)
    told = replay(study_of(config, events)).figures.report()
    counts = coordinator.metrics.counts
    for name in ("steps", "spills", "write_backs", "restores", "preemptions", "rows_computed"):
        assert told[name] == counts[name], name
    assert told["aborted"] == 1 and told["finished"] == 7 and told["violations"] == []
    copies = counts["spills_planned"] + counts["write_backs"]
    assert told["host_bytes_written"] == copies * config.block_bytes > 0


def test_a_log_that_contradicts_the_loop_is_said_to_differ(clean):
    config, events = clean
    changed = [*events]
    seq, admitted = all_of(events, ev.AdmissionDeferred)[0]
    changed[seq - 1] = (seq, msgspec.structs.replace(admitted, need=admitted.need + 1))
    report = study_of(config, changed).run([])
    assert not report["baseline"]["reproduced"]
    assert report["baseline"]["first_difference"]["seq"] == seq
    assert report["baseline"]["figures_differ"] == [], "need is no figure"


# -- other sizes ----------------------------------------------------------------------------------


def test_a_smaller_host_pool_refuses_by_name_and_a_larger_one_does_not(clean):
    config, events = clean
    study = study_of(config, events)
    page_gib = config.host_page_bytes / (1 << 30)
    rows = study.run(
        Variant(
            str(n), changed_config(config, {"pools.host_pool_gib": n * page_gib}), study.recording
        )
        for n in (7, 64, 200)
    )["variants"]
    small, same, large = rows[2:]
    assert small["refused"]["host_pages"] > 0 and "cannot" not in str(same["refused_at_start"])
    assert "host pages" in small["refused_at_start"] and same["refused_at_start"] is None
    assert small["finished"] < same["finished"] == large["finished"] == rows[0]["finished"]
    assert {k: v for k, v in same.items() if k in rows[0] and k != "name"} == {
        k: v for k, v in rows[0].items() if k != "name"
    }
    assert all(row["violations"] == [] for row in rows)


def test_without_offload_no_page_is_copied(clean):
    config, events = clean
    study = study_of(config, events)
    resident = changed_config(config, {"policy.name": "resident", "pools.gpu_blocks": 64})
    told = replay(study, config=resident).figures.report()
    assert told["host_bytes_written"] == told["spills"] == told["prefix_hit_tokens"] == 0
    assert told["finished"] == 7 and told["violations"] == []


def test_a_size_that_makes_no_sense_is_refused_by_field(clean):
    with pytest.raises(ConfigError, match=r"policy.*hot_rows=2 must be at least top_k=4"):
        changed_config(clean[0], {"policy.hot_rows": 2})


# -- other inputs ---------------------------------------------------------------------------------


def dropped(clean, seq):
    config, events = clean
    study = study_of(config, events)
    return study, replay(study, drop(study.recording, seq, events[seq - 1][1]))


def test_a_dropped_arrival_takes_its_request_along_and_changes_nothing_before_it(clean):
    arrivals = all_of(clean[1], ev.RequestArrived)
    seq = next(seq for seq, arrived in arrivals if arrived.request == "req-3")  # aborted later
    study, outcome = dropped(clean, seq)
    told = outcome.figures.report()
    assert outcome.first_difference["seq"] == seq
    assert told["requests"] == 7 and told["aborted"] == 0 and told["finished"] == 7
    assert len(study.recording.requests) == 8, "the recording itself is as it was"


def test_a_dropped_abort_lets_the_request_go_on(clean):
    seq, _ = all_of(clean[1], ev.RequestAborted)[0]
    _, outcome = dropped(clean, seq)
    told = outcome.figures.report()
    assert outcome.first_difference["seq"] == seq
    assert told["aborted"] == 0 and told["finished"] == 8


def test_a_dropped_finish_lets_the_request_generate_all_that_it_may():
    config = small_config()
    events = events_of(served(config))
    seq, finished = all_of(events, ev.RequestFinished)[0]
    arrived = next(e for _, e in all_of(events, ev.RequestArrived) if e.request == finished.request)
    # the rig's requests finish at their limit: this one might have gone on
    longer = msgspec.structs.replace(arrived, max_tokens=arrived.max_tokens + 8)
    study = study_of(config, events)
    longer_one = study.recording.requests[0]
    assert longer_one.request == finished.request
    longer_one.max_tokens = longer.max_tokens
    as_recorded = replay(study).figures.report()["rows_computed"]
    gone = replay(study, drop(study.recording, seq, finished)).figures.report()
    assert gone["rows_computed"] == as_recorded + 8 and gone["finished"] == 7


def test_dropped_acknowledgements_come_with_the_next_ones(clean):
    seq, lost = next((s, e) for s, e in all_of(clean[1], ev.AcknowledgementsTaken) if e.completed)
    _, outcome = dropped(clean, seq)
    told = outcome.figures.report()
    assert outcome.first_difference["seq"] == seq and lost.completed
    assert told["finished"] == 7 and told["violations"] == []


def test_a_dropped_preemption_keeps_the_request_where_it_is(simulated):
    config, events = simulated[30]
    preempted = all_of(events, ev.RequestPreempted)
    study = study_of(config, events)
    recording = study.recording
    for seq, event in preempted:
        recording = drop(recording, seq, event)
    outcome = replay(study, recording)
    told = outcome.figures.report()
    assert preempted and told["preemptions"] == 0 and told["violations"] == []
    assert outcome.first_difference["seq"] == preempted[0][0]


def test_answers_and_wakes_are_not_dropped_by_themselves(simulated):
    for kind, why in (
        (ev.PolicyChosen, "PolicyChosen .*an answer that is asked for again"),
        (ev.SuffixAsked, "SuffixAsked .*an answer that is asked for again"),
        (ev.MemoryRestored, "drop the MemoryReleased before it"),
    ):
        config, events, (seq, event) = next(
            (config, events, found[0])
            for config, events in simulated.values()
            if (found := all_of(events, kind))
        )
        with pytest.raises(UsageError, match=why):
            drop(study_of(config, events).recording, seq, event)


def test_swapped_arrivals_take_each_others_place(clean):
    config, events = clean
    study = study_of(config, events)
    first, second = all_of(events, ev.RequestArrived)[2:4]
    outcome = replay(study, swap(study.recording, first, second))
    assert outcome.first_difference["seq"] == first[0]
    assert outcome.first_difference["decided"]["fields"]["request"] == second[1].request
    assert outcome.figures.report()["violations"] == []


@pytest.mark.parametrize("kind", [ev.StepPlanned, ev.RowsComputed, ev.RequestAdmitted])
def test_what_follows_from_inputs_is_not_dropped_or_swapped(clean, kind):
    config, events = clean
    study = study_of(config, events)
    seq, event = all_of(events, kind)[0]
    with pytest.raises(UsageError, match=rf"{kind.__name__}.*RequestArrived, RequestFinished"):
        drop(study.recording, seq, event)
    arrival = all_of(events, ev.RequestArrived)[0]
    with pytest.raises(UsageError, match="can be swapped is RequestArrived"):
        swap(study.recording, arrival, (seq, event))


def test_a_log_without_a_step_is_refused(clean):
    config, events = clean
    with pytest.raises(UsageError, match="plan no step"):
        study_of(config, events[:1])


def test_a_log_that_contradicts_itself_is_refused_by_seq(clean):
    config, events = clean
    seq, admitted = all_of(events, ev.RequestAdmitted)[0]
    other = msgspec.structs.replace(admitted, request="nobody")
    with pytest.raises(InvariantViolation, match="RequestAdmitted names"):
        study_of(config, [*events[: seq - 1], (seq, other), *events[seq:]])
