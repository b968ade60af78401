"""Machines: the compiled table does what the `transitions` declaration says, word for word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transitions import MachineError

from hisparse.errors import IllegalTransition
from hisparse.fsm.machine import ILLEGAL, Machine
from hisparse.fsm.machines import BLOCK_LEASE, MACHINES, BlockState, BlockTrigger

every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
few = settings(max_examples=60, deadline=None)
INSTANCES = 4


class Model:
    """What `transitions` drives."""


def word_of(machine):
    """Triggers, most of them illegal where they stand: the walk goes on from where it was."""
    return st.lists(st.sampled_from(list(machine.triggers)), max_size=30)


def moved(model, trigger):
    """Whether the declared machine allows `trigger`, which it then takes."""
    try:
        model.trigger(trigger.name)
    except MachineError:
        return False
    return True


@every_machine
@few
@given(data=st.data())
def test_next_goes_where_the_declaration_goes(machine, data):
    model, state = Model(), 0
    machine.attach(model)
    for trigger in data.draw(word_of(machine)):
        allowed = moved(model, trigger)
        try:
            state = machine.next(state, trigger)
        except IllegalTransition:
            assert not allowed, (model.state, trigger)
        else:
            assert allowed, (model.state, trigger)
        assert state == model.state


@every_machine
@few
@given(data=st.data())
def test_apply_moves_all_of_an_array_or_none(machine, data):
    states = np.zeros(INSTANCES, dtype=np.uint8)
    models = [Model() for _ in range(INSTANCES)]
    declared = [machine.attach(model) for model in models]
    chosen = st.lists(st.integers(0, INSTANCES - 1), min_size=1, unique=True)
    for trigger in data.draw(word_of(machine)):
        ids = data.draw(chosen)
        before = [model.state for model in models]
        refused = [i for i in ids if not moved(models[i], trigger)]
        if refused:
            for one, model, state in zip(declared, models, before, strict=True):
                one.set_state(state, model)
            with pytest.raises(IllegalTransition) as caught:
                machine.apply(states, np.array(ids), trigger)
            assert caught.value.ident == refused[0]
        else:
            machine.apply(states, np.array(ids), trigger)
        assert states.tolist() == [int(model.state) for model in models]


def successors(machine: Machine, state: int) -> set[int]:
    return {int(cell) for cell in machine.table[state] if cell != ILLEGAL}


def reached(machine: Machine, start: int) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        fresh = successors(machine, todo.pop()) - found
        found |= fresh
        todo += fresh
    return found


@every_machine
def test_every_state_is_reachable_and_every_trigger_is_used(machine):
    assert reached(machine, 0) == set(range(len(machine.states)))
    assert ((machine.table != ILLEGAL).any(axis=0)).all()


@every_machine
def test_every_life_can_end_and_ends_only_in_a_final_state(machine):
    final = {int(state) for state in machine.final}
    for state in range(len(machine.states)):
        assert reached(machine, state) & final, f"{machine.states(state).name} never ends"
        if successors(machine, state) <= {state}:
            assert state in final, f"{machine.states(state).name} is a dead end, not a final state"


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_refusal_names_machine_id_epoch_state_trigger_and_seq(vectorised):
    with pytest.raises(IllegalTransition) as caught:
        if vectorised:
            states = np.array([0, 2, 0], dtype=np.uint8)
            epochs = np.array([5, 6, 7])
            ids = np.array([1, 2])
            BLOCK_LEASE.apply(states, ids, BlockTrigger.spilled, epochs=epochs, seq=41)
        else:
            BLOCK_LEASE.next(BlockState.DIRTY, BlockTrigger.spilled, 1, epoch=6, seq=41)
    told = caught.value
    assert (told.machine, told.ident, told.epoch) == ("BlockLease", 1, 6)
    assert (told.state, told.trigger, told.seq) == ("DIRTY", "spilled", 41)
    assert "BlockLease 1 (epoch 6) is DIRTY: 'spilled' is illegal at seq 41" in str(told)


def test_two_arrows_for_one_state_and_trigger_are_refused():
    states, triggers = BlockState, BlockTrigger
    arrow = (triggers.reserved, states.FREE, states.RESERVED)
    with pytest.raises(ValueError, match="two arrows"):
        Machine("Twice", states, triggers, [arrow, (triggers.reserved, states.FREE, states.DIRTY)])
