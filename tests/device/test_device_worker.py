"""The worker: its cursor, poison, faults, index copies, the waits that it logs, its end."""

from __future__ import annotations

import numpy as np
import pytest
from backends import closes, plain, value
from device_rig import (
    PAGE,
    ROW_BYTES,
    Rig,
    contents,
    expect,
    host,
    make_config,
    page_rows,
    resident,
    restore,
    spill,
    step_rows,
)

from hisparse.device import open_device
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import (
    ConfigError,
    DeviceError,
    InvariantViolation,
    ProtocolError,
    UsageError,
)
from hisparse.fsm import events
from hisparse.fsm.wire import (
    AckKind,
    IndexCopy,
    SparseKVOffloadCommand,
    Table,
    TableUpdate,
)

on_both = pytest.mark.usefixtures("backend")


@on_both
def test_a_gap_in_the_log_is_reported_and_nothing_applied():
    rig = Rig()
    rig.run_step(tables=(resident(0, 0, 1),))
    command = SparseKVOffloadCommand(2, 1, 2, 3, tables=(resident(0, 0, 2),))
    with pytest.raises(ProtocolError, match=r"\(2, 3\].*cursor at to_seq 1"):
        rig.worker.begin_step(command)
    rig.device.synchronize()
    assert rig.worker.to_seq == 1
    assert plain(rig.worker.tables[Table.RESIDENT])[0, 0] == 1


@on_both
def test_a_command_applied_twice_is_refused():
    rig = Rig()
    command = rig.command()
    rig.begin()
    rig.end()
    with pytest.raises(ProtocolError, match="does not continue"):
        rig.worker.begin_step(command)


