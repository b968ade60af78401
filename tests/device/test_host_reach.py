"""A step waits for the host pages that it can reach, in every layer, and for nothing else.

Pools are pinned piece by piece, as a made-up driver lets go; no GPU is needed.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from device_rig import make_config
from host_memory_rig import PAGE, PIECE, Driver, pinned
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import SuffixConfig
from hisparse.device.cuda import device as cuda_device
from hisparse.device.cuda import reach as reach_module
from hisparse.device.cuda.device import WAIT_BYTES, CudaDevice
from hisparse.device.cuda.host_pieces import Pieces
from hisparse.device.cuda.movers import CudaKernels
from hisparse.device.cuda.pinned import piece_bytes
from hisparse.device.cuda.reach import HostReach
from hisparse.device.cuda.state import WorkerState
from hisparse.device.layout import Geometry
from hisparse.errors import DeviceError
from hisparse.fsm.wire import (
    IndexTransfer,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferKind,
)

CONFIG = make_config(hosts=2048, suffix=SuffixConfig(name="cpu", gib=2 * PIECE / (1 << 30)))
GEOMETRY = Geometry.of(CONFIG)
LAYER = GEOMETRY.host_pages * GEOMETRY.page_bytes
LATE = GEOMETRY.host_pages - 2  # a page at the end of each layer
LATE_SUFFIX = GEOMETRY.suffix_pages - 1


class Pools:
    """Both pools of a worker, their drivers, and its reach."""

    def __init__(self, hold=True, most=1 << 30):
        self.drivers = Driver(most, hold), Driver(hold=hold)
        self.host = pinned(
            GEOMETRY.host_pool_bytes,
            self.drivers[0],
            granule_bytes=GEOMETRY.page_bytes,
            layer_bytes=LAYER,
        )
        self.suffix = pinned(
            GEOMETRY.suffix_pool_bytes,
            self.drivers[1],
            granule_bytes=GEOMETRY.index_page_bytes,
            what="suffix pool",
        )
        self.reach = HostReach(GEOMETRY, self.host, self.suffix)

    def let_go(self):
        for driver in self.drivers:
            if driver.go is not None:
                driver.go.release(1000)


@pytest.fixture
def pools():
    made = Pools()
    yield made
    made.let_go()
    for pool in (made.host, made.suffix):
        pool.release()


def command(**fields):
    return SparseKVOffloadCommand(1, 1, 0, 1, **fields)


def hosts(*ids):
    return command(tables=(TableUpdate(Table.HOST, 0, 0, ids),))


def copied(kind, page):
    return command(transfers=(SparseKVPageTransfer(1, 1, kind, 3, 1, page, 1),))


def index_copied(load, page):
    return command(index_transfers=(IndexTransfer(1, 1, load, 3, 1, 0, page, 1),))


NAMED = {
    "table": hosts(0, LATE),
    "spill": copied(TransferKind.SPILL, LATE),
    "restore": copied(TransferKind.RESTORE, LATE),
    "write-back": copied(TransferKind.WRITE_BACK, LATE),
    "poison": command(poison_hosts=(LATE,)),
}
SUFFIX_NAMED = {
    "store": index_copied(False, LATE_SUFFIX),
    "load": index_copied(True, LATE_SUFFIX),
    "poison": command(poison_suffixes=(LATE_SUFFIX,)),
}


def waits(reach, said, pool):
    """A thread that waits for `said`, and has asked `pool`; the event that it is through."""
    through = threading.Event()

    def step():
        reach.wait(said)
        through.set()

    thread = threading.Thread(target=step)
    thread.start()
    while thread.is_alive() and not pool._pieces._wanted:
        thread.join(0.001)
    return thread, through


def parts_of(page):
    """The pieces that `page` has a part in, a layer after the other, by offset."""
    starts = [layer * LAYER + page * GEOMETRY.page_bytes for layer in range(GEOMETRY.layers)]
    return [start // PIECE * PIECE for start in starts]


# -- what is waited for ----------------------------------------------------------------------------
def test_the_first_step_goes_on_while_later_pieces_are_not_pinned(pools):
    """The pool hands pages out from the lowest number on: their pieces, of all layers, are there
    first without anybody waiting."""
    heads = parts_of(1)
    assert len(set(heads)) == GEOMETRY.layers
    driver = pools.drivers[0]
    driver.go.release(len(heads))
    pools.reach.wait(hosts(1, 2, 3))
    assert driver.offsets(pools.host) == heads and not pools.host.pinned


@pytest.mark.parametrize(
    "said",
    [
        command(),
        hosts(0, 0),
        command(resets=(0,), tables=(TableUpdate(Table.RESIDENT, 0, 0, (LATE,)),)),
        command(poison_blocks=(5,)),
    ],
)
def test_a_step_that_names_no_host_page_waits_for_nothing(pools, said):
    pools.reach.wait(said)
    assert pools.host.progress().registered_bytes == 0


@pytest.mark.parametrize("by", NAMED)
def test_a_page_that_a_command_names_is_waited_for_in_every_layer_and_comes_next(pools, by):
    driver = pools.drivers[0]
    step, through = waits(pools.reach, NAMED[by], pools.host)
    driver.go.release(GEOMETRY.layers)  # the first of all, under way before, and all but one layer
    pools.host.wait(parts_of(LATE)[-2], 1)
    assert not through.wait(0.05), "a part of the page is not pinned yet"
    driver.go.release()
    step.join(timeout=30)
    assert through.is_set() and driver.offsets(pools.host) == [0, *parts_of(LATE)]
    assert pools.suffix.progress().registered_bytes == 0


@pytest.mark.parametrize("by", SUFFIX_NAMED)
def test_a_suffix_page_is_waited_for_likewise_and_no_host_page_with_it(pools, by):
    driver = pools.drivers[1]
    step, through = waits(pools.reach, SUFFIX_NAMED[by], pools.suffix)
    driver.go.release()
    pools.suffix.wait(0, 1)
    assert not through.wait(0.05), "its piece is not pinned yet"
    driver.go.release()
    step.join(timeout=30)
    last = pools.suffix._pieces.all[-1].offset
    assert through.is_set() and driver.offsets(pools.suffix) == [0, last]
    assert pools.host.progress().registered_bytes == 0


def test_the_null_page_is_never_waited_for():
    assert reach_module.host_pages(hosts(0, 7, 0, 3, 7)).tolist() == [3, 7]


def test_once_all_is_pinned_nobody_looks_what_a_command_names(monkeypatch):
    pools = Pools(hold=False)
    for pool in (pools.host, pools.suffix):
        pool.wait()
        for thread in pool._threads:
            thread.join()
    for name in ("host_pages", "suffix_pages"):
        monkeypatch.setattr(reach_module, name, None)
    for said in (*NAMED.values(), *SUFFIX_NAMED.values()):
        pools.reach.wait(said)


def test_what_is_pinned_again_after_sleep_is_waited_for_again(pools):
    pools.let_go()
    pools.host.wait()
    driver = pools.drivers[0]
    while driver.go.acquire(blocking=False):
        pass
    pools.host.discard()
    pools.host.recommit()
    pools.reach.wait(command())
    step, through = waits(pools.reach, NAMED["table"], pools.host)
    assert not through.wait(0.05)
    driver.go.release(1000)
    step.join(timeout=30)
    assert through.is_set()


def test_a_step_waits_by_the_verb_of_the_backend(pools):
    state = SimpleNamespace(_reach=pools.reach)
    state.wait_host = lambda said: WorkerState.wait_host(state, said)
    kernels = SimpleNamespace(state=lambda _: state)
    CudaKernels.wait_host(kernels, None, command())
    began = threading.Event()

    def step():
        CudaKernels.wait_host(kernels, None, NAMED["table"])
        began.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not began.wait(0.05)
    pools.let_go()
    thread.join(timeout=30)
    assert began.is_set()


@pytest.mark.parametrize(("size", "waited"), [(WAIT_BYTES, True), (WAIT_BYTES + 1, False)])
def test_a_small_pool_is_pinned_before_it_is_handed_out_a_large_one_is_not(
    size, waited, monkeypatch
):
    calls = []
    memory = SimpleNamespace(
        address=1,
        size_bytes=size,
        array=None,
        wait=lambda: calls.append("wait"),
        recommit=lambda fill: calls.append("recommit"),
    )
    monkeypatch.setattr(cuda_device, "pinned_memory", lambda *args, **kwargs: memory)
    device = SimpleNamespace(index=0, _pinned={}, memory_of=lambda array: memory)
    CudaDevice.allocate_pinned(device, size, 0, 1, 0)
    CudaDevice.recommit(device, np.zeros(1, np.uint8))
    assert calls == (["wait", "recommit", "wait"] if waited else ["recommit"])


def test_a_small_pool_that_could_not_be_pinned_again_may_be_tried_again():
    driver = Driver(hold=False)
    memory = pinned(2 * PIECE, driver)
    memory.wait()
    device = SimpleNamespace(memory_of=lambda array: memory)
    memory.discard()
    driver.most = len(driver.order) + 1
    with pytest.raises(DeviceError):
        CudaDevice.recommit(device, memory.array)
    driver.most = 1 << 30
    CudaDevice.recommit(device, memory.array)
    assert memory.pinned
    memory.release()


# -- order -----------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(st.integers(1, 40 * PAGE), st.integers(1, 9), st.sampled_from([1, 96, 656 * 4]))
def test_pieces_are_taken_by_how_near_they_come_to_the_beginning_of_a_layer(layer, layers, granule):
    size = layer * layers
    pieces = Pieces(size, PIECE, granule, "pool", layer)
    taken = [pieces.take() for _ in range(len(pieces))]
    assert pieces.take() is None and {piece.number for piece in taken} == set(range(len(pieces)))
    nearest = [int((np.arange(p.offset, min(p.end, size)) % layer).min()) for p in taken]
    assert nearest == sorted(nearest)


@pytest.mark.parametrize(
    ("layer_mib", "piece_mib"), [(0, 256), (100, 32), (400, 50), (2048, 256), (11_000, 256)]
)
def test_a_piece_is_a_small_part_of_a_layer_within_bounds(layer_mib, piece_mib):
    assert piece_bytes(layer_mib << 20) == piece_mib << 20


# -- failures --------------------------------------------------------------------------------------
def test_a_step_that_names_a_page_hears_which_piece_failed_others_go_on():
    pools = Pools(hold=False, most=4)
    for thread in pools.host._threads:  # who asks sooner gets the pieces that it asks for
        thread.join()
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"host pool: piece \d+ of \d+ .* not pinned: cudaHo"):
            pools.reach.wait(NAMED["table"])
        pools.reach.wait(command())
        pools.reach.wait(SUFFIX_NAMED["store"])
    pools.host.release()  # it was told: nothing more to say
    pools.suffix.release()
    assert pools.drivers[0].registered == {}
