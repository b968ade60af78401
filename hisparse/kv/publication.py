"""Publication: a page becomes findable by prefix when everything before it is, and not before.

A page is published when its copy has completed on every writing rank, all its rows are computed,
accepted and confirmed (no step that computed them could read a page whose copy may still fail), and
every earlier page of the request is findable. A page whose content is already
findable under another host page is passed over: one published page a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse.fsm.events import PagesPublished
from hisparse.fsm.machines import PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table
from hisparse.kv.decision import Decision
from hisparse.kv.host_pool import page_epochs


def publish(state: State, rows: Iterable[int], cause: int) -> Decision[None]:
    """Extend the published prefix of each of `rows` as far as its durable, accepted pages reach."""
    host, states, prefix = state.table(Table.HOST), state.pages.state, state.prefix
    completed = int(PageState.COMPLETED)
    places: list[tuple[int, int]] = []
    pages: list[int] = []
    names: list[bytes] = []
    fresh: set[bytes] = set()  # two rows may hold equal content
    for row in rows:
        request = state.request_of(row)
        accepted = int(state.rows.confirmed[row]) // state.page_size
        for entry in range(int(state.rows.published[row]), min(accepted, len(request.hashes))):
            page, name = int(host[row, entry]), request.hashes[entry]
            if states[page] != completed:
                break
            places.append((row, entry))
            names.append(name)
            pages.append(0 if name in prefix or name in fresh else page)
            fresh.add(name)
    if not places:
        return
    epochs = page_epochs(state, np.array(pages, dtype=np.int64))
    found_rows, entries = zip(*places, strict=True)
    if found_rows[0] == found_rows[-1]:  # a row's pages stand together
        yield PagesPublished(cause, *places[0], tuple(pages), epochs, tuple(names))
        return
    yield PagesPublished(cause, -1, -1, tuple(pages), epochs, tuple(names), found_rows, entries)
