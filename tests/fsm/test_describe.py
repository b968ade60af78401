"""The one-line form of an event."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.describe import as_dict, line, runs
from hisparse.fsm.wire import TransferKind


def test_a_transfer_reads_as_documented():
    event = ev.TransferPinned(
        400, TransferKind.SPILL, 3, 1, 1, 1, (17, 18), (4, 5), (5, 6), (1, 1), (10, 12), (2, 3)
    )
    assert line(412, event) == (
        "     412  TransferPinned     SPILL, row 3, epoch 1, readers 1, writers 1, "
        "transfers 17-18, entries 4,5, blocks 5-6 @1, pages 10@2,12@3  <- 400"
    )


def test_every_event_of_a_run_is_one_line_and_json():
    for seq, event in events_of(served(small_config(), seed=0)):
        text = line(seq, event)
        assert len(text.splitlines()) == 1 and type(event).__name__ in text
        told = json.loads(json.dumps(as_dict(seq, event)))
        assert told["fields"].keys() == {*type(event).__struct_fields__}


@given(st.lists(st.integers(0, 20), max_size=7))
def test_runs_name_every_id_in_order(ids):
    named = []
    for part in runs(ids).split(",") if ids else []:
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == ids
