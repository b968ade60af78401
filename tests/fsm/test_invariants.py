"""Invariants: each finds its planted violation by name, and a clean run has none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from invariant_stories import (
    COPIED,
    DRAINED,
    FAILED_ON_BOTH,
    FAILED_ON_ONE,
    PINNED,
    acks,
    admitted,
    adopt,
    checked,
    copied,
    copy_index,
    given_back,
    lease,
    placed,
    spilled,
)
from planted_violations import PLANTED, SPILL, WRONG_BEFORE
from scheduler_rig import PAGE, events_of, served, small_config

from hisparse.errors import InvariantViolation
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants import INVARIANTS, Checker, Violation
from hisparse.fsm.invariants.checker import JUDGED
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.machines import BlockState, PageState, PageTrigger
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found_by_name(what):
    name, before, event = PLANTED[what]
    checker = checked(*before)
    assert not checker.violations or what in WRONG_BEFORE
    found = checker.event(len(before) + 1, event)
    assert name in {violation.invariant for violation in found}
    assert {violation.seq for violation in found} == {len(before) + 1}


def test_every_run_invariant_has_a_planted_violation():
    assert {name for name, _, _ in PLANTED.values()} == set(RUN_CHECKS)


@pytest.mark.parametrize(
    "story",
    [
        [*COPIED, spilled(0, 1)],
        [*PINNED, *copied(1, 2, completed=False), spilled(0, 1, transfers=(1, 2))],
        DRAINED,
        [*DRAINED, *admitted(1, hit=PAGE), lease(), *placed(1)[1:], copy_index(), adopt()],
        [*PINNED, *FAILED_ON_BOTH, given_back(PageTrigger.reclaimed, (10,))],
        [*PINNED, *FAILED_ON_ONE, acks(1, completed=(1,)),
         ev.TransferCompleted(0, 1, True, (1,)), given_back(PageTrigger.reclaimed, (10,))],
    ],
    ids=["spilled", "spilled in stream order", "drained", "found by prefix", "failed",
         "failed on one rank"],
)  # fmt: skip
def test_what_is_allowed_is_not_reported(story):
    assert list(checked(*story).violations) == []


# -- states ---------------------------------------------------------------------------------------


class Stop(Exception):
    """The moment to look at has come."""


@pytest.fixture
def state():
    """A folded state with live requests that read pages from both tiers."""
    config = small_config()
    events = events_of(served(config, seed=2))
    state = State(config)
    for seq, event in events:
        evolve(state, event, seq)
        hosted = state.table(Table.HOST)[state.rows.live] > 0
        holes = state.table(Table.RESIDENT)[state.rows.live] == 0
        if (hosted & holes).any() and state.transfers and state.blocks.cached.count:
            break
    else:
        raise AssertionError("no such moment in this run")
    assert found_in(state) == set()
    return state


def found_in(state):
    return {violation.invariant for violation in Checker(state.config).state(state)}


def place_of(state, *, on_host):
    """(row, entry, block, page) of a computed page of a live request."""
    resident, host = state.table(Table.RESIDENT), state.table(Table.HOST)
    for row in np.flatnonzero(state.rows.live).tolist():
        for entry in range(int(state.rows.computed[row]) // PAGE):
            if (resident[row, entry] == 0) == on_host:
                return row, entry, int(resident[row, entry]), int(host[row, entry])
    raise AssertionError("no such page")


def leak_block(state):
    state.blocks.free.remove(state.blocks.free.peek(1))


def free_null(state):
    state.blocks.free.push(np.array([0]))


def cache_leased(state):
    state.blocks.cached.push(np.array([place_of(state, on_host=False)[2]]))


def leak_page(state):
    state.pages.free.remove(state.pages.free.peek(1))


def count_block(state):
    state.blocks.refs[place_of(state, on_host=False)[2]] += 1


def count_page(state):
    state.pages.refs[place_of(state, on_host=True)[3]] -= 1


def fail_page(state):
    state.pages.state[place_of(state, on_host=True)[3]] = PageState.FAILED


def lose_hot_region(state):
    request = state.request_of(place_of(state, on_host=True)[0])
    request.hot = type(request.hot).NONE


def empty_block(state):
    """The entry names a block that nothing was written to; a host copy does not help."""
    row, _, block, _ = place_of(state, on_host=False)
    state.blocks.state[block] = BlockState.RESERVED
    state.request_of(row).hot = type(state.request_of(row).hot).LEASED


def lose_host_entry(state):
    row, entry, _, _ = place_of(state, on_host=True)
    state.table(Table.HOST)[row, entry] = 0


@pytest.mark.parametrize(
    "name,spoil",
    [
        *[("conservation", spoil) for spoil in (leak_block, free_null, cache_leased, leak_page)],
        *[("refcount_exact", spoil) for spoil in (count_block, count_page)],
        *[
            ("always_readable", spoil)
            for spoil in (fail_page, lose_hot_region, empty_block, lose_host_entry)
        ],
    ],
)
def test_a_spoilt_state_is_found_by_name(state, name, spoil):
    spoil(state)
    assert name in found_in(state)


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed,write_back", [*itertools.product(range(4), ("eager", "on_pressure"))]
)
def test_a_clean_run_has_no_violation(seed, write_back):
    config = small_config(write_back=write_back)

    def after_step(engine):
        engine.coordinator.checker.state(engine.coordinator.state)

    coordinator = served(config, seed=seed, after_step=after_step)
    checker = coordinator.checker
    assert list(checker.violations) == []
    assert all(times > 50 for times in checker.checked.values())
    counts = coordinator.metrics.counts
    assert counts["spills"] and counts["pages_published"] and counts["prefix_hit_pages"]


@pytest.mark.parametrize("name", RUN_CHECKS)
def test_an_invariant_does_not_look_at_kinds_that_it_is_not_asked_to_judge(name):
    """`Checker` asks it about no others; without a run, one that looked would raise."""
    others = [kind for kind in ev.EVENT_TYPES if kind not in JUDGED[name]]
    assert others and JUDGED[name]
    for kind in others:
        event = kind(*[(1,)] * len(kind.__struct_fields__))
        assert list(RUN_CHECKS[name](None, event)) == []


def test_the_first_violation_is_raised_with_its_seq():
    checker = checked(*PINNED, spilled(0))
    with pytest.raises(InvariantViolation) as caught:
        checker.raise_first()
    assert (caught.value.invariant, caught.value.seq) == (SPILL, len(PINNED) + 1)


def test_every_invariant_that_a_log_can_show_is_run_and_is_declared():
    on_log = {invariant.name for invariant in INVARIANTS if invariant.where == "log"}
    assert on_log == {*RUN_CHECKS, *STATE_CHECKS}


def test_the_first_violations_are_kept_and_all_are_counted() -> None:
    checker = Checker(small_config(), keep=2)
    checker._note([Violation("one_content", seq, "x") for seq in (3, 4)])
    checker._note([Violation("one_content", 5, "x")])
    assert [v.seq for v in checker.violations] == [3, 4] and checker.found == 3
