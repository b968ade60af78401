"""The worker on a GPU: followers, groups, pinning, memory, and what is refused."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from backends import forget_all, open_backend, plain, value
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    SPAN,
    Rig,
    contents,
    expect,
    host,
    hot,
    make_config,
    page_rows,
    resident,
    spill,
    step_rows,
)
from graph_rig import GROUPS, STATES, TOP_K, fixed_rig, placed

from hisparse.device import open_device
from hisparse.device.cuda.faults import GROUPS_MAX
from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.kernels import resolve_memory
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import CapacityError, ConfigError, DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


# -- followers, groups, handles -------------------------------------------------------------------


def test_followers_own_no_map_and_no_order_when_memory_is_profiled():
    """Twelve layers in one group take the replacement state of one layer, not of twelve."""
    taken = []
    for groups in ((tuple(range(12)),), tuple((i,) for i in range(12))):
        rig = Rig(make_config(2048, TOP_K, 16, 2048, groups=groups))
        taken.append(rig.worker.statistics()["state_bytes"])
        assert taken[-1] == sum(h.runtime.state_bytes for h in rig.worker.handles)
        for handle in rig.worker.handles:
            assert bool(handle.runtime.state_bytes) == handle.runtime.is_leader
    assert taken[1] > 11.9 * taken[0]


def test_the_kept_map_is_charged():
    """Two bytes a token of context, and the slots' own arrays, a leader and request; and what
    calls are cut from."""
    config = make_config(2048, TOP_K, 16, 2048, groups=((0, 1),))
    import cupy

    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    rig = Rig(config)
    charged = rig.worker.statistics()["state_bytes"]
    said = resolve_memory(config)
    assert charged == said["cuda_state_bytes"]
    assert charged >= 16 * (2 * 2048 * PAGE + 7 * 2048)
    taken = pool.used_bytes() - before - said["cuda_call_bytes"]
    assert taken < 1.25 * charged + 200_000


@pytest.mark.parametrize("groups", [((2, 0), (3, 1)), ((3, 1, 0), (2,)), ((1, 3), (0, 2))])
def test_shuffled_layers_bind_the_same_groups(groups):
    """Which layers share a plan comes from the config, never from where their bytes lie."""
    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=groups))
    rig.begin(tables=placed(rig, STATES["mixed"]))
    top = np.array([[0, 5, 9, 14], [5, 6, 7, 8], [15, 0, -1, 4]])
    for layer, pending in rig.gather(step_rows([0, 1, 2]), top).items():
        assert (value(pending) == expect([0, 1, 2], top, layer)).all()
    rig.end()
    assert [group.layers for group in rig.worker.groups] == list(groups)


def test_calls_of_a_group_that_overlap_are_fetched_in_order():
    """The leader resolves twice before its followers come; the second takes the first's slots."""
    rig = Rig(make_config(4, TOP_K, REQUESTS, PAGES, groups=((0, 1, 2),)))
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    rng = np.random.default_rng(4)
    for _ in range(10):
        rig.begin()
        calls = [(step_rows([r]), rng.integers(-1, SPAN, (1, TOP_K)), r) for r in (0, 1, 0, 0)]
        handles = rig.worker.handles
        pending = [[handles[0].gather(rows, top)] for rows, top, _ in calls[:2]]
        for layer in (1, 2):
            for made, (rows, _, _) in zip(pending, calls, strict=False):
                made.append(handles[layer].gather(rows))
        pending += [[h.gather(rows, None if i else top) for i, h in enumerate(handles)]
                    for rows, top, _ in calls[2:]]  # fmt: skip
        rig.end()
        for made, (_, top, row) in zip(pending, calls, strict=True):
            for layer in range(3):
                assert (value(made[layer]) == expect([row], top, layer)).all()


# -- pinning in the background --------------------------------------------------------------------


def test_the_first_step_ends_while_the_host_pool_is_being_pinned(monkeypatch):
    """Four GiB whose pieces are held back, but for the beginnings of layers; the last page of each
    is waited for by the step that names it."""
    hosts = 1 << 24
    gate, pin = threading.Event(), HostMemory._pin_piece

    def held(memory, piece, fill):
        if memory._pieces._first_use(piece):
            assert gate.wait(60)
        pin(memory, piece, fill)

    monkeypatch.setattr(HostMemory, "_pin_piece", held)
    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, hosts=hosts))
    told = rig.device.statistics
    top = np.array([[0, 3, 2, -1]])
    try:
        rig.begin(tables=(resident(0, 0, 1), hot(0, 30, 31, 32)))
        rig.write_page(0, 0)
        rig.end()
        rig.run_step(tables=(host(0, 0, 1),), transfers=(spill(1, 1, 1),))
        rig.begin(tables=(resident(0, 0, 0),), fences=(1,))
        for layer, pending in rig.gather(step_rows([0]), top).items():
            assert (value(pending) == expect([0], top, layer)).all()
        rig.end()
        rig.device.synchronize()
        assert 0 < told()["pinned_bytes"] < told()["pinned_total_bytes"] >= 4 << 30
        last = rig.worker.geometry.host_pages - 1
        opens = threading.Timer(0.2, gate.set)
        opens.start()
        rig.begin(tables=(resident(0, 0, 2),))
        rig.write_page(0, 0)
        rig.end()
        assert not gate.is_set()
        rig.run_step(tables=(host(0, 0, last),), transfers=(spill(2, 2, last),))
        assert gate.is_set(), "the last page was not there before"
        rig.begin(tables=(resident(0, 0, 0),), fences=(2,))
        for layer, pending in rig.gather(step_rows([0]), top).items():
            assert (value(pending) == expect([0], top, layer)).all()
        rig.end()
        rig.device.synchronize()
    finally:
        gate.set()


