"""Shrinking a violation, and the text of the scenario: nothing can go, and the text says the same.

The emitted tests are run here by `exec`; `tests/cli/test_cli_shrink.py` gives some to pytest.
"""

from __future__ import annotations

import re

import msgspec
import pytest
from invariant_stories import CONFIG, checked
from planted_violations import PLANTED, WRONG_BEFORE
from scheduler_rig import events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.fold import fold
from hisparse.fsm.invariants import Checker
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.reduce import signature
from hisparse.fsm.reduce_units import UNITS, tenants
from hisparse.fsm.rerun import Rerun
from hisparse.fsm.scenario import source
from hisparse.fsm.shrink import Scenario, first_violation, shrink
from hisparse.fsm.witness import keys_of


def executed(text, name):
    space: dict[str, object] = {}
    exec(compile(text, name, "exec"), space)
    return space


@pytest.mark.parametrize("what", [what for what in PLANTED if what not in WRONG_BEFORE])
def test_a_planted_violation_is_still_shown_and_no_event_can_go(what):
    _, before, event = PLANTED[what]
    log = list(enumerate([*before, event], 1))
    violation = checked(*before).event(len(log), event)[0]
    scenario = shrink(CONFIG, violation, len(log), log)
    assert scenario.shown_by == "Checker" and scenario.minimal
    assert scenario.violation.message == violation.message
    space = executed(source(CONFIG, scenario, "log"), "test_case")
    space[f"test_{violation.invariant}"]()
    assert space["EVENTS"] == scenario.events and space["CONFIG"] == CONFIG
    for at in range(len(scenario.events) - 1):
        rest = Checker(CONFIG)
        try:
            for seq, e in scenario.events[:at] + scenario.events[at + 1 : -1]:
                assert not rest.event(seq, e)
            found = list(RUN_CHECKS[violation.invariant](rest.run, scenario.events[-1][1]))
        except (KeyError, AssertionError):  # it names what the log never spoke of, or shows another
            continue
        assert violation.message not in found


def test_a_spoilt_fold_is_shown_by_the_audit_and_a_spent_budget_is_said():
    config = small_config()
    told = [e for _, e in events_of(served(config, seed=1))]
    at = next(i for i, e in enumerate(told) if isinstance(e, ev.BlocksReleased))
    log = list(enumerate([*told[: at + 1], told[at], *told[at + 1 :]], 1))
    violation, told_at = first_violation(config, log, "")
    assert violation is not None and told_at == at + 2
    other, _ = first_violation(config, log, "StaleEpoch")
    assert other is None or other.invariant == "StaleEpoch"
    fold, told_at = first_violation(config, log, "AssertionError")
    fold = fold or first_violation(config, log, "IllegalTransition")[0]
    assert fold is not None
    full = shrink(config, fold, told_at, log)
    hasty = shrink(config, fold, told_at, log, budget=0)
    assert full.shown_by == hasty.shown_by == "Audit" and not hasty.minimal
    assert len(full.events) <= len(hasty.events)
    for scenario in (full, hasty):
        executed(source(config, scenario, "log"), "case")[f"test_{fold.invariant}"]()


def test_a_log_cannot_put_code_into_the_file():
    evil = 'x"""\n\'); import os; os._exit(9) #\\'
    event = ev.RequestFinished(0, evil, 1, evil)
    scenario = Scenario(Violation("KeyError", 1, evil), [(1, event)], [7], "Audit", True)
    text = source(CONFIG, scenario, evil + "\ud800")
    space: dict[str, object] = {}
    exec(compile(text.partition("def test_")[0], "evil", "exec"), space)
    assert space["EVENTS"] == [(1, event)] and space["MESSAGE"] == evil


# -- faults of the fold ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    config = small_config()
    return config, [event for _, event in events_of(served(config, seed=1))]


def without(told, at):
    return [*told[:at], *told[at + 1 :]]


def twice(told, at):
    return [*told[: at + 1], *told[at:]]


def under_its_old_epoch(told, at):
    old = tuple(epoch - 1 for epoch in told[at].epochs)
    return [*told[:at], msgspec.structs.replace(told[at], epochs=old), *told[at + 1 :]]


def too_early(told, at):
    return [*told[: at - 30], told[at], *told[at - 30 : at], *told[at + 1 :]]


