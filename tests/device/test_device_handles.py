"""What handles and runtimes keep of a step: nothing of its requests.

`StepRows` comes with each call, so that one binding serves every batch, and a captured graph too.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from backends import plain, value
from device_rig import (
    PAGES,
    REQUESTS,
    ROW_BYTES,
    SPAN,
    Rig,
    contents,
    make_config,
    place_pages,
    step_rows,
)
from resolver_reference import ReferenceResolver

from hisparse.device.handle import PagedCacheView
from hisparse.errors import UsageError
from hisparse.fsm.wire import Table, TableUpdate

PARTS = {"runtime", "group", "resolver", "_device", "_tables", "_geometry"}  # not their own
COUNTERS = {"_calls", "_host_rows", "_writes", "_reads"}


def kept(value):
    """By value, however deep it lies; what a cache is made of by identity."""
    if value is None or isinstance(value, int | float | str | bytes | np.generic):
        return value
    if isinstance(value, dict):
        return [(kept(key), kept(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [kept(inner) for inner in value]
    if hasattr(value, "dtype"):
        return plain(value).tobytes()
    if isinstance(value, PagedCacheView) or not hasattr(value, "__dict__"):
        return id(value)
    return {
        name: id(inner) if name in PARTS else kept(inner)
        for name, inner in vars(value).items()
        if name not in COUNTERS
    }


@pytest.mark.usefixtures("backend")
def test_the_handle_stores_no_request_mapping():
    rig = Rig(make_config(12, 4, REQUESTS, PAGES + 1))
    reference = ReferenceResolver(4, 12, 4)
    tables = [place_pages(rig, reference, row, [True, False] * 2) for row in range(REQUESTS)]
    own = [TableUpdate(Table.RESIDENT, row, PAGES, (50 + row,)) for row in range(REQUESTS)]
    index = [TableUpdate(Table.INDEX, row, 0, (60 + row,)) for row in range(REQUESTS)]
    rig.run_step(tables=(*sum(tables, ()), *own, *index))
    cache = rig.worker.index
    before = [kept(x) for h in rig.worker.handles for x in (h, h.runtime)] + [kept(cache)]
    for requests, verb in ([0, 1, 2], "gather"), ([2, -1, 0], "gather"), ([1], "resolve"):
        rig.begin()
        rows = step_rows(requests, [SPAN] * len(requests))
        for group, layers in enumerate(rig.config.layout.index_groups):
            cache.write(group, rows, np.full((len(requests), 3), 7, np.uint8))
            cache.keys(group, requests[0], SPAN + 1).result()
            for layer in layers:
                handle = rig.worker.handles[layer]
                data = [contents(max(r, 0), layer, [SPAN])[0] for r in requests]
                handle.write(rows, np.stack(data))
                top = np.arange(4 * len(requests), dtype=np.int32).reshape(-1, 4)
                getattr(handle, verb)(rows, top if layer == layers[0] else None).result()
        rig.end()
        rig.device.synchronize()
        after = [kept(x) for h in rig.worker.handles for x in (h, h.runtime)] + [kept(cache)]
        assert after == before


VERBS = {
    "write": lambda worker, rows: worker.handles[0].write(rows, np.zeros((2, ROW_BYTES), np.uint8)),
    "gather": lambda worker, rows: worker.handles[0].gather(rows, np.zeros((2, 4), np.int32)),
    "resolve": lambda worker, rows: worker.handles[0].resolve(rows, np.zeros((2, 4), np.int32)),
    "write_index": lambda worker, rows: worker.index.write(0, rows, np.zeros((2, 3), np.uint8)),
    "prefixes": lambda worker, rows: worker.index.prefixes(0, rows, 4),
    "keys": lambda worker, rows: worker.index.keys(0, int(rows.rows[1]), 4),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("beyond", [REQUESTS, REQUESTS + 1, 2**31 - 1])
def test_a_request_row_that_there_is_none_of_is_refused_by_every_verb(verb, beyond):
    rig = Rig(make_config(12, 4, REQUESTS, PAGES + 1))
    tables = place_pages(rig, ReferenceResolver(4, 12, 4), 0, [True, False] * 2)
    rig.begin(tables=tables)
    with pytest.raises(UsageError, match=rf"row.*={beyond}\b.* 0\.\.{REQUESTS - 1} .*max_requests"):
        VERBS[verb](rig.worker, step_rows([0, beyond]))
    rows, top = step_rows([0]), np.arange(4, dtype=np.int32)[None]
    for layer, handle in enumerate(rig.worker.handles):  # nothing was queued: the step goes on
        leads = handle.runtime.is_leader
        got = plain(handle.gather(rows, top if leads else None).result())
        assert (got[0] == contents(0, layer, range(4))).all()
    rig.end()


@pytest.mark.usefixtures("backend")
def test_arrays_of_a_step_may_be_written_again_for_the_next():
    """By a loop that keeps one `StepRows`: writes and reads are of what the arrays say in each
    step."""
    rig = Rig(make_config(12, 4, REQUESTS, PAGES + 1))
    reference = ReferenceResolver(4, 12, 4)
    tables = [place_pages(rig, reference, row, [True, False] * 2) for row in range(REQUESTS)]
    own = [TableUpdate(Table.RESIDENT, row, PAGES, (50 + row,)) for row in range(REQUESTS)]
    rig.run_step(tables=(*sum(tables, ()), *own))
    rows, handles = step_rows([0], [SPAN]), rig.worker.handles
    for row, position in (0, SPAN), (2, SPAN), (1, SPAN + 1):
        rows.rows[:], rows.positions[:] = row, position
        top = np.array([[0, 5, 10, position]], dtype=np.int32)
        rig.begin()
        for layer, handle in enumerate(handles):
            handle.write(rows, contents(row, layer, [position]))
        for layer, got in rig.gather(rows, top).items():
            assert (value(got)[0] == contents(row, layer, top[0])).all(), (row, layer)
        rig.end()
        rig.device.synchronize()
