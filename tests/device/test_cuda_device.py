"""The worker on a GPU: graphs, launches, followers, faults, memory, and what is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from backends import plain, value
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
    place_pages,
    resident,
    spill,
    step_rows,
)
from resolver_reference import ReferenceResolver

from hisparse.device import open_device
from hisparse.device.rows import StepRows
from hisparse.errors import ConfigError, InvariantViolation, UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

TOP_K = 4
GROUPS = ((0, 2, 3), (1,))


class Decode:
    """A step of fixed shape, captured once: writes each request's row, resolves, copies out."""

    def __init__(self, rig, rows=REQUESTS, span=1):
        import torch

        self.rig, self.torch, n = rig, torch, rows * span
        self.rows = torch.full((n,), -1, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(n, dtype=torch.int64, device="cuda")
        self.top_k = torch.full((n, TOP_K), -1, dtype=torch.int32, device="cuda")
        row_bytes = rig.config.layout.row_bytes
        self.data = {
            layer: torch.zeros((n, row_bytes), dtype=torch.uint8, device="cuda")
            for layer in rig.layers
        }
        self.step_rows = StepRows(self.rows, self.positions, span=span)
        self.out = {}
        self.graph = None

    def queue(self):
        handles = self.rig.worker.handles
        for group in self.rig.config.layout.index_groups:
            for layer in group:
                handles[layer].write(self.step_rows, self.data[layer])
                chosen = self.top_k if layer == group[0] else None
                self.out[layer] = handles[layer].gather(self.step_rows, chosen).result()

    def capture(self):
        """Between steps; returns the nodes of the graph and the launches that made it."""
        torch, device = self.torch, self.rig.device
        self.rows.fill_(-1)
        torch.cuda.synchronize()
        with self.rig.worker.warm_up(1), device.on_compute():
            self.queue()  # loads kernels, makes the calls whose addresses the graph keeps
        with self.rig.worker.warm_up(1), device.on_compute():
            before = device.statistics()["launches"]
            self.graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(
                self.graph,
                stream=torch.cuda.current_stream(),
                capture_error_mode="thread_local",
            ):
                self.queue()
            self.graph.instantiate()
        return nodes_of(self.graph), device.statistics()["launches"] - before

    def load(self, rows, positions, top_k):
        """Fill the static buffers; the step's own row of a request is its position's content."""
        torch = self.torch
        with self.rig.device.on_compute():
            self.rows.copy_(torch.tensor(rows, dtype=torch.int32))
            self.positions.copy_(torch.tensor(positions))
            self.top_k.copy_(torch.tensor(top_k, dtype=torch.int32))
            for layer, data in self.data.items():
                mine = [
                    contents(max(r, 0), layer, [p])[0] for r, p in zip(rows, positions, strict=True)
                ]
                data.copy_(torch.tensor(np.stack(mine)))

    def run(self, rows, positions, top_k, **fields):
        """One step, replayed; bytes by layer."""
        self.rig.begin(**fields)
        self.load(rows, positions, top_k)
        with self.rig.device.on_compute():
            self.graph.replay()
        self.rig.end()
        return {layer: plain(out) for layer, out in self.out.items()}


def nodes_of(graph):
    """How many nodes a captured graph has, by the driver; all of them kernels."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


KERNEL_NODE = 0
STATES = {
    "all resident": [True] * PAGES,
    "mixed": [True, False, False, True],
    "all on the host": [False] * (PAGES - 1) + [True],
}


def fixed_rig(**kwargs):
    return Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, **kwargs))


def placed(rig, on_gpu):
    """Updates that place all requests' pages so; the last page, which is written, on the GPU."""
    reference = ReferenceResolver(PAGE, rig.config.policy.hot_rows, TOP_K)
    return sum((place_pages(rig, reference, row, on_gpu) for row in range(REQUESTS)), ())


# -- graphs ---------------------------------------------------------------------------------------


def test_one_captured_graph_serves_all_resident_mixed_and_all_host_batches():
    rig = fixed_rig()
    decode, rng = Decode(rig), np.random.default_rng(1)
    nodes = []
    for on_gpu in STATES.values():
        rig.run_step(tables=placed(rig, on_gpu))
        nodes.append(decode.capture()[0])
    assert nodes[0] == nodes[1] == nodes[2]
    for on_gpu in STATES.values():
        rig.run_step(resets=range(REQUESTS), tables=placed(rig, on_gpu))
        for _ in range(8):
            rows = rng.permutation(REQUESTS)
            rows[rng.random(REQUESTS) < 0.2] = -1
            top = rng.integers(-1, SPAN, (REQUESTS, TOP_K))
            out = decode.run(rows.tolist(), [SPAN - 1] * REQUESTS, top)
            live = np.where((rows >= 0)[:, None], top, -1)
            for layer in rig.layers:
                assert (out[layer] == expect(np.maximum(rows, 0), live, layer)).all()
    rig.device.synchronize()


def test_the_wrapper_launches_what_the_kernels_are_and_nothing_else():
    """Groups of three layers and of one: a resolve each, a fetch a follower, and of each layer one
    write and one copy out. Waits between streams are edges of the graph, not nodes."""
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    nodes, launches = Decode(rig).capture()
    resolves, fetches, layers = 2, 2, 4
    assert nodes == [KERNEL_NODE] * (resolves + fetches + 2 * layers)
    assert launches == len(nodes)


def test_rows_that_a_replay_writes_are_spilled_and_read_back():
    """D01: what a graph replay skips is Python; nothing that a spill needs may live there."""
    rig = fixed_rig()
    decode = Decode(rig)
    rig.run_step(tables=placed(rig, [True] * PAGES))
    decode.capture()
    none = [[-1] * TOP_K] * REQUESTS
    for position in range(PAGE):  # page 0 of every request, row by row, by replays
        decode.run([0, 1, 2], [position] * REQUESTS, none)
    blocks = [1 + row * PAGES for row in range(REQUESTS)]
    pages = [40 + row for row in range(REQUESTS)]
    copies = tuple(spill(i + 1, blocks[i], pages[i]) for i in range(REQUESTS))
    rig.run_step(transfers=copies)
    top = [[0, 1, 2, 3]] * REQUESTS
    out = decode.run(
        [0, 1, 2],
        [SPAN - 1] * REQUESTS,
        top,
        fences=(1, 2, 3),
        tables=tuple(
            update
            for row in range(REQUESTS)
            for update in (resident(row, 0, 0), host(row, 0, pages[row]))
        ),
        poison_blocks=tuple(blocks),
    )
    for layer in rig.layers:
        assert (out[layer] == expect([0, 1, 2], np.array(top), layer)).all()


def test_rows_of_a_draft_are_resolved_in_order_and_padding_lines_touch_nothing():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    decode, rng = Decode(rig, span=3), np.random.default_rng(2)
    decode.capture()
    for _ in range(8):
        drafts = rng.integers(1, 4, REQUESTS)
        rows = np.concatenate([[r] * d + [-1] * (3 - d) for r, d in enumerate(drafts)])
        positions = np.tile([SPAN - 3, SPAN - 2, SPAN - 1], REQUESTS)
        top = rng.integers(-1, SPAN - 3, (3 * REQUESTS, TOP_K))
        top[rows < 0] = -1
        out = decode.run(rows.tolist(), positions.tolist(), top)
        for layer in rig.layers:
            assert (out[layer] == expect(np.maximum(rows, 0), top, layer)).all()


def test_a_fixed_step_that_does_not_fit_is_refused():
    rig = fixed_rig()
    rig.run_step()
    rig.begin()
    decode = Decode(rig, span=4)
    with pytest.raises(UsageError, match=r"span \* top_k \(4\) at most hot_rows \(12\)"):
        rig.worker.handles[1].gather(decode.step_rows, decode.top_k)
    with pytest.raises(UsageError, match=r"takes top_k int32\[12, 4\]"):
        rig.worker.handles[1].gather(decode.step_rows, decode.top_k[:, :2])


def test_decode_waits_for_nothing():
    """A hundred steps, replayed and eager, with the synchronising calls of torch made errors."""
    import torch

    rig = fixed_rig()
    decode, rng = Decode(rig), np.random.default_rng(3)
    rig.run_step(tables=placed(rig, STATES["mixed"]))
    decode.capture()
    rows, positions = [0, 1, 2], [SPAN - 1] * REQUESTS
    decode.run(rows, positions, rng.integers(-1, SPAN, (REQUESTS, TOP_K)))
    eager = step_rows(rows)
    rig.device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(100):
            rig.begin(tables=(host(0, 3, 40 + step % 2),), fences=())
            if step % 2:
                rig.gather(eager, rng.integers(0, SPAN, (REQUESTS, TOP_K)))
            else:
                with rig.device.on_compute():
                    decode.graph.replay()
            rig.end()
            rig.worker.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.device.synchronize()
    assert rig.device.statistics()["staging_waits"] == 0


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
    """Two bytes a token of context, and the slots' own arrays, a leader and request."""
    config = make_config(2048, TOP_K, 16, 2048, groups=((0, 1),))
    import cupy

    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    rig = Rig(config)
    charged = rig.worker.statistics()["state_bytes"]
    assert charged >= 16 * (2 * 2048 * PAGE + 7 * 2048)
    assert pool.used_bytes() - before < 1.25 * charged + 200_000


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


def test_the_handle_stores_no_request_mapping():
    rig = fixed_rig()
    handles = [*rig.worker.handles, rig.worker.index]
    before = [dict(vars(handle)) for handle in handles]
    for rows in ([0, 1, 2], [2, -1, 0]):
        rig.begin(tables=placed(rig, STATES["mixed"]))
        rig.gather(step_rows(rows), np.zeros((3, TOP_K), np.int32))
        rig.end()
    assert all(vars(h) == b for h, b in zip(handles, before, strict=True))


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


# -- faults ---------------------------------------------------------------------------------------


def test_a_position_without_a_copy_gives_zeros_and_is_told_a_step_later():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    rig.begin(tables=(host(1, 2, 0),))
    out = rig.gather(step_rows([0, 1]), np.array([[9, 1, -1, -1], [1, 9, -1, -1]]))
    rig.end()
    got = value(out[1])
    assert (got[1, 1] == 0).all() and (got[0, 0] == contents(0, 1, [9])[0]).all()
    with pytest.raises(InvariantViolation, match=r"always_readable: row 1, position 9, layer \d"):
        for _ in range(3):
            rig.run_step()
            plain(rig.worker.gpu_pool)
            rig.worker.poll()
    rig.worker.poll()  # told once
    assert sum(rig.device.faults.counts().values()) == len(rig.layers)


def test_a_fault_is_found_in_a_replayed_graph_too():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    decode = Decode(rig)
    decode.capture()
    decode.run(
        [0, 1, 2],
        [SPAN - 1] * 3,
        [[-1] * TOP_K, [4] * TOP_K, [-1] * TOP_K],
        tables=(host(1, 1, 0),),
    )
    with pytest.raises(InvariantViolation, match="always_readable: row 1, position 4, layer"):
        rig.device.synchronize()


def checked_rig():
    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, checks="on"))
    rig.run_step(tables=(resident(0, 0, 1), resident(0, 1, 2), hot(0, 30, 31, 32)))
    return rig


