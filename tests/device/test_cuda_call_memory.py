"""What calls of steps without a fixed shape take of a GPU: what a config says, at any time.

Worker state and groups are the real ones; arrays are NumPy's in CuPy's place, and nothing is
launched: no GPU is needed.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from device_rig import make_config
from lagging_device import LaggingDevice
from test_cuda_state_bytes import Cupy

from hisparse.device.cpu.streams import SimDevice
from hisparse.device.cuda import resolver, state
from hisparse.device.cuda.faults import GROUPS_MAX, FaultRecord
from hisparse.device.cuda.group import GroupResolver
from hisparse.device.cuda.kernels import open_at_once, resolve_memory
from hisparse.device.cuda.movers import CudaKernels
from hisparse.device.cuda.state import WorkerState
from hisparse.device.layout import Geometry
from hisparse.device.rows import StepRows
from hisparse.device.tables import DeviceTables
from hisparse.errors import ConfigError

TOP_K = 4
IN_TURN, INTERLEAVED = ((0, 1), (2, 3)), ((0, 2), (1, 3))
NO_EPOCH = np.iinfo(np.uint64).max


class Counting(Cupy):
    """Knows the bytes of calls that are held: they alone are made of bytes."""

    def __init__(self):
        super().__init__()
        self._made = []

    def full(self, shape, value, dtype):
        made = np.full(shape, value, dtype)
        if dtype is np.uint8:
            self._made.append(weakref.ref(made))
        return made

    def held(self):
        return sum(made.nbytes for made in (ref() for ref in self._made) if made is not None)


class Model:
    """One worker's groups, whose layers come in order; nobody reads what calls hold."""

    def __init__(self, monkeypatch, hot_rows, step_rows, requests, groups=IN_TURN):
        self.cupy, self.waits = Counting(), []
        kernel = SimpleNamespace(get_function=lambda _: SimpleNamespace(shared_size_bytes=0))
        monkeypatch.setattr(resolver, "require_cupy", lambda: self.cupy)
        monkeypatch.setattr(resolver, "load", lambda *_: kernel)
        for name in ("TableWriter", "HostReach"):
            monkeypatch.setattr(state, name, lambda *_: None)
        config = make_config(hot_rows, TOP_K, requests, groups=groups)
        schedule = config.schedule.model_copy(update={"step_rows": step_rows})
        self.config = config.model_copy(update={"schedule": schedule})
        geometry = Geometry.of(self.config)
        device = SimpleNamespace(
            cupy=self.cupy,
            compute=SimpleNamespace(current=nullcontext, wait=self.waits.append),
            faults=FaultRecord(LaggingDevice()),
            upload=lambda array: array,
            wipe=lambda array, value: array.view(np.uint8).fill(value),
            memory_of=lambda array: None,
        )
        tables = DeviceTables(geometry, SimDevice())
        self.state = WorkerState(SimpleNamespace(device=device), tables)
        self.groups = {g[0]: GroupResolver(self.state, g[0]) for g in groups}
        pool = SimpleNamespace(base=None)
        self.state.bind(SimpleNamespace(handles=(), suffix=(), host=(pool,)))
        self.state.backed[:] = True
        self.said = resolve_memory(self.config)["cuda_call_bytes"]
        self.open, self.now, self.planned = {}, 0, 0

    def begin(self):
        self.now += 1
        for group in self.groups.values():
            group.begin_step(self.now)

    def plan(self, leader, rows):
        """A call of `leader`; its memory is filled with what no other call may write."""
        selection = np.zeros((len(rows), TOP_K), np.int32)
        plan = self.groups[leader].plan(StepRows(rows, np.zeros(len(rows))), selection, self.now)
        for call in plan.calls:
            assert (call.count == NO_EPOCH).all() and (call.misses == NO_EPOCH).all()
            for array in arrays_of(call):
                array[:] = self.planned
        plan.stamp, self.planned = self.planned, self.planned + 1
        return plan

    def close(self, plan):
        """One more layer has copied out."""
        for call in plan.calls:
            assert all((array == plan.stamp).all() for array in arrays_of(call))
        plan.group._close(plan)

    def run_step(self, rows):
        self.begin()
        for layer in range(self.config.layout.layers):
            group = next(g for g in self.config.layout.index_groups if layer in g)
            if layer == group[0]:
                self.open[layer] = self.plan(layer, rows)
                assert self.cupy.held() <= self.said
            self.close(self.open[group[0]])


def arrays_of(call):
    return call.count, call.misses, call.top_k, call.out


def mixed_step(rng, requests, step_rows, chunk):
    """Decode with drafts, and chunks of prompts, in any order, as many as a step takes."""
    rows, left = [], step_rows
    for request in rng.permutation(requests):
        count = int(rng.choice([1, rng.integers(1, 5), rng.integers(1, chunk + 1)]))
        rows += [request] * min(count, left)
        left -= min(count, left)
    return np.array(rows, np.int32)


