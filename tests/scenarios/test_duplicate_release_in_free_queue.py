"""A22: one block released twice in a call, the null block, a block that is free already; then all
blocks are allocated, and one is handed out twice.

Here whoever gives an id back shows the table entry or reservation that holds it, once. Anything
else raises at the call, before anything is changed, and tells who held the id before.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.errors import IllegalTransition, StaleEpoch
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.machines import BlockRole, BlockTrigger, PageTrigger
from hisparse.fsm.state import digest

PROMPT = list(range(12))


def serving():
    rig = SchedulerRig(make_config(blocks=30, host_pages=40))
    key = rig.arrive("q", PROMPT, new=8)
    for _ in range(2):
        rig.step()  # three pages are written back: clean, findable
    return rig, rig.row(key), key


def released(rig, row, entries, blocks, role=BlockRole.RESIDENT, trigger=BlockTrigger.dropped):
    epochs = tuple(int(rig.state.blocks.epoch[b]) for b in blocks)
    return ev.BlocksReleased(0, role, row, trigger, entries, blocks, epochs)


def wrong_releases(rig, row, key):
    """name -> an event that releases what is not held."""
    held, host = rig.blocks(key), rig.host(key)
    free = int(rig.state.blocks.free.peek(1)[0])
    page_epoch = int(rig.state.pages.epoch[host[0]])
    reserved = rig.state.requests[key].reserved[0]
    return {
        "b5 twice in a call": released(rig, row, (0, 0), (held[0], held[0])),
        "b5 twice, by two entries": released(rig, row, (0, 1), (held[0], held[0])),
        "the null block": released(rig, row, (30,), (0,)) if len(host) > 30 else
        released(rig, row, (len(host) - 1,), (0,)),
        "a free block": released(rig, row, (0,), (free,)),
        "another table's block": released(rig, row, (0,), (held[0],), BlockRole.INDEX),
        "nobody's row": released(rig, row + 1, (0,), (held[0],)),
        "a host page twice": ev.HostPagesReleased(
            0, row, PageTrigger.released, (host[0], host[0]), (page_epoch,) * 2, (0, 0)
        ),
        "a reservation twice": ev.HostPagesReleased(
            0, row, PageTrigger.abandoned, (reserved, reserved),
            (int(rig.state.pages.epoch[reserved]),) * 2,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(wrong_releases(*serving())))
def test_a_release_of_what_is_not_held_raises_at_the_call_and_changes_nothing(name):
    rig, row, key = serving()
    before = digest(rig.state)
    with pytest.raises(IllegalTransition, match="is not held by"):
        evolve(rig.state, wrong_releases(rig, row, key)[name], rig.state.seq + 1)
    assert digest(rig.state) == before


def test_the_error_tells_who_held_the_block_before():
    rig, row, key = serving()
    block = rig.blocks(key)[0]
    rig.coordinator.checker = None  # else it is the invariant that speaks first
    rig.coordinator._record(released(rig, row, (0,), (block,), trigger=BlockTrigger.cached))
    with pytest.raises(IllegalTransition) as caught:
        rig.coordinator._record(released(rig, row, (0,), (block,)))
    assert (caught.value.machine, caught.value.ident) == ("BlockLease", block)
    kinds = [line.split()[1] for line in caught.value.history]
    assert kinds[0] == "BlocksReserved" and kinds[-2:] == ["BlocksReleased", "BlocksReleased"]


def test_after_it_all_blocks_can_be_given_out_each_once():
    rig, row, key = serving()
    for event in wrong_releases(rig, row, key).values():
        with pytest.raises((IllegalTransition, StaleEpoch)):
            evolve(rig.state, event, rig.state.seq + 1)
    rig.finish(key)
    for _ in range(2):
        rig.step()
    blocks = rig.state.blocks
    given = [*blocks.free.ordered().tolist(), *blocks.cached.ordered().tolist()]
    assert sorted(given) == list(range(1, len(blocks.state)))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 7), max_size=4)), max_size=20))
def test_whatever_is_asked_of_a_free_queue_an_id_is_in_it_at_most_once(calls):
    queue, inside = IdQueue(8, np.arange(8)), set(range(8))
    for push, ids in calls:
        legal = len(set(ids)) == len(ids) and all((i in inside) is not push for i in ids)
        if legal:
            (queue.push if push else queue.remove)(np.array(ids, dtype=np.int64))
            inside = inside | set(ids) if push else inside - set(ids)
            assert sorted(queue.ordered().tolist()) == sorted(inside)
        else:
            with pytest.raises(AssertionError):
                (queue.push if push else queue.remove)(np.array(ids, dtype=np.int64))
            return  # an assertion is the end of the process that made it
