"""Shrinking a violation, and the text of the scenario: nothing can go, and the text says the same.

The emitted tests are run here by `exec`; `tests/cli/test_cli_shrink.py` gives some to pytest.
"""

from __future__ import annotations

import pytest
from scheduler_rig import events_of, served, small_config
from test_invariants import CONFIG, PLANTED, WRONG_BEFORE, checked

from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.invariants import Checker
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.scenario import source
from hisparse.fsm.shrink import Scenario, first_violation, shrink
from hisparse.fsm.without_requests import without_requests


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


# -- without requests -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    config = small_config()
    return config, events_of(served(config, seed=1))


def keys_of(log):
    return [(e.request, e.epoch) for _, e in log if isinstance(e, ev.RequestArrived)]


def test_a_log_without_one_request_is_most_often_a_clean_log_of_the_others(run):
    config, log = run
    keys = keys_of(log)
    assert without_requests(log, []) == log
    clean = 0
    for key in keys:
        rest = without_requests(log, [key])
        if rest is None:  # another found its prefix
            continue
        assert {name for name, _ in keys_of(rest)} == {name for name, _ in keys} - {key[0]}
        audit = Audit(config)
        if all(audit.take(seq, e) for seq, (_, e) in enumerate(rest, 1)):
            audit.finish()
            clean += audit.violations == []
    assert clean >= len(keys) // 2


def test_a_fault_of_the_fold_keeps_only_the_requests_that_it_needs(run):
    config, log = run
    told = [e for _, e in log]
    releases = [i for i, e in enumerate(told) if isinstance(e, ev.HostPagesReleased) and e.entries]
    at = releases[-1]
    log = list(enumerate([*told[:at], *told[at + 1 :]], 1))
    violation, told_at = first_violation(config, log)
    assert violation is not None and "HOST" in violation.message
    scenario = shrink(config, violation, told_at, log, budget=60_000)
    assert scenario.shown_by == "Audit" and scenario.violation.invariant == violation.invariant
    assert len(scenario.events) < told_at * 3 // 4
    assert len(keys_of(scenario.events)) < len(keys_of(log))
    executed(source(config, scenario, "log"), "case")[f"test_{violation.invariant}"]()