@pytest.mark.parametrize("groups", [IN_TURN, INTERLEAVED])
@pytest.mark.parametrize(
    ("width", "step_rows", "requests"),
    [(1, 256, 16), (2, 512, 64), (4, 512, 64), (4, 61, 60), (3, 7, 5), (64, 300, 9), (5, 1, 1)],
)
def test_random_steps_take_what_the_config_says_and_keep_no_more(
    width, step_rows, requests, groups, monkeypatch
):
    model = Model(monkeypatch, width * TOP_K, step_rows, requests, groups)
    rng = np.random.default_rng(width)
    assert model.cupy.held() == model.said  # taken at the start, where it was asked for
    deepest = step_rows - requests + 1  # the step that takes the most
    model.run_step(np.repeat(np.arange(requests), [deepest] + [1] * (requests - 1)))
    for _ in range(60):
        model.state.backed[:] = rng.random(requests) < rng.choice([0.5, 1])
        model.run_step(mixed_step(rng, requests, step_rows, int(rng.integers(1, step_rows + 1))))
    assert model.cupy.held() == model.said


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        (((0, 1, 2), (3,), (4, 5)), 1),
        (((0, 2), (1, 3)), 2),
        (((3, 1, 0), (2,)), 2),
        (((0, 5), (1, 2), (3, 4)), 2),
        (((0, 3), (1, 4), (2, 5)), 3),
    ],
)
def test_groups_that_are_open_at_once(groups, wanted):
    assert open_at_once(groups) == wanted


def test_calls_of_a_group_that_overlap_are_cut_side_by_side(monkeypatch):
    model = Model(monkeypatch, TOP_K, 64, 8)
    for _ in range(3):
        model.begin()
        plans = [model.plan(0, np.arange(8, dtype=np.int32)) for _ in range(4)]
        for plan in (plans[3], plans[3]):  # each finds what it wrote
            model.close(plan)
        plans[3] = model.plan(0, np.arange(8, dtype=np.int32))
        for plan in plans * 2:
            model.close(plan)
        assert model.cupy.held() == model.said


def test_what_fits_no_arena_has_memory_of_its_own_and_gives_it_back(monkeypatch):
    """More rows than a step's, and more groups open than layers in order have."""
    model = Model(monkeypatch, TOP_K, 8, 8)
    for rows, leaders in ((200, [0]), (8, [0, 2])):
        model.begin()
        step = np.arange(rows, dtype=np.int32) % 8
        plans = [model.plan(leader, step) for leader in leaders]
        assert model.cupy.held() > model.said
        for plan in plans * 2:
            model.close(plan)
        del plan, plans
        assert model.cupy.held() == model.said


@pytest.mark.parametrize("fetched", [True, False])
def test_what_a_failed_step_left_on_side_is_waited_for_before_its_call_is_cut_again(
    fetched, monkeypatch
):
    model = Model(monkeypatch, TOP_K, 8, 8)
    group, rows = model.groups[0], np.arange(8, dtype=np.int32)
    model.begin()
    left = model.plan(0, rows)
    if fetched:
        group._unjoined = left.fetched[1] = "the fetch"
    model.begin()
    assert model.waits == ["the fetch"] * fetched
    again = model.plan(0, rows)
    assert np.shares_memory(left.calls[0].count, again.calls[0].count)
    assert model.cupy.held() == model.said


def test_a_worker_that_is_over_leaves_nothing_of_its_calls_and_its_groups(monkeypatch):
    model = Model(monkeypatch, 2 * TOP_K, 16, 4)
    tables, faults = model.state.tables, model.state.device.faults
    kernels = SimpleNamespace(_states={tables: model.state}, _uploaded=None)
    with pytest.raises(ConfigError, match=f"{GROUPS_MAX} groups, with 2 of workers"):
        faults.check_groups(GROUPS_MAX)
    for _ in range(2):
        CudaKernels.drop(kernels, tables)
        faults.check_groups(GROUPS_MAX)
    model.groups.clear()
    del model.state
    gc.collect()
    assert model.said > 0 == model.cupy.held()


@pytest.mark.parametrize("verb", ["copy_out", "locate"])
def test_a_layer_whose_answer_finds_no_memory_fetches_and_lets_go_of_its_calls(verb, monkeypatch):
    """Who follows it, and later steps, go by the plan: rows that it calls hot have to be there."""
    model = Model(monkeypatch, 2 * TOP_K, 16, 4)
    group, fetched = model.groups[0], []
    model.begin()
    plan = model.plan(0, np.array([0, 1, 1], np.int32))
    monkeypatch.setattr(group, "_fetch", lambda plan, part, tiers, of: fetched.append((of, part)))
    group.device.torch = SimpleNamespace(uint8="uint8", int32="int32")
    group.device.adopt = lambda array: array

    def empty(shape, dtype):
        raise MemoryError(f"{shape} of {dtype}")

    group.device.empty = empty
    tiers = [SimpleNamespace(hot=SimpleNamespace(span=SimpleNamespace(row_bytes=16)))] * 2
    for member in (0, 1):
        with pytest.raises(MemoryError, match=rf"\(3, {TOP_K}"):
            getattr(group, verb)(plan, tiers, member)
    assert fetched == [(member, part) for member in (0, 1) for part in plan.parts] != []
    assert not group._open and group._arena is None