def test_checks_trap_a_selection_behind_the_token_that_selects():
    rig = checked_rig()
    rig.begin()
    rig.gather(step_rows([0], [4]), np.array([[0, 4, 5, -1]]))
    rig.end()
    with pytest.raises(InvariantViolation, match=r"row 0, position 5, layer 0.*behind the token"):
        rig.device.synchronize()


def test_checks_tell_a_row_whose_bytes_changed_behind_the_back():
    rig = checked_rig()
    rig.begin()
    rig.write_page(0, 0)
    top = np.array([[0, 1, 2, 3]])
    for layer, pending in rig.gather(step_rows([0]), top).items():
        assert (value(pending) == expect([0], top, layer)).all()
    rig.end()
    rig.device.synchronize()
    rig.worker.handles[3].resident.array[1, 2, 7] ^= 1
    plain(rig.worker.gpu_pool)
    rig.begin()
    rig.gather(step_rows([0]), top)
    rig.end()
    with pytest.raises(InvariantViolation, match="content: row 0, position 2, layer 3"):
        rig.device.synchronize()


def test_checks_forget_the_rows_of_a_request_row_that_is_handed_on():
    rig = checked_rig()
    rig.begin()
    rig.write_page(0, 0)
    rig.end()
    rig.put("gpu", 1, 0, 1)  # bytes of another request, which a prefix hit would bring
    rig.begin(resets=(0,), tables=(resident(0, 0, 1),))
    top = np.array([[0, 1, 2, 3]])
    assert (value(rig.gather(step_rows([0]), top)[1]) == expect([1], top, 1)).all()
    rig.end()
    rig.device.synchronize()


