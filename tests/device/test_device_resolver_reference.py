"""The fused resolve against plain Python, after every call that a worker is given: bytes, plans,
order, kept map, hot contents and counters.

A plan is where each selected row is, and which host row is copied to which hot row, wave by wave.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import close_all, plain, value
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    ROW_BYTES,
    SPAN,
    Rig,
    content,
    expect,
    host,
    make_config,
    place_pages,
    resident,
    step_rows,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resolver_reference import ReferenceResolver

from hisparse.device.cuda.kernels import CALLS_MAX


@st.composite
def runs(draw, sizes=None):
    """Of any sizes, or of the given (hot rows, top-k), for which kernels are compiled once."""
    hot_rows = draw(st.sampled_from([2, 3, 4, 6, 10])) if sizes is None else sizes[0]
    top_k = draw(st.integers(1, hot_rows)) if sizes is None else sizes[1]
    on_gpu = [draw(st.lists(st.booleans(), min_size=4, max_size=4)) for _ in range(REQUESTS)]
    steps = []
    reach = draw(
        st.sampled_from([SPAN - 1, hot_rows + 1, hot_rows, 2])
    )  # mostly misses .. mostly hits
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=8))
        width = draw(st.sampled_from([top_k, top_k, 1 + top_k // 2]))
        entry = st.integers(-1, min(reach, SPAN - 1))
        picks = [draw(st.lists(entry, min_size=width, max_size=width)) for _ in rows]
        resets = draw(st.sets(st.integers(0, REQUESTS - 1), max_size=1))
        place = st.tuples(st.integers(0, REQUESTS - 1), st.integers(0, PAGES - 1))
        flips = draw(st.lists(place, max_size=2, unique=True))
        moves = draw(st.lists(place, max_size=1))
        steps.append((rows, width, picks, tuple(resets), flips, moves))
    return hot_rows, top_k, on_gpu, steps


def check_cpu(rig, reference):
    """Hot contents, inverse map, order stamps and counters are the reference's, exactly."""
    for group in rig.config.layout.index_groups:
        resolver = rig.worker.handles[group[0]].runtime.resolver
        for row in range(REQUESTS):
            held, _, inverse = reference.state_of(row)
            slots = reference.slots_of(row)
            stamps = [-1 if s is None else 2 * s["step"] + s["hit"] for s in slots]
            assert resolver.positions[row].tolist() == held
            assert resolver.stamps[row].tolist() == stamps
            kept = resolver.hot_map[row]
            assert {int(p): int(kept[p]) for p in np.flatnonzero(kept >= 0)} == inverse
            for layer in group:
                array = plain(rig.worker.handles[layer].runtime.hot.array)
                for slot, position in enumerate(held):
                    if position >= 0:
                        where = divmod(reference.locate(row, slot), PAGE)
                        assert (array[where] == content(row, layer, position)).all()
        counts = resolver.statistics()
        assert counts == {
            "hits": reference.hits,
            "misses": reference.misses,
            "resident": reference.resident,
        }


def check_cpu_plan(group, reference, rows, answers):
    """Places, and the copies of each wave that has any."""
    plan = group.calls[0].plan
    for i, line in enumerate(answers):
        for j, physical in enumerate(line):
            assert physical is None or plan.physical[i, j] == physical
    made = [list(zip(w.sources.tolist(), w.destinations.tolist(), strict=True)) for w in plan.waves]
    wanted = [copies for copies in waves_of(reference, rows) if copies]
    assert [sorted(copies) for copies in made if copies] == wanted


