"""The projection: what a worker learns of a log, and that it learns nothing else."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import BlockRole, BlockTrigger, PageTrigger
from hisparse.fsm.project import project
from hisparse.fsm.state import State, table_widths
from hisparse.fsm.wire import IndexCopy, Table, TableUpdate, TransferKind

CONFIG = small_config()
SECRET = b"a-page-hash-....", "a-request-id"


@pytest.fixture(scope="module")
def log():
    return events_of(served(CONFIG, seed=2))


def command(*events, from_seq=0, poison=False):
    numbered = enumerate(events, from_seq + 1)
    return project(numbered, worker_epoch=1, from_seq=from_seq, poison=poison)


def reserved(entry, *blocks, row=0, role=BlockRole.RESIDENT):
    return ev.BlocksReserved(0, role, row, entry, blocks, (1,) * len(blocks))


def released(*blocks, trigger=BlockTrigger.retired):
    entries = tuple(range(len(blocks)))
    return ev.BlocksReleased(0, BlockRole.RESIDENT, 0, trigger, entries, blocks, (1,) * len(blocks))


def apply_tables(made, tables):
    """What a worker does with a command's tables."""
    for row in made.resets:
        for table in tables:
            table[row] = 0
    for update in made.tables:
        end = update.entry + len(update.ids)
        tables[update.table][update.row, update.entry : end] = update.ids


def empty_tables():
    rows = CONFIG.schedule.max_requests
    return [np.zeros((rows, max(width, 1)), np.int32) for width in table_widths(CONFIG)]


def test_a_command_covers_the_seqs_that_it_was_made_of():
    made = command(ev.Tick(0, 1), ev.StepPlanned(0, 9, (), (), ()), from_seq=40)
    assert (made.from_seq, made.to_seq, made.step, made.worker_epoch) == (40, 42, 9, 1)


def test_no_event_makes_an_empty_command_that_covers_nothing():
    made = command(from_seq=7)
    assert (made.from_seq, made.to_seq) == (7, 7)
    assert not (made.tables or made.transfers or made.resets)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_cut_anywhere_between_steps_commands_build_the_schedulers_tables(log, data):
    """Where the cuts lie does not matter, and no cut loses a table entry of a live request."""
    ends = [seq - 1 for seq, event in log if isinstance(event, ev.RequestAdmitted)]
    ends += [seq for seq, event in log if isinstance(event, ev.StepPlanned)]
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends), max_size=12)) | {*ends[::3], len(log)})
    tables, state, at = empty_tables(), State(CONFIG), 0
    for cut in cuts:
        apply_tables(project(log[at:cut], worker_epoch=1, from_seq=at, poison=True), tables)
        for seq, event in log[at:cut]:
            evolve(state, event, seq)
        at = cut
        for table in Table:
            live = state.rows.live
            assert (tables[table][live] == state.table(table)[live]).all(), (cut, table)


def test_neighbouring_entries_are_one_update_and_order_is_kept():
    made = command(
        ev.BlocksAdopted(0, BlockRole.RESIDENT, 0, (4, 2, 3, 9), (14, 12, 13, 19), (1, 1, 1, 1)),
        reserved(2, 22),
    )
    assert made.tables == (
        TableUpdate(Table.RESIDENT, 0, 2, (12, 13, 14)),
        TableUpdate(Table.RESIDENT, 0, 9, (19,)),
        TableUpdate(Table.RESIDENT, 0, 2, (22,)),
    )


def test_a_spill_empties_the_entry_and_fences_the_copies_under_way():
    spilled = ev.PagesSpilled(0, 1, BlockTrigger.spilled, (3, 4), (7, 8), (1, 1), (31, 0))
    made = command(spilled)
    assert made.tables == (TableUpdate(Table.RESIDENT, 1, 3, (0, 0)),)
    assert made.fences == (31,)


def test_a_planned_copy_names_its_page_in_the_host_table_but_a_restore_does_not():
    def pinned(kind):
        return ev.TransferPinned(0, kind, 2, 5, 1, 1, (9,), (3,), (7,), (4,), (20,), (6,))

    made = command(pinned(TransferKind.WRITE_BACK))
    assert made.tables == (TableUpdate(Table.HOST, 2, 3, (20,)),)
    (copy,) = made.transfers
    assert (copy.transfer, copy.epoch, copy.block, copy.block_epoch) == (9, 5, 7, 4)
    assert (copy.host, copy.host_epoch) == (20, 6)
    assert command(pinned(TransferKind.RESTORE)).tables == ()


def test_index_slots_that_move_together_are_one_copy():
    moved = ev.IndexPagesCopied(
        0, 0, (5, 5, 5, 6), (1, 1, 1, 1), (0, 1, 3, 0), (8, 8, 8, 9), (2, 3, 4, 0)
    )
    copies = (IndexCopy(5, 0, 8, 2, 2), IndexCopy(5, 3, 8, 4, 1), IndexCopy(6, 0, 9, 0, 1))
    assert command(moved).index_copies == copies


def test_freed_blocks_and_pages_are_poisoned_only_when_asked():
    freed = (
        released(5, 6),
        ev.BlocksEvicted(0, (7,), (1,)),
        ev.HostPagesReleased(0, 0, PageTrigger.released, (3,), (1,)),
        ev.HostPagesEvicted(0, (4,), (1,)),
    )
    made = command(*freed, poison=True)
    assert (made.poison_blocks, made.poison_hosts) == ((5, 6, 7), (3, 4))
    made = command(*freed, poison=False)
    assert (made.poison_blocks, made.poison_hosts) == ((), ())


@pytest.mark.parametrize("trigger", [None, BlockTrigger.cached])
def test_a_block_that_stays_readable_is_not_poisoned(trigger):
    assert command(released(5, trigger=trigger), poison=True).poison_blocks == ()


def test_the_source_of_an_index_copy_is_not_poisoned_by_the_command_that_copies_it():
    copied = ev.IndexPagesCopied(0, 0, (5,), (1,), (0,), (8,), (0,))
    made = command(copied, ev.BlocksEvicted(0, (5, 6), (1, 1)), poison=True)
    assert made.poison_blocks == (6,)


def test_how_far_acknowledgements_were_taken_in_is_told():
    taken = [
        ev.AcknowledgementsTaken(0, rank, 1, 1, last, (), (), (), (), (), (), 0)
        for rank, last in ((0, 4), (1, 2), (0, 9))
    ]
    assert dict(command(*taken).acked) == {0: 9, 1: 2}


def test_no_request_id_and_no_hash_crosses():
    page_hash, name = SECRET
    made = command(
        ev.RequestArrived(0, name, 1, 8, 20, (page_hash,)),
        ev.RequestAdmitted(1, name, 1, 0, 0, 3),
        reserved(0, 5),
        ev.StepPlanned(0, 1, (0,), (0,), (8,)),
        ev.RowsComputed(0, 1, (0,), (8,), (0,), (page_hash,)),
        ev.PagesPublished(0, 0, 0, (3,), (1,), (page_hash,)),
        ev.RequestFinished(0, name, 1, name),
    )
    sent = msgspec.msgpack.encode(made)
    assert page_hash not in sent and name.encode() not in sent
    assert made.tables == (TableUpdate(Table.RESIDENT, 0, 0, (5,)),)


def test_a_command_survives_msgpack(log):
    made = project(log, worker_epoch=3, from_seq=0, poison=True)
    assert made.tables and made.transfers and made.fences and made.poison_blocks
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=type(made))
    assert again == made and again.transfers[0].kind is made.transfers[0].kind
