"""The digest of a state: equal for equal folds, and different when anything in it differs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from scheduler_rig import engine, events_of, small_config, workload

from hisparse.fsm.fold import fold
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.state import Request, State, SuffixCopy, Transfer, digest

CONFIG = small_config(suffix_pages=40)
PARTS = ("blocks", "pages", "rows", "suffix")
# Looked at column by column, or said already by other fields or by the configuration.
APART = {"config", "by_row", "rewinding", "blocks", "pages", "rows"}
FIELDS = sorted(
    name
    for name in vars(State(CONFIG)).keys() - APART
    if not hasattr(CONFIG, name) and not hasattr(CONFIG.pools, name)
)


class Stop(Exception):
    """The moment to look at has come."""


@pytest.fixture(scope="module")
def busy() -> tuple[State, list]:
    """A state in which every column and record has something in it, and its events."""
    made, _ = engine(CONFIG)

    def stop(engine):
        state = engine.coordinator.state
        parts = [state.transfers, state.waiting, state.draining, state.prefix, state.index_prefix]
        parts += [state.suffix_index, state.suffix_copies]
        if all(parts) and state.rows.hot.any():
            raise Stop

    with pytest.raises(Stop):
        made.run(workload(2, requests=16), abort_at={"req-3": 2}, after_step=stop)
    return made.coordinator.state, events_of(made.coordinator)


def columns():
    state = State(CONFIG)
    return [(part, name) for part in PARTS for name in vars(getattr(state, part))]


def test_two_folds_of_one_log_have_one_digest(busy):
    state, events = busy
    assert digest(fold(CONFIG, events)) == digest(state)
    assert digest(copy.deepcopy(state)) == digest(state)


def test_a_fold_of_one_event_less_has_another_digest(busy):
    state, events = busy
    assert digest(fold(CONFIG, events[:-1])) != digest(state)


def queue_changes(state, queue):
    """Digests with the queue's order changed, and with one member less or more."""
    if not queue.count:
        queue.push(np.array([3]))
        return [digest(state)]
    first, found = queue.peek(1), []
    queue.remove(first)
    found.append(digest(state))
    if queue.count:
        queue.push(first)
        found.append(digest(state))
    return found


@pytest.mark.parametrize("part,name", columns(), ids=lambda value: value)
def test_a_change_in_any_column_changes_the_digest(busy, part, name):
    state = copy.deepcopy(busy[0])
    holder = getattr(state, part)
    value = getattr(holder, name)
    if isinstance(value, IdQueue):
        changes = queue_changes(state, value)
    elif isinstance(value, dict):
        value[1] = b"another"
        changes = [digest(state)]
    else:
        changes = []
        for array in value if isinstance(value, tuple) else [value]:
            array.flat[-1] = not array.flat[-1] if array.dtype == bool else array.flat[-1] + 1
            changes.append(digest(state))
    assert digest(busy[0]) not in changes
    assert len(set(changes)) == len(changes)


@pytest.mark.parametrize("name", FIELDS)
def test_a_change_in_any_field_of_the_state_changes_the_digest(busy, name):
    state = copy.deepcopy(busy[0])
    value = getattr(state, name)
    if name == "suffix_answers":  # an answer is used up in the call that asked
        value["q", 1] = (0, 1)
    elif isinstance(value, dict):
        value.popitem()
    elif isinstance(value, list):
        value[0] += 1
    else:
        setattr(state, name, value + 1)
    assert digest(state) != digest(busy[0])


@pytest.mark.parametrize(
    "record,name",
    [(cls, name) for cls in (Request, Transfer, SuffixCopy) for name in cls.__struct_fields__],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_change_in_any_record_changes_the_digest(busy, record, name):
    state = copy.deepcopy(busy[0])
    records = {
        Request: state.requests,
        Transfer: state.transfers,
        SuffixCopy: state.suffix_copies,
    }[record]
    one = next(iter(records.values()))
    value = getattr(one, name)
    if isinstance(value, list):
        setattr(one, name, [*value, value[0] if value else 1])
    elif isinstance(value, str):
        setattr(one, name, value + "x")
    elif isinstance(value, bool):
        setattr(one, name, not value)
    else:
        setattr(one, name, int(value) + 1)
    assert digest(state) != digest(busy[0])


def test_the_null_ids_are_in_no_queue():
    state = State(CONFIG)
    assert 0 not in state.blocks.free and 0 not in state.pages.free
    assert state.blocks.available == CONFIG.pools.gpu_blocks - 1
    assert state.pages.available == CONFIG.host_pages - 1
