"""Publication: a page becomes findable by prefix when everything before it is, and not before.

A page is published when its copy has completed on every writing rank, all its rows are computed,
accepted and confirmed (no step that computed them could read a page whose copy may still fail), and
every earlier page of the request is findable. A page whose content is already
findable under another host page is passed over: one published page a prefix.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm.events import PagesPublished
from hisparse.fsm.machines import PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table
from hisparse.kv.decision import Decision, ints
from hisparse.kv.host_pool import page_epochs


def publish(state: State, row: int, cause: int) -> Decision[None]:
    """Extend the published prefix of `row` as far as its durable, accepted pages reach."""
    request = state.request_of(row)
    first = int(state.rows.published[row])
    accepted = int(state.rows.confirmed[row]) // state.page_size
    host = state.table(Table.HOST)[row]
    pages: list[int] = []
    for page in range(first, min(accepted, len(request.hashes))):
        if state.pages.state[host[page]] != PageState.COMPLETED:
            break
        known = request.hashes[page] in state.prefix
        pages.append(0 if known else int(host[page]))
    if pages:
        at = np.array(pages, dtype=np.int64)
        hashes = tuple(request.hashes[first : first + len(pages)])
        yield PagesPublished(cause, row, first, ints(at), page_epochs(state, at), hashes)
