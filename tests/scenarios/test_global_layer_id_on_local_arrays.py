"""D08: arrays sized for a stage's own layers are indexed by the model's layer numbers; a
follower's leader may be on another stage.

Here attention holds a handle and no number. A rank's layers are 0..n-1, and each is in a group
with its leader: what is not is refused with the configuration.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import value
from device_rig import PAGES, Rig, expect, make_config, place_pages, step_rows
from pydantic import ValidationError
from resolver_reference import ReferenceResolver

from hisparse.config import ModelLayout
from hisparse.errors import UsageError


def layout(*groups):
    return ModelLayout(row_bytes=16, index_row_bytes=4, index_groups=groups)


@pytest.mark.parametrize(
    "groups",
    [
        [(30, 31, 32), (33, 34)],  # the model's numbers on the second of two stages
        [(0, 1), (3,)],
        [(0, 1), (1, 2)],
        [(0, 1), ()],
    ],
)
def test_layers_that_are_not_this_ranks_own_are_refused(groups):
    with pytest.raises(ValidationError, match=r"must hold every layer 0\.\.n-1 exactly once"):
        layout(*groups)


@pytest.mark.usefixtures("backend")
def test_a_handle_knows_its_layer_and_its_leader_is_on_its_rank():
    rig = Rig(make_config(groups=((1, 0), (2, 3))))
    assert [handle.layer for handle in rig.worker.handles] == [0, 1, 2, 3]
    leaders = {handle.runtime.group.layers[0] for handle in rig.worker.handles}
    assert leaders == {1, 2} and all(rig.worker.handles[i].runtime.is_leader for i in leaders)
    with pytest.raises(UsageError, match=r"one handle for each layer 0\.\.3"):
        rig.worker.bind(rig.worker.handles[2:])


@pytest.mark.usefixtures("backend")
def test_each_layer_of_a_stage_of_thirty_reads_its_own_rows_from_the_host():
    """Layers 30..59 of a model: a rank knows them as 0..29, leaders and followers alike."""
    rig = Rig(make_config(groups=tuple((i, i + 1, i + 2) for i in range(0, 30, 3))))
    reference = ReferenceResolver(4, rig.config.policy.hot_rows, rig.config.policy.top_k)
    rig.begin(tables=place_pages(rig, reference, 0, [False] * PAGES))
    top = np.array([[0, 5, 14, -1]])
    pending = rig.gather(step_rows([0]), top)
    rig.end()
    assert len(pending) == 30
    for layer, made in pending.items():
        assert (value(made) == expect([0], top, layer)).all()