# What is planted at three fifths of the events of that kind, and the most events that may be left.
FAULTS = {
    "release of host pages dropped": (ev.HostPagesReleased, without, 13),
    "release of blocks dropped": (ev.BlocksReleased, without, 5),
    "release of blocks doubled": (ev.BlocksReleased, twice, 4),
    "reservation dropped": (ev.BlocksReserved, without, 4),
    "completion dropped": (ev.TransferCompleted, without, 10),
    "completion doubled": (ev.TransferCompleted, twice, 11),
    "spill doubled": (ev.PagesSpilled, twice, 18),
    "step doubled": (ev.StepPlanned, twice, 2),
    "publication doubled": (ev.PagesPublished, twice, 13),
    "old epoch": (ev.BlocksReserved, under_its_old_epoch, 8),
    "drained early": (ev.RequestDrained, too_early, 4),
}


def planted(told, what):
    kind, plant, most = FAULTS[what]
    whole = kind is not ev.HostPagesReleased
    places = [i for i, e in enumerate(told) if isinstance(e, kind) and (whole or e.entries)]
    return plant(told, places[len(places) * 3 // 5]), most


def fold_fault(config, log):
    """The audit that stopped at an event, and why it did."""
    audit = Audit(config)
    for seq, event in enumerate(log, 1):
        if not audit.take(seq, event):
            return audit, audit.violations[-1]
    raise AssertionError("it can be folded")


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_the_fold_is_shown_by_few_events_and_is_the_same_fault(run, what):
    config, told = run
    log, most = planted(told, what)
    audit, violation = fold_fault(config, log)
    scenario = shrink(config, violation, violation.seq, list(enumerate(log, 1)))
    assert scenario.shown_by == "Audit" and scenario.minimal and len(scenario.events) <= most
    left = [event for _, event in scenario.events]
    again, same = fold_fault(config, left)
    assert again.events == len(left) and same == scenario.violation
    assert signature(same, left[-1], again.refused) == signature(
        violation, log[violation.seq - 1], audit.refused
    )
    assert {v.seq for v in again.violations} == {len(left)}, "nothing is wrong before it"
    executed(source(config, scenario, "log"), "case")[f"test_{violation.invariant}"]()


def test_faults_that_differ_in_more_than_ids_have_other_signatures(run):
    config, told = run
    found = {}
    for what in FAULTS:
        log, _ = planted(told, what)
        audit, violation = fold_fault(config, log)
        found[what] = signature(violation, log[violation.seq - 1], audit.refused)
    assert found["release of host pages dropped"] != found["release of blocks dropped"]
    assert found["completion dropped"].message.endswith("is illegal at seq #")
    assert not any(re.search(r"\d", one.message) for one in found.values())
    assert len(set(found.values())) >= len(FAULTS) - 1


def test_no_event_and_no_entry_of_the_scenario_can_go(run):
    config, told = run
    log, _ = planted(told, "release of host pages dropped")
    audit, violation = fold_fault(config, log)
    scenario = shrink(config, violation, violation.seq, list(enumerate(log, 1)))
    left = [event for _, event in scenario.events]
    wanted = signature(violation, log[violation.seq - 1], audit.refused)
    rerun = Rerun(config, left)
    for units, cut in UNITS:
        for unit in units(left):
            played = rerun.play(cut(left, [unit]), clean=True)
            if played is None or not played.events:
                continue
            last = [v for v in played.violations if v.seq == len(played.events)]
            assert not any(signature(v, played.events[-1], played.refused) == wanted for v in last)


# -- rerun ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_log_of_which_nothing_is_left_out_is_played_as_it_is(seed):
    config = small_config(ranks=1 + seed % 2, suffix_pages=32 * (seed > 1))
    log = [event for _, event in events_of(served(config, seed=seed))]
    played = Rerun(config, log).play(log, clean=True)
    assert played is not None and played.events == log and not played.violations


def test_a_log_without_any_one_request_is_a_clean_log_of_the_others(run):
    config, log = run
    arrived = [at for at, event in enumerate(log) if isinstance(event, ev.RequestArrived)]
    clean = 0
    for gone in arrived:
        played = Rerun(config, log).play([*log[:gone], None, *log[gone + 1 :]], clean=True)
        if played is None:  # another found its prefix
            continue
        others = [e.request for e in played.events if isinstance(e, ev.RequestArrived)]
        assert others == [log[at].request for at in arrived if at != gone]
        assert fold(config, list(enumerate(played.events, 1))).next_epoch == len(arrived)
        clean += 1
    assert clean >= len(arrived) // 2


def test_a_rewind_names_its_row_and_the_rows_that_it_counts_are_no_ids():
    rewound = ev.RequestRewound(0, "r", 1, 2, 16, 20, (3,), (1,))
    assert list(keys_of(rewound)) == [("block", 3), ("row", 2), ("request", ("r", 1))]
    log = [ev.RequestAdmitted(0, "r", 1, 2, 0, 0), rewound]
    assert tenants(log)[1] == [1, 1]
