"""D08: arrays sized for a stage's own layers are indexed by the model's layer numbers; a
follower's leader may be on another stage.

Here attention holds a handle and no number. A rank's layers are 0..n-1, and each is in a group
with its leader: what is not is refused with the configuration.
"""

from __future__ import annotations

import pytest
from device_rig import Rig, make_config
from pydantic import ValidationError

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
