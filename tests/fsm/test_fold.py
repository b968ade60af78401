"""Events and their fold: every kind has a handler and survives the codec; gaps are refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import events_of, served, small_config

from hisparse.errors import IllegalTransition, LogError, StaleEpoch
from hisparse.fsm import events as ev
from hisparse.fsm.codec import Codec
from hisparse.fsm.fold import HANDLERS, evolve, fold
from hisparse.fsm.machines import BlockRole, BlockTrigger
from hisparse.fsm.state import State, digest
from hisparse.testing.strategies import events

CONFIG = small_config()
CODEC = Codec(ev.EVENT_TYPES)
every_event = pytest.mark.parametrize("cls", ev.EVENT_TYPES, ids=lambda cls: cls.__name__)
# Participles, and the two inputs that are things.
HAPPENED = re.compile(r"(ed|Held|Lost|Reset|Rewound|Taken|Sent|Chosen|Tick|LogGap)$")


def kind_of(cls):
    return cls.__struct_config__.tag


def subclasses(cls):
    return {cls, *(found for one in cls.__subclasses__() for found in subclasses(one))}


def test_every_declared_event_is_in_the_list_under_a_kind_of_its_own():
    # Other streams than the log have events of their own (selections), if their module is loaded.
    declared = {c for c in subclasses(ev.Event) if c.__module__.startswith(ev.__name__)}
    assert declared - {ev.Event} == set(ev.EVENT_TYPES)
    kinds = [kind_of(cls) for cls in ev.EVENT_TYPES]
    assert kinds == sorted(set(kinds))
    assert all(1 <= kind < 100 for kind in kinds)


@every_event
def test_an_event_is_frozen_untracked_and_says_first_what_led_to_it(cls):
    config = cls.__struct_config__
    assert config.frozen and not config.gc and config.array_like
    assert cls.__struct_fields__[0] == "cause"
    assert HAPPENED.search(cls.__name__), f"{cls.__name__} is not what has happened"
    assert cls.is_input == (kind_of(cls) < 20 or cls is ev.WorkerOpened)


@every_event
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_event_survives_the_codec(cls, data):
    event = data.draw(events(cls))
    kind, body = CODEC.encode(event)
    assert kind == kind_of(cls)
    again = CODEC.decode(kind, body)
    assert again == event and type(again) is cls
    assert CODEC.encode(again) == (kind, body)


def test_every_event_of_the_schedulers_log_has_a_handler():
    assert set(HANDLERS) == {cls for cls in ev.EVENT_TYPES if kind_of(cls) < 80}


def test_the_fold_of_a_log_is_the_live_state():
    coordinator = served(CONFIG)
    events = events_of(coordinator)
    assert {type(event) for _, event in events} > {ev.PagesSpilled, ev.IndexPagesCopied}
    assert digest(fold(CONFIG, events)) == coordinator.digest()


def test_the_fold_of_a_decoded_log_is_the_live_state():
    coordinator = served(CONFIG, seed=2)
    frames = [(seq, *CODEC.encode(event)) for seq, event in events_of(coordinator)]
    decoded = [(seq, CODEC.decode(kind, body)) for seq, kind, body in frames]
    assert digest(fold(CONFIG, decoded)) == coordinator.digest()


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_a_gap_in_seq_is_refused_and_changes_nothing(seq):
    state = fold(CONFIG, [(1, ev.Tick(0, 5))])
    before = digest(state)
    with pytest.raises(LogError, match=f"at seq 1, the next event has seq {seq}"):
        evolve(state, ev.Tick(0, 6), seq)
    assert digest(state) == before


def admitted():
    """A request in row 0 that holds block 5 for its first page: seqs 1 to 3."""
    return fold(
        CONFIG,
        [
            (1, ev.RequestArrived(0, "a", 1, 6, 20, (b"h" * 16,))),
            (2, ev.RequestAdmitted(1, "a", 1, 0, 0, 6)),
            (3, ev.BlocksReserved(1, BlockRole.RESIDENT, 0, 0, (5,), (1,))),
        ],
    )


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_block_is_reserved_under_the_next_epoch_only(epoch):
    state = admitted()
    evolve(
        state,
        ev.BlocksReleased(0, BlockRole.RESIDENT, 0, BlockTrigger.abandoned, (0,), (5,), (1,)),
        4,
    )
    with pytest.raises(StaleEpoch, match="block 5 is given out under epoch"):
        evolve(state, ev.BlocksReserved(0, BlockRole.RESIDENT, 0, 0, (5,), (epoch,)), 5)


def test_an_id_with_an_old_epoch_names_nothing():
    event = ev.BlocksReleased(0, BlockRole.RESIDENT, 0, BlockTrigger.abandoned, (0,), (5,), (0,))
    with pytest.raises(StaleEpoch, match="block 5 has epoch 1, the event names 0"):
        evolve(admitted(), event, 4)


def test_an_event_that_cannot_follow_names_what_it_met():
    event = ev.BlocksReserved(0, BlockRole.RESIDENT, 0, 1, (5,), (2,))
    with pytest.raises(IllegalTransition) as caught:
        evolve(admitted(), event, 4)
    assert (caught.value.ident, caught.value.state, caught.value.seq) == (5, "RESERVED", 4)


def test_a_state_before_the_first_event_is_at_seq_0():
    assert State(CONFIG).seq == 0