def waves_of(reference, rows):
    """(host row, hot row) of all misses of each wave of the last call, sorted."""
    waves, seen = {}, dict.fromkeys(rows, 0)
    for row, copies in zip(rows, reference.plan, strict=True):
        waves.setdefault(seen[row] // reference.wave_rows, []).extend(copies)
        seen[row] += 1
    return [sorted(waves[wave]) for wave in sorted(waves)]


def check_gpu(rig, reference):
    """The same of a GPU, where the order is a list and hits are counted by entry."""
    for group in rig.config.layout.index_groups:
        resolver = rig.worker.handles[group[0]].runtime.resolver
        kept, positions, order, _ = map(plain, resolver.state)
        for row in range(REQUESTS):
            held, ranked, inverse = reference.state_of(row)
            assert positions[row, : len(held)].tolist() == held
            assert order[row, : len(held)].tolist() == ranked
            assert {int(p): int(kept[row, p]) for p in np.flatnonzero(kept[row] >= 0)} == inverse
        assert resolver.statistics()["misses"] == reference.misses


def keep_plans(rig):
    """By group, what the device has of each plan when it is given back: (token of each line, misses
    of each line, all that is listed). Without a plan that needs no resolve."""
    kept = {group.group: [] for group in rig.worker.groups}

    def watch(group):
        close = group.leader._close

        def copy_first(plan):
            if plan.left == 1:  # of the last layer: the memory of its calls is another's then
                with rig.device.on_compute():
                    for part in plan.parts:
                        arrays = part.tokens, part.call.count, part.call.misses
                        kept[group.group].append((part.call.ordinal, *(x.copy() for x in arrays)))
            close(plan)

        group.leader._close = copy_first

    for group in rig.worker.groups:
        watch(group)
    return kept


def check_gpu_plan(rig, parts, reference):
    """Each token's misses: how many, from which host row to which row of the packed pool."""
    apart = rig.worker.geometry.block_bytes // ROW_BYTES - PAGE
    found = [[] for _ in reference.plan]
    for ordinal, tokens, count, misses in parts:
        epoch = rig.step * CALLS_MAX + ordinal
        for token, many, listed in zip(*map(plain, (tokens, count, misses)), strict=True):
            assert many >> 32 == epoch
            many = int(many) & 0xFFFFFFFF
            assert (listed[:many] >> 32 == epoch).all() and not (listed[many:] >> 32 == epoch).any()
            assert token >= 0 or not many
            if token >= 0:
                found[token] = (listed[:many] & 0xFFFFFFFF).astype(np.int64).tolist()
    wanted = [[[a, b + b // PAGE * apart] for a, b in copies] for copies in reference.plan]
    assert [sorted(copies) for copies in found] == [sorted(copies) for copies in wanted]


@settings(max_examples=200, deadline=None)
@given(runs(), st.integers(0, 3))
def test_resolver_is_the_reference(run, seed):
    play(run, seed)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs((6, 3)))
def test_the_worker_on_a_gpu_is_the_reference(run):
    """Tables and what they forget, waves, followers and order, by the worker's own calls."""
    play(run, 0)
    close_all()


def play(run, seed):
    hot_rows, top_k, on_gpu, steps = run
    rig = Rig(make_config(hot_rows, top_k, REQUESTS, PAGES), seed=seed)
    reference = ReferenceResolver(PAGE, hot_rows, top_k)
    kept = keep_plans(rig) if rig.device.name == "cuda" else {}
    tables = ()
    for row in range(REQUESTS):
        tables += place_pages(rig, reference, row, on_gpu[row])
    for rows, width, picks, resets, flips, moves in steps:
        for row in resets:
            reference.reset(row)
            tables += place_pages(rig, reference, row, on_gpu[row])
        for row, page in flips:  # a page leaves the GPU or comes back
            block = 0 if reference.resident_pages[row, page] else 1 + row * PAGES + page
            reference.resident_pages[row, page] = block
            tables += (resident(row, page, block),)
        for row, page in moves:  # the page is in another host page from now on
            to = reference.host_pages[row, page] ^ 32
            rig.put("host", row, page, to)
            reference.host_pages[row, page] = to
            reference.forget_page(row, page)
            tables += (host(row, page, to),)
        rig.begin(resets=resets, tables=tables)
        tables = ()
        top = np.array(picks, dtype=np.int64).reshape(len(rows), width)
        pending = rig.gather(step_rows(rows), top)
        rig.end()
        answers = reference.resolve(rows, picks, rig.step)
        for layer, made in pending.items():
            assert (value(made) == expect(rows, top, layer)).all()
        if rig.device.name == "cuda":
            for parts in kept.values():
                check_gpu_plan(rig, parts, reference)
                parts.clear()
            check_gpu(rig, reference)
            continue
        for group in rig.worker.groups:
            check_cpu_plan(group, reference, rows, answers)
        check_cpu(rig, reference)
    for group, layers in enumerate(rig.config.layout.index_groups):
        counts = rig.worker.group_statistics(group)
        assert counts["host_rows"] == len(reference.host_reads) * len(layers)
        assert counts["host_bytes"] == counts["host_rows"] * ROW_BYTES
