"""The host-write event: it protects a CPU reader from writes that are queued and have not happened.

The stream that writes the host stands still: held on a GPU, by `lag` where it is simulated.
"""

from __future__ import annotations

import pytest
from backends import hold
from device_rig import GIB, PAGE, Rig, contents, make_config, resident, spill
from test_device_suffix import TIER, copy, index, rows_of, write_pages

from hisparse.device.layout import POISON
from hisparse.errors import UsageError
from hisparse.fsm.wire import TransferKind

OLD, NEW = contents(2, 0, range(PAGE)), contents(0, 0, range(PAGE))  # of layer 0
WRITES = {
    "spill": ({"transfers": (spill(1, 1, 1),)}, OLD, NEW),
    "write-back": ({"transfers": (spill(1, 1, 1, TransferKind.WRITE_BACK),)}, OLD, NEW),
    "poison": ({"poison_hosts": (1,)}, OLD, POISON),
    "poison, then spill": ({"poison_hosts": (1,), "transfers": (spill(1, 1, 1),)}, OLD, NEW),
    "indexer page": ({"index_transfers": (copy(1, 2, 0, 3, False),)}, 0, rows_of(0, 0)),
    "poison of one": ({"poison_suffixes": (3,)}, 0, POISON),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("command", "old", "new"), WRITES.values(), ids=WRITES)
def test_a_reader_that_waits_sees_what_was_queued_and_one_that_does_not_what_was_there(
    command, old, new
):
    suffix = {"name": "cpu", "gib": TIER * 2 * PAGE * 3 / GIB}
    rig = Rig(make_config(suffix=suffix), lag=1.0)
    rig.put("host", 2, 0, 1)
    rig.begin(tables=(resident(0, 0, 1), index(0, 2)))
    rig.write_page(0, 0)
    write_pages(rig, 0, [0])
    rig.end()
    on_suffix = "index_transfers" in command or "poison_suffixes" in command
    pages = rig.worker.suffix[0] if on_suffix else rig.worker.handles[0].runtime.host
    page = pages.array[3 if on_suffix else 1]
    if on_suffix:
        page[:] = 0
    rig.run_step(poison_hosts=(9,), poison_suffixes=(7,))  # loads the kernel
    hold(rig.device, "d2h")()
    rig.device.synchronize()
    let_go = hold(rig.device, "d2h")
    rig.run_step(**command)
    event = rig.worker.host_writes()
    assert not rig.device.query(event) and (page == old).all()
    let_go()
    rig.device.synchronize(event)
    assert rig.device.query(event) and (page == new).all()


@pytest.mark.usefixtures("backend")
def test_where_no_write_is_queued_there_is_nothing_to_wait_for_but_the_event():
    rig = Rig()
    rig.run_step()
    rig.device.synchronize()
    event = rig.worker.host_writes()
    rig.device.synchronize(event)
    assert rig.device.query(event)


def test_a_worker_without_pools_has_no_host_writes():
    rig = Rig()
    rig.worker.shutdown()
    with pytest.raises(UsageError, match=r"host_writes\(\) .* closed"):
        rig.worker.host_writes()
