"""C10: with a draft head, every group is taken for a draft group and loses its last page: data is
stored and never found.

Here a draft head's group is one index group of the layout like any other: its rows lie in the same
pages, are written with them and found with them, so k pages stored are k pages hit.
"""

from __future__ import annotations

import pytest
from serving_rig import LONGEST, PAGE, events_of, prompt, serve

from hisparse.engine.builtin import DRAFT_LAYER, BuiltinModel
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm import events as ev


@pytest.fixture(scope="module")
def model():
    return BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST + 2, draft=True)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_k_pages_stored_are_k_pages_hit(model, pages):
    assert model.layout.index_groups[-1] == (DRAFT_LAYER,)
    tokens = prompt(pages, pages * PAGE + 1)
    work = [WorkloadRequest(name, at, tokens, 4) for name, at in (("cold", 0.0), ("warm", 1e5))]
    engine, replica = serve(model, work, spec=2)
    hits = [e.hit_tokens for e in events_of(replica, ev.RequestAdmitted)]
    assert hits == [0, pages * PAGE]
    cold, warm = engine.done
    assert cold.generated == warm.generated and engine.acceptance.proposed > 0