# -- workers that come and go ---------------------------------------------------------------------


def test_workers_that_were_shut_down_leave_no_state_and_no_place_of_their_groups():
    """One after the other they have more groups than a device counts for."""
    import cupy

    config = make_config(12, TOP_K, REQUESTS, PAGES, groups=tuple((i,) for i in range(12)))
    device, used = open_backend(), []
    for _ in range(GROUPS_MAX // 12 + 3):
        HiSparseWorker(config, device).shutdown()
        gc.collect()
        used.append(cupy.get_default_memory_pool().used_bytes())
    assert set(used[1:]) == {used[1]} and device.statistics()["allocated_bytes"] == 0


# -- refusals, memory -----------------------------------------------------------------------------


def test_rows_that_are_no_whole_pieces_are_refused_at_start():
    config = make_config()
    layout = config.layout.model_copy(update={"row_bytes": 650})
    with pytest.raises(ConfigError, match=r"row_bytes=650: .* use 656"):
        Rig(config.model_copy(update={"layout": layout}))


def test_a_pool_beyond_the_card_is_refused_before_anything_is_taken():
    import cupy

    before, total = cupy.cuda.runtime.memGetInfo()
    config = make_config()
    layout = config.layout.model_copy(update={"row_bytes": 1152})
    config = config.model_copy(update={"layout": layout})
    blocks = total // config.block_bytes  # the context itself has taken some
    pools = config.pools.model_copy(update={"gpu_blocks": blocks})
    with pytest.raises(CapacityError, match=rf"pools\.gpu_blocks={blocks} .* free of") as caught:
        Rig(config.model_copy(update={"pools": pools}))
    assert 0 < caught.value.fixes["pools.gpu_blocks"] < blocks
    assert before - cupy.cuda.runtime.memGetInfo()[0] < 1 << 30


def test_a_request_beyond_the_hot_region_is_taken_in_waves():
    rig = Rig(make_config(8, TOP_K, REQUESTS, PAGES, groups=GROUPS))
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    rng = np.random.default_rng(5)
    for counts in ([150, 0, 1], [3, 90, 2]):  # more waves than a step has ordinals
        rows = np.repeat(np.arange(3), counts).tolist()
        top = rng.integers(-1, SPAN, (len(rows), TOP_K))
        rig.begin()
        for layer, pending in rig.gather(step_rows(rows), top).items():
            assert (value(pending) == expect(rows, top, layer)).all()
        rig.end()
    rig.device.synchronize()


@pytest.mark.parametrize("verb", ["gather", "resolve"])
def test_rows_of_an_answer_that_there_was_no_memory_for_may_be_read_later(verb, monkeypatch):
    """Whoever follows the leader that failed, and the next step, find what its plan says is hot."""
    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS))
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    rows, top = step_rows([0, 1]), np.array([[0, 5, 3, 9], [8, 1, 2, -1]])
    chosen, empty = rig.device.upload(top.astype(np.int32)), rig.device.empty

    def full(shape, dtype):
        if tuple(shape)[:2] != top.shape:  # not the answer
            return empty(shape, dtype)
        monkeypatch.setattr(rig.device, "empty", empty)
        raise rig.device.torch.OutOfMemoryError("as large as asked for")

    rig.begin()
    monkeypatch.setattr(rig.device, "empty", full)
    leader, *followers = GROUPS[0]
    with pytest.raises((DeviceError, rig.device.torch.OutOfMemoryError), match="asked for"):
        getattr(rig.worker.handles[leader], verb)(rows, chosen).result()
    for layer in followers:
        followed = value(rig.worker.handles[layer].gather(rows))
        assert (followed == expect([0, 1], top, layer)).all()
    rig.end()
    rig.begin()
    again = rig.gather(step_rows([0, 1]), top)
    assert all((value(got) == expect([0, 1], top, layer)).all() for layer, got in again.items())
    rig.end()


def test_what_the_model_passes_may_be_of_torch_or_of_cupy():
    import cupy
    import torch

    rig = fixed_rig()
    rig.begin(tables=(resident(0, 0, 1), resident(0, 1, 2)))
    with rig.device.on_compute():  # as a model does: what other streams make is not waited for
        ours = torch.tensor(contents(0, 0, range(PAGE))).cuda()
        more = cupy.asarray(contents(0, 0, range(PAGE, 2 * PAGE)))
        chosen = torch.tensor([[0, 5, 3, -1]]).cuda()
    rig.worker.handles[0].write(page_rows(0, 0), ours)
    rig.worker.handles[0].write(page_rows(0, 1), more)
    got = rig.worker.handles[0].gather(step_rows([0]), chosen).result()
    assert isinstance(got, torch.Tensor)
    assert (plain(got) == expect([0], np.array([[0, 5, 3, -1]]), 0)).all()


def test_a_device_that_is_dropped_gives_its_memory_back():
    import cupy

    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS))
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    forget_all()
    runtime = cupy.cuda.runtime
    pools = [rig.worker.host_pool.ctypes.data, rig.worker.gpu_pool.data.ptr]

    def kinds():
        return [runtime.pointerGetAttributes(address).type for address in pools]

    assert kinds() == [runtime.memoryTypeHost, runtime.memoryTypeDevice]
    ended = weakref.ref(rig.device)
    del rig
    gc.collect()
    assert ended() is None and kinds() == [0, 0]  # cudaMemoryTypeUnregistered


def test_memory_is_given_back():
    device = open_device("cuda")
    array = device.allocate(1 << 20, 7)
    pinned = device.allocate_pinned(1 << 20, 9)
    assert (plain(array) == 7).all() and (pinned == 9).all()
    assert device.statistics()["allocated_bytes"] == 2 << 20
    device.release(array)
    device.release(pinned)
    assert device.statistics()["allocated_bytes"] == 0