@on_both
def test_a_command_of_another_worker_epoch_is_refused():
    with pytest.raises(ProtocolError, match="worker epoch 7, this is epoch 1"):
        Rig().worker.begin_step(SparseKVOffloadCommand(1, 7, 0, 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"tables": (resident(0, 0, 64),)},
        {"tables": (resident(9, 0, 1),)},
        {"tables": (resident(0, 6, 1),)},
        {"resets": (3,)},
        {"poison_blocks": (0,)},
        {"poison_hosts": (0,)},
        {"transfers": (spill(1, 0, 1),)},
        {"transfers": (spill(1, 1, 64),)},
        {"index_copies": (IndexCopy(1, 0, 2, 0, 99),)},
        {"fences": (1,)},
        {"transfers": (spill(1, 5, 6), restore(2, 7, 5))},
        {"transfers": (spill(1, 5, 6), restore(2, 6, 7))},
        {"transfers": (spill(1, 5, 6), spill(2, 4, 6))},
        {"transfers": (spill(1, 5, 6),), "poison_blocks": (5,)},
        {"transfers": (restore(1, 6, 5),), "poison_hosts": (6,)},
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_queued(fields):
    rig = Rig()
    with pytest.raises(ProtocolError):
        rig.worker.begin_step(rig.command(**fields))
    assert rig.worker.to_seq == 0 and rig.device.compute.idle


@on_both
def test_steps_must_pair():
    rig = Rig()
    rig.begin()
    with pytest.raises(UsageError, match=r"begin_step\(2\) before end_step\(1\)"):
        rig.worker.begin_step(rig.command())
    with pytest.raises(UsageError, match=r"end_step\(5\) inside step 1"):
        rig.worker.end_step(5)


@on_both
def test_poison_fills_the_block_and_the_page_and_nothing_else():
    rig = Rig()
    rig.run_step(poison_blocks=(3, 5), poison_hosts=(2,))
    rig.device.synchronize()
    size = rig.config.block_bytes
    blocks = plain(rig.worker.gpu_pool).reshape(-1, size)
    assert set(np.flatnonzero((blocks == 0xDB).all(axis=1))) == {3, 5}
    assert (blocks == 0xDB).sum() == 2 * size
    pages = rig.worker.host_pool.reshape(rig.config.layout.layers, -1, PAGE * ROW_BYTES)
    assert (pages[:, 2] == 0xDB).all() and (pages == 0xDB).sum() == pages[:, 2].size


@on_both
def test_a_write_without_a_block_raises_in_stream_order():
    rig = Rig()
    rig.begin(tables=(resident(0, 0, 1),))
    rig.worker.handles[1].write(page_rows(0, 0), contents(0, 1, range(PAGE)))
    rig.worker.handles[1].write(page_rows(0, 1), contents(0, 1, range(PAGE)))
    with pytest.raises(InvariantViolation, match=r"table_truth: row 0, position [4-7], layer 1"):
        rig.device.synchronize()
    assert (plain(rig.worker.handles[1].resident.array)[0] == 0).all()


@on_both
def test_every_worker_of_a_device_is_told_of_each_of_its_faults():
    rig = Rig()
    again = HiSparseWorker(rig.config, rig.device)
    closes(again)
    again.begin_step(SparseKVOffloadCommand(1, 1, 0, 1))
    rig.begin(tables=(resident(0, 0, 1),))
    for worker, position in ((rig.worker, 4), (rig.worker, 6), (again, 1), (rig.worker, 9)):
        rows = step_rows([0], [position])
        worker.handles[1].write(rows, contents(0, 1, [position]))
        with pytest.raises(InvariantViolation, match=f"row 0, position {position}, layer 1"):
            rig.device.synchronize()
        rig.device.synchronize()  # once


@on_both
@pytest.mark.parametrize("faults", [1, 2])
def test_a_fault_that_is_told_as_a_warm_up_ends_leaves_no_trace_of_it(faults):
    rig = Rig(lag=1.0)
    rig.begin()
    for position in range(faults):
        row = step_rows([0], [position])
        rig.worker.handles[1].write(row, contents(0, 1, [position]))
    rig.end()
    before = counted(rig.worker)
    nowhere = "table_truth: row 0, position 0, layer 1"
    with pytest.raises(InvariantViolation, match=nowhere), rig.worker.warm_up(2) as rows:
        rig.worker.index.write(0, rows, np.zeros((2, 3), np.uint8))
        rig.gather(rows, np.full((2, 4), -1, np.int32))
    assert counted(rig.worker) == before
    rig.device.synchronize()
    assert counted(rig.worker) == before, "nothing of it is queued any more"


def counted(worker):
    groups = [(group.step, len(group.calls), dict(group.replayed)) for group in worker.groups]
    return groups, [each.counted() for each in [*worker._runtimes, worker.index]]


@on_both
def test_a_write_goes_where_the_table_points_when_it_runs():
    rig = Rig(lag=1.0)
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.begin(tables=(resident(0, 0, 2),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize()
    array = plain(rig.worker.handles[2].resident.array)
    assert (array[1] == array[2]).all() and (array[1] == contents(0, 2, range(PAGE))).all()


@on_both
def test_index_rows_are_read_back_over_block_edges_and_copied_by_page():
    rig = Rig(make_config(pages=24))
    span = rig.worker.geometry.index_pages * PAGE
    length = span + 3
    rows = step_rows([1] * length, range(length))
    rig.begin(tables=(TableUpdate(Table.INDEX, 1, 0, (4, 5)),))
    data = {g: np.random.default_rng(g).integers(0, 256, (length, 3), np.uint8) for g in (0, 1)}
    for group, values in data.items():
        rig.worker.index.write(group, rows, values)
    for group, values in data.items():
        assert (value(rig.worker.index.keys(group, 1, length)) == values).all()
    rig.end()
    copy = IndexCopy(4, 1, 6, 0, 2)
    rig.begin(tables=(TableUpdate(Table.INDEX, 2, 0, (6,)),), index_copies=(copy,))
    for group, values in data.items():
        copied = value(rig.worker.index.keys(group, 2, 2 * PAGE))
        assert (copied == values[PAGE : 3 * PAGE]).all()
    with pytest.raises(InvariantViolation, match="always_readable: row 0"):
        rig.worker.index.keys(0, 0, 1).result()
        rig.device.synchronize()


@on_both
def test_the_event_stream_shows_each_wait_before_the_access_it_guards():
    seen = []
    rig = Rig(sink=seen.append)
    rig.run_step(transfers=(spill(1, 1, 1), restore(2, 2, 3)), poison_blocks=(9,))
    rig.run_step(fences=(1,), tables=(host(0, 0, 1),))
    names = [type(e).__name__ for e in seen]
    assert names[0] == "WorkerOpened" and names.count("CommandApplied") == 2
    whys = [e.why for e in seen if isinstance(e, events.StreamWaited)]
    assert whys == [
        "d2h_after_compute",
        "h2d_after_compute",
        "compute_after_restore",
        "compute_after_spill",
    ]
    accesses = [e for e in seen if isinstance(e, events.MemoryAccessed)]
    assert [(a.stream, a.pool, a.write, a.ids, a.transfer) for a in accesses] == [
        ("compute", "gpu", True, (9,), 0),
        ("d2h", "gpu", False, (1,), 1),
        ("d2h", "host", True, (1,), 1),
        ("h2d", "gpu", True, (3,), 2),
        ("h2d", "host", False, (2,), 2),
    ]
    for access in accesses[1:]:
        waits = [
            e for e in seen if isinstance(e, events.StreamWaited) and e.stream == access.stream
        ]
        assert seen.index(waits[0]) < seen.index(access)
    acks = [e for e in seen if isinstance(e, events.AckSent)]
    assert [a.ack_seq for a in acks] == list(range(1, len(acks) + 1))
    assert acks[0].kind == AckKind.ENQUEUED and acks[0].cause == 1


@on_both
def test_with_checks_on_a_pool_starts_as_poison():
    rig = Rig(make_config(checks="on"))
    assert (plain(rig.worker.gpu_pool) == 0xDB).all() and (rig.worker.host_pool == 0xDB).all()


@on_both
def test_shutdown_is_idempotent_and_final():
    rig = Rig()
    rig.worker.shutdown()
    rig.worker.shutdown()
    assert rig.worker.gpu_pool is None and rig.worker.host_pool is None
    with pytest.raises(UsageError, match="shut down"):
        rig.worker.begin_step(rig.command())


@on_both
def test_the_worker_registers_the_very_handles_that_were_bound():
    rig = Rig()
    handles = rig.worker.handles
    rig.worker.bind(handles)
    assert all(a is b for a, b in zip(rig.worker.handles, handles, strict=True))
    with pytest.raises(UsageError, match="one handle for each layer"):
        rig.worker.bind(handles[:1])
    with pytest.raises(UsageError, match="another allocation"):
        rig.worker.bind(Rig().worker.handles)


@on_both
def test_without_offload_there_is_no_host_pool_and_no_hot_state():
    config = make_config()
    policy = config.policy.model_copy(update={"name": "resident"})
    rig = Rig(config.model_copy(update={"policy": policy}))
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    top = np.array([[0, 3, -1]])
    for layer, pending in rig.gather(step_rows([0]), top).items():
        assert (value(pending) == expect([0], top, layer)).all()
    assert rig.worker.statistics()["state_bytes"] == 0


def test_backends_are_named():
    assert open_device("cpu", seed=3).name == "cpu"
    with pytest.raises(DeviceError, match="ROCm is refused"):
        open_device("rocm")
    with pytest.raises(ConfigError, match="use one of cpu, cuda"):
        open_device("tpu")
