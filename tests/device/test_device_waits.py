"""Each wait between streams is needed: without it, real bytes go wrong for some seed; with it, for
none. The scenarios queue ahead of the device (nobody synchronises before the end)."""

from __future__ import annotations

import numpy as np
import pytest
from backends import value
from device_rig import (
    PAGE,
    Rig,
    contents,
    expect,
    host,
    hot,
    page_rows,
    resident,
    restore,
    spill,
    step_rows,
)

from hisparse.fsm.wire import TransferKind

SEEDS = range(100)
ALL = np.arange(PAGE)[None]


def right_bytes(pending, row=0):
    """Whether every layer gathered page 0 of `row`."""
    return all(
        bool((value(made) == expect([row], ALL, layer)).all()) for layer, made in pending.items()
    )


def read_from_host(rig, transfer):
    """Page 0 of row 0 is host page 1 now, behind its copy; its block 1 is poisoned and reused."""
    rig.begin(
        fences=(transfer,),
        tables=(
            resident(0, 0, 0),
            host(0, 0, 1),
            hot(0, 20, 21),
            resident(1, 0, 1),
        ),
        poison_blocks=(1,),
    )
    rig.write_page(1, 0)
    pending = rig.gather(step_rows([0]), ALL)
    rig.end()
    return pending


def spilled_page_survives_reuse(rig):
    """compute_after_spill: the block is rewritten, and the host page read, behind the copy."""
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize(rig.device.compute)
    rig.run_step(transfers=(spill(1, 1, 1),))
    return right_bytes(read_from_host(rig, 1))


def copy_sees_the_last_write(rig):
    """d2h_after_compute: the copy reads the block behind the rows that were written to it."""
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.run_step(transfers=(spill(1, 1, 1),))
    return right_bytes(read_from_host(rig, 1))


def restore_lands_after_the_old_use(rig):
    """h2d_after_compute: the target block is poisoned, and then restored into, in that order."""
    rig.put("host", 0, 0, 1)
    rig.begin(tables=(resident(0, 0, 2),), poison_blocks=(2, 3, 4), transfers=(restore(1, 1, 2),))
    pending = rig.gather(step_rows([0]), ALL)
    rig.end()
    return right_bytes(pending)


def read_sees_the_restore(rig):
    """compute_after_restore: the step that restores a page reads it."""
    rig.put("host", 0, 0, 1)
    rig.begin(tables=(resident(0, 0, 2),), transfers=(restore(1, 5, 6), restore(2, 1, 2)))
    pending = rig.gather(step_rows([0]), ALL)
    rig.end()
    return right_bytes(pending)


SCENARIOS = {
    "compute_after_spill": spilled_page_survives_reuse,
    "d2h_after_compute": copy_sees_the_last_write,
    "h2d_after_compute": restore_lands_after_the_old_use,
    "compute_after_restore": read_sees_the_restore,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_the_wait_bytes_go_wrong(name):
    wrong = [s for s in SEEDS if not SCENARIOS[name](Rig(seed=s, lag=0.6, without=name))]
    assert wrong, f"{name} left out, and no seed of {SEEDS} shows it"


@pytest.mark.parametrize("lag", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("name", SCENARIOS)
def test_with_all_waits_no_seed_corrupts(name, lag):
    assert all(SCENARIOS[name](Rig(seed=s, lag=lag)) for s in SEEDS)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_hold(name):
    assert all(SCENARIOS[name](Rig(seed=s)) for s in range(4))


@pytest.mark.usefixtures("backend")
def test_a_write_back_keeps_the_block_readable():
    for seed in range(8):
        rig = Rig(seed=seed, lag=0.8)
        rig.begin(tables=(resident(0, 0, 1),))
        rig.write_page(0, 0)
        rig.end()
        rig.begin(transfers=(spill(1, 1, 1, TransferKind.WRITE_BACK),))
        assert right_bytes(rig.gather(step_rows([0]), ALL))
        rig.end()
        rig.device.synchronize()
        for layer in rig.layers:
            got = rig.worker.handles[layer].runtime.host.array[1]
            assert (got == contents(0, layer, range(PAGE))).all()


def test_a_copy_left_out_is_seen():
    """What fault tests knock out matters: without the copy the host page is not the page."""
    rig = Rig()
    rig.worker.transfers._copy = lambda transfer: True
    rig.begin(tables=(resident(0, 0, 1),))
    rig.worker.handles[0].write(page_rows(0, 0), contents(0, 0, range(PAGE)))
    rig.end()
    rig.run_step(transfers=(spill(1, 1, 1),))
    assert not right_bytes(read_from_host(rig, 1))