# -- refusals, memory -----------------------------------------------------------------------------


def test_rows_that_are_no_whole_pieces_are_refused_at_start():
    config = make_config()
    layout = config.layout.model_copy(update={"row_bytes": 650})
    with pytest.raises(ConfigError, match=r"row_bytes=650: .* use 656"):
        Rig(config.model_copy(update={"layout": layout}))


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


def test_what_the_model_passes_may_be_of_torch_or_of_cupy():
    import cupy
    import torch

    rig = fixed_rig()
    rig.begin(tables=(resident(0, 0, 1), resident(0, 1, 2)))
    rig.worker.handles[0].write(page_rows(0, 0), torch.tensor(contents(0, 0, range(PAGE))).cuda())
    more = cupy.asarray(contents(0, 0, range(PAGE, 2 * PAGE)))
    rig.worker.handles[0].write(page_rows(0, 1), more)
    chosen = torch.tensor([[0, 5, 3, -1]]).cuda()
    got = rig.worker.handles[0].gather(step_rows([0]), chosen).result()
    assert isinstance(got, torch.Tensor)
    assert (plain(got) == expect([0], np.array([[0, 5, 3, -1]]), 0)).all()


def test_memory_is_given_back():
    device = open_device("cuda")
    array = device.allocate(1 << 20, 7)
    pinned = device.allocate_pinned(1 << 20, 9)
    assert (plain(array) == 7).all() and (pinned == 9).all()
    assert device.statistics()["allocated_bytes"] == 2 << 20
    device.release(array)
    device.release(pinned)
    assert device.statistics()["allocated_bytes"] == 0
