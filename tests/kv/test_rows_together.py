"""Rows that grow, seal or publish in one step do so in one event: the same as by one a row."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.project import project
from hisparse.kv.decision import spans

TOGETHER = (ev.BlocksReserved, ev.TransferPinned, ev.PagesPublished)


@pytest.fixture
def lockstep():
    """Three requests whose pages fill in the same steps, two pages into their decode."""
    rig = SchedulerRig(make_config(blocks=48))
    for i in range(3):
        rig.arrive(f"r{i}", [100 * i + t for t in range(2 * PAGE)], new=3 * PAGE)
    while rig.state.rows.computed.max() < 4 * PAGE:
        rig.step()
    return rig


def apart(event):
    """The events, one a row, that an event of several rows stands for."""
    if not isinstance(event, TOGETHER) or not event.rows:
        return [event]
    found = []
    for row in dict.fromkeys(event.rows):
        at = [i for i, other in enumerate(event.rows) if other == row]
        columns = {
            name: tuple(value[i] for i in at)
            for name in event.__struct_fields__
            if isinstance(value := getattr(event, name), tuple)
        }
        columns |= {"rows": (), "row": row}
        if isinstance(event, ev.TransferPinned):
            columns |= {"request_epochs": (), "epoch": columns["request_epochs"][0]}
        else:
            columns |= {"entries": (), "entry": columns["entries"][0]}
        found.append(msgspec.structs.replace(event, **columns))
    return found


def columns_of(state):
    """Every column and queue, by name."""
    found = {}
    for part in (state.blocks, state.pages, state.rows):
        for name, value in vars(part).items():
            if isinstance(value, IdQueue):
                value = value.ordered()
            found[type(part).__name__, name] = value
    return found


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), max_size=6))
def test_spans_are_the_ranges_one_after_the_other(parts):
    rows, first, counts = (np.array([p[i] for p in parts], dtype=np.int64) for i in range(3))
    flat = [(row, entry) for row, at, n in parts for entry in range(at, at + n)]
    found = spans(rows, first, first + counts)
    assert list(zip(*(part.tolist() for part in found), strict=True)) == flat


@pytest.mark.parametrize("kind", TOGETHER)
def test_three_rows_in_one_step_are_one_event(lockstep, kind):
    together = [e for e in lockstep.events(kind) if e.rows]
    assert together and all(set(e.rows) == {0, 1, 2} for e in together)
    assert all(e.row == -1 for e in together)


def test_a_single_row_is_named_by_its_event(lockstep):
    while lockstep.state.rows.computed[1] < 5 * PAGE:
        lockstep.step(only={("r1", 2)})
    last = lockstep.events(ev.TransferPinned)[-1]
    assert (last.row, last.epoch, last.rows) == (1, 2, ())


def test_its_fold_is_that_of_one_event_a_row(lockstep):
    events = [event for _, event in lockstep.log.read(1)]
    single = [one for event in events for one in apart(event)]
    assert len(single) > len(events)
    state = fold(lockstep.config, list(enumerate(single, 1)))
    for name, expected in columns_of(lockstep.state).items():
        np.testing.assert_equal(columns_of(state)[name], expected, err_msg=str(name))
    assert state.prefix == lockstep.state.prefix
    assert {t: c.page for t, c in state.transfers.items()} == {
        t: c.page for t, c in lockstep.state.transfers.items()
    }


def test_a_worker_is_told_the_same_as_by_one_event_a_row(lockstep):
    for first in range(1, lockstep.log.last_seq, 7):
        run = [event for _, event in lockstep.log.read(first)][:12]
        single = [one for event in run for one in apart(event)]
        told = [
            project(enumerate(events, 1), worker_epoch=1, from_seq=0, poison=True)
            for events in (run, single)
        ]
        assert msgspec.structs.replace(told[0], to_seq=0) == msgspec.structs.replace(
            told[1], to_seq=0
        )


def test_a_log_from_before_such_events_reads_as_it_did():
    old = msgspec.msgpack.encode([30, 5, 0, 2, 0, [7, 8], [1, 1]])  # tag, cause, role, row, entry
    assert msgspec.msgpack.decode(old, type=ev.BlocksReserved).places() == [(2, 0), (2, 1)]
