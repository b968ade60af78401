"""Snapshots: a state comes back byte for byte, goes on alike, and foreign bytes are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import LogError
from hisparse.fsm.fold import evolve
from hisparse.fsm.snapshot import FORMAT, Snapshot, restore, snapshot
from hisparse.fsm.state import State, digest
from hisparse.testing.calm import CalmSimulation


@pytest.fixture(scope="module")
def run():
    simulation = CalmSimulation(5)
    simulation.run()
    return simulation.config, list(simulation.log.read(1))


def test_a_restored_state_goes_on_like_the_one_it_was_taken_from(run):
    config, events = run
    state = State(config)
    for seq, event in events:
        if seq % 50 == 0:
            state = restore(config, snapshot(state))
        evolve(state, event, seq)
    plain = State(config)
    for seq, event in events:
        evolve(plain, event, seq)
    assert digest(state) == digest(plain)


def test_a_snapshot_that_does_not_have_its_digest_is_refused(run):
    config, events = run
    state = State(config)
    for seq, event in events[:200]:
        evolve(state, event, seq)
    taken = msgspec.msgpack.decode(snapshot(state), type=Snapshot)
    taken.records.step += 1
    with pytest.raises(LogError, match="digest"):
        restore(config, msgspec.msgpack.encode(taken))
    taken.format = FORMAT + 1
    with pytest.raises(LogError, match="format"):
        restore(config, msgspec.msgpack.encode(taken))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data):
    config = CalmSimulation(5).config
    with pytest.raises(LogError):
        restore(config, data)
