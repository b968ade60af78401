"""E05: row numbers times row bytes, in 32 bits, wrap above row 3,273,604 of 656 bytes: other rows
are read, and nothing says so.

Here every offset in bytes has 64 bits. Numbers of rows have 32: a pool with more of them is refused
when a worker starts on a GPU, before it takes memory, and `hisparse config` tells so beforehand.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain, value

from hisparse.config import (
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.device.cuda.state import check_kernel_sizes
from hisparse.device.rows import StepRows
from hisparse.errors import ConfigError
from hisparse.fsm.wire import (
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferKind,
)

ROW, PAGE = 656, 64


def config(blocks=100, host_gib=1, groups=((0,), (1,)), longest=4 * PAGE):
    return HiSparseConfig(
        layout=ModelLayout(row_bytes=ROW, index_row_bytes=132, index_groups=groups),
        pools=PoolConfig(page_size=PAGE, gpu_blocks=blocks, host_pool_gib=host_gib),
        policy=PolicyConfig(top_k=8, hot_rows=64),
        schedule=ScheduleConfig(max_requests=2, max_model_len=longest),
    )


@pytest.mark.parametrize(
    ("asked", "field", "value", "one_more"),
    [
        ({"blocks": 1 << 24}, "pools.gpu_blocks", (1 << 24) - 1, 1),
        ({"host_gib": 3000}, "pools.host_pool_gib", 2623.999, 0.001),
        ({"longest": (1 << 31) + 5}, "schedule.max_model_len", (1 << 31) - PAGE, 1),
    ],
)
def test_more_rows_than_32_bits_name_are_refused_with_the_most_that_would_do(
    asked, field, value, one_more
):
    wanted = config(**asked)
    section, name = field.split(".")
    given = getattr(getattr(wanted, section), name)
    said = rf"^{field}={given:.15g}: \d+ rows, .* at most {2**31 - 1} .*, use at most {value}$"
    with pytest.raises(ConfigError, match=said) as caught:
        check_kernel_sizes(wanted)
    assert caught.value.fixes == {field: value}
    check_kernel_sizes(changed(wanted, field, value))
    with pytest.raises(ConfigError, match=f"^{field}="):
        check_kernel_sizes(changed(wanted, field, value + one_more))


def changed(config, field, value):
    section, name = field.split(".")
    part = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: part})


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_rows_above_4_gib_are_written_spilled_resolved_and_restored():
    from backends import closes, open_backend

    from hisparse.device.worker import HiSparseWorker

    blocks = (1 << 32) // (2 * PAGE * ROW) + 50
    worker = HiSparseWorker(config(blocks, 4.1), open_backend())
    closes(worker)
    geometry = worker.geometry
    block, hot, back = blocks - 1, blocks - 2, blocks - 3
    page = geometry.host_pages - 1
    assert block * geometry.block_bytes > 1 << 32 and block * 2 * PAGE > 3_728_271
    assert (geometry.host_pages + page) * geometry.page_bytes > 1 << 32
    data = np.random.default_rng(0).integers(0, 256, (2, PAGE, ROW), np.uint8)
    rows = StepRows(np.zeros(PAGE, np.int32), np.arange(PAGE))
    asks = StepRows(np.zeros(1, np.int32), np.array([PAGE]))
    top = np.array([[0, 63, 17, 5, -1, 40, 8, 31]], dtype=np.int32)
    chosen = np.where((top >= 0)[0, :, None], data[:, np.maximum(top[0], 0)], 0)
    step = 0

    def command(**fields):
        nonlocal step
        step += 1
        return SparseKVOffloadCommand(step, 1, step - 1, step, **fields)

    def reads():
        pending = [worker.handles[layer].gather(asks, top) for layer in range(2)]
        worker.end_step(step)
        return all((value(made)[0] == chosen[i]).all() for i, made in enumerate(pending))

    worker.begin_step(command(tables=(TableUpdate(Table.RESIDENT, 0, 0, (block,)),)))
    for layer in range(2):
        worker.handles[layer].write(rows, data[layer])
    assert reads(), "resident"
    copy = SparseKVPageTransfer(1, 1, TransferKind.SPILL, block, 1, page, 1)
    worker.begin_step(command(transfers=(copy,)))
    worker.end_step(step)
    on_host = (
        TableUpdate(Table.RESIDENT, 0, 0, (0,)),
        TableUpdate(Table.HOST, 0, 0, (page,)),
        TableUpdate(Table.HOT, 0, 0, (hot,)),
    )
    worker.begin_step(command(fences=(1,), tables=on_host, poison_blocks=(block,)))
    assert reads(), "from the host, by way of the hot region"
    copy = SparseKVPageTransfer(2, 1, TransferKind.RESTORE, back, 1, page, 1)
    moved = (TableUpdate(Table.RESIDENT, 0, 0, (back,)),)
    worker.begin_step(command(transfers=(copy,), tables=moved))
    assert reads(), "restored"
    assert (plain(worker.handles[1].resident.array[back]) == data[1]).all()
