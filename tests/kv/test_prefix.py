"""Prefix identity and sharing: what is found, what it holds, and who leases it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.prefix import PageHasher

STEM = list(range(40))
tokens = st.lists(st.integers(0, 3), max_size=24)


@given(tokens, tokens)
def test_equal_hashes_mean_equal_prefixes(a, b):
    hasher = PageHasher(PAGE)
    for i, (x, y) in enumerate(zip(hasher.extend(b"", a), hasher.extend(b"", b), strict=False)):
        assert (x == y) == (a[: (i + 1) * PAGE] == b[: (i + 1) * PAGE])


@given(tokens, st.integers(0, 6))
def test_a_chain_continues_from_its_parent(a, pages):
    hasher = PageHasher(PAGE)
    whole = hasher.extend(b"", a)
    pages = min(pages, len(whole))
    parent = whole[pages - 1] if pages else b""
    assert whole[pages:] == hasher.extend(parent, a[pages * PAGE :])


def test_the_salt_separates_caches():
    assert PageHasher(PAGE, b"a").extend(b"", STEM) != PageHasher(PAGE, b"b").extend(b"", STEM)


def served(rig, name="first", prompt=STEM):
    """A request served to its end: its pages are published."""
    key = rig.arrive(name, prompt)
    for _ in range(4):
        rig.step()
    rig.finish(key)
    rig.step()
    return key


def test_a_finished_requests_pages_are_found_and_skipped():
    rig = SchedulerRig()
    served(rig)
    key = rig.arrive("again", [*STEM, 7, 8])
    command = rig.step()
    request = rig.state.requests[key]
    assert request.hit_tokens == 40
    assert {t.kind for t in command.transfers} <= {TransferKind.WRITE_BACK}, "all copies lived on"


def test_the_last_prompt_row_is_always_computed():
    rig = SchedulerRig()
    served(rig)
    key = rig.arrive("same", STEM)
    rig.step()
    assert rig.state.requests[key].hit_tokens == 36


def test_only_the_common_prefix_is_shared():
    rig = SchedulerRig()
    served(rig)
    key = rig.arrive("fork", [*STEM[:18], *range(500, 520)])
    rig.step()
    assert rig.state.requests[key].hit_tokens == 16


def test_pages_not_complete_are_not_found():
    rig = SchedulerRig()
    rig.arrive("first", STEM, new=20)
    rig.step(ack=False)
    key = rig.arrive("again", [*STEM, 7])
    rig.step(ack=False)
    assert rig.state.requests[key].hit_tokens == 0


def test_a_live_requests_pages_are_found_while_it_prefills():
    rig = SchedulerRig()
    first = rig.arrive("first", STEM, new=20)
    rig.step(rows=16)
    rig.step(rows=16)
    key = rig.arrive("again", [*STEM, 7])
    rig.step(rows=16)
    assert rig.state.requests[first].live
    assert 0 < rig.state.requests[key].hit_tokens < 40


def test_a_host_only_hit_is_restored_while_there_is_room():
    rig = SchedulerRig(make_config(blocks=64, host_pages=100))
    served(rig)
    for i in range(4):  # others take the cached blocks
        served(rig, f"other{i}", [5000 + 100 * i + t for t in range(60)])
    assert not (rig.state.blocks.role[rig.state.blocks.state == BlockState.CACHED] == 0).all()
    key = rig.arrive("again", [*STEM, 7])
    command = rig.step()
    hit = rig.state.requests[key].hit_tokens // PAGE
    kinds = [t.kind for t in command.transfers]
    adopted = sum(len(e.blocks) for e in rig.events(ev.BlocksAdopted) if e.role == 0)
    assert kinds.count(TransferKind.RESTORE) + adopted >= hit
    assert 0 not in rig.blocks(key)


def test_without_room_a_hit_is_read_from_the_host_through_a_hot_region():
    rig = SchedulerRig(make_config(blocks=26, host_pages=100))
    served(rig)
    for i in range(3):
        served(rig, f"other{i}", [5000 + 100 * i + t for t in range(60)])
    rig.arrive("big", [9000 + t for t in range(60)])
    rig.step()
    key = rig.arrive("again", [*STEM, 7])
    rig.step()
    request = rig.state.requests.get(key)
    if request is not None and request.hit_tokens:
        holes = [e for e, b in enumerate(rig.blocks(key)[: request.hit_tokens // PAGE]) if not b]
        assert not holes or request.hot.name == "LEASED"


def test_indexer_blocks_are_shared_whole_and_copied_in_part():
    rig = SchedulerRig()
    per_block = rig.config.index_pages_per_block
    prompt = list(range(PAGE * (per_block + 2) + 1))
    served(rig, prompt=prompt)
    key = rig.arrive("again", [*prompt, 7])
    command = rig.step()
    adopted = [e for e in rig.events(ev.BlocksAdopted) if e.role == 2]
    assert [len(e.blocks) for e in adopted] == [1]
    (copy,) = command.index_copies
    assert (copy.source_slot, copy.slot, copy.pages) == (0, 0, 2)
    own = rig.state.table(Table.INDEX)[rig.row(key)][:2].tolist()
    assert own == [adopted[0].blocks[0], copy.block] and copy.source != copy.block


def test_equal_pages_computed_twice_are_published_once():
    rig = SchedulerRig(make_config(blocks=64, host_pages=100))
    one, two = rig.arrive("one", STEM), rig.arrive("two", STEM)
    for _ in range(4):
        rig.step()
    assert len(rig.state.prefix) == 10
    for row in (rig.row(one), rig.row(two)):
        assert rig.state.rows.published[row] == 10
    rig.finish(one)
    rig.finish(two)
    rig.step()
    assert rig.drained()


def test_leased_pages_are_not_evicted_and_idle_ones_are_lru_tail_first():
    rig = SchedulerRig(make_config(blocks=64, host_pages=25))
    served(rig)
    keeper = rig.arrive("keeper", [*STEM[:20], 7], new=40)
    rig.step()
    kept = [p for p in rig.host(keeper) if p][:5]
    served(rig, "other", [7000 + t for t in range(20)])
    evicted = [p for e in rig.events(ev.HostPagesEvicted) for p in e.pages]
    assert evicted and not set(evicted) & set(kept)
    hashes = rig.hasher.extend(b"", STEM)
    found = [h in rig.state.prefix for h in hashes]
    assert found == sorted(found, reverse=True) and 5 <= sum(found) < 10, "the tail went first"
