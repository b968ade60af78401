"""What an engineer reads when a rule is broken: who, in which state, and how it came to that."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.errors import IllegalTransition, UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, BlockTrigger
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.groups import INDEX_GROUP, RESIDENT_GROUP, SOURCE_GROUP, device_pool


def test_a_log_that_holds_events_is_gone_on_with_as_the_error_says():
    rig = SchedulerRig()
    rig.arrive("q", list(range(10)))
    with pytest.raises(
        UsageError, match=r"go on with it by HiSparseCoordinator\.recover\(config, log"
    ):
        HiSparseCoordinator(rig.config, rig.log)
    assert HiSparseCoordinator.recover(rig.config, rig.log).recovered_seq == 1


def test_an_illegal_transition_tells_the_last_events_of_the_id():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", list(range(40)))
    rig.step(ack=False)  # written back: the first block is PINNED
    block = rig.blocks(key)[0]
    event = ev.BlocksReleased(
        0, BlockRole.RESIDENT, rig.row(key), BlockTrigger.retired, (0,), (block,), (1,)
    )
    with pytest.raises(IllegalTransition) as caught:
        rig.coordinator._record(event)
    error = caught.value
    assert (error.machine, error.ident, error.state) == ("BlockLease", block, "PINNED")
    assert [line.split()[1] for line in error.history] == [
        "BlocksReserved",
        "TransferPinned",
        "BlocksReleased",
    ]
    assert "last events of it: " in str(error)


def test_the_source_group_has_no_device_pool():
    rig = SchedulerRig()
    assert device_pool(rig.state, RESIDENT_GROUP) is device_pool(rig.state, INDEX_GROUP)
    with pytest.raises(UsageError, match="'source' lives in the host pool"):
        device_pool(rig.state, SOURCE_GROUP)
