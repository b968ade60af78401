"""H05: a host block holds four pages, three are spilled, four names are advertised as stored, and a
look-up of a prefix of two pages finds nothing; or the request is gone when the store completes.

Here a page is what is copied, published, found and evicted: one name, one host page, one event of
each kind. Names are the request's from when its rows were computed, and are told at completion,
whoever is still there.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.kv.prefix import find_prefix
from hisparse.testing.calm import CalmSimulation

PROMPT = list(range(16))  # four pages; an index block holds six


def stored(pages, end="finish", when="after"):
    """A rig in which the first `pages` of four pages completed their copies."""
    rig = SchedulerRig(make_config())
    key = rig.arrive("q", PROMPT, new=4)
    rig.step(ack=False)
    transfers = [t.transfer for t in rig.step(ack=False).transfers]
    if when == "before":
        getattr(rig.coordinator, end)(*key)
    rig.complete(*transfers[:pages])
    rig.fail(*transfers[pages:])
    rig.retire()
    if when == "after":
        getattr(rig.coordinator, end)(*key)
    rig.send()
    rig.fail(*rig.state.transfers)
    rig.retire()
    return rig


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("end", ["finish", "abort", "preempt"])
@pytest.mark.parametrize("pages", range(5))
def test_as_many_pages_as_were_told_are_found_and_no_more(pages, end, when):
    rig = stored(pages, end, when)
    names = rig.hasher.extend(b"", PROMPT)
    told = [name for e in rig.events(ev.PagesPublished) for name in e.page_hashes]
    assert told == names[:pages], "told by the names of the rows, though the request is gone"
    for length in range(1, 5):
        key = rig.arrive(f"prefix of {length}", [*PROMPT[: 4 * length], 99], new=1)
        rig.coordinator.admit_waiting()
        assert rig.state.requests[key].hit_tokens == 4 * min(length, pages)
        rig.coordinator.abort(*key)  # before it computes, and stores, what was not found


def advertised(events):
    """Names that the log says are stored, after each event: one more, or one less, never twice."""
    names, page_of = {}, {}
    for _, e in events:
        if isinstance(e, ev.PagesPublished):
            for page, epoch, name in zip(e.pages, e.epochs, e.page_hashes, strict=True):
                if page:
                    assert name not in names, "stored twice"
                    names[name] = page_of[page, epoch] = name
        elif isinstance(e, ev.HostPagesEvicted):
            for page, epoch in zip(e.pages, e.epochs, strict=True):
                del names[page_of.pop((page, epoch))]  # KeyError: removed what was never stored
    return names


@pytest.mark.parametrize("seed", range(6))
def test_stored_and_removed_are_symmetric_and_add_up_to_what_is_findable(seed):
    world = CalmSimulation(seed, requests=8)
    assert world.run().violation is None
    assert advertised(world.log.read(1)).keys() == world.coordinator.state.prefix.keys()


@settings(max_examples=4)
@given(st.lists(st.integers(1, 5), min_size=4, max_size=8), st.integers(20, 30))
def test_evicted_names_are_told_and_the_others_are_found(sizes, hosts):
    rig = SchedulerRig(make_config(host_pages=hosts))
    prompts = [[1000 * i + t for t in range(4 * n)] for i, n in enumerate(sizes)]
    for i, prompt in enumerate(prompts):
        key = rig.arrive(f"q{i}", prompt, new=4)
        rig.step()
        rig.step()
        rig.finish(key)
        rig.step()
    names = advertised(rig.log.read(1))
    for prompt in prompts:
        chain = rig.hasher.extend(b"", prompt)
        held = 0
        while held < len(chain) and chain[held] in names:
            held += 1
        on_gpu = all(name in rig.state.index_prefix for name in chain[:held])
        assert not on_gpu or find_prefix(rig.state, chain, len(chain)) == held
