"""A04: the finishing token fills a page, its copy is planned a step later and sent a step after
that; in between the block is free, and another request takes it.

Here the lease is taken in the decision in which the copy becomes intended: the one that accepts the
rows (eager) or that ends the request (on pressure). Between "the page is whole" and "its block is
leased to a copy" there is no state.
"""

from __future__ import annotations

import pytest
from byte_rig import ByteRig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_rig import PAGE, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState

OTHER = [700 + t for t in range(40)]


def finish_at(rows, write_back, *, lag=1.0, seed=0):
    """(rig, request, block of its last whole page): ended by the step that computed row `rows`."""
    rig = ByteRig(make_config(blocks=26, host_pages=60, write_back=write_back), lag=lag, seed=seed)
    q = rig.arrive("q", list(range(rows - 1)), new=4)
    rig.step()
    rig.settle()
    rig.step(only=[q])  # the row of the last token but one; the last is EOS
    last = rig.blocks(q)[rows // PAGE - 1]
    rig.finish(q)
    return rig, q, last


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_the_page_that_the_last_token_fills_is_leased_before_anybody_else_is_served(write_back):
    rig, q, last = finish_at(8, write_back)
    assert rig.state.blocks.state[last] == BlockState.PINNED
    z = rig.arrive("z", OTHER)
    rig.step()
    assert rig.state.requests[z].live and last not in rig.blocks(z)
    rig.settle()
    assert rig.assert_findable_pages_hold_what_they_are_named() >= 2
    assert all(name in rig.state.prefix for name in rig.hasher.extend(b"", rig.tokens[q][:8]))


@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_the_copy_is_planned_in_the_very_decision_that_makes_it_intended(write_back):
    rig, _q, last = finish_at(8, write_back)
    events = [e for _, e in rig.log.read(1)]
    inputs = [i for i, e in enumerate(events) if e.is_input]
    planned = next(
        i for i, e in enumerate(events) if isinstance(e, ev.TransferPinned) and last in e.blocks
    )
    cause = max(i for i in inputs if i < planned)
    wanted = ev.RowsComputed if write_back == "eager" else ev.RequestFinished
    assert isinstance(events[cause], wanted)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(min_value=2, max_value=21),
    st.sampled_from(["eager", "on_pressure"]),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.integers(min_value=0, max_value=3),
)
@pytest.mark.usefixtures("backend")
def test_wherever_it_ends_exactly_its_whole_computed_pages_are_published(rows, policy, lag, seed):
    rig, q, _ = finish_at(rows, policy, lag=lag, seed=seed)
    rig.arrive("z", OTHER)
    rig.step()
    rig.settle()
    rig.assert_findable_pages_hold_what_they_are_named()
    chain = rig.hasher.extend(b"", rig.tokens[q])
    assert [name in rig.state.prefix for name in chain] == [
        (page + 1) * PAGE <= rows for page in range(len(chain))
    ]
