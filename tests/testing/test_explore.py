"""Exhaustive exploration: counts that stay, renaming that loses nothing, branches that are replays,
and faults in the production code that it finds by a short path."""

from __future__ import annotations

from unittest import mock

import pytest
from mutants.pools import freed_block_kept_in_no_queue, reuse_an_epoch
from mutants.publication import publish_at_enqueue
from mutants.tiers import host_page_freed_before_readers_retire

from hisparse.fsm.branch import branched
from hisparse.fsm.state import digest
from hisparse.testing.explore import Search, World, walk
from hisparse.testing.explore.canonical import canonical

ONE = World(requests=1, ranks=1, failures=1)
TWO = World(requests=2, ranks=1, faults=0)
TWO_RANKS = World(requests=2, ranks=2, crashes=0, failures=1)


@pytest.mark.parametrize(
    ("world", "unique", "schedulers"), [(ONE, 1636, 281), (TWO, 2137, 802)], ids=["one", "two"]
)
def test_a_small_world_is_explored_to_its_end_and_its_counts_stay(world, unique, schedulers):
    result = Search(world).run()
    assert result.complete and not result.violations and not result.bounded
    assert (result.unique, result.schedulers) == (unique, schedulers)


def test_a_branch_equals_the_replay_of_its_path():
    """Byte for byte, ids and epochs included, through crashes and failed copies."""
    search = Search(World(requests=2, ranks=2, failures=1), most=3000)
    search.run()
    schedulers = search.schedulers
    for number in range(0, len(schedulers), 7):
        made = walk(search.world, schedulers.path(number))
        assert made.fault is None
        assert digest(made.seat.state) == digest(schedulers.branches[number].state), number


def test_a_path_of_the_world_ends_in_the_state_that_it_is_the_path_of():
    search = Search(World(requests=2, ranks=2, failures=1), most=3000)
    search.run()
    for place, at in list(search.places.items())[::101]:
        made = walk(search.world, search.path(at))
        seat, branch = made.seat, search.schedulers.branches[place[0]]
        key = canonical(search.world, seat.state, None, False)[0]
        assert made.fault is None and key == canonical(search.world, branch.state, None, False)[0]


def test_states_that_differ_by_a_renaming_are_one():
    """Either request comes first; afterwards nobody can tell which it was."""
    search = Search(TWO)
    search.run()
    first = search.schedulers.edge(0, ("arrive", 0))
    assert first == search.schedulers.edge(0, ("arrive", 1))
    one, other = (walk(TWO, [("arrive", n), ("plan",)]) for n in (0, 1))
    assert digest(one.seat.state) != digest(other.seat.state)
    assert (
        canonical(TWO, one.seat.state, None, False)[0]
        == (canonical(TWO, other.seat.state, None, False)[0])
    )


def test_renaming_host_pages_leaves_nothing_out():
    """Exploring them apart, and renaming them afterwards, meets the same states."""
    renamed, apart = Search(TWO), Search(TWO, exact=True)
    renamed.run()
    apart.run()
    found = {canonical(TWO, b.state, b.extra, False)[0] for b in apart.schedulers.branches}
    assert found == renamed.schedulers.keys


def test_a_branched_state_shares_nothing_with_the_first():
    made = walk(ONE, [("arrive", 0), ("plan",), ("computed",)])
    state, before = made.seat.state, digest(made.seat.state)
    other = branched(state)
    assert digest(other) == before
    other.rows.computed[0] += 1
    other.requests[("q0", 1)].reserved.clear()
    other.blocks.free.remove(other.blocks.free.peek(1))
    assert digest(state) == before != digest(other)


def test_what_nobody_said_how_to_copy_is_refused():
    state = walk(ONE, []).seat.state
    state.cache = {1, 2}
    with pytest.raises(TypeError, match="holds a set"):
        branched(state)


def test_a_coordinator_with_a_cache_that_branches_do_not_know_is_refused():
    fewer = mock.patch("hisparse.testing.explore.branch._KEPT", {"_computed_seq"})
    with fewer, pytest.raises(TypeError, match="_under_way"):
        Search(ONE)


LONG = World(requests=1, pages=4, blocks=6, host_pages=5, ranks=1, crashes=0, failures=1)


@pytest.mark.parametrize(
    ("fault", "invariant", "world", "moves"),
    [
        (publish_at_enqueue, "complete_before_publish", TWO_RANKS, 20),
        (reuse_an_epoch, "one_content", TWO_RANKS, 12),
        (freed_block_kept_in_no_queue, "conservation", TWO_RANKS, 4),
        (host_page_freed_before_readers_retire, "host_reuse_after_readers", LONG, 12),
    ],
)
def test_a_fault_of_the_production_code_is_found_by_a_short_path(fault, invariant, world, moves):
    with fault():
        result = Search(world, most=12_000).run()
        (found,) = result.violations
        made = walk(world, found.moves)
    assert found.invariant == invariant and len(found.moves) <= moves
    assert made.fault is not None and made.fault.invariant == found.invariant
    assert walk(world, found.moves).fault is None  # it was the fault that broke it


def test_a_request_that_nobody_admits_is_no_progress():
    target = "hisparse.kv.coordinator.HiSparseCoordinator.admit_waiting"
    with mock.patch(target, lambda self: []):
        result = Search(World(requests=1, ranks=1, faults=0)).run()
    assert [found.invariant for found in result.violations] == ["progress"]
